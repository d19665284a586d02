"""A build or a move whose record may be older than the world: the cell's database was set back in the middle of it.

`table.step` judges such a record by `table.DOUBTED` instead of the row of its state. All compute services of the cell
are queried which machines of the instance they have, and meanwhile nothing is begun, undone or confirmed. By their
answers the record becomes one of the ordinary table that is true of the world (`resolve`), and what follows, follows
from that record alone.

The newest complete machine is the instance's. A destination that is not complete is awaited as any other is, by an
order that spares what is complete (`Destroy.unless_built`). What the answers do not explain holds the record as it is.

An instance at rest is searched for before the next request of it is begun (`later_machine`).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from bus.contracts.cell import FoundMachine
from bus.contracts.moves import Condition, MoveKind, MoveState

from . import delete_rules, rules, steps, way_back
from .adopt_rules import adopt_found, best_of, by_worth, forgotten_machines, proved_of
from .departure_rules import refuse_other
from .desires import MAY_BE_THERE, OVER, Ask, Wish, Work, desire_of
from .events import (
    Awaited,
    DeleteRequested,
    Destroyed,
    HostRuns,
    InstanceSearched,
    MachineQuery,
    MoveRequested,
    Spawned,
    SpawnFailed,
    TimedOut,
)
from .instance import Instance, State
from .later_machine import adopt_moved
from .move_events import (
    ENDS_ANOTHER,
    IN_DOUBT,
    WHY,
    MoveEnd,
    after,
    answer_early,
    answer_other,
    move_of,
    refuse_busy,
    refuse_request,
    repeat_end,
)
from .move_steps import arrived, confirm, leave, note, undo
from .orders import change_of, numbered, step_s
from .set_back import FORGOTTEN_ATTEMPTS, certain
from .steps import Step, StepContext


def machine_query_of(instance: Instance) -> MachineQuery | None:
    """The query that a record in doubt waits for, and one of a lost machine before it is released; None: it waits for
    none. It follows from the record alone.
    """
    desire, move = desire_of(instance), instance.move
    is_ending = desire.asks is Ask.RELEASE and desire.condition is Condition.FAILED and move is None
    if not is_in_doubt(instance) and not (instance.doubted and is_ending):
        return None
    if move is None:
        awaited = Awaited.UP if is_ending and instance.code != rules.OUTCOME_UNKNOWN else Awaited.NONE
        places = [instance.here] if instance.state is State.BUILDING else []
    else:
        awaited = Awaited.ALL if _is_from_image(instance) else Awaited.OF_PLACES
        claimed = instance.alternates if desire.asks is Ask.CLAIM else ()
        is_left = move.source is None and instance.position == 0 and desire.asks is Ask.CLAIM  # it has no host by now
        places = [*([] if is_left else [instance.here]), *([] if move.source is None else [move.source]), *claimed]
        if move.kind is MoveKind.EVACUATE:  # the host that it leaves is off: its service may never be back
            places = [*(claimed or [instance.here])]
    return MachineQuery(instance.since, awaited, tuple((one.service, one.host_uuid) for one in places))


def is_in_doubt(instance: Instance) -> bool:
    """Whether it is judged by `table.DOUBTED`."""
    return instance.doubted and desire_of(instance).work in (Work.BUILD, Work.MOVE)


def _is_from_image(instance: Instance) -> bool:
    """Whether by the record there is no machine but one that is built from the image, or that is being offloaded."""
    return move_of(instance).source is None and desire_of(instance).here is not Wish.STAY


# --- Until the services have answered


def ask(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """The services are queried again. No client waits for them beyond the doubt's limit, and no delete at all: one on
    record waited for placement.
    """
    if instance.move is not None and instance.move.delete:
        return leave(_furthest(instance), event.at, context)
    waiting = _hold(instance, event.at, context)
    if instance.move is None:  # the doubt's limit ends a build (`resolve`)
        return Step(waiting)
    if context.set_back.doubted_for_s(instance.since, event.at) < context.doubt_limit_s:
        return Step(waiting)
    over = MoveEnd(MoveState.FAILED, IN_DOUBT, WHY)
    ended = answer_early(waiting, over, event.at, context)
    return after(ended, answer_other(ended.instance, over, event.at, context))


def _hold(instance: Instance, at: float, context: StepContext) -> Instance:
    doubted_for_s = context.set_back.doubted_for_s(instance.since, at)
    wait_s = min(max(context.destroy_retry_s, doubted_for_s), context.destroy_retry_max_s)
    return replace(instance, deadline=at + wait_s)


def ask_now(instance: Instance, event: SpawnFailed | Destroyed, context: StepContext) -> Step:
    """A host has no machine of a build: it may have one elsewhere. A second service of the same name answers for
    machines that it has not.
    """
    is_ours = instance.move is None and (event.attempt, event.host_uuid) == (instance.attempt, instance.host_uuid)
    return Step(replace(instance, deadline=event.at) if is_ours else instance)


def come_up(instance: Instance, event: Spawned | HostRuns, context: StepContext) -> Step:
    """The host of a build has it complete: that is its client's, or was. It stays in doubt at rest, as a later machine
    may be elsewhere.
    """
    is_build = instance.state is State.BUILDING and steps.is_ours(instance, event)
    return rules.come_up(instance, event, context) if is_build else Step(instance)


def refuse(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    """A request about a move that may have ended: the client repeats it when the services have answered."""
    if instance.move is None:
        return refuse_other(instance, event, context)
    move, request = instance.move, event.request
    if request.kind not in ENDS_ANOTHER or request.request_id in (move.request_id, move.by):
        return refuse_busy(instance, event, context)
    again = repeat_end(instance, event, context)
    return refuse_request(instance, event, context, IN_DOUBT, WHY) if again is None else again


def delete(instance: Instance, event: DeleteRequested, context: StepContext) -> Step:
    """Every machine of it is destroyed, however far its move may have come."""
    if instance.move is None:
        return delete_rules.delete(instance, event, context)
    known = instance if move_of(instance).delete else _furthest(instance)
    return delete_rules.delete_moving(known, event, context)


def _furthest(instance: Instance) -> Instance:
    """The record as if its destination had been commanded to build: it may have the machine."""
    desire = desire_of(instance)
    if desire.here in MAY_BE_THERE:
        return instance
    # A revert that is under way has used the next number: the release comes after it.
    newest = instance.next_attempt if desire.asks is Ask.REVERT else instance.newest
    unclaimed = replace(instance, state=State.PREPARING, then=None, newest=newest)
    if instance.position == 0:
        return unclaimed
    return replace(unclaimed, state=State.FINISHING)


# --- The services have answered


def resolve(instance: Instance, event: InstanceSearched, context: StepContext) -> Step:
    """The record becomes what is true of the world by these machines of it. It stays in doubt while they do not show
    that: one is foreign or not proved.
    """
    if instance.move is None:
        return _resolve_build(instance, event, context)
    at, move, there = event.at, move_of(instance), _destination_of(instance, event)
    is_source_gone, later = _is_source_gone(instance, event), _later(instance, event.machines)
    if move.delete:
        return leave(_furthest(instance), at, context)
    if any((one.host_uuid, instance.uuid) in context.kept for one in filter(None, (there, *later))):
        return Step(_hold(instance, at, context))  # until another word of its operator
    newest = max(filter(None, (best_of(instance, later), there)), key=by_worth, default=None)
    if there is None or newest is not there:
        moved = _follow_later(instance, newest, event, context, is_source_gone=is_source_gone)
        if moved is not None:
            return moved
    is_offloading = instance.state is State.CHANGING and move.offload
    if is_offloading and _is_missing(event, instance.attempt, instance.host_uuid):
        return Step(_hold(instance, at, context))  # its image may be kept under a forgotten name
    if _is_one_machine(instance):
        return _go_on(instance, at, context)
    desire = desire_of(instance)
    if there is not None and (there.built or desire.progress is not MoveState.UNDOING):
        return _take(instance, there, at, context, is_source_gone=is_source_gone)
    if desire.source is Wish.UNKNOWN:  # by the record the only machine of it is destroyed, or released
        return _go_on(instance, at, context)
    is_unseen = is_source_gone and instance.host_uuid not in event.hosts
    if _has_destination(instance) and (instance.host_uuid in context.fences if _is_from_image(instance) else is_unseen):
        return Step(_hold(instance, at, context))  # it may be the only one, which its host is to keep when it is back
    return _undo(instance, at, context)


def _follow_later(
    instance: Instance,
    newest: FoundMachine | None,
    event: InstanceSearched,
    context: StepContext,
    *,
    is_source_gone: bool,
) -> Step | None:
    """A later machine than the destination's is this move's own, or was made after it, by a move that the record has
    lost. Beside the latter nothing is started, and when it is complete it is the instance's. None: there is none that
    is proved to be, or the move was confirmed, and starts nothing: the next request finds it.
    """
    at, desire, is_from_image = event.at, desire_of(instance), _is_from_image(instance)
    if is_from_image and _is_unexplained(instance, event.machines):
        return Step(_hold(instance, at, context))
    is_confirmed = desire.here is Wish.STAY and desire.source in OVER
    if newest is None or is_confirmed:
        return None
    if (found := _having(instance, newest)) is None:  # another project's, or it may be its own
        assert instance.spec is not None
        is_anothers = newest.project_id not in (None, instance.spec.project_id)
        return None if is_anothers else Step(_hold(instance, at, context))
    is_alternate = any(one.host_uuid == newest.host_uuid for one in instance.alternates)
    is_tried = is_alternate and desire.progress is not MoveState.UNDOING
    if is_from_image or (not _is_one_machine(instance) and (is_source_gone or is_tried)):
        return _take(found, newest, at, context, is_source_gone=is_source_gone)
    return adopt_moved(instance, newest, at, context) if newest.built else Step(_hold(instance, at, context))


def _resolve_build(instance: Instance, event: InstanceSearched, context: StepContext) -> Step:
    """Its newest complete machine is the instance's, and the others stay, in quarantine. One that is not proved to be
    counts where nothing else is. One that is still being built is awaited as any other is. Without one its host is to
    end the attempt unless it is complete, as the command may come late, and a machine of it that is listed later is
    kept. The build has failed for its client if a service was silent until the doubt's limit, which may have one.
    """
    assert instance.spec is not None
    at, is_building = event.at, instance.state is State.BUILDING
    own = [
        replace(one, project_id=instance.spec.project_id)  # that is proved by its record
        for one in event.machines
        if is_building and _is_at(one, instance.attempt, instance.host_uuid)
    ]
    sure = replace(certain(instance, at), doubted=bool(event.silent), queried=False)
    best = best_of(instance, (*own, *forgotten_machines(instance, event.machines)))
    if best is not None and best not in own:
        return _adopt(sure, best, at, context)
    if best is not None and best.built:
        up = Spawned(at=at, attempt=best.attempt, host_uuid=best.host_uuid, service=best.service)
        active = rules.come_up(steps.at_service(sure, best.service), up, context)
        return replace(active, instance=replace(active.instance, doubted=sure.doubted))
    if best is None and event.silent:
        reason = f"the cell's database was set back, and silent since were {', '.join(sorted(event.silent))}"
        given_up = rules.give_up_unsure(sure, at, context, reason)
        if not is_building or instance.here.service in event.silent:
            return given_up
        last = steps.destroy_at(instance, instance.here, instance.attempt, context, unless_built=True)
        return replace(given_up, commands=(*given_up.commands, last))
    first = instance.attempt if is_building else instance.next_attempt
    numbered_anew = replace(instance, reused_from=min(instance.reused_from or first, first))
    if best is not None:
        goes_on = replace(certain(numbered_anew if event.silent else instance, at), queried=False)
        return Step(replace(steps.at_service(goes_on, best.service), deadline=at + instance.build_timeout_s))
    if not is_building:
        return _go_on(numbered_anew, at, context)
    asked = replace(_sure(numbered_anew, at), queried=True, deadline=at + context.answer_timeout_s)
    return Step(asked, again=True)


def adopt_lost(instance: Instance, event: InstanceSearched, context: StepContext) -> Step:
    """A record that ends as failed may be older than the world, and a service has a machine of it that it has not."""
    best = best_of(instance, forgotten_machines(instance, event.machines))
    return Step(instance) if best is None else _adopt(instance, best, event.at, context)


def _adopt(instance: Instance, found: FoundMachine, at: float, context: StepContext) -> Step:
    adopting = replace(instance, reused_from=instance.reused_from or 1, code="", reason="")
    return adopt_found(adopting, found, at, context)


def _is_at(found: FoundMachine, attempt: int, host_uuid: str | None) -> bool:
    return (found.attempt, found.host_uuid) == (attempt, host_uuid) and not found.foreign


def _has_destination(instance: Instance) -> bool:
    """Whether a host of this cell, which is not the source's, may have been commanded to build it."""
    return instance.position > 0 and not instance.is_in_place and instance.state is not State.CLAIMING


