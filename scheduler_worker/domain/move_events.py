"""Events of requests about instances: the scheduler's decisions and the cells' announcements. Pure."""

from __future__ import annotations

from contextlib import suppress

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import MAX_REASON, Refusal, Uuid
from bus.contracts.build import AttemptRecord, TimelineEntry
from bus.contracts.catalogue import project_of
from bus.contracts.moves import Condition, MoveEvent, MoveKind, MoveState
from bus.wire import Malformed
from scheduler_worker.domain.builds import Author, RecordedBuild
from scheduler_worker.domain.recorded_moves import InstanceRecord, MoveContext, PendingMove, RecordedMove, flavor_of

# The scheduler's own sequence numbers of a request's events; a conductor's numbers are above them.
OFF_RECORD, SCHEDULED, FAILED_OR_REFUSED = 0, 2, 3


def recorded(pending: PendingMove, state: MoveState, author: Author, **more: object) -> RecordedMove:
    """The record of a request that was dispatched, refused, or failed because no host fits."""
    request = pending.request
    ended = state is not MoveState.SCHEDULED
    return RecordedMove(
        request_id=request.request_id,
        instance_uuid=request.instance_uuid,
        project_id=request.project_id,
        kind=request.kind,
        digest=pending.digest,
        state=state,
        sequence=FAILED_OR_REFUSED if ended else SCHEDULED,
        terminal=ended,
        created_at=author.at,
        **more,  # type: ignore[arg-type]
    )


def event_of(move: RecordedMove, known: MoveContext, at: float) -> MoveEvent:
    """The scheduler's event about its decision on a request."""
    is_theirs = known.build is not None and known.build.project_id == move.project_id
    return MoveEvent(
        request_id=move.request_id,
        instance_uuid=move.instance_uuid,
        project_id=move.project_id,
        kind=move.kind,
        state=move.state,
        sequence=move.sequence,
        terminal=move.terminal,
        condition=(known.now.condition if move.terminal else Condition.MOVING) if is_theirs else Condition.UNKNOWN,
        cell=move.cell,
        host=move.host,
        flavor=flavor_of(known) if is_theirs and known.build_request is not None else "",
        code=move.code,
        reason=move.reason,
        funnel=move.funnel,
        at=at,
    )


def clash_event(pending: PendingMove, refusal: Refusal) -> MoveEvent:
    """The event has the lowest sequence: outdated for a client that follows the request on record."""
    request = pending.request
    return MoveEvent(
        request_id=request.request_id,
        instance_uuid=request.instance_uuid,
        project_id=request.project_id,
        kind=request.kind,
        state=MoveState.REFUSED,
        sequence=OFF_RECORD,
        terminal=True,
        condition=Condition.UNKNOWN,
        code=refusal.code,
        reason=refusal.reason,
        at=pending.taken_at,
    )


# --- what its cell announces


class Announced(Struct, frozen=True, kw_only=True):
    """The change that an announcement makes. event: to publish; None: outdated."""

    move: RecordedMove
    instance: InstanceRecord
    build: RecordedBuild
    event: MoveEvent | None = None
    timeline: tuple[TimelineEntry, ...] = ()


