"""How a move is rolled back: the proof that it can go back, and the rollback to the source."""

# The destination destroys its machine, placement is reverted, and the source is started again if it was commanded to
# stop.
# Of a move that has arrived the machine at the destination runs, and a revert or a fence gives it up for the source's,
# which is stopped. A record does not prove that the source is still there: its host may be dead or reinstalled, or be
# none of its service any more. So the compute services are queried for it first; meanwhile the move stays as it is, and
# states why it is to be rolled back (`rollback_code`). Only the answer that its host lists that very machine rolls it
# back.
# Without that a revert is refused, and the client may confirm the move or request the revert again. After a fence of
# the destination the services are queried again, until the source is seen or the destination is used again.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from bus.contracts.actions import MACHINE_ABSENT, ActionKind, ActionState
from bus.contracts.cell import MachineLookupResult, Selection
from bus.faults import Fault
from cell_conductor.rules.action_events import (
    ActionEnd,
    after,
    answer_early,
    answer_other,
    refuse_request,
    report_progress,
    report_silent,
    report_waiting,
    source_of,
)
from cell_conductor.rules.move_steps import (
    change,
    confirm,
    end_rolled_back,
    ending_of,
    is_awaited,
    revert_allocations,
    roll_back,
)
from cell_conductor.state import step
from cell_conductor.state.commands import next_resend_at, resend_all, resend_sooner, with_change_number
from cell_conductor.state.desired_state import MachineTarget, desired_state_of
from cell_conductor.state.events import (
    ActionRequested,
    ChangeEnded,
    Destroyed,
    MachineMissing,
    Reverted,
    RevertRefused,
    SourceAnswered,
    SourceQuery,
    TimedOut,
)
from cell_conductor.state.instance import ActionInProgress, Instance, Power, State, action_of
from cell_conductor.state.step import Step, StepContext

SOURCE_FENCED = "action.source_fenced"  # an operator has stated that its host is off
SOURCE_SILENT = "action.source_silent"  # its compute service has not answered
SOURCE_LOST = "action.source_lost"  # its host was looked at, and does not have it
SOURCE_UNREPORTED = "action.source_unreported"  # its compute service has no such host any more
SOURCE_REFUSED = "action.source_refused"  # placement does not give its allocation back
# The answers are waited for so many times as long as one of them: several searches may be ahead. After that no
# conductor is waiting for them any more.
ANSWERS = 3


def source_query_of(instance: Instance) -> SourceQuery | None:
    """The query that an instance waits for; None: for none. It follows from the record alone."""
    if not is_waiting(instance):
        return None
    action = action_of(instance)
    source = source_of(action)
    return SourceQuery(source.host_uuid, source.service, action.source_attempt, action.change_number)


def answer_about(
    uuid: str, source: SourceQuery, answers: Sequence[tuple[str, MachineLookupResult | Fault]], at: float
) -> SourceAnswered:
    """The event of the services' answers: (service, its answer). Another service that has the host counts when it lists
    the machine; that it does not proves nothing while the service on record is silent.
    """
    looked = [(name, one) for name, one in answers if isinstance(one, MachineLookupResult)]
    for service, found in looked:
        if source.host_uuid in found.hosts and any(
            (m.instance_uuid, m.host_uuid, m.attempt) == (uuid, source.host_uuid, source.attempt)
            for m in found.machines
        ):
            return SourceAnswered(at=at, query=source, service=service)
    if all(service != source.service for service, _ in looked):
        code, reason = SOURCE_SILENT, f"compute service {source.service} has not answered"
    elif any(source.host_uuid in answer.hosts for _, answer in looked):
        code, reason = SOURCE_LOST, "its host does not have the machine any more"
    else:
        code, reason = SOURCE_UNREPORTED, f"compute service {source.service} has no such host any more"
    return SourceAnswered(at=at, query=source, code=code, reason=reason)


def is_waiting(instance: Instance) -> bool:
    """Whether the move has arrived, and is to be rolled back once its source was seen."""
    return instance.state is State.RESIZED and bool(action_of(instance).rollback_code)


def revert(instance: Instance, event: ActionRequested, context: StepContext, code: str) -> Step:
    """A client requests the way back: it is started once the source was seen."""
    action = action_of(instance)
    named = replace(action, ending_request_id=event.request.request_id, ending_kind=ActionKind.REVERT)
    started = replace(instance, action=named, cause=event.cause)
    if (fenced := fence_reason(source_of(action), context)) is not None:
        return refuse_request(instance, event, context, fenced.code, fenced.reason)
    return _query(started, event.at, context, code, "")


def leave_fenced(instance: Instance, at: float, context: StepContext, code: str, reason: str) -> Step:
    """The destination of a move that has arrived was fenced: it goes back once the source was seen. A resize in place
    has nowhere to go back to.
    """
    if is_waiting(instance) or not context.is_off(instance.host_uuid):
        return Step(instance)
    if not instance.is_in_place:
        return _query(instance, at, context, code, reason)
    return _confirm_on_fenced(instance, at, context) if _is_not_awaited(instance) else Step(instance)