def _is_one_machine(instance: Instance) -> bool:
    """Whether the record goes on with one machine, where it is: its change or its move was decided, and its orders and
    questions show the rest.
    """
    is_here = desire_of(instance).here is Wish.STAY or (instance.is_in_place and instance.state is not State.CLAIMING)
    return is_here or instance.state is State.REVERTING


def _destination_of(instance: Instance, event: InstanceSearched) -> FoundMachine | None:
    found = [one for one in event.machines if _is_at(one, instance.attempt, instance.host_uuid)]
    return found[0] if found and _has_destination(instance) else None


def _is_source_gone(instance: Instance, event: InstanceSearched) -> bool:
    move = move_of(instance)
    return move.source is not None and _is_missing(event, move.source_attempt, move.source.host_uuid)


def _is_missing(event: InstanceSearched, attempt: int, host_uuid: str | None) -> bool:
    """Whether the host was looked at, and does not have that machine."""
    place = attempt, host_uuid
    return host_uuid in event.hosts and all((one.attempt, one.host_uuid) != place for one in event.machines)


def _later(instance: Instance, machines: Sequence[FoundMachine]) -> list[FoundMachine]:
    """The machines that were made by what the database has lost."""
    known = move_of(instance).book_attempt if _is_from_image(instance) else instance.last_attempt
    return [one for one in machines if one.attempt > known and not one.foreign]


