"""A build on record, the changes to it (by the request, the decision, its cell's events), and what follows: messages
and releases. A request has exactly one terminal event. `effects` alone decides whether a claim is released; the release
commits with its cause, and is sent at least once. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API
from bus.contracts.actions import Condition
from bus.contracts.build import (
    TERMINAL_STATES,
    BuildEvent,
    BuildQuery,
    BuildRecord,
    BuildRequest,
    BuildState,
    FunnelStep,
    TimelineEntry,
)
from bus.contracts.cell import CellBuild, CellBuildQuery, CellDelete
from bus.contracts.placement import ReleaseByOwner
from bus.contracts.stages import StageTimes
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.records.request_record import RecordedRequest, is_newer

# The scheduler's own sequence numbers, of builds and of actions; a conductor starts at 10, so the stream of one
# instance always rises.
ACCEPTED, SCHEDULED, FAILED_OR_REFUSED, DELETED = 1, 2, 3, 4

UNLOCATABLE = "claim.unlocatable"  # a claim is held on a host that no compute service reports, and of no known cell
FIRST_ATTEMPT = 1  # the scheduler's claim; the conductor's claims of alternates are the next

# A build in one of these states has no end yet, or its delete has none: of an accepted one by the schedulers, of the
# others by their cell.
OPEN = tuple(one for one in BuildState if one not in TERMINAL_STATES)


def is_search(query: BuildQuery) -> bool:
    """Whether builds are selected by a column without an index, so that only a bounded number is examined."""
    return any(value is not None for value in (query.cell, query.host, query.flavor, query.code, query.name))


class Actor(Struct, frozen=True):
    """The process that writes a build's timeline, and the time."""

    name: str
    at: float

    def entry(self, what: str, detail: str = "", *, by: str = "") -> TimelineEntry:
        """One entry of the timeline, written now by this process. by: who asked for it."""
        return TimelineEntry(at=self.at, actor=self.name, what=what, detail=detail, by=by)


class SinceBuild(Struct, frozen=True, kw_only=True):
    """What an instance has become since its build."""

    condition: Condition = Condition.ACTIVE
    # flavor, image: its present ones; "": as it was built
    flavor: str = ""
    # new_flavor, old_flavor: of the resize that is not confirmed or ended yet ("": of none)
    new_flavor: str = ""
    old_flavor: str = ""
    image: str = ""
    snapshot: str = ""  # the image that is kept of a shelved one
    # {image: its properties} of the image that a rebuild gave it, and of the one that the rebuild under way names
    image_properties: Mapping[str, Mapping[str, str]] = {}
    under_way: str | None = None  # the request that has no terminal event yet
    first_attempt: int = 0  # the first that it may have in its present cell (0: it was built there)


AS_BUILT = SinceBuild()


def present_flavor(built: str, current: SinceBuild | None) -> str:
    """The flavor that an instance has now (`tables.FLAVOR`). built: that of its build."""
    return (current or AS_BUILT).flavor or built


def flavors_in_use(built: str, current: SinceBuild | None) -> tuple[str, ...]:
    """The flavors by which an instance may claim: its present one, and those that it may have next
    (`tables.FLAVORS`).
    """
    current = current or AS_BUILT
    return present_flavor(built, current), current.new_flavor, current.old_flavor


# Of an instance that has been built. Between two hosts it has none until the next has claimed it.
MAY_HAVE_NO_HOST = (Condition.OFFLOADED, Condition.MOVING)


def as_it_is(record: BuildRecord, instance: SinceBuild | None) -> BuildRecord:
    """A build's record with what the instance has become since."""
    if instance is None:
        return record
    flavor = present_flavor(record.flavor, instance)
    return replace(record, flavor=flavor, condition=instance.condition.value, under_way=instance.under_way)


class RecordedBuild(RecordedRequest, frozen=True, kw_only=True):
    """The part of a build's record that a cell's event is compared with. Its sequence is that of the newest event about
    the instance, which may be an action's.
    """

    state: BuildState
    # that holds its claim, as its cell last reported, or placement for a delete; of one that ended without a cell, that
    # a delivery may have claimed (0: no claim was sent for it)
    attempt: int = 0
    # by which schedulers claim and release for this record. An earlier, lost record of the same request had another.
    claim_owner: str = ""
    instance: SinceBuild | None = None  # None: as it was built

    @property
    def current(self) -> SinceBuild:
        """The instance's present state."""
        return self.instance or AS_BUILT

    @property
    def awaits_decision(self) -> bool:
        """Whether a decision may be written: the build is still being scheduled."""
        return self.state is BuildState.ACCEPTED


# (instance, project): what a request names. Another project may name the same instance.
ProjectsBuild: TypeAlias = tuple[str, str]


class Gang(Struct, frozen=True, kw_only=True):
    """The members of one request that start together or not at all."""

    uuid: str  # the request's instance, which is its first member
    size: int  # how many members were requested
    min_count: int  # the least number that may start


class NewBuild(Struct, frozen=True, kw_only=True):
    """A request to put on record, or as it was put there."""

    request: BuildRequest
    build: RecordedBuild
    timeline: tuple[TimelineEntry, ...] = ()
    gang: Gang | None = None
    created_at: float = 0.0  # seconds since the epoch (0: now)


class BuildUpdate(Struct, frozen=True, kw_only=True):
    """The whole record of a build after a change, and the lines to add to its timeline: of one that was read under a
    lock, or of one that awaits its decision.
    """

    build: RecordedBuild
    funnel: tuple[FunnelStep, ...] = ()  # of the decision, which writes it
    timeline: tuple[TimelineEntry, ...] = ()


