"""How a move is undone: the way back to the source, once the destination is given up.

The destination destroys its machine, the book is reverted, and the source is started again if it was commanded to stop.
"""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.moves import (
    MACHINE_ABSENT,
    MoveState,
)

from . import steps, way_back
from .desires import Wish, desire_of
from .events import (
    ChangeEnded,
    Destroyed,
    HostMissing,
    Reverted,
    TimedOut,
)
from .instance import Instance, Power, State
from .move_events import (
    MoveEnd,
    after,
    answer,
    move_of,
    report_silent,
)
from .move_steps import change, end_undone, ending_of, is_awaited, revert_book
from .orders import repeated
from .steps import Step, StepContext, is_doubted

DESTINATION_SILENT = "move.destination_silent"  # of a move that is undone: it has not answered that nothing is left


def undo_failed_in_place(instance: Instance, event: ChangeEnded, context: StepContext) -> Step:
    """The machine has its old size again, or is gone: the book is reverted. Otherwise the command is repeated at its
    deadline.
    """
    if not instance.is_in_place or not is_awaited(instance, event, instance.here, instance.attempt):
        return Step(instance)
    is_back = event.done or event.code == MACHINE_ABSENT
    return Step(steps.ask(instance, State.REVERTING, event.at, context)) if is_back else Step(instance)


def revert_destroyed(instance: Instance, event: Destroyed | HostMissing, context: StepContext) -> Step:
    """No machine is left at the destination: the book is reverted, or an unshelved instance is without a host again."""
    if instance.is_in_place or not steps.here_gone(instance, event):
        return Step(instance)
    return Step(revert_book(instance, event.at, context))


def return_to_source(instance: Instance, event: Reverted, context: StepContext) -> Step:
    """The instance holds its source again: it is started there if it was commanded to stop."""
    if event.attempt != instance.next_attempt:
        return Step(instance)
    move = move_of(instance)
    assert move.source is not None
    generation = instance.consumer_generation if event.consumer_generation is None else event.consumer_generation
    back = replace(
        instance,
        selections=(move.source,),
        position=0,
        attempt=move.source_attempt,
        newest=event.attempt,
        consumer_generation=generation,
        spec=move.spec,
        power=move.power,
        queried=False,
    )
    # In doubt the machine of one that was to leave its cell may be gone: its host answers for that.
    is_sure = move.to_cell is None or not is_doubted(instance, context)
    if is_sure and (not move.handed_over or move.power is not Power.RUNNING):
        # Stopped before and handed over: the next start, or hand-over, has a higher order and undoes it.
        return end_undone(back, event.at, context)
    return change(back, State.RESTARTING, event.at, context)


def restarted(instance: Instance, event: ChangeEnded, context: StepContext) -> Step:
    """The source runs again, or reports that it cannot: then it is stopped, and a client may start it.

    If its host does not know, it is queried again at the deadline: a machine that may run is not on record as stopped.
    So it is where the machine was destroyed for another cell, and the departure was lost: it has its image, and is
    offloaded with it. An image that was kept under a forgotten name is no reason to end it: it is held.
    """
    if not is_awaited(instance, event, instance.here, instance.attempt):
        return Step(instance)
    if event.done:
        return end_undone(instance, event.at, context)
    if event.runs is None:
        return Step(instance)
    move = move_of(instance)
    if move.to_cell is not None and event.code == MACHINE_ABSENT:
        if instance.image:
            return Step(revert_book(replace(instance, move=replace(move, source=None)), event.at, context))
        if is_doubted(instance, context):
            return Step(instance)
    power = Power.RUNNING if event.runs else Power.STOPPED
    move_event = f"{move.lost_reason}; and it could not be started again: {event.code} {event.reason}".strip("; ")
    left = replace(instance, power=power, move=replace(move, lost_reason=steps.cut(move_event)))
    return end_undone(left, event.at, context)


def command_again(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """A host has not answered: what was commanded is commanded again. A client that waits for the end of its confirm or
    revert is informed of that; a request for a change, or a move that was undone, does not wait for it.
    """
    again = repeated(instance, event.at, context)
    desire, move = desire_of(instance), instance.move
    if move is None:
        return again
    if desire.source is Wish.DESTROY and move.source is not None:
        waits = report_silent(again.instance, way_back.SOURCE_SILENT, move.source, event.at, context)
    elif desire.here is Wish.DESTROY:
        waits = report_silent(again.instance, DESTINATION_SILENT, instance.here, event.at, context)
    elif desire.here is Wish.STAY:
        reason = f"no answer within {move.step_timeout_s:g} s; the command is repeated"
        is_back = desire.progress is MoveState.UNDOING
        ending = ending_of(move) if is_back else MoveEnd(MoveState.FAILED, "change.timeout", reason)
        waits = answer(again.instance, ending, event.at, context)
    else:
        return again
    return after(again, waits)
