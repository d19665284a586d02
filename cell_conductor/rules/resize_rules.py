"""Rules for resizes: in place, and of both kinds the confirmation and the revert. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.actions import MACHINE_ABSENT, ActionKind, ActionState
from cell_conductor.rules import build_end_rules, rollback_rules
from cell_conductor.rules.action_events import (
    after,
    refuse_request,
    repeat_end,
    report_progress,
    report_silent,
    source_of,
)
from cell_conductor.rules.move_rules import TIMED_OUT
from cell_conductor.rules.move_steps import (
    add_history,
    complete_at_destination,
    confirm,
    is_awaited,
    roll_back,
    try_next,
)
from cell_conductor.state import step
from cell_conductor.state.commands import with_change_number
from cell_conductor.state.events import ActionRequested, ChangeEnded, MachineMissing, TimedOut
from cell_conductor.state.instance import Instance, State, action_of
from cell_conductor.state.step import Step, StepContext

REVERTED = "action.reverted"


def end_resized(instance: Instance, event: ActionRequested, context: StepContext) -> Step:
    """Confirm or revert. The second of two finds the state changed and is refused."""
    action = action_of(instance)
    request = event.request
    again = repeat_end(instance, event, context)
    if again is not None:
        return again
    if request.kind not in (ActionKind.CONFIRM, ActionKind.REVERT):
        return refuse_request(instance, event, context, "instance.resized", "confirm or revert it first")
    if request.migration not in (None, action.request_id):
        return refuse_request(instance, event, context, "action.none", "another move is to be confirmed or reverted")
    if (answered := rollback_rules.alternative_ending(instance, event, context)) is not None:
        return answered
    if request.kind is ActionKind.REVERT:
        return rollback_rules.revert(instance, event, context, REVERTED)
    named = replace(action_of(instance), ending_request_id=request.request_id, ending_kind=request.kind)
    confirmed = confirm(
        rollback_rules.keep_current(replace(instance, action=named, cause=event.cause)), event.at, context
    )
    source, waits = source_of(action), confirmed.instance.state is State.DESTROYING
    if not waits or source.host_uuid in context.fences or source.service not in context.down:
        return confirmed
    return after(confirmed, report_silent(confirmed.instance, rollback_rules.SOURCE_SILENT, source, event.at, context))


def on_resized_in_place(instance: Instance, event: ChangeEnded, context: StepContext) -> Step:
    """The machine has its new size. If not, its host restores the old size, and then the next destination is tried."""
    # A failed resize may have left either size: until the old one is restored, the larger of the two stays claimed
    # here.
    if not is_awaited(instance, event, instance.current, instance.attempt):
        return Step(instance)
    action, is_absent = action_of(instance), event.code == MACHINE_ABSENT
    if action.restoring_size:
        if not event.done and not is_absent:
            return Step(
                instance
            )  # its deadline rolls the move back, and then the command is repeated until it confirms
        return try_next(replace(instance, action=replace(action, restoring_size=False)), event.at, context)
    if not event.done:
        failed = add_history(instance, "failed", event.at, event.code, event.reason)
        if is_absent:
            return try_next(failed, event.at, context)
        back = replace(failed, action=replace(action_of(failed), restoring_size=True))
        return Step(replace(with_change_number(back, event.at), deadline=event.at + action.step_timeout_s))
    return complete_at_destination(add_history(instance, "active", event.at), event.at, context)


def abandon_in_place(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """The host does not answer whether the machine has its new size: it is commanded to restore the old one."""
    return roll_back(
        instance, event.at, context, TIMED_OUT, "the host did not confirm that the machine has its new size"
    )


def revert_lost(instance: Instance, event: MachineMissing, context: StepContext) -> Step:
    """The destination is gone before it was confirmed: the source is still there, and is started again."""
    if not step.current_destroyed(instance, event):
        return Step(instance)
    if instance.is_in_place:
        return build_end_rules.mark_lost(instance, event, context)
    reason = f"host {instance.current.host} does not run it any more"
    return roll_back(instance, event.at, context, "instance.lost", reason)


# --- the end of a move


def confirm_in_time(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """No client has confirmed or reverted in the time that the request allowed: the move is confirmed."""
    # Only while its destination is known to be usable: the source, which is whole, would be abandoned for it by the
    # time alone. And not while the services are queried for the source, in order to go back.
    if rollback_rules.is_waiting(instance):
        return rollback_rules.query_services_again(instance, event.at, context)
    if not instance.is_in_place and not context.is_usable(instance.current):
        return Step(replace(instance, deadline=event.at + context.destroy_retry_s))
    earlier = report_progress(instance, ActionState.CONFIRMED, event.at, context)
    return after(earlier, confirm(earlier.instance, event.at, context))
