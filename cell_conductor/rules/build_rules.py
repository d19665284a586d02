"""The rules of a build, `rule(instance, event, context) -> Step`; the table has the rule of each state and event."""

# A rule may be called late or twice; if an attempt or a host does not match, the rule changes nothing, or destroys a
# machine that should not run. Commands are the contract's own messages, ready to be sent.

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.actions import ActionState
from bus.contracts.base import Refusal
from bus.contracts.build import BuildState
from bus.contracts.cell import UNKNOWN_ATTEMPT, Destroy, Spawn
from bus.contracts.stages import StageTimes
from cell_conductor.rules.action_events import DELETED, ActionEnd, after, end_action_with_instance
from cell_conductor.state import step
from cell_conductor.state.desired_state import COMMANDED, DELETE_REQUESTED, desired_state_of
from cell_conductor.state.events import (
    BuildRequested,
    Claimed,
    ClaimRefused,
    DeleteRequested,
    Destroyed,
    Event,
    MachineMissing,
    MachineRunning,
    Released,
    ServiceLost,
    Spawned,
    SpawnFailed,
    TimedOut,
)
from cell_conductor.state.fence import Closure
from cell_conductor.state.instance import (
    FENCED,
    MACHINE_EXISTS,
    NO_HOST,
    NOT_COMMANDED,
    Instance,
    State,
    claim_failure_reason,
    summary_of_attempts,
)
from cell_conductor.state.ownership_proof import is_newer_scan, is_provably_ended
from cell_conductor.state.step import Step, StepContext

# The codes of attempts that their host has ended: because they were out of time, or without a query.
TIMED_OUT = "spawn.timeout"
ENDED_BY_HOST = "spawn.destroyed"
# The code of an active instance that its host does not run any more.
LOST = "instance.lost"
DESTROY_CODES = "destroy."  # the prefix of the codes with which a host refuses to destroy


def ignore(instance: Instance, event: object, context: StepContext) -> Step:
    """Nothing changes: the event is late, repeated, or already handled."""
    return Step(instance)


def start_build(instance: Instance, event: BuildRequested, context: StepContext) -> Step:
    """Command the first selection, unless its host is fenced, or its service is down and another's is not."""
    # In a record that has had attempts nothing is commanded: what the build was decided by may be one's claim, which
    # was released.
    adopted = with_request(instance, event)
    refusal = event.dead_letter_reason
    if instance.uuid in context.quarantined:
        refusal = Refusal(code=MACHINE_EXISTS, reason="a host has a machine of it that no record explains")
    if refusal is not None:
        return _end_without_machine(adopted, event, refusal, context)
    if instance.last_attempt:
        return _reclaim(adopted, event.at, context)
    closed = closure_reason(adopted, context)
    if closed is None:
        return _spawn(adopted, event.at, context)
    # This record has commanded nothing there, so nothing has to be destroyed.
    passed = _with_attempt(adopted, NOT_COMMANDED, at=event.at, code=closed.code, reason=closed.reason)
    left = _without_closed(passed, event.at, context)
    if left.alternates:
        return Step(step.enter_claiming(left, State.BUILDING, event.at, context))
    return _without_host(left, event.at, context)


def _reclaim(instance: Instance, at: float, context: StepContext) -> Step:
    """Its hosts are claimed above every number that was given out, the first one too, and what it may hold is released
    with that. Nothing is commanded before: `current` has no number, and no machine.
    """
    unnumbered = replace(instance, selections=(instance.current, *instance.selections), attempt=UNKNOWN_ATTEMPT)
    reclaimed = _with_attempt(unnumbered, NOT_COMMANDED, at=at, reason="it is claimed anew")
    return Step(step.enter_claiming(reclaimed, State.BUILDING, at, context))


def _without_host(instance: Instance, at: float, context: StepContext) -> Step:
    over = replace(instance, code=NO_HOST, reason=step.truncate(summary_of_attempts(instance)))
    return Step(step.enter_releasing(over, State.FAILED, at, context))


