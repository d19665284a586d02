"""Requests about an instance after its build: their record, the rules they are judged by, and a cell's events. Pure.

A request has exactly one terminal event. While one is under way another is refused; only an abort may follow it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from hashlib import blake2b

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bus.consuming.given_up import given_up_of
from bus.consuming.outcome import Done, Outcome, Received, Retry
from bus.contracts.base import MAX_REASON, Refusal, Uuid
from bus.contracts.build import AttemptRecord, BuildRequest, BuildState, FunnelStep, TimelineEntry
from bus.contracts.catalogue import project_of
from bus.contracts.moves import (
    CHOOSES_HOSTS,
    Condition,
    MoveAccepted,
    MoveEvent,
    MoveKind,
    MoveRecord,
    MoveRequest,
    MoveState,
    ResizePolicy,
)
from bus.wire import Malformed
from scheduler_worker.domain.admission import DUPLICATE
from scheduler_worker.domain.builds import Author, RecordedBuild
from scheduler_worker.domain.pending import TOO_OLD, FlavorAccess

# The scheduler's own sequence numbers of a request's events; a conductor's begin above them.
MALFORMED, SCHEDULED, DECIDED = 0, 2, 3

INCOMPLETE = "request.incomplete"
UNKNOWN = "instance.unknown"
BUSY = "instance.busy"
NOT_ACTIVE = "instance.not_active"
CHANGED = Retry("request.concurrent", "the instance changed while hosts were chosen for it")

# A request may overtake its instance's build on the way to another scheduler: so often it is looked for again.
UNKNOWN_RETRIES = 2
# Ends of an instance: no request is taken for it any more.
_ENDED = frozenset({Condition.DELETED, Condition.FAILED})

_encode = msgspec.json.Encoder(order="deterministic").encode


class RecordedMove(Struct, frozen=True, kw_only=True):
    """What is on record of one request. digest: of its whole content. sequence: of the newest event that it had.

    cell: where it was dispatched to. created_at: seconds since the epoch.
    """

    request_id: str
    instance_uuid: str
    project_id: str
    kind: MoveKind
    digest: bytes
    state: MoveState
    sequence: int
    terminal: bool = False
    cell: str | None = None
    host: str | None = None
    code: str = ""
    reason: str = ""
    funnel: tuple[FunnelStep, ...] = ()
    history: tuple[AttemptRecord, ...] = ()
    created_at: float = 0.0


def record_of(move: RecordedMove, updated_at: float) -> MoveRecord:
    """A request as it is answered to queries."""
    return MoveRecord(
        request_id=move.request_id,
        instance_uuid=move.instance_uuid,
        project_id=move.project_id,
        kind=move.kind,
        state=move.state,
        terminal=move.terminal,
        cell=move.cell,
        host=move.host,
        code=move.code,
        reason=move.reason,
        funnel=move.funnel,
        history=move.history,
        created_at=move.created_at,
        updated_at=updated_at,
    )


class InstanceRecord(Struct, frozen=True, kw_only=True):
    """What an instance has become since its build. Without a record it is as it was built.

    flavor, image: what it has now; "": as it was built. image_properties: {image: its properties}, of the image that
    a rebuild gave it, and of the one that the rebuild under way names. under_way: the request that has no terminal
    event yet.
    sequence: of the newest event of its cell that changed this.
    """

    instance_uuid: str
    condition: Condition = Condition.ACTIVE
    flavor: str = ""
    image: str = ""
    image_properties: Mapping[str, Mapping[str, str]] = {}
    under_way: str | None = None
    sequence: int = 0


class PendingMove(Struct, frozen=True, kw_only=True):
    """A request that has no outcome yet. position: in its batch. delivery: how often its queue has retried it.

    too_old: it was sent so long ago that its record may have been purged. given_up: why its queue has given it up, or
    is about to; None: it has not.
    """

    position: int
    request: MoveRequest
    digest: bytes
    taken_at: float
    delivery: int = 0
    given_up: Refusal | None = None
    too_old: bool = False


class MoveContext(Struct, frozen=True, kw_only=True):
    """What is on record of what a request names. build_request: as it was built.

    names_instance: the request_id is the uuid of an instance.
    """

    move: RecordedMove | None = None
    build: RecordedBuild | None = None
    build_request: BuildRequest | None = None
    instance: InstanceRecord | None = None
    names_instance: bool = False

    @property
    def now(self) -> InstanceRecord:
        """What the instance is now."""
        assert self.build is not None
        return self.instance or InstanceRecord(instance_uuid=self.build.instance_uuid)


def known_of(
    requests: Mapping[str, str],
    *,
    moves: Mapping[str, RecordedMove],
    builds: Mapping[str, RecordedBuild],
    requested: Mapping[str, BuildRequest],
    instances: Mapping[str, InstanceRecord],
    named: Collection[str],
) -> dict[str, MoveContext]:
    """What is on record of requests ({request_id: instance}), from what is on record by id and by instance.

    named: the request_ids that are uuids of instances.
    """
    return {
        request_id: MoveContext(
            move=moves.get(request_id),
            build=builds.get(uuid),
            build_request=requested.get(uuid),
            instance=instances.get(uuid),
            names_instance=request_id in named,
        )
        for request_id, uuid in requests.items()
    }


def pending_move(received: Received, position: int, *, now: float, max_age_s: float) -> PendingMove:
    """A request that has just been taken."""
    request, meta = received.message, received.meta
    assert isinstance(request, MoveRequest)
    return PendingMove(
        position=position,
        request=request,
        digest=blake2b(_encode(request), digest_size=16).digest(),
        taken_at=now,
        delivery=meta.attempt,
        given_up=given_up_of(received),
        too_old=0 < meta.sent_at < now - max_age_s,
    )


class Clash(Struct, frozen=True):
    """The request_id is on record with other content, or is an instance's: refused, and nothing goes on record."""

    refusal: Refusal


