"""The rules of a build under way: `rule(instance, event, context) -> Step`. The table selects the rule that applies."""

# A rule may be called late or twice; if an attempt or a host does not match, the rule changes nothing, or destroys a
# machine that should not run. Commands are the contract's own messages, ready to be sent.

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.build import BuildState
from bus.contracts.cell import UNKNOWN_ATTEMPT, Spawn
from bus.contracts.stages import StageTimes
from cell_conductor.rules import build_end_rules, machine_rules
from cell_conductor.state import step
from cell_conductor.state.events import (
    BuildRequested,
    Claimed,
    Destroyed,
    Event,
    MachineRunning,
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
    summary_of_attempts,
)
from cell_conductor.state.step import Step, StepContext

# The codes of attempts that their host has ended: because they were out of time, or without a query.
TIMED_OUT = "spawn.timeout"
ENDED_BY_HOST = "spawn.destroyed"


def start_build(instance: Instance, event: BuildRequested, context: StepContext) -> Step:
    """Command the first selection, unless its host is fenced, or its service is down and another's is not."""
    # In a record that has had attempts nothing is commanded: what the build was decided by may be one's claim, which
    # was released.
    adopted = with_request(instance, event)
    if instance.uuid in context.quarantined:
        return _refuse(adopted, event, context)
    if event.dead_letter_reason is not None:
        return _end_without_machine(adopted, event, event.dead_letter_reason, context)
    if instance.last_attempt:
        return _reclaim(adopted, event.at, context)
    closed = closure_reason(adopted, context)
    if closed is None:
        return _spawn(adopted, event.at, context)
    # This record has commanded nothing there, so nothing has to be destroyed.
    passed = step.with_attempt(adopted, NOT_COMMANDED, at=event.at, code=closed.code, reason=closed.reason)
    left = _without_closed(passed, event.at, context)
    if left.alternates:
        return Step(step.enter_claiming(left, State.BUILDING, event.at, context))
    return _without_host(left, event.at, context)


def _reclaim(instance: Instance, at: float, context: StepContext) -> Step:
    """Its hosts are claimed above every number that was given out, the first one too, and what it may hold is released
    with that. Nothing is commanded before: `current` has no number, and no machine.
    """
    unnumbered = replace(instance, selections=(instance.current, *instance.selections), attempt=UNKNOWN_ATTEMPT)
    reclaimed = step.with_attempt(unnumbered, NOT_COMMANDED, at=at, reason="it is claimed anew")
    return Step(step.enter_claiming(reclaimed, State.BUILDING, at, context))


def _without_host(instance: Instance, at: float, context: StepContext) -> Step:
    over = replace(instance, code=NO_HOST, reason=step.truncate(summary_of_attempts(instance)))
    return Step(step.enter_releasing(over, State.FAILED, at, context))


def _end_without_machine(instance: Instance, event: BuildRequested, refusal: Refusal, context: StepContext) -> Step:
    """Its message was dead-lettered: nothing is commanded, its claim is released, and it ends as failed."""
    passed = step.with_attempt(instance, NOT_COMMANDED, at=event.at, code=refusal.code, reason=refusal.reason)
    over = replace(passed, code=refusal.code, reason=step.truncate(refusal.reason))
    return Step(step.enter_releasing(over, State.FAILED, event.at, context))


def _refuse(instance: Instance, event: BuildRequested, context: StepContext) -> Step:
    """A host has a machine of it that is not proved to be its project's: the build ends, and names no host."""
    reason = "a host has a machine of it that no record explains"
    met = step.with_attempt(instance, NOT_COMMANDED, at=event.at, code=MACHINE_EXISTS, reason=reason)
    refused = replace(met, selections=(), code=MACHINE_EXISTS, reason=reason, proves_from=instance.next_attempt)
    if event.is_query:  # its claim may be for that machine, and is not released
        return build_end_rules.enter_failed(refused, event.at, context)
    return Step(step.enter_releasing(refused, State.FAILED, event.at, context))