def _end_without_machine(instance: Instance, event: BuildRequested, refusal: Refusal, context: StepContext) -> Step:
    """Its message was dead-lettered: nothing is commanded, its claim is released, and it ends as failed."""
    # Of a query whose instance has a machine that no record explains: its claim may be for that one, and is not
    # released.
    if event.is_query and refusal.code == MACHINE_EXISTS:
        return _end_failed(
            replace(instance, code=refusal.code, reason=step.truncate(refusal.reason)), event.at, context
        )
    passed = _with_attempt(instance, NOT_COMMANDED, at=event.at, code=refusal.code, reason=refusal.reason)
    over = replace(passed, code=refusal.code, reason=step.truncate(refusal.reason))
    return Step(step.enter_releasing(over, State.FAILED, event.at, context))


def tombstone(instance: Instance, event: DeleteRequested, context: StepContext) -> Step:
    """The delete came first: it is recorded, so that the build never starts."""
    highest = max(instance.highest_attempt, event.attempt)
    return Step(replace(instance, state=State.TOMBSTONE, highest_attempt=highest, since=event.at, cause=event.cause))


def on_active(instance: Instance, event: Spawned | MachineRunning, context: StepContext) -> Step:
    """The current attempt runs: the instance is active, once the machine is certainly built."""
    # An older attempt is destroyed.
    if not step.is_current_attempt(instance, event):
        return destroy_superseded(instance, event, context)
    instance = step.with_current_service(instance, event)
    if isinstance(event, MachineRunning) and not event.built:
        return Step(instance)
    here, warning = instance.current, event.warning if isinstance(event, Spawned) else ""
    up = replace(
        _with_attempt(instance, "active", at=event.at, reason=warning),
        stage_times=_stamped(instance, event),
        state=State.ACTIVE,
        next_state=None,
        selections=(here,),  # alternates have no use any more
        selection_index=0,
        deadline=None,
        since=event.at,
        answered=True,
        queried=False,
    )
    return step.emit_event(up, BuildState.ACTIVE, event.at, context, terminal=True, detail=("", step.truncate(warning)))


def destroy_failed_attempt(instance: Instance, event: SpawnFailed, context: StepContext) -> Step:
    """An attempt that is over has failed once more, and may have left a machine again: destroy it."""
    # Its command was delivered again after the answer that no machine is left, perhaps to another process of its
    # service, which has no record of that answer. A host that refuses to destroy is not sent the command again because
    # of its refusal.
    return Step(instance) if event.code.startswith(DESTROY_CODES) else destroy_superseded(instance, event, context)


def destroy_superseded(instance: Instance, event: Spawned | SpawnFailed | MachineRunning, context: StepContext) -> Step:
    """An attempt runs that the record proves to be over: it is destroyed on its host. Without a proof it is kept."""
    if not is_provably_ended(instance, event.attempt, event.host_uuid):
        return Step(instance)
    if (
        isinstance(event, MachineRunning)
        and instance.phase not in DELETE_REQUESTED
        and not is_newer_scan(event, instance)
    ):
        return Step(instance)  # it may be gone by now
    order = Destroy(
        instance_uuid=instance.uuid,
        attempt=event.attempt,
        host_uuid=event.host_uuid,
        service=event.service,
        database_id=context.database_id,
    )
    return Step(instance, (order,))


def confirm_running(instance: Instance, event: Spawned | MachineRunning, context: StepContext) -> Step:
    """A machine is where the record has it, perhaps under another service now, which gets its commands. One that is
    over, and that its host was not commanded to destroy, is destroyed.
    """
    desired = desired_state_of(instance)
    is_here = step.is_current_attempt(instance, event) and desired.current in COMMANDED
    if is_here or (step.is_source(instance, event) and desired.source in COMMANDED):
        return Step(step.with_current_service(instance, event))
    return destroy_superseded(instance, event, context)


def fail_over(instance: Instance, event: SpawnFailed, context: StepContext) -> Step:
    """The current attempt failed: clean up there, then claim the next alternate, or fail."""
    if not step.is_current(instance, event.attempt, event.host_uuid):
        return destroy_failed_attempt(instance, event, context)
    failed = _with_attempt(instance, "failed", at=event.at, code=event.code, reason=event.reason)
    failed = replace(failed, stage_times=_stamped(instance, event))
    if event.final:
        return _fail(failed, event.at, context, code=event.code, reason=event.reason)
    return _claim_next(failed, event.at, context)


