"""The rule of each transition of a move: `rule(instance, event, context) -> Step`. The table selects the one that
applies.

An instance that moves has two machines, of which at most one runs. `here` is the source until a destination has been
claimed, and the destination from then on. A move that succeeds advances; every state also goes back: `undo` gives the
destination up, has the book reverted, and starts the source again if it was commanded to stop.

Changes of a machine in place (stop, start, rebuild, rescue, shelve), and how an instance leaves its host, are the last.
"""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.moves import (
    ACROSS_CELLS,
    MACHINE_ABSENT,
    UNSUPPORTED,
    ChangeKind,
    MoveKind,
    MoveState,
)

from . import departure_rules, rules, steps, way_back
from .build_repeat_rules import is_held
from .events import (
    ChangeEnded,
    Claimed,
    ClaimRefused,
    DepartRequested,
    Destroyed,
    HostMissing,
    HostRuns,
    MoveRequested,
    Released,
    ServiceLost,
    Spawned,
    SpawnFailed,
    TimedOut,
)
from .instance import Instance, Power, State, why_not_claimed
from .move_events import (
    DELETED,
    DONE,
    ENDS_ANOTHER,
    MoveEnd,
    after,
    answer_early,
    answer_other,
    close,
    has_ended,
    move_of,
    refuse_busy,
    refuse_request,
    repeat_end,
    report_progress,
    report_silent,
    source_of,
    without_move,
)
from .move_steps import (
    CLAIMS,
    adopt,
    answered,
    arrived,
    as_left,
    begin_claimed,
    begin_in_place,
    change,
    claim,
    confirm,
    ending_of,
    finish,
    is_awaited,
    leave,
    note,
    note_not_claimed,
    offload,
    over,
    summary_of_hosts,
    try_next,
    undo,
    why_not_evacuated,
)
from .orders import change_of, numbered, sooner, step_s
from .steps import Step, StepContext

ABORTED = "move.aborted"
REVERTED = "move.reverted"
TIMED_OUT = "move.timeout"
MIGRATION_IN_USE = "claim.migration_in_use"  # placement's reason for a refused claim
_OF_SHELVED = frozenset({MoveKind.UNSHELVE, MoveKind.OFFLOAD, MoveKind.SHELVE, MoveKind.EVACUATE})


# --- requests


