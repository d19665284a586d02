"""Deletes of instances that move, that have no host or no record, or that their host cannot destroy now. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.actions import ActionState, Condition
from bus.contracts.build import BuildState
from bus.contracts.cell import InstanceSpec
from cell_conductor.rules import blocked_rules, build_rules, machine_rules
from cell_conductor.rules.action_events import DELETED, ActionEnd, after, answer, answer_other
from cell_conductor.rules.build_repeat_rules import report_deleting
from cell_conductor.rules.cell_transfer_rules import refer_to_next_cell
from cell_conductor.rules.move_steps import delete_during_action
from cell_conductor.state import step
from cell_conductor.state.desired_state import DESIRED, MachineTarget, PlacementCall, desired_state_of
from cell_conductor.state.events import BuildRequested, DeleteRequested, Destroyed, MachineMissing, SpawnFailed
from cell_conductor.state.instance import Instance, State, action_of
from cell_conductor.state.ownership_proof import next_attempt_record
from cell_conductor.state.step import Step, StepContext


def delete_unknown(instance: Instance, event: DeleteRequested, context: StepContext) -> Step:
    """Delete an instance without a record: the delete is remembered, so that a build that comes later never starts."""
    # What this cell has published has been here and is not any more: its claim is released, and the delete is answered;
    # but first what a host has of it that no record explains is destroyed. Of that a tombstone would prove that it is
    # over, and it may be another project's.
    is_quarantined = instance.uuid in context.quarantined
    if not (event.may_have_started or is_quarantined):
        return tombstone(instance, event, context) if instance.state is State.ABSENT else Step(instance)
    gone = replace(
        instance,
        spec=InstanceSpec(instance_uuid=instance.uuid, project_id=event.project_id),
        highest_attempt=max(instance.last_attempt, event.attempt),
        cause=event.cause or instance.cause,
    )
    releasing = step.enter_releasing(gone, State.DELETED, event.at, context)
    if is_quarantined:
        releasing = blocked_rules.block(releasing, event.at)
    return step.emit_event(releasing, BuildState.DELETING, event.at, context)


def tombstone(instance: Instance, event: DeleteRequested, context: StepContext) -> Step:
    """The delete came first: it is recorded, so that the build never starts."""
    highest = max(instance.highest_attempt, event.attempt)
    return Step(replace(instance, state=State.TOMBSTONE, highest_attempt=highest, since=event.at, cause=event.cause))


def refuse_build(instance: Instance, event: BuildRequested, context: StepContext) -> Step:
    """The build of a deleted instance: start nothing, and release its claim."""
    if event.is_query:
        return Step(instance)  # as its delete: nothing is released
    adopted = replace(build_rules.with_request(instance, event), cause=instance.cause)
    return Step(step.enter_releasing(adopted, State.DELETED, event.at, context))


def is_other_project(instance: Instance, event: DeleteRequested) -> bool:
    """Whether the instance is of another project than the delete names: nothing is deleted for it."""
    # Schedulers send none: they give a build to a cell by its project's claim. An operator may name a wrong instance.
    return instance.spec is not None and event.project_id not in ("", instance.spec.project_id)


def report_destroy_failure(instance: Instance, event: SpawnFailed, context: StepContext) -> Step:
    """The host cannot destroy it now: publish why, once for each reason. The delete goes on."""
    if desired_state_of(instance).condition is not Condition.DELETED or not event.code.startswith(
        machine_rules.DESTROY_CODES
    ):
        return machine_rules.destroy_failed_attempt(instance, event, context)
    detail = (event.code, step.truncate(event.reason))
    is_current = step.is_current(instance, event.attempt, event.host_uuid)
    if not is_current or detail == (instance.code, instance.reason):
        return Step(instance)
    code, reason = detail
    recorded = replace(instance, code=code, reason=reason)
    return step.emit_event(recorded, BuildState.DELETING, event.at, context, detail=detail)


def delete(instance: Instance, event: DeleteRequested, context: StepContext) -> Step:
    """A client's delete of an instance that is under way: what it waits for is awaited, and then it is deleted."""
    desired = desired_state_of(instance)
    if desired.condition is Condition.DELETED:
        return report_deleting(instance, event, context)
    if instance.action is not None and desired.condition is not Condition.FAILED:
        return delete_moving(instance, event, context)
    if desired.current in DESIRED:  # the allocation is held until the host confirms that it has destroyed the machine
        leaving = step.enter_destroying(instance, State.DELETED, event.at, context)
    else:  # of a claim that is under way what it has claimed is released, and nothing is built
        leaving = replace(instance, next_state=State.DELETED)
    leaving = replace(leaving, cause=event.cause or instance.cause)
    return step.emit_event(leaving, BuildState.DELETING, event.at, context)


def delete_moving(
    instance: Instance,
    event: DeleteRequested,
    context: StepContext,
) -> Step:
    """Destroy every machine of it, then release both consumers."""
    # While a destination is requested of placement, the conductor awaits the answer: it shows whether the migration
    # holds anything.
    action = action_of(instance)
    if action.delete:
        return step.emit_event(instance, BuildState.DELETING, event.at, context)
    deleted = ActionEnd(ActionState.FAILED, DELETED, "the instance was deleted")
    earlier = answer(instance, deleted, event.at, context)
    earlier = after(earlier, answer_other(earlier.instance, deleted, event.at, context))
    named = replace(earlier.instance, cause=event.cause or instance.cause)
    desired = desired_state_of(named)
    # The answer of placement shows which consumer holds what.
    if desired.placement_call is PlacementCall.CLAIM:
        waiting = replace(named, action=replace(action_of(named), delete=True))
        return after(earlier, step.emit_event(waiting, BuildState.DELETING, event.at, context))
    deleting = delete_during_action(named, event.at, context)
    stepped = step.emit_event(deleting.instance, BuildState.DELETING, event.at, context, first=deleting.commands)
    return after(earlier, stepped)


def delete_transferred(instance: Instance, event: DeleteRequested, context: StepContext) -> Step:
    """It has left: the transfer is published again. If it is here by the schedulers' record it has come back since,
    and the record of that is lost.
    """
    if event.attempt <= instance.last_attempt:
        return refer_to_next_cell(instance, event, context)
    return delete_unknown(next_attempt_record(instance), event, context)


def delete_offloaded(instance: Instance, event: DeleteRequested, context: StepContext) -> Step:
    """No host has it: release its allocation, which refuses claims that may be under way, and end as deleted."""
    leaving = replace(instance, cause=event.cause or instance.cause)
    releasing = step.enter_releasing(leaving, State.DELETED, event.at, context)
    return step.emit_event(releasing, BuildState.DELETING, event.at, context)


def release_destroyed(instance: Instance, event: Destroyed | MachineMissing, context: StepContext) -> Step:
    """A host has destroyed its machine, or reports that it has none: when nothing is left that was
    to be destroyed, what it takes is released.
    """
    desired, action = desired_state_of(instance), instance.action
    is_current_due = desired.current is MachineTarget.DESTROYED and not (
        action is not None and action.current_destroyed
    )
    is_source_due = instance.source_host_uuid is not None and not action_of(instance).source_destroyed
    here = is_current_due and step.current_destroyed(instance, event)
    source = is_source_due and step.source_destroyed(instance, event)
    if not here and not source:
        return Step(instance)
    if here is is_current_due and source is is_source_due:
        return Step(step.release_after_destroy(instance, event.at, context))
    # Both are due, and one is gone.
    return Step(replace(instance, action=replace(action_of(instance), current_destroyed=here, source_destroyed=source)))