def _is_unexplained(instance: Instance, machines: Sequence[FoundMachine]) -> bool:
    """Whether one of these is neither a later one that is proved to be its project's, nor by its record there."""
    is_expected = _has_destination(instance) or desire_of(instance).here is Wish.DESTROY
    own = (instance.attempt, instance.host_uuid) if is_expected else None
    later = {(one.attempt, one.host_uuid) for one in _later(instance, machines) if proved_of(instance, one) is not None}
    return any(one.foreign or (one.attempt, one.host_uuid) not in {own, *later} for one in machines)


def _having(instance: Instance, found: FoundMachine) -> Instance | None:
    """The record with this machine as its destination; None: it is not proved to be its own, or its size not known."""
    if (here := proved_of(instance, found)) is None:
        return None
    return replace(
        instance,
        selections=(instance.selections[0], here),
        position=1,
        attempt=found.attempt,
        newest=max(found.attempt, instance.last_attempt),
        reused_from=instance.reused_from or 1,
    )


def _sure(instance: Instance, at: float) -> Instance:
    """The record is certain. What it has forgotten may have given out the numbers that it gives out from now on, and
    commanded the source to hand over: it is started if the move goes back to it. What is resized in place is not
    stopped: it hands over before another host builds from its disk.
    """
    move, reused_from = instance.move, instance.reused_from or instance.next_attempt
    is_stopped = instance.state is not State.RESIZING
    if is_stopped and move is not None and move.source is not None and move.kind is not MoveKind.EVACUATE:
        move = replace(move, handed_over=True)
    return replace(certain(instance, at), queried=False, reused_from=reused_from, move=move)


