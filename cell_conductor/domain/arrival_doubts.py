"""Instances that have come from another cell, by a record that was set back (decision 0021).

The forgotten records may have commanded another destination, which runs it; or confirmed the move, after which the
former cell has destroyed what it kept. So the instance is given back only when every compute service of the cell has
answered that it has no machine of it, a complete machine is never destroyed for it, and a revert is refused unless an
operator's request forces it. The client's delete, and its confirm of a machine that was seen, are carried out as ever.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from bus.contracts.cell import FoundMachine, Selection
from bus.contracts.moves import MoveKind

from . import rules, steps
from .adopt_rules import MAX_SELECTIONS, taken_of
from .desires import Wish, desire_of
from .events import MachineFound, MoveRequested, Reverted, TimedOut
from .instance import Instance, State
from .move_events import DONE, after, answer_other, move_of
from .move_steps import confirm, undo
from .orders import repeated
from .steps import Step, StepContext, is_doubted
from .undo_rules import return_to_source

FORCED = "move.forced"
# The longest pause between two searches for an instance that is held: when the services have answered, it goes on then.
MAX_SEARCH_PAUSE_S = 60.0


def is_unsure(instance: Instance, context: StepContext) -> bool:
    """Whether neither its destination nor the machine in its former cell may be given up by the record."""
    move = instance.move
    return move is not None and move.kept is not None and not move.delete and is_doubted(instance, context)


def is_searched_for(instance: Instance) -> bool:
    """Whether the cell's services are to be queried about a moved instance before placement is: its machine may be on
    a host that the record does not have.
    """
    move = instance.move
    if not instance.doubted or move is None:
        return False
    is_back = instance.state is State.REVERTING and move.to_cell is not None
    # Nothing of it is here: it may be built, or given back, next.
    return is_back or (move.kept is not None and desire_of(instance).here is Wish.NONE)


def is_taken_back(instance: Instance) -> bool:
    """Whether it has come back from another cell, and the book has not given it its allocation here again.

    If the book has a newer claim for it, the instance may still run in the other cell.
    """
    move = instance.move
    return instance.state is State.REVERTING and move is not None and move.to_cell is not None and move.claimed


def repeat_in_doubt(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """Placement's answer never arrived, or the instance is held: the same is requested again, in doubt less and less
    often, because a service that does not answer may be down for long.
    """
    if not is_searched_for(instance) and not is_taken_back(instance):
        return rules.repeat_question(instance, event, context)
    pause_s = min(max(context.claim_retry_s, event.at - instance.since), MAX_SEARCH_PAUSE_S)
    return Step(replace(instance, deadline=event.at + pause_s))


def services_of(instance: Instance, fenced: Collection[str]) -> set[str]:
    """The services of the hosts in this cell that it may be on by its record, but those of hosts that are fenced."""
    return {one.service for one in _here(instance) if one.host_uuid not in fenced}


def hosts_of(instance: Instance, fenced: Collection[str]) -> set[str]:
    """The hosts in this cell that it may be on by its record, but those that are fenced."""
    return {one.host_uuid for one in _here(instance)} - set(fenced)


def _here(instance: Instance) -> tuple[Selection, ...]:
    # The first selection of one that has come from another cell is its host there.
    return instance.selections if instance.state is State.REVERTING else instance.selections[1:]


def unexpected(instance: Instance, found: Sequence[FoundMachine]) -> tuple[FoundMachine, ...]:
    """The machines among these because of which the record is not continued: all but the one that is kept, which a
    service of this cell may see as well if its former cell keeps it.
    """
    move = move_of(instance)
    attempt, source = move.source_attempt, move.source
    if instance.state is not State.REVERTING:
        attempt, source = (0, None) if move.kept is None else (move.kept.attempt, move.kept.here)
    kept = (attempt, None if source is None else source.host_uuid)
    return tuple(one for one in found if (one.attempt, one.host_uuid) != kept)


def follow_found(instance: Instance, event: MachineFound, context: StepContext) -> Step:
    """A host has a machine of it that the record does not have: it becomes the destination that is given up, which its
    host ends unless it is complete. One that is not proved to be its project's, or that is older than the departure
    (the instance was in this cell before), holds the move, and so does one with the mark of another deployment: this
    one cannot end it.
    """
    move, spec = instance.move, instance.spec
    if move is None or move.kept is None or spec is None or not event.machines:
        return Step(instance)
    if any(one.foreign for one in event.machines):
        return Step(instance)
    if not move.delete and any(one.attempt <= move.book_attempt for one in event.machines):
        return Step(instance)
    best = max(event.machines, key=lambda one: (one.built, one.attempt, one.host_uuid))
    allocations = taken_of(instance, best)
    if best.project_id != spec.project_id or allocations is None or best.attempt < 1:
        return Step(instance)
    here = Selection(host_uuid=best.host_uuid, host=best.host, service=best.service, allocations=allocations)
    others = tuple(one for one in instance.selections[1:] if one.host_uuid != here.host_uuid)
    leaving = replace(
        instance,
        selections=(instance.selections[0], here, *others)[:MAX_SELECTIONS],
        position=1,
        attempt=best.attempt,
        newest=max(best.attempt, instance.last_attempt),
        reused_from=instance.reused_from or 1,
        move=replace(move, finishing=True),
    )
    return Step(steps.destroying(leaving, State.REVERTING, event.at, context))


def may_end(instance: Instance, event: MoveRequested) -> bool:
    """Whether a doubted move that has arrived is confirmed or reverted: confirmed once its machine was seen."""
    move = move_of(instance)
    if move.kept is None:
        return False
    return move.here_seen if event.request.kind is MoveKind.CONFIRM else event.request.force


def force_back(instance: Instance, event: MoveRequested, context: StepContext) -> Step | None:
    """An operator, who has looked at both cells, has a doubted move given back; None: it is not that.

    The operator's request ends here: the one that it ends goes on, and fails in the former cell. There, the machine
    that is held is started, whatever the search has found and whatever the book has.
    """
    is_meant = event.request.kind is MoveKind.REVERT and event.request.force and not event.is_query
    if is_meant and is_taken_back(instance):
        return _start_here(instance, event, context)
    if not is_meant or instance.state is State.RESIZED or not is_unsure(instance, context):
        return None
    move = move_of(instance)
    if event.request.migration not in (None, move.request_id) or move.by:
        return None
    named = replace(move, by=event.request.request_id, by_kind=MoveKind.REVERT)
    forced = replace(instance, move=named, doubted=False, cause=event.cause)
    earlier = answer_other(forced, DONE, event.at, context)
    return after(earlier, undo(earlier.instance, event.at, context, FORCED, "an operator has forced it back"))


def _start_here(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    """Start the machine here. A request that had the instance reverted before is done as well."""
    by = event.request.request_id
    is_another = move_of(instance).by not in ("", by)
    earlier = answer_other(instance, DONE, event.at, context) if is_another else Step(instance)
    move = replace(move_of(earlier.instance), by=by, by_kind=MoveKind.REVERT)
    named = replace(earlier.instance, move=move, doubted=False, cause=event.cause)
    return after(earlier, return_to_source(named, Reverted(at=event.at, attempt=named.next_attempt), context))


def confirm_seen(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """The time to confirm a doubted move has come: it is confirmed once its host has answered that it is complete."""
    move = move_of(instance)
    if move.here_seen and not instance.queried:
        return confirm(instance, event.at, context)
    return repeated(instance, event.at, context)