def check_move(
    pending: PendingMove, known: MoveContext, flavors: FlavorAccess, *, same_host: bool
) -> Outcome | Clash | Refusal | None:
    """An outcome: it was handled before, or comes too early. A refusal goes on record. None: it may be carried out."""
    request, move, build = pending.request, known.move, known.build
    if move is not None:
        if move.digest != pending.digest or move.project_id != request.project_id:
            return Clash(Refusal(code=DUPLICATE, reason="this request_id is on record with other content"))
        if move.terminal and move.state is MoveState.REFUSED:
            return Done(reply=Refusal(code=move.code, reason=move.reason))
        return accepted(request)
    if known.names_instance or request.request_id == request.instance_uuid:
        return Clash(Refusal(code=DUPLICATE, reason="the request_id is the uuid of an instance"))
    if build is None or build.project_id != request.project_id:
        # Another project learns nothing of it.
        if build is None and pending.delivery < UNKNOWN_RETRIES and pending.given_up is None:
            return Retry(UNKNOWN, "not on record (yet)")
        return Refusal(code=UNKNOWN, reason="there is no such instance in this project")
    if pending.too_old:
        return Refusal(code=TOO_OLD, reason="it was sent so long ago that it may have been carried out already")
    if pending.given_up is not None:
        return pending.given_up
    return _misfit(request, known, flavors, same_host=same_host)


