"""How a build or an instance ends: it is lost, or has no alternate left, and no allocation is held any more. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.actions import ActionState
from bus.contracts.build import BuildState
from cell_conductor.rules.action_events import DELETED, ActionEnd, after, end_action_with_instance
from cell_conductor.state import step
from cell_conductor.state.events import ClaimRefused, DeleteRequested, Destroyed, MachineMissing, Released
from cell_conductor.state.instance import Instance, State, claim_failure_reason, summary_of_attempts
from cell_conductor.state.step import Step, StepContext

# The code of an active instance that its host does not run any more.
LOST = "instance.lost"


def no_alternate_left(instance: Instance, event: ClaimRefused, context: StepContext) -> Step:
    """No alternate could be claimed: release, so that a late copy of the claim is refused, and end as failed."""
    # If another client holds the consumer, there is nothing of the instance to release.
    skipped = step.unclaimed_records(instance, event.outcomes, event.at)
    tried = replace(instance, history=instance.history + skipped)
    if event.consumer_conflict:
        reason = event.reason or "another client holds this instance's allocation"
        changed = replace(tried, code="placement.consumer_conflict", reason=step.truncate(reason))
        return enter_failed(changed, event.at, context)
    code, reason = claim_failure_reason(event, summary_of_attempts(tried))
    over = replace(tried, code=code, reason=step.truncate(reason))
    return Step(step.enter_releasing(over, State.FAILED, event.at, context))


def end_unclaimed(instance: Instance, event: ClaimRefused, context: StepContext) -> Step:
    """No alternate was claimed for an instance that is to be deleted: release as in `no_alternate_left`, and end as
    deleted.
    """
    if event.consumer_conflict:
        return enter_deleted(instance, event.at, context)
    return Step(step.enter_releasing(instance, State.DELETED, event.at, context))


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
    lost = step.with_attempt(instance, "lost", at=at, code=code, reason=reason)
    return fail(lost, at, context, code=code, reason=reason)


def end_failed(instance: Instance, event: Released, context: StepContext) -> Step:
    """No allocation is held any more: failed. While it moved there are two consumers, released one after the other."""
    if (left := _release_second_consumer(instance, event, context)) is not None:
        return left
    return enter_failed(instance, event.at, context)


def end_deleted(instance: Instance, event: Released | DeleteRequested, context: StepContext) -> Step:
    """No allocation is held any more: deleted. While it moved there are two consumers, released one after the other."""
    if isinstance(event, Released) and (left := _release_second_consumer(instance, event, context)) is not None:
        return left
    cause = event.cause if isinstance(event, DeleteRequested) and event.cause else instance.cause
    return enter_deleted(replace(instance, cause=cause), event.at, context)


def _release_second_consumer(instance: Instance, event: Released, context: StepContext) -> Step | None:
    """The next step when that was not the last consumer; None: nothing is held."""
    # The instance first: once it holds nothing, a late copy of the move's claim cannot move an allocation to the
    # migration. A copy that came late but before that has moved it, whatever answer to it the conductor received.
    action = instance.action
    if action is None or action.instance_released or not (action.claimed or action.source is not None):
        return None
    updated = replace(instance, action=replace(action, instance_released=True))
    return Step(replace(updated, deadline=event.at + context.claim_retry_s))


def fail(instance: Instance, at: float, context: StepContext, *, code: str, reason: str) -> Step:
    """Possible remains are destroyed, its allocation is released, and it ends as failed."""
    over = step.enter_releasing(replace(instance, code=code, reason=step.truncate(reason)), State.FAILED, at, context)
    return Step(over, (step.destroy_current(over, context),))


def enter_failed(instance: Instance, at: float, context: StepContext) -> Step:
    """Failed, now that nothing is held; its action ends with it."""
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


def enter_deleted(instance: Instance, at: float, context: StepContext) -> Step:
    """Deleted, now that nothing is held; its action ends with it."""
    gone = replace(instance, state=State.DELETED, next_state=None, deadline=None, since=at)
    moved = end_action_with_instance(
        gone, ActionEnd(ActionState.FAILED, DELETED, "the instance was deleted"), at, context
    )
    return after(moved, step.emit_event(moved.instance, BuildState.DELETED, at, context, terminal=True))
