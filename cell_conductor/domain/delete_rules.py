"""Deletes of what moves or is without a host, and of what its host cannot destroy now. Pure, as the other rules are."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.build import BuildState
from bus.contracts.moves import (
    MoveState,
)

from . import rules, steps
from .events import (
    DeleteRequested,
    Destroyed,
    HostMissing,
    HostRuns,
    Spawned,
    SpawnFailed,
    TimedOut,
)
from .instance import Instance, State
from .move_events import (
    DELETED,
    MoveEnd,
    after,
    answer,
    answer_other,
    move_of,
)
from .move_steps import (
    destroy_left,
    destroy_source,
    here_gone,
    leave,
    repeat_at,
    source_gone,
)
from .steps import Step, Timeouts


def report_undestroyed(instance: Instance, event: SpawnFailed, timeouts: Timeouts) -> Step:
    """The host cannot destroy it now: announce why, once for each reason. The delete goes on."""
    why = (event.code, steps.cut(event.reason))
    is_refusal = event.code.startswith(rules.DESTROY_CODES) and event.attempt == instance.attempt
    if not is_refusal or event.host_uuid != instance.here.host_uuid or why == (instance.code, instance.reason):
        return Step(instance)
    code, reason = why
    held = replace(instance, code=code, reason=reason)
    return steps.announce(held, BuildState.DELETING, event.at, timeouts, why=why)


def delete(instance: Instance, event: DeleteRequested, timeouts: Timeouts) -> Step:
    """Every machine of it is destroyed, and then both consumers are released.

    While a destination is requested of placement, the answer is awaited: it shows whether the migration holds anything.
    """
    move = move_of(instance)
    if move.delete:
        return Step(instance)
    deleted = MoveEnd(MoveState.FAILED, DELETED, "the instance was deleted")
    earlier = answer(instance, deleted, event.at, timeouts)
    earlier = after(earlier, answer_other(earlier.instance, deleted, event.at, timeouts))
    named = replace(earlier.instance, cause=event.cause or instance.cause)
    if named.state is State.CLAIMING:
        waiting = replace(named, move=replace(move_of(named), delete=True))
        return after(earlier, steps.announce(waiting, BuildState.DELETING, event.at, timeouts))
    left = leave(named, event.at, timeouts)
    move_event = steps.announce(left.instance, BuildState.DELETING, event.at, timeouts, first=left.commands)
    return after(earlier, move_event)


def delete_offloaded(instance: Instance, event: DeleteRequested, timeouts: Timeouts) -> Step:
    """No host has it: release, which fences what may be under way, and end deleted."""
    leaving = replace(instance, cause=event.cause or instance.cause)
    queried = steps.ask(leaving, State.RELEASING, event.at, timeouts)
    return steps.announce(queried, BuildState.DELETING, event.at, timeouts)


def destroy_both_again(instance: Instance, event: TimedOut, timeouts: Timeouts) -> Step:
    """The command is repeated to hosts that have not confirmed."""
    if instance.move is None:
        return rules.destroy_again(instance, event, timeouts)
    return Step(replace(instance, deadline=repeat_at(instance, event.at, timeouts)), destroy_left(instance, timeouts))


def release_both(instance: Instance, event: Destroyed | HostMissing, timeouts: Timeouts) -> Step:
    """A host reports that nothing of it is left there; when both have, the allocations go."""
    move = instance.move
    if move is None:
        return rules.release_destroyed(instance, event, timeouts)
    here = move.here_gone or here_gone(instance, event, timeouts)
    source = move.source_gone or source_gone(instance, event, timeouts)
    if (here, source) == (move.here_gone, move.source_gone):
        return Step(instance)
    updated = replace(instance, move=replace(move, here_gone=here, source_gone=source))
    return Step(steps.ask(updated, State.RELEASING, event.at, timeouts) if here and source else updated)


def repeat_destroy_both(instance: Instance, event: Spawned | HostRuns, timeouts: Timeouts) -> Step:
    """It is listed still, perhaps under another service: that one is commanded."""
    move = instance.move
    is_source = move is not None and (event.host_uuid, event.attempt) == (
        instance.source_host_uuid,
        move.source_attempt,
    )
    if move is not None and is_source and move.source is not None:
        if event.service == move.source.service:
            return Step(instance)
        found = replace(instance, move=replace(move, source=replace(move.source, service=event.service)))
        return Step(found, (destroy_source(found, timeouts),))
    return rules.repeat_destroy(instance, event, timeouts)
