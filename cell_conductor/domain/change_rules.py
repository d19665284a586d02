"""Changes of a machine in place: stop, start, rebuild, rescue, shelve; and how an instance leaves its host."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.moves import (
    MoveKind,
    MoveState,
)

from .events import (
    ChangeEnded,
    Released,
)
from .instance import Instance, Power, State
from .move_events import (
    DONE,
    MoveEnd,
    answer,
    close,
    move_of,
)
from .move_steps import as_left, ending_of, is_awaited, offload, over
from .steps import Step, StepContext

# By these it is built from its image, and is offloaded again where no host could: in the cell that it has come to.
_FROM_IMAGE = frozenset({MoveKind.UNSHELVE, MoveKind.MIGRATE, MoveKind.RESIZE})


def changed(instance: Instance, event: ChangeEnded, context: StepContext) -> Step:
    """The host has carried out the command, or reports that it could not; if it does not know, it is queried again."""
    if not is_awaited(instance, event, instance.here, instance.attempt):
        return Step(instance)
    move = move_of(instance)
    if not event.done:
        ending = MoveEnd(MoveState.FAILED, event.code or "change.failed", event.reason)
        if event.runs is None:
            return answer(instance, ending, event.at, context)
        back = as_left(instance, event)
        return close(over(back, event.at, context), ending, event.at, context)
    if move.kind is MoveKind.SHELVE:
        kept = replace(instance, power=Power.SHELVED, image=event.image)
        if move.offload:
            return offload(kept, event.at, context)
        return close(over(kept, event.at, context), DONE, event.at, context)
    if move.kind in (MoveKind.START, MoveKind.UNSHELVE):
        instance = replace(instance, power=Power.RUNNING, image="")
    if move.kind in (MoveKind.RESCUE, MoveKind.UNRESCUE):
        instance = replace(instance, power=Power.RESCUED if move.kind is MoveKind.RESCUE else Power.RUNNING)
    if move.kind is MoveKind.STOP:
        instance = replace(instance, power=Power.STOPPED)
    return close(over(instance, event.at, context), DONE, event.at, context)


def end_offloaded(instance: Instance, event: Released, context: StepContext) -> Step:
    """Nothing is allocated any more: the instance has no host.

    A copy of a claim, or of this release, is fenced by its attempt.
    """
    move = move_of(instance)
    gone = replace(
        instance,
        state=State.OFFLOADED,
        then=None,
        power=Power.SHELVED,
        newest=instance.next_attempt,
        consumer_generation=None,
        selections=(instance.here,),
        position=0,
        deadline=None,
        since=event.at,
        queried=False,
    )
    if move.kind in _FROM_IMAGE:
        gone = replace(gone, spec=move.spec)
        return close(gone, ending_of(move), event.at, context)
    return close(gone, DONE, event.at, context)
