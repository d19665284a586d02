"""Moves in doubt: the database was set back in the middle of one, so only its two hosts know its state.

Such a move is not continued, undone or confirmed by the record alone. Its hosts are queried first: each is
to end its attempt *unless it is complete* (`Destroy.unless_built`). A complete machine stays and is reported. A
complete machine at the destination has arrived; if the destination has none, the move is undone; a source is given up
only when the destination has reported that it is complete.

One without a source (an unshelving, an arrival from another cell) may have another destination than its record has. It
is offloaded only when every compute service of the cell has answered that it has no machine of it.
"""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.cell import Selection
from bus.contracts.moves import MoveState

from . import rules, steps, way_back
from .adopt_rules import adopt_found, by_worth, proved_of, unproved_from
from .desires import Wish, desire_of
from .events import Destroyed, HostRuns, MachineFound, MoveRequested, Spawned
from .instance import Instance, Move, Power, State
from .move_events import IN_DOUBT, WHY, MoveEnd, after, answer_other, move_of, refuse_request
from .move_steps import arrived, confirm, note, undo
from .orders import repeated
from .report import is_over
from .set_back import doubted_from, is_outdated
from .steps import Step, StepContext

OLDER = "the cell's database was set back to before it was moved"


def is_unsure(instance: Instance) -> bool:
    """Whether it has no source, and may have a destination that the record does not have."""
    return move_of(instance).source is None and instance.doubted


def follow_found(instance: Instance, event: MachineFound, context: StepContext) -> Step:
    """A host has a machine of it that the record does not have: it becomes the destination that is given up, which its
    host ends unless it is complete. One that is not proved to be its project's, that is older than the request, or that
    has the mark of another deployment holds it.
    """
    if not is_unsure(instance):
        return Step(instance)
    move = move_of(instance)
    best = max(event.machines, key=by_worth)
    allocations = proved_of(instance, best)
    is_another = any(one.foreign or one.attempt <= move.book_attempt for one in event.machines)
    if is_another or allocations is None:
        return Step(instance)
    here = Selection(host_uuid=best.host_uuid, host=best.host, service=best.service, allocations=allocations)
    found = replace(
        instance,
        selections=(instance.selections[0], here),
        position=1,
        attempt=best.attempt,
        newest=max(best.attempt, instance.last_attempt),
        reused_from=instance.reused_from or 1,
        power=move.power,
        move=replace(move, finishing=True),
    )
    return Step(steps.destroying(found, State.REVERTING, event.at, context))


def take_over_later(instance: Instance, event: MoveRequested, context: StepContext) -> Step | None:
    """The cell has a machine of it that is later than its record: it was moved before the database was set back. The
    request is refused, and that machine is the instance's if it is complete and proved to be its own; a client repeats
    the request. None: there is none, and the request is begun.
    """
    own = instance.attempt, instance.host_uuid
    later = [
        one
        for one in (event.found or () if is_outdated(instance, context.set_back) else ())
        if one.attempt >= instance.attempt
        and (one.attempt, one.host_uuid) != own
        and not is_over(instance, one.attempt, one.host_uuid)
    ]
    if not later:
        return None
    unsure, newest = doubted_from(instance, context.set_back), max(later, key=lambda one: (one.attempt, one.host_uuid))
    refused = refuse_request(unsure, event, context, IN_DOUBT, f"host {newest.host} has a later machine of it: {OLDER}")
    if newest.built and newest.attempt > instance.attempt and proved_of(instance, newest):
        runs = Power.RUNNING if instance.power is Power.SHELVED else instance.power
        first = unproved_from(instance, context)
        awake = replace(refused.instance, power=runs, image="", reused_from=first, doubted=False)
        return after(refused, adopt_found(awake, (newest,), event.at, context))
    return refused


def undo_doubted(instance: Instance, at: float, context: StepContext) -> Step:
    """Stop the move: the destination is queried, and the move is undone unless its machine is complete."""
    return undo(instance, at, context, IN_DOUBT, WHY)


