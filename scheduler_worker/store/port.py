"""The scheduler's store, as its handlers see it: a unit of work commits state and outgoing messages together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from bus.contracts.actions import ActionQuery, ActionRecord, Condition
from bus.contracts.base import DatabaseMark
from bus.contracts.build import BuildQuery, BuildRecord
from bus.contracts.objects import ChangedObject, ObjectKind, ObjectLogEntry, ObjectLogQuery
from bus.persistence.group_flush import Flushed, FlushedStore
from bus.persistence.guarded_statement import Conflict
from bus.persistence.outbox import OutboxMessage, Rows
from bus.persistence.relay import Relay
from bus.persistence.unit_of_work import (
    EmittingUnit,
    OptimisticFirst,
    OptimisticUnitOfWork,
    RowStore,
    VersionCache,
    WriteSet,
    published,
)
from scheduler_worker.records.action_record import ActionContext, RecordedAction, RequestKey
from scheduler_worker.records.build_record import BuildUpdate, NewBuild, RecordedBuild
from scheduler_worker.records.drain_record import BegunMoves, EndedRequest
from scheduler_worker.records.object_records import ChangeActor, RecordedObjects

ProjectsGroup: TypeAlias = tuple[str, str]  # (project, uuid of its server group)
MAX_EXAMINED = 5_000  # rows that one page of a cell's instances, or the actions of one instance, are looked for in
FIRST_UUID = "00000000-0000-0000-0000-000000000000"  # before every instance's


class Purged(Struct, frozen=True):
    """How many builds and actions one statement has deleted, and when the youngest of these builds was created."""

    builds: int
    actions: int
    until: float


class OpenBuilds(Struct, frozen=True):
    """Builds that have no end."""

    builds: Sequence[RecordedBuild]
    # when the last build that was examined was requested, and its instance, where the next page begins (None: there is
    # none after it)
    last: tuple[float, str] | None = None


class WithoutHost(Struct, frozen=True):
    """How many instances of a project have no host, by their condition and the flavor that they have."""

    project_id: str
    condition: Condition
    flavor: str
    count: int


class CellInstances(Struct, frozen=True):
    """A page of a cell's instances, by uuid."""

    instances: Sequence[str]
    last: str = ""  # all up to this uuid were looked at ("": all there are)


class BuildUnit(Protocol):
    """One transaction. The messages that it emits are published after it has committed, and only then."""

    async def insert(self, builds: Sequence[NewBuild], now: float) -> set[str]:
        """Put requests on record; returns those that were new."""

    async def read(self, instances: Sequence[str]) -> dict[str, RecordedBuild]:
        """The present records, without locks."""

    async def write_decisions(self, decisions: Sequence[BuildUpdate], now: float) -> set[str]:
        """Write decisions on the builds that await one; returns those written."""

    async def lock(self, instances: Sequence[str]) -> dict[str, RecordedBuild]:
        """Read records and hold them until the end of the unit."""

    async def update(self, updates: Sequence[BuildUpdate], now: float) -> None:
        """Write records that were locked."""

    def emit(self, message: OutboxMessage) -> None:
        """Publish this after the commit."""


class OperationUnit(BuildUnit, Protocol):
    """A transaction that locks the rows that it reads, for records that are rarer than builds."""

    async def first_time(self, handler: str, message_id: str) -> bool:
        """Record that a handler has taken a message; False: it was on record already."""

    async def is_handled(self, handler: str, message_id: str) -> bool:
        """Whether `first_time` has recorded this, in a unit that has committed."""

    async def known(self, requests: Collection[RequestKey], *, lock: bool = False) -> dict[RequestKey, ActionContext]:
        """The records that these requests concern.

        lock: hold the instances' builds until the end of the unit, which holds the rows that belong to them as well.
        """

    async def insert_actions(self, actions: Sequence[RecordedAction], now: float) -> set[str]:
        """Put requests on record; returns those that were new."""

    async def update_actions(self, actions: Sequence[RecordedAction], now: float) -> None:
        """Write records whose instances were locked."""

    async def lock_objects(self) -> RecordedObjects:
        """Hold all objects until the end of the unit, and read them."""

    async def write_objects(self, changed: Sequence[ChangedObject], actor: ChangeActor) -> str:
        """Write objects that were locked, and their log, under the next revision; returns its token. Once a unit."""

    async def lock_object(self, kind: ObjectKind, name: str) -> dict[str, Any] | None:
        """Hold one object until the end of the unit; returns its body (None: it is not on record).

        After `lock_objects`, where a unit needs both.
        """

    async def begun(self, drain: str | None, now: float) -> BegunMoves:
        """The requests of a drain on record; None: the evacuations under way, whichever fence they were begun under.

        The newest is none that was made long after now: the clock was set back since.
        """

    async def ended(self, instances: Collection[str], limit: int) -> dict[str, list[EndedRequest]]:
        """The requests about these instances that have ended, the newest first; so many of each."""

    async def newest(self, drain: str, limit: int) -> list[RecordedAction]:
        """The newest request of a drain about each instance; so many, by the instances' uuids."""

    async def moved_counts(self, drains: Collection[str]) -> dict[tuple[str, bool], int]:
        """How many instances drains have moved, or do now, by drain and whether that has ended."""


