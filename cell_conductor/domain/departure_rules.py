"""An instance goes from one cell to another: what its former cell and its next one do (decision 0021).

The former one states once what it has, does nothing about the instance from then on, and the next one has it on record.
`sequence` shows which of two is newer: it rises over all cells that an instance has been in. Of an instance without a
host nothing runs and nothing is held. One with a machine leaves it behind, stopped (`leave_rules`), and goes back to it
when it cannot be built in its next cell.
"""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.moves import ENDS_OF_MOVES, CellMove, Condition, Departure, KeptMachine, MoveKind, MoveState

from . import steps
from .departure_steps import announce_departure, depart, give_back
from .desires import ELSEWHERE, desire_of
from .events import DeleteRequested, MoveRequested
from .instance import MAX_ENDED, SET_BACK_GAP, EndedMove, Instance, Power, State
from .move_events import (
    DELETED,
    IN_DOUBT,
    MOVE_LOST,
    WHY,
    answer_query,
    has_ended,
    move_of,
    refuse,
    refuse_busy,
    refuse_given_up,
    refuse_request,
)
from .move_rules import begin_offloaded
from .move_steps import adopt, claim, revert_book
from .steps import Step, StepContext

ENDED_ELSEWHERE = "instance.departed"


def numbered_above(instance: Instance, request: CellMove) -> Instance:
    """The record, numbered above all that the schedulers have had of the instance.

    They take no departure below: one by a record that was set back would leave the instance in no cell.
    """
    if instance.phase in ELSEWHERE or instance.spec is None or instance.sequence > request.sequence:
        return instance
    return replace(instance, sequence=request.sequence + 1)


def answer_unbegun(instance: Instance, event: MoveRequested, context: StepContext) -> Step | None:
    """The answer to a query, and to a request that its queue has given up, in every state that has the instance, and to
    the command to destroy what is not kept; None: the table's rule applies.
    """
    if event.request.active_in is not None and instance.state is not State.KEPT:
        return Step(instance)  # nothing is kept here (any more); an answer would be answered by the same command
    if instance.phase in ELSEWHERE or is_arrival(instance, event):
        return None
    if event.is_query or event.request.arrival is not None:  # a late arrival begins nothing, and refuses nothing either
        return answer_query(_settled_before(instance, event.request.arrival), event, context)
    return refuse_given_up(instance, event, context) if event.given_up is not None else None


def _settled_before(instance: Instance, arrival: Departure | None) -> Instance:
    """An instance whose move a version before `settled` has closed: it is here for good by its record, where the move's
    request is done and no machine is kept for it any more.
    """
    kept, move = None if arrival is None else arrival.kept, instance.move
    if kept is None or (move is not None and move.kept is not None):
        return instance
    is_done = any((one.request_id, one.state) == (kept.migration, MoveState.DONE) for one in instance.ended)
    return replace(instance, settled=kept.migration) if is_done else instance