def _misfit(request: MoveRequest, known: MoveContext, flavors: FlavorAccess, *, same_host: bool) -> Refusal | None:
    """Why this cannot be requested of the instance as it is. The cell decides the rest."""
    build, now = known.build, known.now
    assert build is not None and known.build_request is not None
    if build.state is not BuildState.ACTIVE or build.cell is None or now.condition in _ENDED:
        state = now.condition.value if now.condition in _ENDED else build.state.value
        return Refusal(code=NOT_ACTIVE, reason=f"the instance is {state}")
    if now.under_way is not None and request.kind is not MoveKind.ABORT:
        return Refusal(code=BUSY, reason=f"request {now.under_way} is under way")
    if request.kind is MoveKind.RESIZE:
        if request.flavor is None:
            return Refusal(code=INCOMPLETE, reason="a resize names a flavor")
        if not flavors.allows(request.flavor, request.project_id):
            there_are = ", ".join(sorted(flavors.flavors_for(request.project_id)))
            reason = f"there is no flavor {request.flavor} (there are: {there_are})"
            return Refusal(code="flavor.unknown", reason=reason[:MAX_REASON])
        if request.flavor == flavor_of(known):
            return Refusal(code="flavor.same", reason=f"the instance has flavor {request.flavor}")
        if request.policy is ResizePolicy.SAME_HOST and not same_host:
            return Refusal(code="resize.same_host", reason="this site does not resize on the same host")
    if request.kind is MoveKind.REBUILD and request.image is None:
        return Refusal(code=INCOMPLETE, reason="a rebuild names an image")
    if request.kind is MoveKind.RESCUE and not request.rescue_password:
        return Refusal(code=INCOMPLETE, reason="a rescue names a password")
    return None


def flavor_of(known: MoveContext) -> str:
    """The flavor that the instance has now."""
    assert known.build_request is not None
    return known.now.flavor or known.build_request.flavor


def image_of(known: MoveContext) -> str:
    """The image that the instance has now."""
    assert known.build_request is not None
    return known.now.image or known.build_request.image


def image_properties_of(known: MoveContext) -> Mapping[str, str]:
    """The properties of the image that the instance has now."""
    assert known.build_request is not None
    return known.now.image_properties.get(image_of(known), known.build_request.image_properties)


def rebuilt_from(request: MoveRequest, known: MoveContext) -> Mapping[str, str]:
    """The properties of the image that a rebuild names."""
    if request.image_properties is not None:
        return request.image_properties
    return image_properties_of(known) if request.image == image_of(known) else {}


def changes_image(request: MoveRequest, known: MoveContext) -> bool:
    """Whether it is a rebuild from another image than the instance has, which its host may not support."""
    if request.kind is not MoveKind.REBUILD:
        return False
    return request.image != image_of(known) or rebuilt_from(request, known) != image_properties_of(known)


def under_way(request: MoveRequest, known: MoveContext) -> InstanceRecord:
    """The record of an instance whose request is dispatched."""
    if request.kind is MoveKind.ABORT:  # it goes beside the request that it ends, which stays the one under way
        return known.now
    begun = replace(known.now, under_way=request.request_id)
    if not changes_image(request, known):
        return begun
    assert request.image is not None
    properties = {image_of(known): image_properties_of(known), request.image: rebuilt_from(request, known)}
    return replace(begun, image_properties=properties)


def chooses_hosts(request: MoveRequest, known: MoveContext) -> bool:
    """Whether hosts are chosen for it; a shelved instance that still has its host starts there."""
    if request.kind is MoveKind.UNSHELVE:
        return known.now.condition is Condition.OFFLOADED
    return request.kind in CHOOSES_HOSTS


def looks_at_hosts(request: MoveRequest, known: MoveContext) -> bool:
    """Whether it depends on hosts: those that are chosen for it, or its own, which may not support another image."""
    return chooses_hosts(request, known) or changes_image(request, known)


def leaves_source(request: MoveRequest, *, same_host: bool) -> bool:
    """Whether the host that the instance is on may not be chosen."""
    if request.kind is MoveKind.RESIZE:
        return request.policy is ResizePolicy.OTHER_HOST or (request.policy is ResizePolicy.ANY and not same_host)
    return request.kind is not MoveKind.UNSHELVE


def placed_as(request: MoveRequest, known: MoveContext) -> BuildRequest:
    """The request for which hosts are chosen: that of the build, with what the instance has now and this one names."""
    built = known.build_request
    assert built is not None
    is_rebuilt = request.kind is MoveKind.REBUILD
    return replace(
        built,
        flavor=request.flavor if request.kind is MoveKind.RESIZE and request.flavor else flavor_of(known),
        image=request.image if is_rebuilt and request.image is not None else image_of(known),
        image_properties=dict(rebuilt_from(request, known) if is_rebuilt else image_properties_of(known)),
        host=request.host,
        forced=request.forced,
        ignore_hosts=request.ignore_hosts,
        max_attempts=request.max_attempts,
    )


