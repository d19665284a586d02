"""The parts of a departure that several rules share: its announcement, and how an instance is given back."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.moves import Condition, Departure, GivenBack, MoveEvent, MoveKind, MoveState

from .instance import Instance, Move, State
from .steps import Step, StepContext, cut

# Below these bits an order is a time in milliseconds, until the year 2109; above, how often it has left a cell.
ORDER_EPOCH_BITS = 42


def announce_departure(instance: Instance, at: float, context: StepContext) -> MoveEvent:
    """That it has left, always under the same number: what comes late or twice changes nothing."""
    departure = instance.departure
    assert instance.spec is not None
    assert departure is not None
    state = MoveState.SCHEDULED if departure.kept is None else MoveState.MIGRATING
    return MoveEvent(
        request_id=instance.departed_by,
        instance_uuid=instance.uuid,
        project_id=instance.spec.project_id,
        kind=departure.kind,
        state=MoveState.UNDOING if departure.given_back is not None else state,
        sequence=departure.sequence,
        condition=Condition.MOVING,
        cell=context.cell,
        flavor=instance.spec.flavor,
        image=instance.spec.image,
        at=at,
        departure=departure,
        settled=instance.settled or None,
    )


def give_back(instance: Instance, at: float, context: StepContext) -> Step:
    """Nothing of it is left here: it goes back to the cell that keeps its machine, which starts that and answers.

    No host here has a machine of it, and nothing is claimed for it: the caller has that on record.
    """
    move = instance.move
    assert move is not None and move.kept is not None
    by = move.by if move.by_kind is MoveKind.REVERT else ""
    back = GivenBack(
        migration=move.kept.migration,
        code=move.lost_code,
        reason=cut(move.lost_reason),
        answered=next((one.state for one in instance.ended if one.request_id == move.request_id), None),
        by=by or None,
        history=move.history,
        is_deleted=move.delete,
        kept=move.kept,
    )
    departure = Departure(
        cell=move.kept.cell,
        spec=move.spec,
        image=move.image,
        last=instance.here,
        newest=instance.next_attempt,
        order=instance.order,
        sequence=instance.sequence,
        kind=MoveKind.REVERT if by else move.kind,
        given_back=back,
    )
    return depart(instance, State.DEPARTED, departure, by or move.request_id, at, context)


def depart(  # noqa: PLR0917  (what a departure consists of)
    instance: Instance, state: State, departure: Departure, by: str, at: float, context: StepContext
) -> Step:
    """It is on record as having left, and that is announced. The cell that it leaves ends nothing by itself after."""
    left = replace(
        instance,
        state=state,
        then=None,
        departure=departure,
        departed_by=by,
        sequence=instance.sequence + 1,
        move=_kept_beside(instance.move, state),
        deadline=None,
        since=at,
        queried=False,
        doubted=False,
    )
    return Step(left, (announce_departure(left, at, context),))


def _kept_beside(move: Move | None, state: State) -> Move | None:
    return move if state is State.KEPT else None


def begin_order_epoch(instance: Instance) -> Instance:
    """Number the next changes of the machine above all that a record from before this could give out.

    The host carries out none at or below the highest that it has had: a record that is set back to before the instance
    left for another cell cannot start the machine that is kept, by whatever deadline (decision 0021).
    """
    return replace(instance, order=order_epoch(instance) + (1 << ORDER_EPOCH_BITS))


def order_epoch(instance: Instance) -> int:
    """The bits of its orders that every change has until it leaves for another cell the next time."""
    return instance.order >> ORDER_EPOCH_BITS << ORDER_EPOCH_BITS
