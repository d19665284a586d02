"""An instance that goes from one cell to another (decision 0021): its former cell's last steps, the announcement that
hands it on, what its next cell does, and what the former one answers from then on.

The former one states once what it has left, does nothing about the instance from then on, and the next one has it on
record. The schedulers count these stays, and the ordinal of each shows which of two is later. Nothing runs at that
moment: the instance has its image, and a host of the next cell is claimed for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from bus.contracts.base import Message
from bus.contracts.moves import (
    ARRIVED,
    ENDS_OF_MOVES,
    NOT_ARRIVED,
    CellAsks,
    CellCheck,
    Condition,
    Departure,
    MachineChanged,
    MoveEvent,
    MoveState,
)

from . import steps
from .desires import Wish, desire_of
from .events import DeleteRequested, InstanceArrives, MoveQueried, MoveRequested, Released
from .instance import MAX_ENDED, EndedMove, Instance, Power, State
from .move_events import (
    DELETED,
    MOVE_LOST,
    answer_query,
    has_ended,
    move_of,
    refuse,
    refuse_busy,
    refuse_given_up,
    refuse_request,
    report_progress,
)
from .move_steps import adopt, finish, try_next, undo
from .report import followed_by
from .set_back import numbered_on
from .steps import Step, StepContext


def give_away(instance: Instance, at: float, context: StepContext) -> Step:
    """A host of the other cell is claimed, and reads the image: what is left here is destroyed and released."""
    if move_of(instance).source is None:
        return _depart(instance, at, context)
    leaving = steps.destroying(instance, State.DEPARTED, at, context)
    return report_progress(leaving, MoveState.MIGRATING, at, context)


def passed_on(
    message: Message, cell: str, known: Mapping[str, Instance], unexplained: Collection[str]
) -> Message | None:
    """The message to which a check for another cell leads here: the command to the host, or its answer to that cell, or
    this cell's own. No record is changed; None: it leads to none.

    unexplained: instances of which a host has a machine that no record explains. The arrival of one may have been lost
    here, so that it has not arrived is not answered, and no host is checked for it.
    """
    if isinstance(message, CellCheck) and message.answer is None and (change := message.change) is not None:
        uuid = change.spec.instance_uuid
        arrived = has_arrived(known.get(uuid), message)
        if not arrived and uuid in unexplained:
            return None
        if not arrived and not message.is_query:
            return change
        answer = MachineChanged(
            instance_uuid=uuid,
            attempt=change.attempt,
            order=change.order,
            host_uuid=change.host_uuid,
            service=change.service,
            change=change.change,
            done=False,
            code=ARRIVED if arrived else NOT_ARRIVED,
            asked_by=message.asked_by,
        )
        return CellAsks(message=CellCheck(cell=cell, asked_by=message.asked_by, answer=answer))
    if isinstance(message, MachineChanged) and message.asked_by is not None:
        return CellAsks(message=CellCheck(cell=cell, asked_by=message.asked_by, answer=message))
    return None


def has_arrived(record: Instance | None, check: CellCheck) -> bool:
    """Whether an instance has left the cell that asks for this one, by this one's record: it is in a later stay. Also
    where it has left this one since, unless that was for the cell that asks.
    """
    if record is None or record.stay <= check.stay:
        return False
    return record.departure is None or record.departure.cell != check.asked_by.cell


def end_left(instance: Instance, event: Released, context: StepContext) -> Step:
    """Nothing of it is left here, neither a machine nor an allocation: it is the other cell's from now on."""
    return _depart(instance, event.at, context)


def _depart(instance: Instance, at: float, context: StepContext) -> Step:
    """It is on record as having left, and that is announced."""
    move = move_of(instance)
    assert move.to_cell is not None
    last = instance.selections[0]
    departure = Departure(
        cell=move.to_cell,
        spec=move.spec,
        image=instance.image,
        last=last,
        selections=instance.alternates_and_here,
        newest=instance.attempt,
        consumer_generation=instance.consumer_generation,
        order=instance.order,
        sequence=instance.sequence,
        stay=instance.stay,
        kind=move.kind,
        is_stopped=move.power is Power.STOPPED,
        at=at,
    )
    left = replace(
        instance,
        state=State.DEPARTED,
        then=None,
        selections=(last,),
        position=0,
        departure=departure,
        departed_by=move.request_id,
        sequence=instance.sequence + 1,
        stay=instance.stay + 1,
        move=None,
        deadline=None,
        since=at,
        queried=False,
    )
    return Step(left, (announce_departure(left, at, context),))


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