def accepted(request: MoveRequest) -> Done:
    """The outcome of a request that is on record."""
    return Done(reply=MoveAccepted(request_id=request.request_id, instance_uuid=request.instance_uuid))


# --- what goes on record, and its events


def recorded(pending: PendingMove, state: MoveState, author: Author, **more: object) -> RecordedMove:
    """The record of a request that was dispatched, refused, or failed for want of a host."""
    request = pending.request
    ended = state is not MoveState.SCHEDULED
    return RecordedMove(
        request_id=request.request_id,
        instance_uuid=request.instance_uuid,
        project_id=request.project_id,
        kind=request.kind,
        digest=pending.digest,
        state=state,
        sequence=DECIDED if ended else SCHEDULED,
        terminal=ended,
        created_at=author.at,
        **more,  # type: ignore[arg-type]
    )


def event_of(move: RecordedMove, known: MoveContext, at: float) -> MoveEvent:
    """The scheduler's event of a request that it has decided about."""
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
        sequence=MALFORMED,
        terminal=True,
        condition=Condition.UNKNOWN,
        code=refusal.code,
        reason=refusal.reason,
        at=pending.taken_at,
    )


# --- what its cell announces


class Announced(Struct, frozen=True, kw_only=True):
    """What an announcement changes. event: to publish; None: outdated."""

    move: RecordedMove
    instance: InstanceRecord
    host: str | None
    event: MoveEvent | None = None
    timeline: tuple[TimelineEntry, ...] = ()


def apply_announcement(
    event: MoveEvent, move: RecordedMove, instance: InstanceRecord, *, host: str | None, cell: str, now: float
) -> Announced:
    """Apply a cell's event of a request. host: on record of the instance."""
    ends = event.terminal and not move.terminal
    # What follows the end (source gone, confirmed by itself) may overtake it on the way here; the end is still the end.
    if (event.sequence <= move.sequence and not ends) or (event.terminal and move.terminal):
        return Announced(move=move, instance=instance, host=host)
    event = replace(event, cell=cell, project_id=move.project_id, instance_uuid=move.instance_uuid)
    if not move.terminal or event.terminal:
        # What follows a terminal event (confirmed by itself, source gone) does not reopen the request.
        after = replace(
            move,
            state=event.state,
            sequence=max(event.sequence, move.sequence),
            terminal=event.terminal,
            host=event.host or move.host,
            code=event.code,
            reason=event.reason,
            history=event.history or move.history,
        )
    else:
        after = replace(move, sequence=event.sequence)
    is_newest, is_awaited = event.sequence > instance.sequence, instance.under_way == move.request_id
    if is_newest or (event.terminal and is_awaited and instance.condition is Condition.MOVING):
        # A cell whose database was set back counts from lower numbers again; its word ends what was under way.
        instance = replace(instance, condition=event.condition, sequence=max(event.sequence, instance.sequence))
    if event.terminal and (is_newest or is_awaited):  # before that they are where it goes to
        host = None if event.condition is Condition.OFFLOADED else event.host or host
        instance = replace(instance, flavor=event.flavor or instance.flavor, image=event.image or instance.image)
    if event.terminal and is_awaited:
        instance = replace(instance, under_way=None)
    timeline = timeline_of(event, len(move.history), now)
    return Announced(move=after, instance=instance, host=host, event=event, timeline=timeline)


def timeline_of(event: MoveEvent, known: int, now: float) -> tuple[TimelineEntry, ...]:
    """One event as entries of the instance's timeline: first the hosts tried that it names, then itself."""
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
    """What else may be readable of it."""

    kind: MoveKind | None = None


def refused_move(malformed: Malformed) -> tuple[MoveEvent, ...]:
    """An unreadable request, answered on the event stream of the project whose routing key it came under.

    Nothing where its ids are unreadable, too.
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
            sequence=MALFORMED,
            terminal=True,
            condition=Condition.UNKNOWN,
            code=malformed.code,
            reason=malformed.reason[:MAX_REASON],
        ),
    )
