"""An instance with a machine leaves for another cell: what the cell that it leaves does (decision 0021).

Its host stops the machine and keeps its image, the book gives the allocation to the migration, and only then does the
cell announce the departure: from then on the instance is the other cell's, and the machine here is kept, stopped. It is
started again only when the other cell has given the instance back, and destroyed only when that cell has it active.
"""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.moves import Departure, GivenBack, KeptMachine, MoveKind, MoveState

from . import departure_rules, steps, way_back
from .departure_steps import announce_departure, begin_order_epoch, depart
from .desires import DELETE_REQUESTED, desire_of
from .events import (
    ChangeEnded,
    Claimed,
    ClaimRefused,
    DeleteRequested,
    MoveRequested,
    Released,
    TimedOut,
)
from .instance import MAX_ENDED, SET_BACK_GAP, EndedMove, Instance, Move, Power, State
from .move_events import (
    DELETED,
    MoveEnd,
    after,
    answer,
    answer_other,
    has_ended,
    move_of,
    refuse_request,
    report_progress,
)
from .move_rules import TIMED_OUT, begin
from .move_steps import adopt, change, end_undone, is_awaited, leave
from .orders import repeat_at, repeated
from .steps import Step, StepContext, is_doubted

LEAVES_WITH_MACHINE = frozenset({MoveKind.MIGRATE, MoveKind.RESIZE})
ACROSS_CELLS = "move.across_cells"
_CAN_LEAVE = frozenset({Power.RUNNING, Power.STOPPED})


