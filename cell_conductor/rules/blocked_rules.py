"""Rules for an instance of which a recovery could not find out what is true: nothing is started with it, a delete is
recorded, and no report or answer judges it. It is reconciled again until that is known (`recovery`).
"""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.build import BuildState
from cell_conductor.rules import cell_transfer_rules
from cell_conductor.rules.action_events import refuse_request, repeat_end
from cell_conductor.rules.instance_facts import DESTROYING_DELETED
from cell_conductor.rules.reconcile import RELEASING_DELETED
from cell_conductor.state.commands import next_resend_at
from cell_conductor.state.desired_state import DELETE_REQUESTED, desired_state_of, phase_to_text
from cell_conductor.state.events import (
    ActionRequested,
    DeleteRequested,
    InstanceTransferredIn,
    MachineDecided,
    TimedOut,
)
from cell_conductor.state.instance import BlockedReason, Instance
from cell_conductor.state.step import Step, StepContext, emit_event

INSTANCE_BLOCKED = "instance.blocked"


def block(instance: Instance, at: float) -> Instance:
    """What is true of it is to be found out now."""
    return replace(instance, blocked_reason=BlockedReason.CONFLICT.value, since=at, deadline=at)


def decide(instance: Instance, event: MachineDecided, context: StepContext) -> Step:
    """By an operator's decision a machine in quarantine is the instance's (`reconcile.adopt_decided`)."""
    return Step(instance) if adoption_blocker(instance) else Step(block(instance, event.at))


def adoption_blocker(instance: Instance | None) -> str:
    """Why no machine may be given to this record by an operator's decision; "": it may."""
    if instance is None or instance.spec is None or not instance.selections:
        return "the cell has no record of it"
    if not desired_state_of(instance).may_adopt or instance.action is not None:
        now = phase_to_text(instance.phase)
        return f"it is {now}: only what is active elsewhere by its record, or failed, takes a machine over"
    return ""


def wait(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """It is looked at again, less and less often."""
    return Step(replace(instance, deadline=next_resend_at(instance, event.at, context)))


def refuse(instance: Instance, event: ActionRequested, context: StepContext) -> Step:
    """Nothing is begun; a copy of a request that has ended is answered as it was, and one under way is awaited."""
    action = instance.action
    if action is not None and event.request.request_id in (action.request_id, action.ending_request_id):
        return Step(instance)
    again = repeat_end(instance, event, context)
    return again or refuse_request(instance, event, context, INSTANCE_BLOCKED, instance.blocked_reason)


def accept_transfer(instance: Instance, event: InstanceTransferredIn, context: StepContext) -> Step:
    """Another cell has given it up for this one, and has nothing of it any more: to refuse it would lose it. By the
    later attempt nothing was left here when it left. One that is late begins nothing.
    """
    transfer = event.request.transfer
    assert transfer is not None
    is_late = transfer.attempt < instance.last_attempt
    return Step(instance) if is_late else cell_transfer_rules.accept_transfer(instance, event, context)


def delete(instance: Instance, event: DeleteRequested, context: StepContext) -> Step:
    """It is on record from now on, and carried out by the next reconciliation. It is of the attempt that it names: the
    record may be older.
    """
    action, cause = instance.action, event.cause or instance.cause
    instance = replace(instance, highest_attempt=max(instance.last_attempt, event.attempt))
    if action is not None and not action.delete:
        recorded = replace(instance, action=replace(action, delete=True), cause=cause, deadline=event.at)
    elif action is None and instance.phase not in DELETE_REQUESTED:
        state, next_state = DESTROYING_DELETED if instance.selections else RELEASING_DELETED
        recorded = replace(instance, state=state, next_state=next_state, cause=cause, deadline=event.at)
    else:
        recorded = instance
    return emit_event(recorded, BuildState.DELETING, event.at, context)