def on_active(instance: Instance, event: Spawned | MachineRunning, context: StepContext) -> Step:
    """The current attempt runs: the instance is active, once the machine is certainly built."""
    # An older attempt is destroyed.
    if not step.is_current_attempt(instance, event):
        return machine_rules.destroy_superseded(instance, event, context)
    instance = step.with_current_service(instance, event)
    if isinstance(event, MachineRunning) and not event.built:
        return Step(instance)
    here, warning = instance.current, event.warning if isinstance(event, Spawned) else ""
    up = replace(
        step.with_attempt(instance, "active", at=event.at, reason=warning),
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


def fail_over(instance: Instance, event: SpawnFailed, context: StepContext) -> Step:
    """The current attempt failed: clean up there, then claim the next alternate, or fail."""
    if not step.is_current(instance, event.attempt, event.host_uuid):
        return machine_rules.destroy_failed_attempt(instance, event, context)
    failed = step.with_attempt(instance, "failed", at=event.at, code=event.code, reason=event.reason)
    failed = replace(failed, stage_times=_stamped(instance, event))
    if event.final:
        return build_end_rules.fail(failed, event.at, context, code=event.code, reason=event.reason)
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
    failed = step.with_attempt(instance, "failed", at=event.at, code=code, reason=reason)
    return _claim_next(replace(failed, stage_times=_stamped(failed, event)), event.at, context)


def fail_over_destroyed(instance: Instance, event: Destroyed, context: StepContext) -> Step:
    """The host has ended the attempt that was being built: it was out of time, or it has failed without a query. It is
    not commanded to once more: a second service of the same name answers for machines that it has not.
    """
    if event.attempt != instance.attempt or not step.current_destroyed(instance, event):
        return Step(instance)
    if instance.queried:
        return Step(_fail_timed_out(instance, event, context).instance)
    gone = step.with_attempt(instance, "failed", at=event.at, code=ENDED_BY_HOST)
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


def repeat_request(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """Placement's answer never arrived: the same request is sent again (it is idempotent by attempt)."""
    return Step(replace(instance, deadline=event.at + context.claim_retry_s))


# --- what several rules share


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
    over = step.with_attempt(instance, "timed_out", at=event.at, code=TIMED_OUT, reason=reason)
    return _claim_next(replace(over, stage_times=_stamped(instance, event)), event.at, context)


def _claim_next(instance: Instance, at: float, context: StepContext) -> Step:
    """After a failed attempt: its remains are destroyed, and the next alternate is claimed, if there is one."""
    instance = _without_closed(instance, at, context)
    if not instance.alternates:
        return build_end_rules.fail(instance, at, context, code=NO_HOST, reason=summary_of_attempts(instance))
    left = step.enter_claiming(instance, State.BUILDING, at, context)
    return Step(left, (step.destroy_current(left, context),))


def closure_reason(instance: Instance, context: StepContext) -> Closure | None:
    """Why nothing is started on its host now that it would be; None: it is. One whose service is only down is passed
    over while another is not closed.
    """
    closed = context.closed.closure_of(instance.current)
    is_to_try = closed is not None and closed.code != FENCED and not _has_open_alternate(instance, context)
    return None if is_to_try else closed


def _has_open_alternate(instance: Instance, context: StepContext) -> bool:
    closed = context.closed
    return any(closed.closure_of(selection) is None for selection in instance.alternates)


def _without_closed(instance: Instance, at: float, context: StepContext) -> Instance:
    """Hosts that are closed now are skipped, and recorded: a request to placement is never changed."""
    closed = context.closed
    notes = closed.skipped(instance.alternates, instance.next_attempt, at)
    kept = tuple(selection for selection in instance.alternates if closed.closure_of(selection) is None)
    tried = instance.selections[: instance.selection_index + 1]
    return replace(instance, selections=(*tried, *kept), history=instance.history + notes)


def _with_claim(instance: Instance, event: Claimed) -> Instance:
    skipped = step.unclaimed_records(instance, event.outcomes[: event.option], event.at)
    return replace(
        instance,
        history=instance.history + skipped,
        selection_index=instance.selection_index + 1 + event.option,
        attempt=event.attempt,
        consumer_generation=event.consumer_generation,
    )


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
