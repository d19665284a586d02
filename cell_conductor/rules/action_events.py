"""A conductor's events of requests: progress, and one end each, kept for a repeated request."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.actions import ENDS_OF_ACTIONS, ActionEvent, ActionKind, ActionState, CellAction, Condition
from bus.contracts.base import Message
from bus.contracts.build import AttemptRecord
from bus.contracts.cell import Selection
from cell_conductor.state.desired_state import desired_state_of
from cell_conductor.state.events import ActionRequested
from cell_conductor.state.instance import (
    MAX_ENDED,
    MAX_ENDED_ATTEMPTS,
    ActionInProgress,
    EndedAction,
    Instance,
    Power,
    State,
    action_of,
)
from cell_conductor.state.step import Step, StepContext, truncate

_AT_REST = {
    Power.RUNNING: Condition.ACTIVE,
    Power.STOPPED: Condition.STOPPED,
    Power.SHELVED: Condition.SHELVED,
    Power.RESCUED: Condition.RESCUED,
}
ACTION_LOST = "action.lost"
TRANSFERRED_SINCE = "the instance has left the cell by it, and has come back since: its end is not known here"

ENDS_ANOTHER = frozenset({ActionKind.CONFIRM, ActionKind.REVERT, ActionKind.ABORT})


class ActionEnd(Struct, frozen=True):
    """How a request ends."""

    state: ActionState
    code: str = ""  # why the request failed or was refused
    reason: str = ""


DONE = ActionEnd(ActionState.DONE)
DELETED = "instance.deleted"  # the code of an action that ended because its instance was deleted


def condition_of(instance: Instance) -> Condition:
    """The state of the instance for its client."""
    return desired_state_of(instance).condition or _AT_REST[instance.power]


def source_of(action: ActionInProgress) -> Selection:
    """The source of a move that has one."""
    assert action.source is not None, action
    return action.source


def notify_end(instance: Instance, ended: EndedAction, at: float, context: StepContext) -> Step:
    """The end of a request, which is on record."""
    return _event(instance, ended, at, context, condition=condition_of(instance))


def notify_condition(instance: Instance, at: float, context: StepContext) -> Step:
    """What the instance is now, about no request: schedulers take its condition and place, no client hears of it."""
    about_none = EndedAction(instance.uuid, ActionKind.STOP, ActionState.DONE)
    return _event(instance, about_none, at, context, condition=condition_of(instance))


def report_progress(instance: Instance, state: ActionState, at: float, context: StepContext) -> Step:
    """Progress of the request that is under way, not its end."""
    action = action_of(instance)
    return _event(
        instance, EndedAction(action.request_id, action.kind, state), at, context, condition=condition_of(instance)
    )


def report_waiting(instance: Instance, code: str, reason: str, at: float, context: StepContext) -> Step:
    """Progress of the request that ends the action (confirm, revert, abort), if any, with why it has no end."""
    action = action_of(instance)
    if action.ending_kind is None:
        return Step(instance)
    waits = EndedAction(
        action.ending_request_id, action.ending_kind, desired_state_of(instance).progress, code, truncate(reason)
    )
    return _event(instance, waits, at, context, condition=condition_of(instance))


def report_silent(instance: Instance, code: str, silent: Selection, at: float, context: StepContext) -> Step:
    """The same, where a host does not answer that its machine is destroyed."""
    down = context.down.get(silent.service)
    fault = "" if down is None else f" ({down.code}: {down.reason})"
    reason = f"host {silent.host} has not answered that its machine is destroyed{fault}; it is commanded again"
    return report_waiting(instance, code, reason, at, context)


def answer(instance: Instance, ending: ActionEnd, at: float, context: StepContext) -> Step:
    """The end of the request that is under way, published once. What has come home has failed, wherever it rests."""
    action = action_of(instance)
    if action.answered:
        return Step(instance)
    if action.failure is not None and ending.code != DELETED:
        ending = ActionEnd(ActionState.FAILED, action.failure.code, action.failure.reason)
    kept = replace(instance, action=replace(action, answered=True))
    ended = EndedAction(action.request_id, action.kind, ending.state, ending.code, truncate(ending.reason))
    return _end(kept, ended, at, context, action.history)


def answer_early(instance: Instance, ending: ActionEnd, at: float, context: StepContext) -> Step:
    """The end of the request before that of its action: no client waits for a host. What goes to another cell has its
    end there, and is under way until then.
    """
    if action_of(instance).to_cell is not None:
        return report_progress(instance, desired_state_of(instance).progress, at, context)
    return answer(instance, ending, at, context)


def answer_other(instance: Instance, ending: ActionEnd, at: float, context: StepContext) -> Step:
    """The end of the request that has ended the action (confirm, revert, abort), if there is one."""
    action = action_of(instance)
    if action.ending_kind is None:
        return Step(instance)
    kept = replace(instance, action=replace(action, ending_request_id="", ending_kind=None))
    ended = EndedAction(
        action.ending_request_id, action.ending_kind, ending.state, ending.code, truncate(ending.reason)
    )
    return _end(kept, ended, at, context, action.history)


def close(instance: Instance, ending: ActionEnd, at: float, context: StepContext) -> Step:
    """The action is over: every request that has not had its end gets it, and nothing is under way any more."""
    # If each has had its end (a finished resize whose destination was lost; a change that came late), the instance's
    # state is published all the same.
    ends = answer if action_of(instance).ending_kind is not None else answer_or_notify
    earlier = ends(instance, ending, at, context)
    # An abort or a revert has succeeded; a confirm has ended with the release of the source.
    other = answer_other(earlier.instance, DONE, at, context)
    return after(earlier, Step(clear_action(other.instance), other.commands))


def end_action_with_instance(instance: Instance, ending: ActionEnd, at: float, context: StepContext) -> Step:
    """The instance is over, and so is the action: every request that has not had its end has failed."""
    if instance.action is None:
        return Step(instance)
    earlier = answer(instance, ending, at, context)
    other = answer_other(earlier.instance, ending, at, context)
    return after(earlier, Step(clear_action(other.instance), other.commands))


def answer_or_notify(instance: Instance, ending: ActionEnd, at: float, context: StepContext) -> Step:
    """The end of the request that is under way. If it has had one, the instance's state is published all the same:
    schedulers have another host, or another flavor, on record.
    """
    action, earlier = action_of(instance), answer(instance, ending, at, context)
    if earlier.commands:
        return earlier
    state = ActionState.CHANGING if ending.state is ActionState.DONE else ActionState.ROLLING_BACK
    late = EndedAction(action.request_id, action.kind, state, ending.code, truncate(ending.reason))
    return _event(instance, late, at, context, condition=condition_of(instance))


def clear_action(instance: Instance) -> Instance:
    """No action is under way any more; the attempts whose machines it has ended stay on record."""
    action = action_of(instance)
    given_out = (
        *instance.ended_attempts,
        action.source_attempt,
        *(one.attempt for one in action.history),
        instance.highest_attempt,
    )
    ended = tuple(attempt for attempt in dict.fromkeys(given_out) if attempt not in (0, instance.attempt))
    return replace(instance, action=None, ended_attempts=ended[-MAX_ENDED_ATTEMPTS:])


def refuse_request(
    instance: Instance, event: ActionRequested, context: StepContext, code: str, reason: str = ""
) -> Step:
    """Nothing is begun."""
    request: CellAction = event.request
    ended = EndedAction(request.request_id, request.kind, ActionState.REFUSED, code, reason)
    return _end(instance, ended, event.at, context)


def refuse_unknown(instance: Instance, event: ActionRequested, context: StepContext) -> Step:
    """This cell has no such instance: publish that, and make no record."""
    request = event.request
    action_event = ActionEvent(
        request_id=request.request_id,
        instance_uuid=request.instance_uuid,
        project_id=request.project_id,
        kind=request.kind,
        state=ActionState.REFUSED,
        terminal=True,
        condition=Condition.UNKNOWN,
        cell=context.cell,
        code="instance.unknown",
        at=event.at,
    )
    return Step(instance, (action_event,))


def refuse_dead_lettered(instance: Instance, event: ActionRequested, context: StepContext) -> Step:
    """Its message was dead-lettered, so it is not started; if it has been started, its progress or its end is
    published.
    """
    refusal, action = event.dead_letter_reason, instance.action
    assert refusal is not None
    if instance.spec is None:
        return refuse_unknown(instance, event, context)
    if action is not None and event.request.request_id in (action.request_id, action.ending_request_id):
        return Step(instance)
    return repeat_end(instance, event, context) or refuse_request(
        instance, event, context, refusal.code, refusal.reason
    )


def answer_query(instance: Instance, event: ActionRequested, context: StepContext) -> Step:
    """The state of a request: its progress, or its end once more. A request without a record ends here."""
    # It is `failed` and not `refused`: a record that was restored may have had it. A delete under way ends it by
    # itself.
    request, action = event.request, instance.action
    if instance.spec is None:
        lost = refuse_unknown(instance, event, context)
        return Step(instance, tuple(_as_failed(command) for command in lost.commands))
    if again := repeat_end(instance, event, context):
        return again
    if action is not None and request.request_id in (action.request_id, action.ending_request_id):
        state = desired_state_of(instance).progress
        progress = EndedAction(request.request_id, request.kind, state)
        return _event(instance, progress, event.at, context, condition=Condition.MOVING)
    reason = "its cell has no record of it: it never came there, or the cell's database was restored"
    return _end(
        instance,
        EndedAction(request.request_id, request.kind, ActionState.FAILED, ACTION_LOST, reason),
        event.at,
        context,
    )


def _as_failed(command: Message) -> Message:
    return replace(command, state=ActionState.FAILED) if isinstance(command, ActionEvent) else command


def refuse(instance: Instance, event: ActionRequested, context: StepContext) -> Step:
    """The request is not possible in this state; a copy of a request that has ended is answered as it was."""
    if instance.spec is None:
        return refuse_unknown(instance, event, context)
    return repeat_end(instance, event, context) or refuse_request(instance, event, context, "instance.not_active")


def refuse_busy(instance: Instance, event: ActionRequested, context: StepContext) -> Step:
    """Another request is under way; a copy of that very one changes nothing."""
    action = action_of(instance)
    if event.request.request_id in (action.request_id, action.ending_request_id):
        return Step(instance)
    again = repeat_end(instance, event, context)
    if again is not None:
        return again
    if event.request.kind in ENDS_ANOTHER:
        return refuse_request(instance, event, context, "action.too_late", "the move has come too far for that")
    return refuse_request(instance, event, context, "instance.busy", "another request is under way")


def has_ended(instance: Instance, request_id: str) -> bool:
    """Whether this request's end is on record: another delivery of it begins nothing."""
    return any(one.request_id == request_id for one in instance.ended)


