"""The records of requests about instances, and the changes to them: by the decision, and by its cell's announcements.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.build import AttemptRecord, BuildRequest, FunnelStep, TimelineEntry
from bus.contracts.moves import CellMove, Condition, MoveEvent, MoveKind, MoveRequest, MoveState
from scheduler_worker.domain.builds import FAILED_OR_REFUSED, SCHEDULED, Author, RecordedBuild
from scheduler_worker.domain.requests import OFF_RECORD, RequestDelivery, is_newer, timeline_of


class RecordedMove(Struct, frozen=True, kw_only=True):
    """The record of one request. digest: of its whole content. sequence: of its newest event.

    cell: where it was dispatched to. created_at: seconds since the epoch. command: of one that ends in another cell
    than it begins in, what its cell is to do now; None: of every other one, and once it has ended.
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
    host_uuid: str | None = None
    code: str = ""
    reason: str = ""
    funnel: tuple[FunnelStep, ...] = ()
    history: tuple[AttemptRecord, ...] = ()
    created_at: float = 0.0
    command: CellMove | None = None


class InstanceRecord(Struct, frozen=True, kw_only=True):
    """The changes of an instance since its build. Without this record the instance is as it was built.

    flavor, image: its present ones; "": as it was built. image_properties: {image: its properties}, of the image that a
    rebuild gave it, and of the one that the rebuild under way names. under_way: the request that has no terminal event
    yet. sequence: of the newest event of its cell that changed this. stay: the ordinal of its stay in the cell that has
    it: how often it has left one, or what it was to leave for was given back.
    """

    instance_uuid: str
    condition: Condition = Condition.ACTIVE
    flavor: str = ""
    image: str = ""
    image_properties: Mapping[str, Mapping[str, str]] = {}
    under_way: str | None = None
    sequence: int = 0
    stay: int = 0


class PendingMove(Struct, frozen=True, kw_only=True):
    """A request that has no outcome yet. position: in its batch."""

    position: int
    request: MoveRequest
    digest: bytes
    taken_at: float
    delivery: RequestDelivery = RequestDelivery()


class MoveContext(Struct, frozen=True, kw_only=True):
    """The records that a request concerns. build_request: as it was built.

    names_instance: the request_id is the uuid of an instance.
    """

    move: RecordedMove | None = None
    build: RecordedBuild | None = None
    build_request: BuildRequest | None = None
    instance: InstanceRecord | None = None
    names_instance: bool = False

    @property
    def now(self) -> InstanceRecord:
        """The instance's present state."""
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
    """The records of requests ({request_id: instance}), from the rows by id and by instance.

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
    # An event after the end (source gone, confirmed by itself) may overtake the end on the way here; the end is still
    # applied.
    if (event.terminal and move.terminal) or not is_newer(event, move, ends=event.terminal):
        return Announced(move=move, instance=instance, build=build)
    is_newest, is_awaited = is_newer(event, instance), instance.under_way == move.request_id
    event = replace(event, cell=cell, project_id=move.project_id, instance_uuid=move.instance_uuid)
    host_uuid = event.host_uuid
    event = replace(event, departure=None, host_uuid=None)
    number = event.sequence
    if number == OFF_RECORD:  # its cell has no record of the instance, and so no number: clients have had more
        event = replace(event, sequence=move.sequence + 1)
    if not move.terminal:
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