def begin(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    """A request for an instance that has no request under way: it has a machine, or none, and is unshelved on a host
    that is claimed anew.
    """
    again = repeat_end(instance, event, context)
    if again is not None:
        return again
    if isinstance(event, DepartRequested) and event.attempt != instance.last_attempt:
        return departure_rules.name_attempt(instance, event, context)
    if (why := _why_not_now(instance, event.request.kind)) is not None:
        return refuse_request(instance, event, context, *why)
    if (refused := _refuse_other_flavor(instance, event, context)) is not None:
        return refused
    if (refused := _refuse_to_leave(instance, event, context)) is not None:
        return refused
    if isinstance(event, DepartRequested):
        return departure_rules.depart(instance, event, context)
    if instance.state is State.OFFLOADED:
        if not event.request.selections:
            return refuse_request(instance, event, context, "move.no_host")
        # `here` is the host that it had; no machine is there.
        begun = adopt(instance, event, source=None, selections=(instance.here, *event.request.selections))
        return claim(begun, event.at, context)
    if event.request.kind in CLAIMS:
        return begin_claimed(instance, event, context)
    return begin_in_place(instance, event, context)


def _why_not_now(instance: Instance, kind: MoveKind) -> tuple[str, str] | None:
    """The code and the reason for which a request of this kind is not begun as the instance is; None: it may be."""
    if instance.state is State.OFFLOADED:
        return None if kind is MoveKind.UNSHELVE else ("instance.offloaded", "unshelve it first")
    if kind is MoveKind.OFFLOAD and instance.power is not Power.SHELVED:
        return "instance.not_shelved", "shelve it first"
    if kind in ENDS_ANOTHER:
        reason = f"no move is there to {kind.value}; one from another cell is over, and migrating it leads back there"
        return "move.none", reason
    if instance.power is Power.SHELVED and kind not in _OF_SHELVED:
        return "instance.shelved", "unshelve or offload it first"
    if instance.power is Power.RESCUED and kind not in (MoveKind.RESCUE, MoveKind.UNRESCUE, MoveKind.EVACUATE):
        return "instance.rescued", "unrescue it first"
    return None


def _refuse_to_leave(instance: Instance, event: MoveRequested, context: StepContext) -> Step | None:
    """What has things of its cell stays in it, with a host or without."""
    assert instance.spec is not None
    if event.request.to_cell is None or not (instance.spec.networks or instance.spec.volumes):
        return None
    reason = "its networks and volumes are its cell's own"
    return refuse_request(instance, event, context, ACROSS_CELLS, reason)


def _refuse_other_flavor(instance: Instance, event: MoveRequested, context: StepContext) -> Step | None:
    """Hosts that were chosen for another flavor than the instance has here would claim that one's amounts for it. The
    sender's record is behind (a database was set back); it takes the present flavor from the refusal. For a stop, and
    other changes on the instance's own host, no hosts were chosen.
    """
    request, expected = event.request, event.request.expected_flavor
    if not request.selections and request.spec is None and request.to_cell is None:
        return None
    assert instance.spec is not None
    if "" in (expected, instance.spec.flavor) or expected == instance.spec.flavor:
        return None
    reason = f"its flavor is {instance.spec.flavor}, and the hosts were chosen for {expected}"
    return refuse_request(instance, event, context, "instance.flavor_changed", reason)


def end_resized(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    """Confirm or revert. The second of two finds the state changed and is refused."""
    move = move_of(instance)
    request = event.request
    again = repeat_end(instance, event, context)
    if again is not None:
        return again
    if request.kind not in (MoveKind.CONFIRM, MoveKind.REVERT):
        return refuse_request(instance, event, context, "instance.resized", "confirm or revert it first")
    if request.migration not in (None, move.request_id):
        return refuse_request(instance, event, context, "move.none", "another move is to be confirmed or reverted")
    if (answered := way_back.ending_instead(instance, event, context)) is not None:
        return answered
    if request.kind is MoveKind.REVERT:
        return way_back.revert(instance, event, context, REVERTED)
    named = replace(move_of(instance), by=request.request_id, by_kind=request.kind)
    confirmed = confirm(way_back.kept_here(replace(instance, move=named, cause=event.cause)), event.at, context)
    source, waits = source_of(move), confirmed.instance.state is State.DESTROYING
    if not waits or source.host_uuid in context.fences or source.service not in context.down:
        return confirmed
    return after(confirmed, report_silent(confirmed.instance, way_back.SOURCE_SILENT, source, event.at, context))


def abort(instance: Instance, event: MoveRequested, context: StepContext) -> Step:
    """No destination has been commanded: the move is undone. While a request to placement is under way, the move is
    undone once it has answered. An abort that ended before this move, and is delivered again, was not meant for it.
    """
    move, request = move_of(instance), event.request
    is_meant = request.migration in (None, move.request_id) and not has_ended(instance, request.request_id)
    if request.kind is not MoveKind.ABORT or not is_meant or move.by or move.source is None:
        return refuse_busy(instance, event, context)
    if move.delete:
        return refuse_request(instance, event, context, DELETED)
    named = replace(instance, move=replace(move, by=request.request_id, by_kind=request.kind), cause=event.cause)
    if instance.state is State.CLAIMING:
        return Step(named)
    return undo(named, event.at, context, ABORTED, "")


# --- a destination


def take_destination(instance: Instance, event: Claimed, context: StepContext) -> Step:
    """A destination is claimed: query whether it can, or change the size in place."""
    move = move_of(instance)
    outcomes = event.outcomes[: event.option]
    updated = note_not_claimed(instance, outcomes, event.at)
    taken = replace(
        updated,
        position=instance.position + 1 + event.option,
        consumer_generation=event.consumer_generation,
        newest=event.attempt,
        move=replace(move_of(updated), claimed=move.source is not None),
    )
    taken = replace(taken, attempt=move.source_attempt if taken.is_in_place else event.attempt)
    if move.delete:
        return leave(taken, event.at, context)
    if move.by_kind is MoveKind.ABORT:
        return undo(taken, event.at, context, ABORTED, "")
    if taken.is_in_place:
        return change(taken, State.RESIZING, event.at, context)
    return change(taken, State.PREPARING, event.at, context)


def run_out_of_hosts(instance: Instance, event: ClaimRefused, context: StepContext) -> Step:
    """No destination could be claimed: back to the source. The revert has a later number than the claim: it fences a
    late copy of that, or takes back what a copy has claimed.
    """
    tried = replace(note_not_claimed(instance, event.outcomes, event.at), newest=event.attempt)
    move = move_of(instance)
    if move.delete and event.reason.startswith(MIGRATION_IN_USE) and not move.claimed:
        # Another instance keeps its source under this uuid: it is not this one's to release.
        tried = replace(tried, move=replace(move_of(tried), source=None))
    if move.delete:
        return leave(tried, event.at, context)
    if (known := _with_books_generation(instance, event)) is not None:
        return Step(known)
    if event.consumer_changed:
        reason = event.reason or "another client holds this instance's allocation"
        return undo(tried, event.at, context, "placement.consumer_changed", reason)
    if move_of(instance).by_kind is MoveKind.ABORT:
        return undo(tried, event.at, context, ABORTED, "")
    return undo(tried, event.at, context, *why_not_claimed(event, event.reason or summary_of_hosts(tried)))


def _with_books_generation(instance: Instance, event: ClaimRefused) -> Instance | None:
    """The claim once more, with the generation that the book has; None: it was refused for another reason.

    The book holds just the source: an audit has claimed it again, or released the allocation beside it. Once a move,
    because another client may keep changing it.
    """
    move = move_of(instance)
    if move.refreshed or move.by_kind is MoveKind.ABORT or move.source is None or instance.position > 0:
        return None
    if not event.consumer_changed or not is_held(move.source, event):
        return None
    return replace(instance, consumer_generation=event.consumer_generation, move=replace(move, refreshed=True))


def go_on(instance: Instance, event: ChangeEnded, context: StepContext) -> Step:
    """The destination can, or cannot: have the source hand over, or try the next destination."""
    if not is_awaited(instance, event, instance.here, instance.attempt):
        return Step(instance)
    if not event.done:
        return try_next(note(instance, "failed", event.at, event.code, event.reason), event.at, context)
    move = move_of(instance)
    if move.kind is MoveKind.EVACUATE:
        unproved = why_not_evacuated(instance, context, fenced=move.fenced, force=move.force)
        if unproved is not None:
            return undo(instance, event.at, context, unproved.code, unproved.reason)
    if move.source is None or move.kind is MoveKind.EVACUATE or move.handed_over:
        return finish(instance, event.at, context)
    earlier = replace(instance, move=replace(move, handed_over=True))
    return change(earlier, State.HANDING_OVER, event.at, context)


def skip_destination(instance: Instance, event: TimedOut | ServiceLost, context: StepContext) -> Step:
    """The destination does not answer, and was commanded nothing yet: the next one is tried."""
    if isinstance(event, ServiceLost):
        if event.service != instance.service:
            return Step(instance)
        code, reason = event.code, event.reason
    else:
        code, reason = "prepare.timeout", "no answer in time"
    return try_next(note(instance, "failed", event.at, code, reason), event.at, context)


def take_over(instance: Instance, event: ChangeEnded, context: StepContext) -> Step:
    """The source has stopped and handed over: the destination starts it.

    It could not: the instance stays on the source. Where it refused before it began, the machine was never commanded to
    stop, and need not be started; another destination is tried only if the source may let it go there.
    """
    move = move_of(instance)
    if not is_awaited(instance, event, source_of(move), move.source_attempt):
        return Step(instance)
    if event.done:
        return finish(instance, event.at, context)
    if not event.refused or not event.runs:
        return undo(instance, event.at, context, event.code or "hand-over.failed", event.reason)
    kept = note(instance, "failed", event.at, event.code, event.reason)
    kept = replace(kept, move=replace(move_of(kept), handed_over=False))
    if event.elsewhere:
        return try_next(kept, event.at, context)
    return undo(kept, event.at, context, event.code, event.reason)


def give_up_hand_over(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """The source does not answer: the move is undone.

    It is started again, which cancels the hand-over that it may have begun.
    """
    kind = change_of(instance)
    assert kind is not None
    reason = f"the source did not hand over within {step_s(move_of(instance), kind, context):g} s"
    return undo(instance, event.at, context, TIMED_OUT, reason)


def arrive(instance: Instance, event: Spawned | HostRuns, context: StepContext) -> Step:
    """The destination has the machine. Only now may the source be given up: at once, or when the move is confirmed."""
    if not steps.is_ours(instance, event):
        return rules.destroy_orphan(instance, event, context)
    here = steps.followed(instance, event)
    if isinstance(event, HostRuns) and not event.built:
        return Step(here)
    return arrived(note(here, "active", event.at), event.at, context)


def arrive_in_place(instance: Instance, event: ChangeEnded, context: StepContext) -> Step:
    """The machine has its new size. It could not: the host is commanded to restore the old size, because the machine
    may have either; then the next destination is tried.

    Until it has, the larger of the two sizes stays claimed here.
    """
    if not is_awaited(instance, event, instance.here, instance.attempt):
        return Step(instance)
    move, is_absent = move_of(instance), event.code == MACHINE_ABSENT
    if move.resizing_back:
        if not event.done and not is_absent:
            return Step(instance)  # its deadline undoes the move, and then the command is repeated until it confirms
        return try_next(replace(instance, move=replace(move, resizing_back=False)), event.at, context)
    if not event.done:
        failed = note(instance, "failed", event.at, event.code, event.reason)
        if is_absent:
            return try_next(failed, event.at, context)
        back = replace(failed, move=replace(move_of(failed), resizing_back=True))
        return Step(replace(numbered(back, event.at), deadline=event.at + move.step_timeout_s))
    return arrived(note(instance, "active", event.at), event.at, context)


def give_up_in_place(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """The host does not answer whether the machine has its new size: it is commanded to restore the old one."""
    return undo(instance, event.at, context, TIMED_OUT, "the host did not confirm that the machine has its new size")


def fail_destination(instance: Instance, event: SpawnFailed, context: StepContext) -> Step:
    """The destination could not: its remains are destroyed, and the next one is tried, or the move is undone."""
    if not steps.is_current(instance, event.attempt, event.host_uuid):
        return rules.destroy_leftover(instance, event, context)
    failed = note(instance, "failed", event.at, event.code, event.reason)
    if event.final:
        return undo(failed, event.at, context, event.code, event.reason)
    return try_next(failed, event.at, context)


def lose_destination(instance: Instance, event: Destroyed, context: StepContext) -> Step:
    """The destination has ended the attempt: the next one is tried, or the move is undone."""
    if not steps.here_gone(instance, event):
        return Step(instance)
    gone = note(instance, "timed_out" if instance.queried else "failed", event.at, "spawn.timeout", "no answer in time")
    return try_next(replace(gone, move=replace(move_of(gone), finishing=False)), event.at, context)


def revert_lost(instance: Instance, event: HostMissing, context: StepContext) -> Step:
    """The destination is gone before it was confirmed: the source is still there, and is started again."""
    if not steps.here_gone(instance, event):
        return Step(instance)
    if instance.is_in_place:
        return rules.lose(instance, event, context)
    reason = f"host {instance.here.host} does not run it any more"
    return undo(instance, event.at, context, "instance.lost", reason)


# --- the end of a move


def confirm_in_time(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """No client has confirmed or reverted in the time that the request allowed: the move is confirmed.

    Only while its destination is known to be usable: the source, which is whole, would be given up for it by the time
    alone. And not while the services are queried for the source, in order to go back.
    """
    if way_back.is_waiting(instance):
        return way_back.query_again(instance, event.at, context)
    if not instance.is_in_place and not context.is_usable(instance.here):
        return Step(replace(instance, deadline=event.at + context.destroy_retry_s))
    earlier = report_progress(instance, MoveState.CONFIRMED, event.at, context)
    return after(earlier, confirm(earlier.instance, event.at, context))


def end_source_released(instance: Instance, event: Released, context: StepContext) -> Step:
    """The migration holds no allocation any more: the move is over."""
    earlier = answer_other(over(instance, event.at, context), DONE, event.at, context)
    gone = report_progress(earlier.instance, MoveState.SOURCE_GONE, event.at, context)
    return after(earlier, Step(without_move(gone.instance), gone.commands))


# By these it is built from its image, and is offloaded again where no host could: in the cell that it has come to.
_FROM_IMAGE = frozenset({MoveKind.UNSHELVE, MoveKind.MIGRATE, MoveKind.RESIZE})


def changed(instance: Instance, event: ChangeEnded, context: StepContext) -> Step:
    """The host has carried out the command, or reports that it could not; if it does not know, it is queried again."""
    if not is_awaited(instance, event, instance.here, instance.attempt):
        return Step(instance)
    move, event = move_of(instance), answered(instance, event)
    if not event.done:
        ending = MoveEnd(MoveState.FAILED, event.code or "change.failed", event.reason)
        if event.runs is None and event.code != UNSUPPORTED:
            return answer_early(sooner(instance, event.at, context), ending, event.at, context)
        back = as_left(instance, event)
        if change_of(instance) is ChangeKind.SNAPSHOT and (instance.power, back.power) == (
            Power.RUNNING,
            Power.STOPPED,
        ):
            runs = replace(move, to_cell=None, lost_code=ending.code, lost_reason=steps.cut(ending.reason))
            return change(replace(instance, move=runs), State.RESTARTING, event.at, context)
        return close(over(back, event.at, context), ending, event.at, context)
    if move.kind is MoveKind.SHELVE or move.to_cell is not None:
        kept = replace(instance, power=Power.SHELVED, image=event.image)
        if move.offload and not move.answered:  # its client was told that it had failed: the machine stays
            return offload(kept, event.at, context)
        return close(over(kept, event.at, context), DONE, event.at, context)
    if move.kind in (MoveKind.START, MoveKind.UNSHELVE):
        instance = replace(instance, power=Power.RUNNING, image="")
    if move.kind in (MoveKind.RESCUE, MoveKind.UNRESCUE):
        instance = replace(instance, power=Power.RESCUED if move.kind is MoveKind.RESCUE else Power.RUNNING)
    if move.kind is MoveKind.STOP or (move.kind is MoveKind.REBUILD and event.runs is False):
        instance = replace(instance, power=Power.STOPPED)
    if move.kind is MoveKind.REBUILD and event.runs:  # Ironic switches the node on
        instance = replace(instance, power=Power.RUNNING)
    return close(over(instance, event.at, context), DONE, event.at, context)


def end_offloaded(instance: Instance, event: Released, context: StepContext) -> Step:
    """Nothing is allocated any more: the instance has no host.

    A copy of a claim, or of this release, is fenced by its attempt.
    """
    move = move_of(instance)
    gone = replace(
        over(instance, event.at, context),
        state=State.OFFLOADED,
        power=Power.SHELVED,
        newest=instance.next_attempt,
        consumer_generation=None,
    )
    if move.to_cell is not None:
        return departure_rules.have_left(gone, event.at, context)
    if move.kind in _FROM_IMAGE:
        gone = replace(gone, spec=move.spec)
        return close(gone, ending_of(move), event.at, context)
    return close(gone, DONE, event.at, context)