class LockingUnit(OperationUnit, EmittingUnit, Protocol):
    """Such a transaction, of an adapter."""


class SchedulerStore(Flushed, Protocol):
    """Build requests and the instance-to-cell map. Adapters: `store.postgres`, `store.memory`."""

    @property
    def outbox(self) -> Rows:
        """The rows behind `BuildUnit.emit`, for the relay."""

    @property
    def ready(self) -> bool:
        """Whether it is open (for /readyz)."""

    @property
    def database_id(self) -> str:
        """The identity of this database: a uuid made once with its schema. Known once it has been open."""

    async def open(self) -> None:
        """Connect and migrate; waits while the database is unavailable."""

    async def close(self) -> None:
        """Disconnect."""

    def publish_through(self, relay: Relay) -> None:
        """Set the relay that publishes what units emit. Before the first unit."""

    def unit(self, *, durable: bool = True, optimistic: bool = False) -> AbstractAsyncContextManager[BuildUnit]:
        """A transaction. Not durable: for rows that a redelivered message would write again after a crash. optimistic:
        expects new requests, awaited decisions, and rows as this process left them, else raises Conflict at its end.
        """
        # For PostgreSQL an optimistic unit is one round trip instead of five.

    def operation(self) -> AbstractAsyncContextManager[OperationUnit]:
        """A durable transaction that also reads and writes actions, drains and operators' objects."""

    async def objects(self, unless: str | None = None) -> RecordedObjects | None:
        """All objects of operators; None when their token is `unless`."""

    async def object_log(self, query: ObjectLogQuery) -> list[ObjectLogEntry]:
        """Entries of the log of changes, newest first."""

    async def machines(
        self, limit: int, *, flavor: str | None = None, group: ProjectsGroup | None = None, cell: str | None = None
    ) -> int:
        """How many builds of a flavor, of a server group or in a cell have a machine, or may get one; counted up to
        `limit`. A cell has one, too, that an instance moves to, or may go back to. Reads all builds.
        """

    async def without_host(self, projects: Sequence[str]) -> list[WithoutHost]:
        """The instances of these projects that have no host: offloaded, or between two hosts. Along an index."""

    async def purge(self, before: float, limit: int, start_at: float = 0.0) -> Purged:
        """Delete builds without a machine and actions that ended and last changed before this time (seconds since the
        epoch), oldest first, at most `limit` of each, builds from a creation time on; with a build its cell mapping.
        Builds that have a machine, or may get one, stay.
        """
        # Moves of an instance that awaits a confirm or a revert stay: the id of its move is that of a migration, and no
        # other request may have it.

    async def actions(self, query: ActionQuery) -> list[ActionRecord]:
        """One request, or a page of them, newest first."""

    async def open_actions(self, after: str, limit: int) -> list[RecordedAction]:
        """Requests without a terminal event that were dispatched to a cell, in order of their ids after this one."""

    async def open_builds(
        self, watched: Collection[str], after: tuple[float, str], unchanged_since: float, limit: int
    ) -> OpenBuilds:
        """The builds among these that have no end; and those of a page of all builds, in the order in which they
        were requested, that have not changed since that time. limit: builds of the page, in whatever state.
        """
        ...

    async def requests_of(self, instances: Sequence[str]) -> list[NewBuild]:
        """The requests of these builds and of the other members of their gangs; the first member of a gang first."""

    async def active_on(self, hosts: Sequence[str], limit: int, *, after: str = FIRST_UUID) -> list[str]:
        """The active instances on hosts (uuids), in order of their uuids, up to a bound. Reads all builds."""

    async def in_cell(self, cell: str, after: str, limit: int) -> CellInstances:
        """A page of the instances that the map has in a cell and that have a machine, or may get one; those behind
        `after`, along the primary key. At most MAX_EXAMINED builds are looked at.
        """
        ...

    async def raise_mark(self, cell: str, mark: DatabaseMark) -> int:
        """Record what of the mark of a cell's database is above the one on record. Returns the highest incarnation."""
        ...

    async def mark_of(self, cell: str) -> DatabaseMark:
        """The mark of a cell's database on record."""

    async def actions_of(self, instances: Sequence[str], limit: int) -> dict[str, list[RecordedAction]]:
        """The newest actions of each of these that were not refused, up to a bound; of the newest MAX_EXAMINED."""

    async def searched_to(self, query: BuildQuery) -> tuple[float, str] | None:
        """The last build that such a search looks at, and when it was requested; None: it looks at all."""
        ...

    async def count_builds(self, query: BuildQuery, most: int) -> int:
        """How many builds such a query has on all its pages, at most `most`; of no search."""
        ...

    async def builds(self, query: BuildQuery) -> list[BuildRecord]:
        """One build, or a page of them, newest first."""

    async def builds_named(self, instances: Sequence[str]) -> dict[str, BuildRecord]:
        """Builds by the uuids of their instances, all in one statement."""


