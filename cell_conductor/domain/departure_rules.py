"""An instance without a host goes from one cell to another: what its former cell and its next one do (decision 0021).

Nothing of it runs and nothing is held for it, so the cells need no agreement: the former one states once what it has,
does nothing about the instance from then on, and the next one has it on record. `sequence` shows which of two is newer:
it rises over all cells that an instance has been in.
"""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.moves import Condition, Departure, MoveEvent, MoveKind, MoveState

from . import steps
from .events import DeleteRequested, MoveRequested
from .instance import MAX_ENDED, EndedMove, Instance, Power, State
from .move_events import (
    DELETED,
    MOVE_LOST,
    answer_query,
    has_ended,
    refuse,
    refuse_given_up,
    refuse_request,
)
from .move_rules import begin_offloaded
from .steps import Step, StepContext

ENDED_ELSEWHERE = "instance.departed"
_NOWHERE = frozenset({State.ABSENT, State.TOMBSTONE, State.OFFLOADED, State.DEPARTED})


def answer_unbegun(instance: Instance, event: MoveRequested, context: StepContext) -> Step | None:
    """The answer to a query, and to a request that its queue has given up, in every state that has the instance; None:
    the table's rule applies.
    """
    if instance.state is State.DEPARTED or is_arrival(instance, event):
        return None
    if event.is_query:
        return answer_query(instance, event, context)
    return refuse_given_up(instance, event, context) if event.given_up is not None else None


def begin_or_depart(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    """An instance without a host: it leaves for another cell, comes from one, or starts here."""
    if is_arrival(instance, event):
        return arrive(instance, event, context)
    if event.request.to_cell is None or has_ended(instance, event.request.request_id):
        return begin_offloaded(instance, event, context)
    return _depart(instance, event, event.request.to_cell, context)


def arrive(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    """It comes from another cell, and is on record here from now on, whatever becomes of the request."""
    if not is_arrival(instance, event):
        return refuse(instance, event, context)
    is_deleted = instance.state is State.TOMBSTONE
    here = _with_arrival(instance, event)
    if is_deleted:
        # The delete was here first. Nothing is held for it; the release fences what is late, and its end is announced.
        return refuse_request(steps.ask(here, State.RELEASING, event.at, context), event, context, DELETED)
    if event.is_query:
        return answer_query(here, event, context)
    if event.given_up is not None:
        return refuse_given_up(here, event, context)
    return begin_offloaded(here, event, context)


def refer(instance: Instance, event: MoveRequested | DeleteRequested, context: StepContext) -> Step:
    """It has left: the scheduler that commands this cell has not received the departure, which is published again."""
    if isinstance(event, DeleteRequested):
        return Step(instance, (_announcement(instance, event.at, context),))
    if is_arrival(instance, event):
        return arrive(instance, event, context)
    request = event.request
    left = _announcement(instance, event.at, context)
    if request.request_id == instance.departed_by:
        return Step(instance, (left,))
    known = next((one for one in instance.ended if one.request_id == request.request_id), None)
    ended = known or EndedMove(request.request_id, request.kind, MoveState.REFUSED, ENDED_ELSEWHERE)
    if event.is_query and known is None:
        ended = replace(ended, state=MoveState.FAILED, code=MOVE_LOST)
    answer = replace(
        left,
        request_id=request.request_id,
        kind=request.kind,
        state=ended.state,
        terminal=True,
        condition=Condition.OFFLOADED,
        code=ended.code,
        reason=ended.reason,
    )
    return Step(instance, (answer,))


def is_arrival(instance: Instance, event: MoveRequested) -> bool:
    """Whether it comes from another cell with what is newer than the record, which has it nowhere."""
    arrival = event.request.arrival
    is_newer = arrival is not None and (instance.spec is None or arrival.sequence >= instance.sequence)
    return is_newer and instance.state in _NOWHERE


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
    left = replace(
        instance,
        state=State.DEPARTED,
        departure=departure,
        departed_by=request.request_id,
        sequence=instance.sequence + 1,
        deadline=None,
        since=event.at,
        cause=event.cause,
    )
    return Step(left, (_announcement(left, event.at, context),))


def _announcement(instance: Instance, at: float, context: StepContext) -> MoveEvent:
    """That it has left, always under the same number: what comes late or twice changes nothing."""
    assert instance.spec is not None
    assert instance.departure is not None
    return MoveEvent(
        request_id=instance.departed_by,
        instance_uuid=instance.uuid,
        project_id=instance.spec.project_id,
        kind=MoveKind.UNSHELVE,
        state=MoveState.SCHEDULED,
        sequence=instance.departure.sequence,
        condition=Condition.MOVING,
        cell=context.cell,
        flavor=instance.spec.flavor,
        image=instance.spec.image,
        at=at,
        departure=instance.departure,
    )


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