def _take(instance: Instance, found: FoundMachine, at: float, context: StepContext, *, is_source_gone: bool) -> Step:
    """The destination has its machine. Complete, the move has arrived, and if no machine is left at the source, it was
    confirmed. Else it is awaited.
    """
    sure = steps.at_service(_sure(instance, at), found.service)
    if found.built and instance.state is State.RESIZED:
        return _rest(sure, at, context, is_source_gone=is_source_gone)
    if found.built:
        return _arrive(sure, at, context, is_source_gone=is_source_gone)
    earlier = _wanted(sure, at, context)
    waits = replace(earlier.instance, state=State.FINISHING, then=None, queried=True)
    return Step(replace(waits, deadline=at + context.destroy_retry_s), earlier.commands, again=True)


def follow_spared(instance: Instance, event: Spawned | HostRuns, context: StepContext) -> Step:
    """The destination of a move that is undone, which its host is to end unless it is complete, is complete: it has
    arrived. Any other is destroyed as it was commanded.
    """
    is_spared = instance.queried and steps.is_ours(instance, event) and not instance.is_in_place
    if not is_spared or (isinstance(event, HostRuns) and not event.built):
        return rules.confirm_running(instance, event, context)
    return _arrive(steps.followed(instance, event), event.at, context, is_source_gone=False)