def apply_build_event(build: RecordedBuild, event: BuildEvent) -> tuple[RecordedBuild, BuildEvent | None]:
    """Apply what its cell reports; returns the build and the event to publish (None: it is outdated). `deleted` is the
    last event whatever its number: a cell whose database was lost starts its numbers again.
    """
    if build.state is BuildState.DELETED:
        return build, None
    if not is_newer(event, build.sequence, ends=event.state is BuildState.DELETED):
        return build, None
    if event.sequence <= build.sequence:
        event = replace(event, sequence=build.sequence + 1)
    # The state is compared too: the event that the cell called the terminal one may have been overtaken, and is
    # outdated.
    ends = event.terminal or event.state in TERMINAL_STATES
    terminal = ends and (event.state is BuildState.DELETED or not build.terminal)
    # During a delete the cell still reports what the build does: it is published, and the record stays `deleting`.
    deleting = build.state is BuildState.DELETING and event.state is not BuildState.DELETED
    after = replace(
        build,
        state=build.state if deleting else event.state,
        sequence=event.sequence,
        terminal=build.terminal or terminal,
        host=event.host or build.host,
        host_uuid=event.host_uuid or build.host_uuid,
        code=event.code,
        reason=event.reason,
        history=event.history or build.history,
        attempt=event.attempt or build.attempt,
    )
    return after, replace(event, terminal=terminal, cell=build.cell, project_id=build.project_id, host_uuid=None)


def is_known(before: RecordedBuild, after: RecordedBuild) -> bool:
    """Whether an event brings nothing but its number: the answer to a query, of a build that is as it was."""
    return after.state is before.state and after == replace(before, sequence=after.sequence)


def is_out_of_order(build: RecordedBuild, event: BuildEvent) -> bool:
    """Whether its cell has ended the request by an earlier event, which is not on record here but on its way:
    overtaken, or lost by a crashed database and delivered again. Reporting this one now would be a second terminal
    event.
    """
    ends_it = event.state is BuildState.FAILED and not event.terminal and not build.terminal
    return ends_it and is_newer(event, build.sequence) and build.state is not BuildState.DELETED


def effects(  # noqa: PLR0917  (hot, so no keywords)
    before: BuildState | None,
    after: RecordedBuild,
    at: float,
    command: CellBuild | CellBuildQuery | None = None,
    stage_times: StageTimes | None = None,
    funnel: Sequence[FunnelStep] = (),
    reader: str = "",
) -> list[OutboxMessage]:
    """The messages of a change to a record, published with it: to its cell, to clients, and to placement. before: its
    state (None: new). command: to its cell. stage_times, funnel: of its event. at: seconds since the epoch. reader: as
    in `releases_of`.
    """
    uuid = after.instance_uuid
    if after.state is before:
        return []
    if after.state is BuildState.DELETING:
        assert after.cell is not None, after
        # A build that its cell has not reported may not have come there yet. One without a cell before is another
        # record's, which was dispatched.
        return [OutboxMessage(after.cell, delete_of(after, may_have_started=before is not BuildState.SCHEDULED), uuid)]
    ends_well = after.state is BuildState.DELETED
    event = BuildEvent(
        instance_uuid=uuid,
        project_id=after.project_id,
        state=after.state,
        sequence=after.sequence,
        terminal=after.terminal,
        cell=after.cell,
        host=after.host,
        attempt=after.attempt if after.host is not None else 0,
        code="" if ends_well else after.code,
        reason="" if ends_well else after.reason,
        funnel=tuple(funnel),
        at=at,
        stage_times=stage_times if after.terminal else None,
    )
    to_clients = OutboxMessage(API, event, uuid)
    if command is not None:
        assert after.cell is not None, after
        return [OutboxMessage(after.cell, command, uuid), to_clients]
    if after.attempt and not _is_over(before, after):
        return [to_clients, *releases_of(after, reader)]
    return [to_clients]


def delete_of(build: RecordedBuild, *, may_have_started: bool) -> CellDelete:
    """The command to its cell to delete an instance."""
    # By what a cell has of it that does not have its record: of a build that may yet come there it has nothing.
    claimed = build.attempt if may_have_started else 0
    return CellDelete(
        instance_uuid=build.instance_uuid,
        project_id=build.project_id,
        may_have_started=may_have_started,
        attempt=max(build.current.first_attempt, claimed),
    )


def releases_of(build: RecordedBuild, *readers: str) -> list[OutboxMessage]:
    """What placement is told of a record that another process may have claimed for, and of one that is read again: if
    it has ended and no cell has it, no claim of its claim owner is granted any more, nor of the owners that read it.
    Its instance held nothing when it ended, so what it holds now was never dispatched.
    """
    if not _is_over(build.state, build):
        return []
    uuid = build.instance_uuid
    return [
        OutboxMessage(
            API, ReleaseByOwner(consumer=uuid, attempt=FIRST_ATTEMPT, project_id=build.project_id, owner=owner), uuid
        )
        for owner in dict.fromkeys((build.claim_owner, *readers))
        if owner
    ]


def _is_over(state: BuildState | None, build: RecordedBuild) -> bool:
    """Whether in this state of it the instance held nothing, and no cell has it. What an unlocatable one holds stays
    until its delete finds nothing any more.
    """
    has_failed = state in (BuildState.FAILED, BuildState.REFUSED) and build.code != UNLOCATABLE
    return build.cell is None and (has_failed or state is BuildState.DELETED)