def repeat_end(instance: Instance, event: ActionRequested, context: StepContext) -> Step | None:
    """The end of a request that has ended, once more; None: it is a new one."""
    # One by which the instance has left, before it came back, has ended in another cell. Only schedulers whose database
    # was restored to before request it here again, and they would wait for its end for ever.
    known = next((one for one in instance.ended if one.request_id == event.request.request_id), None)
    if known is not None and known.state not in ENDS_OF_ACTIONS:
        known = replace(known, state=ActionState.FAILED, code=ACTION_LOST, reason=TRANSFERRED_SINCE)
    return None if known is None else _event(instance, known, event.at, context, condition=condition_of(instance))


def after(first: Step, following: Step) -> Step:
    """Apply both, one after the other: the second was made of the first's instance."""
    return Step(following.instance, (*first.commands, *following.commands), resend=first.resend or following.resend)


def _end(
    instance: Instance, ended: EndedAction, at: float, context: StepContext, history: tuple[AttemptRecord, ...] = ()
) -> Step:
    kept = replace(instance, ended=(*instance.ended, ended)[-MAX_ENDED:])
    return _event(kept, ended, at, context, condition=condition_of(instance), history=history)


def _event(
    instance: Instance,
    outcome: EndedAction,
    at: float,
    context: StepContext,
    *,
    condition: Condition,
    history: tuple[AttemptRecord, ...] = (),
) -> Step:
    """Take the instance's next number and publish the progress of a request."""
    assert instance.spec is not None
    # One that was deleted before it came has none.
    has_host = bool(instance.selections) and instance.state is not State.OFFLOADED
    action_event = ActionEvent(
        request_id=outcome.request_id,
        instance_uuid=instance.uuid,
        project_id=instance.spec.project_id,
        kind=outcome.kind,
        state=outcome.state,
        sequence=instance.sequence,
        terminal=outcome.state in ENDS_OF_ACTIONS,
        condition=condition,
        cell=context.cell,
        host=instance.current.host if has_host else None,
        host_uuid=instance.host_uuid if has_host else None,
        flavor=instance.spec.flavor,
        image=instance.spec.image,
        snapshot=instance.image,
        attempt=instance.attempt,
        code=outcome.code,
        reason=outcome.reason,
        history=history,
        at=at,
        zone=instance.current.zone if has_host else "",
    )
    return Step(replace(instance, sequence=instance.sequence + 1), (action_event,))