ENDED_ELSEWHERE = "instance.departed"


def arrive(instance: Instance, event: InstanceArrives, context: StepContext) -> Step:
    """It comes from another cell, and is on record here from now on, whatever becomes of the request: it is built from
    its image on the host that is claimed for it, or offloaded here.

    A record of an earlier stay is replaced, whatever it says: when the instance left, nothing of it was left here, but
    perhaps a machine in quarantine, about which this record proves no more than that one (`reused_from`). If the
    database was set back or made anew since the arrival, the forgotten record may have a machine of it: none is built,
    and it is offloaded only when none is found (`doubt`).
    """
    arrival, request_id = event.request.arrival, event.request.request_id
    assert arrival is not None
    desire = desire_of(instance)
    if arrival.stay < instance.stay:  # it is late: it begins nothing, and refuses nothing either
        return (refer if desire.elsewhere else answer_query)(instance, event, context)
    here = _with_arrival(instance, event)
    if desire.condition is Condition.DELETED:
        # The delete was here first. The release fences what is late, and its end is announced; one that waits for its
        # hosts goes on to do so.
        deleted = replace(instance, stay=here.stay, newest=here.newest)
        if desire.here is not Wish.DESTROY:
            deleted = steps.releasing(here, State.DELETED, event.at, context)
        return refuse_request(deleted, event, context, DELETED)
    begun = adopt(here, event, source=None, selections=(arrival.last, *arrival.selections))
    move = replace(move_of(begun), book_attempt=arrival.newest, began=arrival.at, answered=has_ended(here, request_id))
    begun = replace(begun, position=1, attempt=arrival.newest, move=move)
    if context.set_back.may_lack(arrival.at):
        reused_from = here.reused_from or arrival.newest
        finishing = replace(begun, state=State.FINISHING, since=event.at, deadline=event.at + context.destroy_retry_s)
        doubted = replace(numbered_on(finishing, context.set_back), doubted=True, reused_from=reused_from)
        return report_progress(doubted, MoveState.FINISHING, event.at, context)
    if move.answered or event.is_query:
        return undo(begun, event.at, context, MOVE_LOST, "its next cell has no record of the request")
    if event.given_up is not None:
        return undo(begun, event.at, context, event.given_up.code, event.given_up.reason)
    if context.closed(begun).why(begun.here) is not None:
        return try_next(begun, event.at, context)
    return finish(begun, event.at, context)


def answer_unbegun(instance: Instance, event: MoveQueried, context: StepContext) -> Step:
    """The answer to a query, and to a request that its queue has given up."""
    answers = answer_query if event.is_query else refuse_given_up
    return answers(instance, event, context)


def refer(instance: Instance, event: MoveRequested | DeleteRequested, context: StepContext) -> Step:
    """It has left: the scheduler that commands this cell has not received the departure, which is published again."""
    left = announce_departure(instance, event.at, context)
    if isinstance(event, DeleteRequested):
        return Step(instance, (left,))
    request = event.request
    known = next((one for one in instance.ended if one.request_id == request.request_id), None)
    is_ended = known is not None and known.state in ENDS_OF_MOVES
    if request.request_id == instance.departed_by or (known is not None and not is_ended):
        return Step(instance, (left,))  # it has left by this one, now or before
    if request.arrival is not None and not is_ended:
        return Step(instance, (left,))  # an arrival that is news, and came too early, is repeated
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


def _with_arrival(instance: Instance, event: InstanceArrives) -> Instance:
    arrival, kept = event.request.arrival, followed_by(instance)
    ended = kept.ended
    assert arrival is not None
    if instance.departure is not None:  # a late copy of the request that it left by is not carried out again
        left = EndedMove(instance.departed_by, instance.departure.kind, MoveState.SCHEDULED)
        ended = (*ended, left)[-MAX_ENDED:]
    return replace(
        kept,
        state=State.OFFLOADED,
        spec=arrival.spec,
        selections=(arrival.last,),
        attempt=arrival.newest,
        consumer_generation=arrival.consumer_generation,
        sequence=arrival.sequence + 1,
        stay=arrival.stay + 1,
        requested_at=event.at,
        since=event.at,
        answered=True,
        cause=event.cause,
        newest=max(arrival.newest, kept.newest),
        power=Power.STOPPED if arrival.is_stopped else Power.SHELVED,
        image=arrival.image,
        order=max(arrival.order, kept.order),
        ended=ended,
    )