def adopt_arrived(instance: Instance, event: Spawned | HostRuns, context: StepContext) -> Step:
    """The destination has it complete: the move had arrived, and is not undone.

    If a confirm is awaited, the source is queried as well: the move may have been confirmed since.
    """
    here = steps.followed(instance, event)
    if isinstance(event, HostRuns) and not event.built:
        return Step(here)
    move = replace(move_of(here), lost_code="", lost_reason="", finishing=True)
    here = replace(here, move=move)
    # A revert or an abort that was requested before has not taken effect.
    earlier = answer_other(here, MoveEnd(MoveState.FAILED, IN_DOUBT, WHY), event.at, context)
    step = after(earlier, arrived(note(earlier.instance, "active", event.at), event.at, context))
    if step.instance.state is not State.RESIZED:
        return step
    unsure = replace(step.instance, doubted=True, move=replace(move_of(step.instance), here_seen=True))
    return after(Step(unsure, step.commands), repeated(unsure, event.at, context))


def refuse_doubted(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    """A client confirms or reverts a move that may have ended: the client repeats the request when the hosts have
    answered.
    """
    queried = repeated(instance, event.at, context)
    return after(queried, refuse_request(queried.instance, event, context, IN_DOUBT, WHY))


def note_there(instance: Instance, event: Spawned | HostRuns, context: StepContext) -> Step:
    """A host of a move in doubt has its machine complete."""
    of_source = steps.is_source(instance, event)
    if not of_source and not steps.is_ours(instance, event):
        return rules.destroy_orphan(instance, event, context)
    instance = steps.followed(instance, event)
    move = move_of(instance)
    if isinstance(event, HostRuns) and not event.built:
        return Step(instance)
    here_seen = move.here_seen or not of_source
    source_seen = move.source_seen or of_source
    updated = replace(instance, move=replace(move, here_seen=here_seen, source_seen=source_seen))
    return _decide(updated, event.at, context)


def note_gone(instance: Instance, event: Destroyed, context: StepContext) -> Step:
    """A host of a move in doubt has no machine of it: it was reverted, or confirmed."""
    if not instance.doubted:
        return Step(instance)
    if steps.here_gone(instance, event):
        return undo_doubted(instance, event.at, context)
    if not steps.source_gone(instance, event):
        return Step(instance)
    return _decide(replace(instance, move=replace(move_of(instance), source_gone=True)), event.at, context)


def follow_undone(instance: Instance, event: Spawned | HostRuns, context: StepContext) -> Step:
    """A host still has a machine that it was commanded to destroy.

    In doubt the destination of a move that is undone had arrived, if it is complete there.
    """
    is_undone = desire_of(instance).source is Wish.STAY
    if instance.doubted and is_undone and not instance.is_in_place and steps.is_ours(instance, event):
        return adopt_arrived(instance, event, context)
    return rules.confirm_running(instance, event, context)


def follow_resized(instance: Instance, event: Spawned | HostRuns, context: StepContext) -> Step:
    """Both hosts of a move that has arrived keep their machines. In doubt their answers decide."""
    if instance.doubted and not instance.is_in_place:
        return note_there(instance, event, context)
    return rules.confirm_running(instance, event, context)


def _decide(instance: Instance, at: float, context: StepContext) -> Step:
    move: Move = move_of(instance)
    if move.here_seen and move.source_gone:
        stays = way_back.end_without_source(_certain(instance), at, context)
        return after(stays, confirm(way_back.kept_here(stays.instance), at, context))
    if move.here_seen and move.source_seen:
        if way_back.is_waiting(instance):
            return Step(_certain(instance))
        deadline = None if move.auto_confirm_s is None else at + move.auto_confirm_s
        return Step(replace(_certain(instance), deadline=deadline))
    return Step(instance)


def _certain(instance: Instance) -> Instance:
    move = replace(move_of(instance), here_seen=False, source_seen=False, source_gone=False)
    return replace(instance, doubted=False, queried=False, move=move)