class BuildWrites(WriteSet, kw_only=True):
    """The writes of one unit: inserts must be new, decisions must be awaited."""

    inserts: Sequence[NewBuild] = ()
    decisions: Sequence[BuildUpdate] = ()
    updates: Sequence[BuildUpdate] = ()
    at: float = 0.0  # the time of all writes

    def is_empty(self) -> bool:
        """Whether there is nothing to write and nothing to compare."""
        return not (self.inserts or self.decisions or self.versions or self.outbox)


class OptimisticBuildUnit(OptimisticUnitOfWork[RecordedBuild, BuildWrites]):
    """A BuildUnit that writes at its end."""

    def __init__(
        self,
        rows: RowStore[RecordedBuild, BuildWrites],
        cache: VersionCache[RecordedBuild],
        relay: Relay | None,
        *,
        durable: bool,
    ) -> None:
        super().__init__(rows, cache, BuildWrites(durable=durable))
        assert relay is not None, "publish_through() first"
        self._relay = relay

    async def commit(self) -> None:
        """Write the whole set, and pass its messages to the relay. Raises Conflict."""
        await super().commit()
        self._relay.send(self.rows, self.writes.outbox)

    async def insert(self, builds: Sequence[NewBuild], now: float) -> set[str]:
        """All of them are expected to be new."""
        self.writes.inserts, self.writes.at = [*self.writes.inserts, *builds], now
        self._after.update((new.build.instance_uuid, new.build) for new in builds)
        return {new.build.instance_uuid for new in builds}

    async def read(self, instances: Sequence[str]) -> dict[str, RecordedBuild]:
        """Raises Conflict: a read of existing records takes the locking unit."""
        if instances:
            raise Conflict
        return {}

    async def write_decisions(self, decisions: Sequence[BuildUpdate], now: float) -> set[str]:
        """All of them are expected to be awaited."""
        self.writes.decisions, self.writes.at = decisions, now
        # A record that is not cached belongs to a redelivered request: another scheduler may be processing it too, so
        # it is read again next time.
        cached = [one.build for one in decisions if self._cache.get(one.build.instance_uuid) is not None]
        self._after.update((build.instance_uuid, build) for build in cached)
        return {one.build.instance_uuid for one in decisions}

    async def lock(self, instances: Sequence[str]) -> dict[str, RecordedBuild]:
        """As cached, else as read; compared at the end."""
        return await self._read(instances)

    async def update(self, updates: Sequence[BuildUpdate], now: float) -> None:
        """Kept for the end."""
        self.writes.updates, self.writes.at = updates, now
        self._after.update((one.build.instance_uuid, one.build) for one in updates)

    def emit(self, message: OutboxMessage) -> None:
        """Kept for the end, in the outbox."""
        self.writes.outbox.append(message)


class UnitStore(FlushedStore):
    """Base of a store: its units are optimistic ones over these rows, or lock; a relay publishes what they emit."""

    def __init__(self, database: Flushed, rows: RowStore[RecordedBuild, BuildWrites]) -> None:
        super().__init__(database)
        self._rows = rows
        self._cache: VersionCache[RecordedBuild] = VersionCache(database)
        self._relay: Relay | None = None

    def locking(self, durable: bool) -> AbstractAsyncContextManager[LockingUnit]:
        """A transaction that locks what it reads; its messages are in the outbox when it commits."""
        raise NotImplementedError

    def publish_through(self, relay: Relay) -> None:
        """Set the relay that publishes what units emit."""
        self._relay = relay

    def unit(self, *, durable: bool = True, optimistic: bool = False) -> AbstractAsyncContextManager[BuildUnit]:
        """A transaction; the messages that it emits are published once it has committed."""
        if optimistic:
            return OptimisticBuildUnit(self._rows, self._cache, self._relay, durable=durable)
        return published(self._relay, self.locking(durable))

    def operation(self) -> AbstractAsyncContextManager[OperationUnit]:
        """A durable transaction; the messages that it emits are published once it has committed."""
        return published(self._relay, self.locking(True))


async def write_decided(
    store: SchedulerStore, decided: Sequence[tuple[BuildUpdate, Sequence[OutboxMessage]]], now: float
) -> set[str]:
    """Write the decisions that their records still await, each with its messages, in one transaction; returns the
    instances of those written.
    """
    units = OptimisticFirst(lambda optimistic: store.unit(optimistic=optimistic))
    while units.has_next_try():
        async with units as unit:
            written = await unit.write_decisions([decision for decision, _ in decided], now)
            for decision, messages in decided:
                if decision.build.instance_uuid in written:
                    for message in messages:
                        unit.emit(message)
    return written