def roll_back_to_source(instance: Instance, event: SourceAnswered, context: StepContext) -> Step:
    """The source was seen: the move is rolled back. It was not: the destination stays, and a revert is refused."""
    action = action_of(instance)
    if event.code:
        return _keep_destination(instance, ActionEnd(ActionState.REFUSED, event.code, event.reason), event.at, context)
    if (fenced := fence_reason(source_of(action), context)) is not None:
        return _keep_destination(instance, fenced, event.at, context)
    if not _is_still_due(instance, context):
        return Step(_await_confirm(instance))
    seen = replace(instance, action=replace(action, source=replace(source_of(action), service=event.service)))
    if instance.is_in_place:
        seen = step.with_service(seen, event.service)
    return roll_back(seen, event.at, context, action.rollback_code, action.rollback_reason)


def query_services_again(instance: Instance, at: float, context: StepContext) -> Step:
    """No answer is on record in time: a revert is refused; after a fence the services are queried again."""
    reason = f"no conductor has an answer of compute service {source_of(action_of(instance)).service}"
    silent = ActionEnd(ActionState.REFUSED, SOURCE_SILENT, reason)
    return _keep_destination(with_change_number(instance, at), silent, at, context)


def end_source_lost(instance: Instance, at: float, context: StepContext) -> Step:
    """The source's host has stated meanwhile that its machine is gone: nothing is left to go back to."""
    lost = ActionEnd(ActionState.REFUSED, SOURCE_LOST, "its host does not have the machine any more")
    return _keep_destination(instance, lost, at, context) if is_waiting(instance) else Step(instance)


def alternative_ending(instance: Instance, event: ActionRequested, context: StepContext) -> Step | None:
    """The answer to a confirm or revert while the source is queried for; None: it may be carried out."""
    # After a fence the client may still confirm the move, or wait for the answer by a revert.
    action = action_of(instance)
    if not action.ending_request_id:
        return None
    if event.request.request_id == action.ending_request_id:
        return Step(instance)
    return refuse_request(instance, event, context, "instance.busy", "a revert of it waits for its source")


def keep_current(instance: Instance) -> Instance:
    """The move as it is when it is not to be rolled back any more."""
    return replace(instance, action=replace(action_of(instance), rollback_code="", rollback_reason=""))


def fence_reason(source: Selection, context: StepContext) -> ActionEnd | None:
    """Why nothing can be started on the source's host; None: it is not fenced."""
    fence = context.fences.get(source.host_uuid)
    if fence is None:
        return None
    reason = (
        f"host {fence.host}, where it would go back to, is fenced; confirm the move, or revert it when it is enabled"
    )
    return ActionEnd(ActionState.REFUSED, SOURCE_FENCED, reason)


def _is_still_due(instance: Instance, context: StepContext) -> bool:
    """Whether the reason for which the source was queried for still holds: the fence may have been ended since."""
    return action_of(instance).ending_kind is ActionKind.REVERT or context.is_off(instance.host_uuid)


def _query(instance: Instance, at: float, context: StepContext, code: str, reason: str) -> Step:
    lost = replace(action_of(instance), rollback_code=code, rollback_reason=step.truncate(reason))
    return Step(replace(with_change_number(replace(instance, action=lost), at), deadline=at + _wait_s(context)))


def _wait_s(context: StepContext) -> float:
    return max(context.destroy_retry_s, ANSWERS * context.answer_timeout_s)


def _keep_destination(instance: Instance, refused: ActionEnd, at: float, context: StepContext) -> Step:
    if action_of(instance).ending_kind is ActionKind.REVERT:
        return answer_other(_await_confirm(instance), refused, at, context)
    if not _is_still_due(instance, context):
        return Step(_await_confirm(instance))
    if context.is_off(source_of(action_of(instance)).host_uuid) and _is_not_awaited(instance):
        return _confirm_on_fenced(instance, at, context)
    return Step(replace(instance, deadline=at + _wait_s(context)))


def _is_not_awaited(instance: Instance) -> bool:
    """Whether its policy is that it does not wait for its host, nor for its client there."""
    assert instance.spec is not None
    return instance.spec.on_host_failure is not None


def _confirm_on_fenced(instance: Instance, at: float, context: StepContext) -> Step:
    """The destination is off, and so is the source's host: the move is confirmed, and the instance is on record there,
    as any instance of a dead host. That a look did not find the source is no proof that it is gone.
    """
    earlier = report_progress(keep_current(instance), ActionState.CONFIRMED, at, context)
    return after(earlier, confirm(earlier.instance, at, context))


def _await_confirm(instance: Instance) -> Instance:
    """It waits for a confirm or a revert again, for as long as it was to."""
    action = action_of(instance)
    deadline = None if action.auto_confirm_s is None else instance.since + action.auto_confirm_s
    return replace(keep_current(instance), deadline=deadline)


DESTINATION_SILENT = (
    "action.destination_silent"  # of a move that is rolled back: it has not answered that nothing is left
)


