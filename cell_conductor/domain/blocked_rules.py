"""An instance of which a recovery could not find out what is true: nothing is begun with it, a delete is recorded, and
no report or answer judges it. It is reconciled again, again and again, until that is known (`recovery`).
"""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.build import BuildState

from .desires import DELETE_REQUESTED
from .events import DeleteRequested, MoveRequested, TimedOut
from .instance import Instance, State
from .move_events import refuse_request, repeat_end
from .orders import repeat_at
from .steps import Step, StepContext, announce

INSTANCE_BLOCKED = "instance.blocked"


def wait(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """It is looked at again, less and less often."""
    return Step(replace(instance, deadline=repeat_at(instance, event.at, context)))


def refuse(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    """Nothing is begun; a copy of a request that has ended is answered as it was, and one under way is awaited."""
    move = instance.move
    if move is not None and event.request.request_id in (move.request_id, move.by):
        return Step(instance)
    again = repeat_end(instance, event, context)
    return again or refuse_request(instance, event, context, INSTANCE_BLOCKED, instance.blocked_reason)


def delete(instance: Instance, event: DeleteRequested, context: StepContext) -> Step:
    """It is on record from now on, and carried out by the next reconciliation. It is of the attempt that it names: the
    record may be older.
    """
    move, cause = instance.move, event.cause or instance.cause
    instance = replace(instance, newest=max(instance.last_attempt, event.attempt))
    if move is not None and not move.delete:
        recorded = replace(instance, move=replace(move, delete=True), cause=cause, deadline=event.at)
    elif move is None and instance.phase not in DELETE_REQUESTED:
        recorded = replace(instance, state=State.DESTROYING, then=State.DELETED, cause=cause, deadline=event.at)
    else:
        recorded = instance
    return announce(recorded, BuildState.DELETING, event.at, context)
