"""An instance that goes from one cell to another (decision 0021): how its cell gives it up and announces that, what the
next one does with it, and what the former one answers from then on.

The schedulers lead the move. The numbers of attempts show which of two messages is later: each cell goes on above those
of the former one.
"""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.moves import ENDS_OF_MOVES, OTHER_ATTEMPT, Condition, Departure, MoveEvent, MoveKind, MoveState

from . import steps
from .desires import BUILT_ELSEWHERE, desire_of
from .events import (
    BuildRequested,
    DeleteRequested,
    DepartRequested,
    DepartureEnded,
    InstanceArrives,
    MoveQueried,
    MoveRequested,
    TimedOut,
)
from .instance import MAX_ENDED, NO_HOST, EndedMove, Instance, Power, State
from .move_events import (
    DELETED,
    MOVE_LOST,
    MoveEnd,
    answer_query,
    close,
    has_ended,
    move_of,
    refuse,
    refuse_busy,
    refuse_given_up,
    refuse_request,
    refuse_unknown,
    without_move,
)
from .move_steps import adopt, change, claim, offload, undo
from .orders import repeat_at
from .report import followed_by
from .steps import Step, StepContext

ENDED_ELSEWHERE = "instance.departed"


def depart(instance: Instance, event: DepartRequested, context: StepContext) -> Step:
    """The image of the instance is kept, its machine destroyed, and what it holds released. One that has no machine has
    left at once.
    """
    begun = adopt(instance, event, source=None, selections=(instance.here,))
    if instance.state is State.OFFLOADED:
        return have_left(begun, event.at, context)
    if instance.power is Power.SHELVED:
        return offload(begun, event.at, context)
    return change(begun, State.CHANGING, event.at, context)


def have_left(instance: Instance, at: float, context: StepContext) -> Step:
    """Nothing of it is left here, neither a machine nor an allocation: that is on record, and announced."""
    move = move_of(instance)
    assert move.to_cell is not None
    departure = Departure(
        cell=move.to_cell,
        spec=move.spec,
        image=instance.image,
        last=instance.selections[0],
        attempt=instance.last_attempt,
        sequence=instance.sequence,
        kind=move.kind,
        is_stopped=move.power is Power.STOPPED,
        at=at,
        code=move.lost_code,
        reason=move.lost_reason,
    )
    left = _left(without_move(instance), departure, move.request_id)
    left = replace(left, deadline=at + context.destroy_retry_s)
    return Step(left, (announce_departure(left, at, context),))


def _left(instance: Instance, departure: Departure, request_id: str) -> Instance:
    return replace(
        instance,
        state=State.DEPARTED,
        then=None,
        spec=departure.spec,
        selections=(departure.last,),
        position=0,
        newest=departure.attempt,
        departure=departure,
        departed_by=request_id,
        sequence=departure.sequence + 1,
        deadline=None,
        since=departure.at,
        queried=False,
    )