def roll_back_in_place(instance: Instance, event: ChangeEnded, context: StepContext) -> Step:
    """The machine has its old size again, or is gone: placement is reverted. Otherwise the command is repeated at its
    deadline.
    """
    if not instance.is_in_place or not is_awaited(instance, event, instance.current, instance.attempt):
        return Step(instance)
    is_back = event.done or event.code == MACHINE_ABSENT
    return Step(step.await_placement(instance, State.REVERTING, event.at, context)) if is_back else Step(instance)


def revert_destroyed(instance: Instance, event: Destroyed | MachineMissing, context: StepContext) -> Step:
    """No machine is left at the destination: placement is reverted, or an unshelved instance is without a host
    again.
    """
    if instance.is_in_place or not step.current_destroyed(instance, event):
        return Step(instance)
    return Step(revert_allocations(instance, event.at, context))


def return_to_source(instance: Instance, event: Reverted, context: StepContext) -> Step:
    """The instance holds its source again: it is started there if it was commanded to stop."""
    action = action_of(instance)
    generation = instance.consumer_generation if event.consumer_generation is None else event.consumer_generation
    at_source = replace(instance, **source_fields(action))
    back = replace(at_source, highest_attempt=event.attempt, consumer_generation=generation, power=action.power)
    if not action.handed_over or action.power is not Power.RUNNING:
        # Stopped before and handed over: the next start, or hand-over, has a higher number and undoes it.
        return end_rolled_back(back, event.at, context)
    return change(back, State.RESTARTING, event.at, context)


def wait_for_source(instance: Instance, event: RevertRefused, context: StepContext) -> Step:
    """The source's host has no room for it in placement, or is not there any more: the requests end, and the revert is
    repeated less and less often. The machine waits as it is for its allocation: nothing starts without one.
    """
    action = action_of(instance)
    why = (
        f"the allocation on host {source_of(action).host} cannot be taken back: {event.outcome} {event.reason}".strip()
    )
    waits = replace(instance, deadline=next_resend_at(instance, event.at, context))
    ending = ending_of(action)
    ending = replace(ending, reason=f"{ending.reason}; {why}".strip("; "))
    return _end_before_return(waits, ending, ActionEnd(ActionState.FAILED, SOURCE_REFUSED, why), event.at, context)


def _end_before_return(
    instance: Instance, ending: ActionEnd, other: ActionEnd | None, at: float, context: StepContext
) -> Step:
    """The move, and the request that ends it (None: not yet), have their ends before the instance is back. For clients
    it is where it will be: on its former host, as it was there, and not where it is abandoned.
    """
    back = source_fields(action_of(instance))
    ended = answer_early(replace(instance, **back), ending, at, context)
    if other is not None:
        ended = after(ended, answer_other(ended.instance, other, at, context))
    return Step(replace(ended.instance, **{name: getattr(instance, name) for name in back}), ended.commands)


def source_fields(action: ActionInProgress) -> dict[str, Any]:
    """What an instance is on the source of its move; nothing else where it has none."""
    if action.source is None:
        return {}
    return {"selections": (action.source,), "selection_index": 0, "attempt": action.source_attempt, "spec": action.spec}


def on_restarted(instance: Instance, event: ChangeEnded, context: StepContext) -> Step:
    """The source runs again, or reports that it cannot: then it is stopped, and a client may start it."""
    # If its host does not know, it is queried again at the deadline: a machine that may run is not on record as
    # stopped.
    if not is_awaited(instance, event, instance.current, instance.attempt):
        return Step(instance)
    if event.done:
        return end_rolled_back(instance, event.at, context)
    if event.runs is None:
        return Step(resend_sooner(instance, event.at, context))
    action = action_of(instance)
    power = Power.RUNNING if event.runs else Power.STOPPED
    reason = f"{action.rollback_reason}; and it could not be started again: {event.code} {event.reason}".strip("; ")
    left = replace(instance, power=power, action=replace(action, rollback_reason=step.truncate(reason)))
    return end_rolled_back(left, event.at, context)


def resend_commands(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """A host has not answered: what was commanded is commanded again. A client that waits for the end of its confirm or
    revert is informed of that; a request for a change, or a move that was rolled back, does not wait for it.
    """
    again = resend_all(instance, event.at, context)
    desired, action = desired_state_of(instance), instance.action
    if action is None:
        return again
    is_back = desired.progress is ActionState.ROLLING_BACK
    if desired.source is MachineTarget.DESTROYED and action.source is not None:
        waits = report_silent(again.instance, SOURCE_SILENT, action.source, event.at, context)
    elif desired.current is MachineTarget.DESTROYED:
        ended = Step(again.instance)
        if is_back:
            ended = _end_before_return(again.instance, ending_of(action), None, event.at, context)
        silent = report_silent(ended.instance, DESTINATION_SILENT, instance.current, event.at, context)
        waits = after(ended, silent)
    elif desired.current is MachineTarget.PRESENT:
        reason = f"no answer within {action.step_timeout_s:g} s; the command is repeated"
        ending = ending_of(action) if is_back else ActionEnd(ActionState.FAILED, "change.timeout", reason)
        waits = answer_early(again.instance, ending, event.at, context)
        waits = after(waits, report_waiting(waits.instance, SOURCE_SILENT, reason, event.at, context))
    else:
        return again
    return after(again, waits)