def time_out(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """No answer in time: command the host to end the attempt unless it is complete, then claim the next alternate, or
    fail.
    """
    # A deadline alone proves nothing: the answer may be on its way, or in the part that a restored database has lost.
    # The conductor does not wait for a host that stays silent: its attempt counts as ended.
    if not instance.queried:
        return Step(replace(instance, queried=True, deadline=event.at + context.answer_timeout_s), resend=True)
    return _fail_timed_out(instance, event, context)


def fail_over_lost_service(instance: Instance, event: ServiceLost, context: StepContext) -> Step:
    """End the attempt at its lost service without waiting, then claim the next alternate on another service."""
    # Without such an alternate the build waits for its deadline, in case the service comes back. A machine that the
    # lost service may have built, or still builds, belongs to an attempt that is over: when a report lists it, the
    # record proves that, and it is destroyed.
    if instance.current.service != event.service or not _has_open_alternate(instance, context):
        return Step(instance)
    return claim_next_or_fail(instance, event, context, code=event.code, reason=event.reason)


def claim_next_or_fail(instance: Instance, event: Event, context: StepContext, *, code: str, reason: str) -> Step:
    """The attempt has failed: the next alternate is claimed, or the build ends."""
    failed = _with_attempt(instance, "failed", at=event.at, code=code, reason=reason)
    return _claim_next(replace(failed, stage_times=_stamped(failed, event)), event.at, context)


def fail_over_destroyed(instance: Instance, event: Destroyed, context: StepContext) -> Step:
    """The host has ended the attempt that was being built: it was out of time, or it has failed without a query. It is
    not commanded to once more: a second service of the same name answers for machines that it has not.
    """
    if event.attempt != instance.attempt or not step.current_destroyed(instance, event):
        return Step(instance)
    if instance.queried:
        return Step(_fail_timed_out(instance, event, context).instance)
    gone = _with_attempt(instance, "failed", at=event.at, code=ENDED_BY_HOST)
    return Step(_claim_next(replace(gone, stage_times=_stamped(instance, event)), event.at, context).instance)


def build_on_alternate(instance: Instance, event: Claimed, context: StepContext) -> Step:
    """An alternate is claimed: command it under the next attempt."""
    # If its host was closed after the request and another is open, nothing is commanded here, and the other is claimed.
    # If none is open the build ends, unless only the service of its host is down.
    taken = _with_claim(instance, event)
    if closure_reason(taken, context) is None:
        return _spawn(taken, event.at, context)
    again = replace(instance, highest_attempt=event.attempt, consumer_generation=event.consumer_generation)
    left = _without_closed(again, event.at, context)
    if left.alternates:
        return Step(replace(left, deadline=event.at + context.claim_retry_s))
    return _without_host(left, event.at, context)


def release_alternate(instance: Instance, event: Claimed, context: StepContext) -> Step:
    """An alternate was claimed for an instance that is to be deleted: release it, no machine was built there."""
    return Step(step.enter_releasing(_with_claim(instance, event), State.DELETED, event.at, context))


def no_alternate_left(instance: Instance, event: ClaimRefused, context: StepContext) -> Step:
    """No alternate could be claimed: release, so that a late copy of the claim is refused, and end as failed."""
    # If another client holds the consumer, there is nothing of the instance to release.
    skipped = step.unclaimed_records(instance, event.outcomes, event.at)
    tried = replace(instance, history=instance.history + skipped)
    if event.consumer_conflict:
        reason = event.reason or "another client holds this instance's allocation"
        changed = replace(tried, code="placement.consumer_conflict", reason=step.truncate(reason))
        return _end_failed(changed, event.at, context)
    code, reason = claim_failure_reason(event, summary_of_attempts(tried))
    over = replace(tried, code=code, reason=step.truncate(reason))
    return Step(step.enter_releasing(over, State.FAILED, event.at, context))


def end_unclaimed(instance: Instance, event: ClaimRefused, context: StepContext) -> Step:
    """No alternate was claimed for an instance that is to be deleted: release as in `no_alternate_left`, and end as
    deleted.
    """
    if event.consumer_conflict:
        return _end_deleted(instance, event.at, context)
    return Step(step.enter_releasing(instance, State.DELETED, event.at, context))


def destroy(instance: Instance, event: DeleteRequested, context: StepContext) -> Step:
    """Command the host to destroy; the allocation is held until it confirms."""
    leaving = step.enter_destroying(instance, State.DELETED, event.at, context)
    leaving = replace(leaving, cause=event.cause or instance.cause)
    return step.emit_event(leaving, BuildState.DELETING, event.at, context)


def mark_lost(instance: Instance, event: Destroyed | MachineMissing, context: StepContext) -> Step:
    """An active instance is gone from its host: possible remains are destroyed, then release, and end as failed."""
    # Its host answers so as well, if the deadline of its build commanded the end of what was not built: it ends this
    # attempt wherever it comes up again.
    if not step.current_destroyed(instance, event):
        return Step(instance)
    reason = f"host {instance.current.host} does not run it any more"
    return fail_lost(instance, event.at, context, code=LOST, reason=reason)


def fail_lost(instance: Instance, at: float, context: StepContext, *, code: str, reason: str) -> Step:
    """An active instance is lost: possible remains are destroyed, its allocation is released, and it ends as failed."""
    lost = _with_attempt(instance, "lost", at=at, code=code, reason=reason)
    return _fail(lost, at, context, code=code, reason=reason)


def repeat_request(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """Placement's answer never arrived: the same request is sent again (it is idempotent by attempt)."""
    return Step(replace(instance, deadline=event.at + context.claim_retry_s))


def end_failed(instance: Instance, event: Released, context: StepContext) -> Step:
    """No allocation is held any more: failed. While it moved there are two consumers, released one after the other."""
    if (left := _release_second_consumer(instance, event, context)) is not None:
        return left
    return _end_failed(instance, event.at, context)


def end_deleted(instance: Instance, event: Released | DeleteRequested, context: StepContext) -> Step:
    """No allocation is held any more: deleted. While it moved there are two consumers, released one after the other."""
    if isinstance(event, Released) and (left := _release_second_consumer(instance, event, context)) is not None:
        return left
    cause = event.cause if isinstance(event, DeleteRequested) and event.cause else instance.cause
    return _end_deleted(replace(instance, cause=cause), event.at, context)


# --- what several rules share


def _release_second_consumer(instance: Instance, event: Released, context: StepContext) -> Step | None:
    """The next step when that was not the last consumer; None: nothing is held."""
    # The instance first: once it holds nothing, a late copy of the move's claim cannot move an allocation to the
    # migration. A copy that came late but before that has moved it, whatever answer to it the conductor received.
    action = instance.action
    if action is None or action.instance_released or not (action.claimed or action.source is not None):
        return None
    updated = replace(instance, action=replace(action, instance_released=True))
    return Step(replace(updated, deadline=event.at + context.claim_retry_s))


def with_request(instance: Instance, event: BuildRequested) -> Instance:
    """The record of what this request specifies; its first selection is claimed under the request's attempt."""
    return replace(
        instance,
        spec=event.spec,
        selections=event.selections,
        server_group=event.server_group,
        limits=event.limits,
        attempt=event.attempt,
        consumer_generation=event.consumer_generation,
        build_timeout_s=event.build_timeout_s,
        requested_at=event.requested_at,
        cause=event.cause,
        stage_times=event.stage_times,
        sequence=max(instance.sequence, event.sequence + 1),  # schedulers may have had more of a record that is lost
    )


def _spawn(instance: Instance, at: float, context: StepContext) -> Step:
    assert instance.spec is not None
    here = instance.current
    deadline = at + instance.build_timeout_s
    building = replace(instance, state=State.BUILDING, next_state=None, deadline=deadline, since=at, queried=False)
    order = Spawn(
        spec=instance.spec,
        attempt=instance.attempt,
        host_uuid=here.host_uuid,
        allocations=here.allocations,
        service=here.service,
        database_id=context.database_id,
    )
    return step.emit_event(building, BuildState.BUILDING, at, context, first=(order,))


def _fail_timed_out(instance: Instance, event: TimedOut | Destroyed, context: StepContext) -> Step:
    reason = f"no answer within {instance.build_timeout_s:g} s"
    over = _with_attempt(instance, "timed_out", at=event.at, code=TIMED_OUT, reason=reason)
    return _claim_next(replace(over, stage_times=_stamped(instance, event)), event.at, context)


def _claim_next(instance: Instance, at: float, context: StepContext) -> Step:
    """After a failed attempt: its remains are destroyed, and the next alternate is claimed, if there is one."""
    instance = _without_closed(instance, at, context)
    if not instance.alternates:
        return _fail(instance, at, context, code=NO_HOST, reason=summary_of_attempts(instance))
    left = step.enter_claiming(instance, State.BUILDING, at, context)
    return Step(left, (step.destroy_current(left, context),))


def closure_reason(instance: Instance, context: StepContext) -> Closure | None:
    """Why nothing is started on its host now that it would be; None: it is. One whose service is only down is passed
    over while another is not closed.
    """
    closed = context.closed(instance).closure_of(instance.current)
    is_to_try = closed is not None and closed.code != FENCED and not _has_open_alternate(instance, context)
    return None if is_to_try else closed


def _has_open_alternate(instance: Instance, context: StepContext) -> bool:
    closed = context.closed(instance)
    return any(closed.closure_of(selection) is None for selection in instance.alternates)


def _without_closed(instance: Instance, at: float, context: StepContext) -> Instance:
    """Hosts that are closed now are skipped, and recorded: a request to placement is never changed."""
    closed = context.closed(instance)
    notes = closed.skipped(instance.alternates, instance.next_attempt, at)
    kept = tuple(selection for selection in instance.alternates if closed.closure_of(selection) is None)
    tried = instance.selections[: instance.selection_index + 1]
    return replace(instance, selections=(*tried, *kept), history=instance.history + notes)


def _fail(instance: Instance, at: float, context: StepContext, *, code: str, reason: str) -> Step:
    over = step.enter_releasing(replace(instance, code=code, reason=step.truncate(reason)), State.FAILED, at, context)
    return Step(over, (step.destroy_current(over, context),))


def _with_claim(instance: Instance, event: Claimed) -> Instance:
    skipped = step.unclaimed_records(instance, event.outcomes[: event.option], event.at)
    return replace(
        instance,
        history=instance.history + skipped,
        selection_index=instance.selection_index + 1 + event.option,
        attempt=event.attempt,
        consumer_generation=event.consumer_generation,
    )


def _end_failed(instance: Instance, at: float, context: StepContext) -> Step:
    over = replace(
        instance,
        state=State.FAILED,
        next_state=None,
        deadline=None,
        since=at,
        answered=True,
        queried=False,
    )
    moved = end_action_with_instance(over, ActionEnd(ActionState.FAILED, over.code, over.reason), at, context)
    failed = step.emit_event(moved.instance, BuildState.FAILED, at, context, terminal=not instance.answered)
    return after(moved, failed)


def _end_deleted(instance: Instance, at: float, context: StepContext) -> Step:
    gone = replace(instance, state=State.DELETED, next_state=None, deadline=None, since=at)
    moved = end_action_with_instance(
        gone, ActionEnd(ActionState.FAILED, DELETED, "the instance was deleted"), at, context
    )
    return after(moved, step.emit_event(moved.instance, BuildState.DELETED, at, context, terminal=True))


def _with_attempt(instance: Instance, outcome: str, *, at: float, code: str = "", reason: str = "") -> Instance:
    if not instance.selections:  # on record since a query only, which names no host
        return instance
    record = step.attempt_record(instance, instance.attempt, outcome, at, code=code, reason=reason)
    return replace(instance, history=(*instance.history, record))


def _stamped(instance: Instance, event: Event) -> StageTimes | None:
    """The stages, now that an attempt has ended: `dispatched` by the first attempt, `built` by the last."""
    # If a host never answered, or no longer knows when the build began, the time of the command counts.
    if instance.stage_times is None:
        return None
    started_at, ended_at = (
        (event.started_at, event.ended_at) if isinstance(event, Spawned | SpawnFailed) else (0.0, 0.0)
    )
    return replace(
        instance.stage_times,
        dispatched=instance.stage_times.dispatched or started_at or instance.since,
        built=ended_at or event.at,
    )
