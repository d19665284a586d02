"""The effect of a fence on an instance: `rule(instance, event, context) -> Step`. A fence proves what a host's own
answer proves: no machine of the instance runs there, and none will before the host has received its stale machines.
"""

# So a step that waits for the host's answer goes on without it. An instance that is active there stays so: only its
# policy, or an operator, decides whether it is rebuilt elsewhere.

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.actions import ActionState, Condition
from bus.contracts.cell import Selection
from bus.contracts.operations import EvacuationPolicy
from cell_conductor.rules import build_end_rules, build_rules, delete_rules, rollback_rules
from cell_conductor.rules.action_events import ActionEnd, close
from cell_conductor.rules.move_steps import (
    add_history,
    end_rolled_back,
    enter_active,
    revert_allocations,
    roll_back,
    try_next,
)
from cell_conductor.state import step
from cell_conductor.state.desired_state import desired_state_of
from cell_conductor.state.events import Destroyed, HostFenced
from cell_conductor.state.instance import FENCED, Instance, State, action_of
from cell_conductor.state.step import Step, StepContext


def fail_over_fenced(instance: Instance, event: HostFenced, context: StepContext) -> Step:
    """A build there: its attempt is over, and the next alternate is claimed, or the build has failed."""
    if event.host_uuid != instance.host_uuid:
        return Step(instance)
    return build_rules.claim_next_or_fail(instance, event, context, code=FENCED, reason=_reason(instance.current.host))


def fail_by_policy(instance: Instance, event: HostFenced, context: StepContext) -> Step:
    """Active there: it stays on record, unless its policy is that it fails with its host. Not by a fence that is being
    taken back: its host runs it again.
    """
    assert instance.spec is not None
    is_here = event.host_uuid == instance.host_uuid and context.is_off(event.host_uuid)
    if not is_here or instance.spec.on_host_failure is not EvacuationPolicy.FAIL:
        return Step(instance)
    return build_end_rules.fail_lost(instance, event.at, context, code=FENCED, reason=_reason(instance.current.host))


def end_destroyed(instance: Instance, event: HostFenced, context: StepContext) -> Step:
    """The conductor does not wait for the host's confirmation; the history of one that is deleted records that."""
    where = _where(instance, event)
    gone = Destroyed(at=event.at, attempt=instance.last_attempt, host_uuid=event.host_uuid, service=where.service)
    ended = delete_rules.release_destroyed(instance, gone, context)
    if ended.instance is instance or desired_state_of(instance).condition is not Condition.DELETED:
        return ended
    reason = "the delete did not wait for this host's answer"
    tried = step.attempt_record(instance, instance.attempt, "fenced", event.at, code=FENCED, reason=reason)
    record = replace(tried, host=where.host)
    return Step(replace(ended.instance, history=(*ended.instance.history, record)), ended.commands)


def skip_checked_destination(instance: Instance, event: HostFenced, context: StepContext) -> Step:
    """A destination that was only checked: the next one is tried."""
    if event.host_uuid != instance.host_uuid:
        return Step(instance)
    failed = add_history(instance, "failed", event.at, FENCED, _reason(instance.current.host))
    return try_next(failed, event.at, context)


def stay_at_source(instance: Instance, event: HostFenced, context: StepContext) -> Step:
    """The source was commanded to hand over, and cannot: the move is rolled back."""
    if event.host_uuid != instance.source_host_uuid:
        return Step(instance)
    return roll_back(instance, event.at, context, FENCED, "the source was fenced before it had handed over")


def abandon_destination(instance: Instance, event: HostFenced, context: StepContext) -> Step:
    """The destination is off: the source, which is stopped and whole, goes on, or the next destination is tried."""
    # Of a move that had arrived, the destination's machine is the newest, and is destroyed when its host is back: the
    # source is seen first. It is not abandoned when the fence is being ended.
    if event.host_uuid != instance.host_uuid:
        return Step(instance)
    if instance.state is State.FINISHING:
        return skip_checked_destination(instance, event, context)
    if instance.state is State.RESIZED:
        return rollback_rules.leave_fenced(instance, event.at, context, FENCED, _reason(instance.current.host))
    return roll_back(instance, event.at, context, FENCED, _reason(instance.current.host))


def revert(instance: Instance, event: HostFenced, context: StepContext) -> Step:
    """The conductor does not wait for the remains of a move that was rolled back there."""
    if event.host_uuid != instance.host_uuid:
        return Step(instance)
    return Step(revert_allocations(instance, event.at, context))


def end_unstarted(instance: Instance, event: HostFenced, context: StepContext) -> Step:
    """The source of a move that was rolled back cannot be started: it is on record on its old host, as any
    instance of a dead host.
    """
    if event.host_uuid != instance.host_uuid:
        return Step(instance)
    action = action_of(instance)
    reason = step.truncate(f"{action.rollback_reason}; its host was fenced before it was started again".strip("; "))
    return end_rolled_back(replace(instance, action=replace(action, rollback_reason=reason)), event.at, context)


def end_change(instance: Instance, event: HostFenced, context: StepContext) -> Step:
    """A change of a machine that is off: the change has failed, and the machine is on record as it was."""
    if event.host_uuid != instance.host_uuid:
        return Step(instance)
    back = replace(instance, spec=action_of(instance).spec)
    ending = ActionEnd(ActionState.FAILED, FENCED, _reason(instance.current.host))
    return close(enter_active(back, event.at, context), ending, event.at, context)


def _where(instance: Instance, event: HostFenced) -> Selection:
    source = instance.separate_source
    return source if source is not None and source.host_uuid == event.host_uuid else instance.current


def _reason(host: str) -> str:
    return f"host {host} was fenced"