def tell_again(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """Its schedulers have not said yet that the build in the next cell has ended."""
    waits = replace(instance, deadline=repeat_at(instance, event.at, context))
    return Step(waits, (announce_departure(waits, event.at, context),))


def announce_departure(instance: Instance, at: float, context: StepContext) -> MoveEvent:
    """That it has left, always under the same number: what comes late or twice changes nothing."""
    departure = instance.departure
    assert instance.spec is not None
    assert departure is not None
    return MoveEvent(
        request_id=instance.departed_by,
        instance_uuid=instance.uuid,
        project_id=instance.spec.project_id,
        kind=departure.kind,
        state=MoveState.MIGRATING,
        sequence=departure.sequence,
        condition=Condition.MOVING,
        cell=context.cell,
        flavor=departure.spec.flavor,
        image=departure.spec.image,
        at=at,
        departure=departure,
    )


def name_attempt(instance: Instance, event: DepartRequested, context: StepContext) -> Step:
    """Another attempt than this record's newest was to leave: its schedulers ask again for that one."""
    if instance.spec is None:
        return refuse_unknown(instance, event, context)
    request = event.request
    read = MoveEvent(
        request_id=request.request_id,
        instance_uuid=instance.uuid,
        project_id=instance.spec.project_id,
        kind=request.kind,
        state=MoveState.SCHEDULED,
        sequence=instance.sequence,
        condition=Condition.MOVING,
        cell=context.cell,
        attempt=instance.last_attempt,
        code=OTHER_ATTEMPT,
        at=event.at,
    )
    return Step(replace(instance, sequence=instance.sequence + 1), (read,))


def end_departure(instance: Instance, event: DepartureEnded, context: StepContext) -> Step:
    """The build in the next cell has ended. Also a record from before the departure gives the instance up by it: the
    former one was announced by this cell, with nothing left here.
    """
    if instance.spec is None or instance.last_attempt > event.attempt or not instance.selections:
        return Step(instance)
    if desire_of(instance).condition is Condition.DELETED:
        return Step(instance)
    left = instance
    if instance.departure is None:
        kind, request_id = event.kind, event.request_id
        left = left_for(instance, event.to_cell, event.attempt, kind=kind, request_id=request_id, at=event.at)
    state, then = BUILT_ELSEWHERE
    return Step(replace(left, state=state, then=then, newest=event.attempt, deadline=None, since=event.at))


def left_for(instance: Instance, cell: str, attempt: int, *, kind: MoveKind, request_id: str, at: float) -> Instance:
    """The record of one that another cell has built, from a record from before it left: what this cell announced then
    is lost. attempt: the last one here.
    """
    spec = instance.spec if instance.move is None else instance.move.spec
    assert spec is not None
    departure = Departure(
        cell=cell,
        spec=spec,
        image=instance.image,
        last=instance.here,
        attempt=attempt,
        sequence=instance.sequence,
        kind=kind,
        is_stopped=instance.power is Power.STOPPED,
        at=at,
    )
    left = _left(instance if instance.move is None else without_move(instance), departure, request_id)
    return replace(left, state=BUILT_ELSEWHERE[0], then=BUILT_ELSEWHERE[1])


def arrive(instance: Instance, event: InstanceArrives, context: StepContext) -> Step:
    """It comes from another cell, and is on record here from now on, whatever becomes of the request: it is built from
    its image on a host that is claimed for it. Where none takes it, it leaves for its former cell again, or is
    offloaded here.

    A record of lower attempts is replaced, whatever it says: when the instance left, nothing of it was left here, but
    perhaps a machine in quarantine, about which this record proves no more than that one (`proves_from`).
    """
    request = event.request
    departure, desire = request.departure, desire_of(instance)
    assert departure is not None
    if departure.attempt < instance.last_attempt:  # it is late: it begins nothing, and refuses nothing either
        if instance.state is State.TOMBSTONE:  # the delete was here first: its end is announced
            deleted = steps.releasing(_with_departure(instance, event), State.DELETED, event.at, context)
            return refuse_request(deleted, event, context, DELETED)
        return (refer if desire.elsewhere else answer_query)(instance, event, context)
    here = _with_departure(instance, event)
    begun = adopt(here, event, source=None, selections=(here.here, *request.selections))
    comes_home = request.to_cell is None and departure.code
    failure = Refusal(code=departure.code, reason=departure.reason) if comes_home else None
    answered = has_ended(here, request.request_id)
    begun = replace(begun, move=replace(move_of(begun), began=departure.at, answered=answered, failure=failure))
    if move_of(begun).answered or event.is_query:
        return undo(begun, event.at, context, MOVE_LOST, "its next cell has no record of the request")
    if event.given_up is not None:
        return undo(begun, event.at, context, event.given_up.code, event.given_up.reason)
    if not request.selections:
        rests = replace(begun, power=Power.SHELVED)
        return close(rests, MoveEnd(MoveState.FAILED, NO_HOST, "no host was named for it"), event.at, context)
    return claim(begun, event.at, context)


def answer_unbegun(instance: Instance, event: MoveQueried, context: StepContext) -> Step:
    """The answer to a query, and to a request that its queue has given up."""
    answers = answer_query if event.is_query else refuse_given_up
    return answers(instance, event, context)


def refer(instance: Instance, event: MoveRequested | DeleteRequested | BuildRequested, context: StepContext) -> Step:
    """It has left: the scheduler that commands this cell has not received the departure, which is published again."""
    left = announce_departure(instance, event.at, context)
    if not isinstance(event, MoveRequested):
        return Step(instance, (left,))
    request = event.request
    known = next((one for one in instance.ended if one.request_id == request.request_id), None)
    is_ended = known is not None and known.state in ENDS_OF_MOVES
    if request.request_id == instance.departed_by or (known is not None and not is_ended):
        return Step(instance, (left,))  # it has left by this one, now or before
    ended = known or EndedMove(request.request_id, request.kind, MoveState.REFUSED, ENDED_ELSEWHERE)
    if event.is_query and known is None:
        ended = replace(ended, state=MoveState.FAILED, code=MOVE_LOST)
    # The departure is announced by its own request, which the schedulers carry on, and with the higher number.
    answer = replace(
        left,
        request_id=request.request_id,
        kind=request.kind,
        state=ended.state,
        sequence=left.sequence - 1,
        terminal=True,
        condition=Condition.MOVING,
        code=ended.code,
        reason=ended.reason,
        departure=None,
    )
    # Kept, so that a query of it has the same end.
    recorded = instance if known else replace(instance, ended=(*instance.ended, ended)[-MAX_ENDED:])
    return Step(recorded, (left, answer))


def refuse_other(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    """A request that cannot be begun now: another one is under way, or the instance is not active."""
    is_over = desire_of(instance).condition in {Condition.DELETED, Condition.FAILED}
    refuses = refuse if is_over or instance.move is None else refuse_busy
    return refuses(instance, event, context)


def _with_departure(instance: Instance, event: InstanceArrives) -> Instance:
    request, kept = event.request, followed_by(instance)
    departure, ended = request.departure, kept.ended
    assert departure is not None
    if instance.departure is not None and instance.departed_by != request.request_id:
        # A late copy of the request that it left by is not carried out again.
        left = EndedMove(instance.departed_by, instance.departure.kind, MoveState.SCHEDULED)
        ended = (*ended, left)[-MAX_ENDED:]
    return replace(
        kept,
        state=State.OFFLOADED,
        spec=departure.spec,
        selections=(*request.selections, *instance.selections[:1], departure.last)[:1],
        attempt=departure.attempt,
        sequence=max(departure.sequence, kept.sequence) + 1,
        requested_at=event.at,
        since=event.at,
        answered=True,
        cause=event.cause,
        newest=departure.attempt + 1,
        power=Power.STOPPED if departure.is_stopped else Power.SHELVED,
        image=departure.image,
        ended=ended,
    )
