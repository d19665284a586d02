"""How an instance leaves for another cell: its former cell's last steps, and the announcement that hands it on."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.moves import Condition, Departure, MoveEvent, MoveState

from . import steps
from .events import Released
from .instance import Instance, Power, State
from .move_events import move_of, report_progress
from .steps import Step, StepContext


def give_away(instance: Instance, at: float, context: StepContext) -> Step:
    """A host of the other cell is claimed, and reads the image: what is left here is destroyed and released."""
    if move_of(instance).source is None:
        return _depart(instance, at, context)
    leaving = steps.destroying(instance, State.DEPARTED, at, context)
    return report_progress(leaving, MoveState.MIGRATING, at, context)


def end_left(instance: Instance, event: Released, context: StepContext) -> Step:
    """Nothing of it is left here, neither a machine nor an allocation: it is the other cell's from now on."""
    if event.consumer != move_of(instance).request_id:
        return Step(instance)
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
        move=None,
        deadline=None,
        since=at,
        queried=False,
        doubted=False,
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