def apply_announcement(
    event: MoveEvent, move: RecordedMove, instance: InstanceRecord, build: RecordedBuild, *, cell: str, now: float
) -> Announced:
    """Apply a cell's event of a request to the records of the request, its instance and the instance's build."""
    ends = event.terminal and not move.terminal
    # An event after the end (source gone, confirmed by itself) may overtake the end on the way here; the end is still
    # applied.
    if (event.sequence <= move.sequence and not ends) or (event.terminal and move.terminal):
        return Announced(move=move, instance=instance, build=build)
    event = replace(event, cell=cell, project_id=move.project_id, instance_uuid=move.instance_uuid)
    host_uuid = event.host_uuid
    event = replace(event, departure=None, host_uuid=None)
    number = event.sequence
    if ends and number == OFF_RECORD:  # its cell has no record of the instance, and so no number: clients have had more
        event = replace(event, sequence=move.sequence + 1)
    if not move.terminal or event.terminal:
        # An event after the terminal one (confirmed by itself, source gone) does not reopen the request.
        after = replace(
            move,
            state=event.state,
            sequence=max(event.sequence, move.sequence),
            terminal=event.terminal,
            host=event.host or move.host,
            host_uuid=host_uuid or move.host_uuid,
            code=event.code,
            reason=event.reason,
            history=event.history or move.history,
            command=None if event.terminal else move.command,
        )
    else:
        after = replace(move, sequence=event.sequence)
    is_newest, is_awaited = number > instance.sequence, instance.under_way == move.request_id
    if is_newest or (event.terminal and is_awaited and instance.condition is Condition.MOVING):
        # A cell whose database was set back numbers from lower numbers again; its event ends the request under way.
        instance = replace(instance, condition=event.condition, sequence=max(number, instance.sequence))
    # Before the end, host and cell are the destination's. An event after the end (source gone, undone by itself) names
    # the reason itself.
    names_what_it_is = event.terminal or (move.terminal and event.condition is not Condition.MOVING)
    if names_what_it_is and (is_newest or (event.terminal and is_awaited)):
        if event.condition is Condition.OFFLOADED:
            build = replace(build, host=None, host_uuid=None)
        elif event.host:
            build = replace(build, host=event.host, host_uuid=host_uuid)
        instance = replace(instance, flavor=event.flavor or instance.flavor, image=event.image or instance.image)
    if event.terminal and is_awaited:
        instance = replace(instance, under_way=None)
    timeline = timeline_of(event, len(move.history), now)
    return Announced(move=after, instance=instance, build=build, event=event, timeline=timeline)


def timeline_of(event: MoveEvent, known: int, now: float) -> tuple[TimelineEntry, ...]:
    """One event as entries of the instance's timeline: first the tried hosts that it names, then itself."""
    who = f"conductor {event.cell}" if event.cell else "conductor"
    tried = tuple(
        TimelineEntry(at=one.at or now, who=who, what=f"{event.kind} {one.outcome}", detail=_detail(one.host, one))
        for one in event.history[known:]
        if one.outcome != "active"
    )
    return (
        *tried,
        TimelineEntry(
            at=event.at or now, who=who, what=f"{event.kind} {event.state}", detail=_detail(event.host, event)
        ),
    )


def _detail(host: str | None, entry: MoveEvent | AttemptRecord) -> str:
    where = f"{host} (attempt {entry.attempt})" if host and entry.attempt else host or ""
    why = f"{entry.code}: {entry.reason}" if entry.code and entry.reason else entry.code or entry.reason
    return "; ".join(part for part in (where, why) if part)


class _Named(Struct):
    """The fields of an unreadable request that an answer on the event stream needs."""

    request_id: Uuid
    instance_uuid: Uuid


class _Kind(Struct):
    """Other fields that may be readable."""

    kind: MoveKind | None = None


def refused_move(malformed: Malformed) -> tuple[MoveEvent, ...]:
    """An unreadable request, answered on the event stream of the project whose routing key it came under.

    Nothing is answered if its ids are unreadable, too.
    """
    project_id = project_of(malformed.key)
    if not project_id:
        return ()
    kind = None
    try:
        named = msgspec.json.decode(malformed.body, type=_Named)
        with suppress(msgspec.ValidationError):
            kind = msgspec.json.decode(malformed.body, type=_Kind).kind
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()
    return (
        MoveEvent(
            request_id=named.request_id,
            instance_uuid=named.instance_uuid,
            project_id=project_id,
            kind=kind,
            state=MoveState.REFUSED,
            sequence=OFF_RECORD,
            terminal=True,
            condition=Condition.UNKNOWN,
            code=malformed.code,
            reason=malformed.reason[:MAX_REASON],
        ),
    )