def begin_or_leave(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    """A request for an active instance: one to another cell has it stopped and its image kept first."""
    request = event.request
    is_leaving = request.to_cell is not None and request.kind in LEAVES_WITH_MACHINE and instance.power in _CAN_LEAVE
    if not is_leaving or has_ended(instance, request.request_id):
        return begin(instance, event, context)
    assert instance.spec is not None
    if instance.spec.networks or instance.spec.volumes:
        reason = "its networks and volumes are its cell's own"
        return refuse_request(instance, event, context, ACROSS_CELLS, reason)
    begun = adopt(instance, event, source=instance.here, selections=(instance.here,))
    move = replace(move_of(begun), handed_over=True, to_cell=request.to_cell)
    begun = begin_order_epoch(replace(begun, move=move, spec=instance.spec))
    return change(begun, State.LEAVING, event.at, context)


def leave_again(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """Its host does not answer: it stays, and is started again.

    In doubt it may have left, and run in the other cell: it is not started, and the command is repeated.
    """
    if is_doubted(instance, context):
        return repeated(instance, event.at, context)
    reason = f"its host did not stop it and keep its image within {move_of(instance).step_timeout_s:g} s"
    return _stay(instance, event.at, context, TIMED_OUT, reason)


def reassign(instance: Instance, event: ChangeEnded, context: StepContext) -> Step:
    """It is stopped, and its image is kept: its allocation is to go to the migration. It could not: it stays."""
    if not is_awaited(instance, event, instance.here, instance.attempt):
        return Step(instance)
    if not event.done:
        if is_doubted(instance, context):
            return Step(instance)  # the command is repeated at its deadline
        return _stay(instance, event.at, context, event.code or "snapshot.failed", event.reason)
    stopped = replace(instance, image=event.image)
    return Step(steps.claiming(stopped, State.KEPT, event.at, context))


def keep(instance: Instance, event: ClaimRefused, context: StepContext) -> Step:
    """The allocation could not go to the migration, because another client holds it, for example: it stays.

    The revert fences a late copy of the claim. In doubt it may have left, and run in the other cell: it is announced as
    having left, and the schedulers know whether it has.
    """
    if event.attempt != instance.next_attempt:
        return Step(instance)
    move = move_of(instance)
    if move.delete:
        return leave(instance, event.at, context)
    if is_doubted(instance, context):
        return _depart(instance, event.at, context)
    reason = event.reason or "its allocation could not go to the migration"
    move = replace(move, lost_code="placement.consumer_changed", lost_reason=steps.cut(reason))
    back = replace(instance, move=move, image=move.image)
    return report_progress(steps.ask(back, State.REVERTING, event.at, context), MoveState.UNDOING, event.at, context)


def hand_over(instance: Instance, event: Claimed, context: StepContext) -> Step:
    """The migration holds the allocation, and the instance holds nothing: it is the other cell's from now on."""
    if event.attempt != instance.next_attempt:
        return Step(instance)
    move = replace(move_of(instance), claimed=True)
    apart = replace(instance, newest=event.attempt, consumer_generation=None, move=move)
    return leave(apart, event.at, context) if move.delete else _depart(apart, event.at, context)


def _depart(instance: Instance, at: float, context: StepContext) -> Step:
    move = move_of(instance)
    assert instance.spec is not None and move.to_cell is not None
    is_stopped = move.power is Power.STOPPED
    departure = Departure(
        cell=move.to_cell,
        spec=instance.spec,
        image=instance.image,
        last=instance.here,
        # One more than the next: a record that is set back to before this gives out the next one at most.
        newest=instance.next_attempt,
        order=instance.order,
        sequence=instance.sequence,
        kind=move.kind,
        kept=KeptMachine(
            cell=context.cell,
            migration=move.request_id,
            is_stopped=is_stopped,
            at=at,
            number=instance.sequence,
            here=instance.here,
            attempt=instance.attempt,
            book_attempt=move.book_attempt,
            kind=move.kind,
        ),
    )
    kept = replace(instance, image=move.image, move=replace(move, claimed=True))
    gone = depart(kept, State.KEPT, departure, move.request_id, at, context)
    return Step(replace(gone.instance, deadline=at + context.destroy_retry_s), gone.commands)


# --- another cell has it


def announce_again(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """No command has come for a while: the departure is announced again, and the schedulers answer by their record.

    The answer about the kept machine, which a revert waits for, has not come in time either.
    """
    if way_back.is_waiting(instance):
        return way_back.query_again(instance, event.at, context)
    kept = replace(instance, deadline=repeat_at(instance, event.at, context))
    return Step(kept, (announce_departure(kept, event.at, context),))


def follow_kept(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    """It comes back, is active in the other cell, or is to come back; every other request is answered with the
    departure.
    """
    request, move = event.request, move_of(instance)
    is_to_come_back = request.kind is MoveKind.REVERT and request.to_cell is not None and not event.is_query
    if is_to_come_back and event.given_up is None and not has_ended(instance, request.request_id):
        return way_back.look_at_kept(instance, event, context)
    back = request.arrival.given_back if request.arrival is not None else None
    if request.arrival is not None and _has_left_again(instance, request.arrival, context):
        return _clear(instance, event, context)
    if back is not None and back.migration == move.request_id:
        return _take_back(instance, event, context)
    if request.active_in is not None and request.request_id == move.request_id:
        return _clear(instance, event, context)
    return departure_rules.refer(instance, event, context)


def _clear(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    return Step(steps.destroying(instance, State.DEPARTED, event.at, context))


def _has_left_again(instance: Instance, arrival: Departure, context: StepContext) -> bool:
    """Whether the instance has left another cell for this one since, by a record that was set back: no cell lets one
    go while its former cell still keeps a machine for it. The arrival is repeated, and taken once that is gone.
    """
    left, kept = instance.departure, arrival.kept
    if left is None or kept is None or kept.cell == context.cell or context.set_back_at <= 0:
        return False
    return arrival.sequence > left.sequence and instance.since <= context.set_back_at + steps.CLOCKS_APART_S


def note_delete(instance: Instance, event: DeleteRequested, context: StepContext) -> Step:
    """The other cell is to delete it; if it comes back before, it is deleted here."""
    recorded = replace(instance, move=replace(move_of(instance), delete=True))
    return Step(recorded, (announce_departure(recorded, event.at, context),))


def end_kept(instance: Instance, event: Released, context: StepContext) -> Step:
    """Nothing of it is left here: neither a machine nor an allocation."""
    if event.consumer != move_of(instance).request_id:
        return Step(instance)
    gone = report_progress(instance, MoveState.SOURCE_GONE, event.at, context)
    left = replace(gone.instance, state=State.DEPARTED, then=None, move=None, deadline=None, since=event.at)
    return Step(left, gone.commands)


def follow_outdated(instance: Instance, event: MoveRequested, context: StepContext) -> Step | None:
    """Apply what another cell states about the machine that this one keeps, to a record from before the departure: the
    database was set back. None: the record is not that.

    The departure had a higher number than the record's, so nothing that the record has is newer.
    """
    request = event.request
    arrival = request.arrival
    back = arrival.given_back if arrival is not None else None
    kept = back.kept if back is not None else arrival.kept if arrival is not None else None
    if arrival is None or kept is None or kept.cell != context.cell or (back is None and request.active_in is None):
        return None
    if instance.phase in DELETE_REQUESTED or not _is_outdated(instance, kept, context):
        return None
    keeper = _rebuilt(instance, arrival, kept)
    if keeper is None:
        return None
    return follow_kept(replace(keeper, cause=event.cause), event, context)


def _is_outdated(instance: Instance, kept: KeptMachine, context: StepContext) -> bool:
    if instance.state is State.ABSENT:
        return context.set_back_at > 0
    move = instance.move
    if move is not None and move.to_cell is not None and desire_of(instance).progress is MoveState.MIGRATING:
        # In doubt it is numbered on: it was leaving by this very request.
        return move.request_id == kept.migration
    return instance.sequence <= kept.number


def _rebuilt(instance: Instance, arrival: Departure, kept: KeptMachine) -> Instance | None:
    """The record as it was when the cell announced the departure."""
    if kept.here is None or not kept.attempt:
        return None
    power = Power.STOPPED if kept.is_stopped else Power.RUNNING
    move = Move(
        request_id=kept.migration,
        kind=kept.kind,
        source=kept.here,
        source_attempt=kept.attempt,
        book_attempt=kept.book_attempt,
        spec=arrival.spec,
        power=power,
        began=kept.at,
        handed_over=True,
        claimed=True,
        to_cell=arrival.cell,
    )
    return replace(
        instance,
        state=State.KEPT,
        then=None,
        spec=arrival.spec,
        selections=(kept.here,),
        position=0,
        attempt=kept.attempt,
        newest=max(arrival.newest, instance.last_attempt),
        order=max(arrival.order, instance.order),
        sequence=max(kept.number + 1, instance.sequence),
        power=power,
        image="",
        move=move,
        departure=replace(arrival, given_back=None, kept=kept),
        departed_by=kept.migration,
        answered=True,
        queried=False,
        doubted=False,
        deadline=None,
    )


def _take_back(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    """The other cell has nothing of it: the book is reverted above that cell's attempts, and the machine started.

    If the database was set back since it has left, it may have been taken back before, and moved on in this cell: then
    the cell is searched first (`arrival_doubts`), and its announcements are numbered on.
    """
    arrival, move = event.request.arrival, move_of(instance)
    assert arrival is not None and arrival.given_back is not None
    back = arrival.given_back
    is_set_back = context.set_back_at > 0 and move.began <= context.set_back_at + steps.CLOCKS_APART_S
    move = _undone_by(move, back)
    here = replace(
        instance,
        move=move,
        newest=max(arrival.newest, instance.last_attempt),
        order=max(arrival.order, instance.order),
        sequence=max(arrival.sequence + 1, instance.sequence) + (SET_BACK_GAP if is_set_back else 0),
        doubted=is_set_back,
        departure=None,
        departed_by="",
        cause=event.cause,
        ended=_with_end(instance, back),
    )
    if move.delete:
        deleted = MoveEnd(MoveState.FAILED, DELETED, "the instance was deleted")
        earlier = answer(here, deleted, event.at, context)
        earlier = after(earlier, answer_other(earlier.instance, deleted, event.at, context))
        return after(earlier, leave(earlier.instance, event.at, context))
    return report_progress(steps.ask(here, State.REVERTING, event.at, context), MoveState.UNDOING, event.at, context)


def _undone_by(move: Move, back: GivenBack) -> Move:
    return replace(
        move,
        lost_code=back.code or move.lost_code,
        lost_reason=back.reason,
        history=(*move.history, *back.history),
        answered=back.answered is not None,
        by=back.by or "",
        by_kind=MoveKind.REVERT if back.by is not None else None,
        delete=move.delete or back.is_deleted,
    )


def _with_end(instance: Instance, back: GivenBack) -> tuple[EndedMove, ...]:
    """The request that it left by may have ended in the other cell: a copy of it, or a query, has that end here too."""
    if back.answered is None:
        return instance.ended
    code = DELETED if back.answered is MoveState.FAILED else ""
    ended = EndedMove(back.migration, move_of(instance).kind, back.answered, code)
    return (*instance.ended, ended)[-MAX_ENDED:]


def _stay(instance: Instance, at: float, context: StepContext, code: str, reason: str) -> Step:
    """It has not left: the machine is started again, if it ran."""
    move = replace(move_of(instance), lost_code=code, lost_reason=steps.cut(reason))
    back = replace(instance, move=move, image=move.image)
    if move.power is not Power.RUNNING:
        return end_undone(back, at, context)
    return change(back, State.RESTARTING, at, context)