def begin_or_depart(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    """An instance without a host: it leaves for another cell, comes from one, or starts here."""
    if is_arrival(instance, event):
        return arrive(instance, event, context)
    request = event.request
    if request.to_cell is None or request.kind is not MoveKind.UNSHELVE or has_ended(instance, request.request_id):
        return begin_offloaded(instance, event, context)
    return _depart(instance, event, request.to_cell, context)


def arrive(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    """It comes from another cell, and is on record here from now on, whatever becomes of the request."""
    if not is_arrival(instance, event):
        return refuse(instance, event, context)
    arrival = event.request.arrival
    assert arrival is not None
    if arrival.kept is not None:
        return _take_over(instance, event, arrival.kept, context)
    was_deleted = arrival.given_back is not None and arrival.given_back.is_deleted
    is_deleted = instance.state is State.TOMBSTONE or was_deleted
    here = _with_arrival(instance, event)
    if is_deleted:
        # The delete was here first. Nothing is held for it; the release fences what is late, and its end is announced.
        return refuse_request(steps.releasing(here, State.DELETED, event.at, context), event, context, DELETED)
    if event.is_query:
        return answer_query(here, event, context)
    if event.given_up is not None:
        return refuse_given_up(here, event, context)
    return begin_offloaded(here, event, context)


def _take_over(instance: Instance, event: MoveRequested, kept: KeptMachine, context: StepContext) -> Step:
    """Its former cell keeps its stopped machine: it is built here from its image, or goes back there at once.

    If the database was set back or made anew since, a record of it may be lost here that has a machine: it is searched
    for, adopted if it is found, and given back only if it is not (`arrival_doubts`).
    """
    request = event.request
    is_deleted = instance.state is State.TOMBSTONE
    here = replace(_with_arrival(instance, event), power=Power.STOPPED if kept.is_stopped else Power.RUNNING)
    begun = adopt(here, event, source=None, selections=(here.here, *request.selections))
    move = replace(move_of(begun), kept=kept, delete=is_deleted, request_id=kept.migration)
    code, reason = "", ""
    if is_deleted:
        code, reason = DELETED, "the instance was deleted"
    elif event.is_query:
        code, reason = MOVE_LOST, "its next cell has no record of the request"
    elif event.given_up is not None:
        code, reason = event.given_up.code, event.given_up.reason
    elif not request.selections:
        code, reason = "move.no_host", "no host was named that it can go to"
    begun = replace(begun, move=replace(move, lost_code=code, lost_reason=reason))
    if context.may_lack(kept.at):
        lost = replace(move_of(begun), began=kept.at, lost_code=code or IN_DOUBT, lost_reason=reason or WHY)
        doubted = replace(begun, move=lost, doubted=True, sequence=begun.sequence + SET_BACK_GAP)
        return Step(revert_book(doubted, event.at, context))
    return give_back(begun, event.at, context) if code else claim(begun, event.at, context)


def refer(instance: Instance, event: MoveRequested | DeleteRequested, context: StepContext) -> Step:
    """It has left: the scheduler that commands this cell has not received the departure, which is published again."""
    if isinstance(event, DeleteRequested):
        return Step(instance, (announce_departure(instance, event.at, context),))
    if is_arrival(instance, event):
        return arrive(instance, event, context)
    request = event.request
    left = announce_departure(instance, event.at, context)
    known = next((one for one in instance.ended if one.request_id == request.request_id), None)
    is_ended = known is not None and known.state in ENDS_OF_MOVES
    if request.request_id == instance.departed_by or (request.arrival is not None and not is_ended):
        return Step(instance, (left,))  # an arrival that is news, and came too early, is repeated
    if known is not None and not is_ended:
        return Step(instance, (left,))  # it has left by this one before
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
    """A request that cannot be begun now: another one is under way, the instance is not active, or is elsewhere."""
    desire = desire_of(instance)
    if desire.elsewhere:
        return refer(instance, event, context)
    is_over = desire.condition in {Condition.DELETED, Condition.FAILED}
    refuses = refuse if is_over or instance.move is None else refuse_busy
    return refuses(instance, event, context)


def is_arrival(instance: Instance, event: MoveRequested) -> bool:
    """Whether it comes from another cell with what is newer than the record, which has it nowhere."""
    arrival = event.request.arrival
    is_newer = arrival is not None and (instance.spec is None or arrival.sequence >= instance.sequence)
    return is_newer and desire_of(instance).arrives


def _depart(instance: Instance, event: MoveRequested, cell: str, context: StepContext) -> Step:
    assert instance.spec is not None
    request = event.request
    departure = Departure(
        cell=cell,
        spec=instance.spec,
        image=instance.image,
        last=instance.here,
        # One more than the next: a record that is set back to before this gives out the next one at most.
        newest=instance.next_attempt,
        order=instance.order,
        sequence=instance.sequence,
    )
    named = replace(instance, cause=event.cause)
    return depart(named, State.DEPARTED, departure, request.request_id, event.at, context)


def _with_arrival(instance: Instance, event: MoveRequested) -> Instance:
    arrival, ended = event.request.arrival, instance.ended
    assert arrival is not None
    if instance.state is State.DEPARTED:  # a late copy of the request that it left by is not carried out again
        left = EndedMove(instance.departed_by, MoveKind.UNSHELVE, MoveState.SCHEDULED)
        ended = (*ended, left)[-MAX_ENDED:]
    return Instance(
        uuid=instance.uuid,
        state=State.OFFLOADED,
        spec=arrival.spec,
        selections=(arrival.last,),
        attempt=arrival.newest,
        sequence=arrival.sequence + 1,
        requested_at=event.at,
        since=event.at,
        answered=True,
        cause=event.cause,
        newest=arrival.newest,
        power=Power.SHELVED,
        image=arrival.image,
        order=max(arrival.order, instance.order),
        ended=ended,
        traceparent=instance.traceparent,
    )