def _wanted(instance: Instance, at: float, context: StepContext) -> Step:
    """The destination is wanted, whatever was to end the move: that has not taken effect."""
    move = move_of(instance)
    kept = replace(instance, move=replace(move, lost_code="", lost_reason="", finishing=True))
    return answer_other(kept, MoveEnd(MoveState.FAILED, IN_DOUBT, WHY), at, context)


def _arrive(instance: Instance, at: float, context: StepContext, *, is_source_gone: bool) -> Step:
    earlier = _wanted(instance, at, context)
    there = after(earlier, arrived(note(earlier.instance, "active", at), at, context))
    if there.instance.state is State.RESIZED and is_source_gone:
        return after(there, confirm(there.instance, at, context))
    return there


def _rest(instance: Instance, at: float, context: StepContext, *, is_source_gone: bool) -> Step:
    """A move that has arrived by its record, too. One that waits for its source goes on to do so."""
    move = move_of(instance)
    if is_source_gone:
        stays = way_back.end_without_source(instance, at, context)
        return after(stays, confirm(way_back.kept_here(stays.instance), at, context))
    if way_back.is_waiting(instance):
        return Step(replace(instance, deadline=at + context.destroy_retry_s))
    return Step(replace(instance, deadline=None if move.auto_confirm_s is None else at + move.auto_confirm_s))


def _undo(instance: Instance, at: float, context: StepContext) -> Step:
    """No complete machine is at the destination, and the move goes back to where it began. The host of the destination
    is to end it unless it is complete, as the command may come late. What was claimed may have later numbers than the
    record, and so has what is released without a source.
    """
    move, has_destination, newest = move_of(instance), _has_destination(instance), instance.newest
    if (
        move.source is None and move.to_cell is None
    ):  # else another cell may have claimed the next ones (`doubted_from`)
        newest = instance.last_attempt + FORGOTTEN_ATTEMPTS
    elif instance.state is State.CLAIMING:  # a copy of the claim may be under way
        newest = instance.next_attempt
    sure = replace(_sure(instance, at), newest=newest)
    back = replace(sure, move=replace(move_of(sure), finishing=has_destination))
    undone = undo(back, at, context, move.lost_code or IN_DOUBT, move.lost_reason or WHY)
    if not has_destination:
        return undone
    return replace(undone, instance=replace(undone.instance, queried=True), again=True)


def _go_on(instance: Instance, at: float, context: StepContext) -> Step:
    """The record stays as it is. What it waits for is commanded, or asked of placement, once more."""
    sure = _sure(instance, at)
    kind, is_asking = change_of(sure), desire_of(sure).asks is not None
    if sure.state is State.RESIZED:
        return _rest(sure, at, context, is_source_gone=False)
    wait_s = context.claim_retry_s if is_asking else context.destroy_retry_s
    if kind is not None:
        sure = numbered(sure, at)
        wait_s = wait_s if sure.state is State.DESTROYING else step_s(move_of(sure), kind, context)
    return Step(replace(sure, deadline=at + wait_s), again=True)
