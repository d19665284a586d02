"""Build requests in memory: for simulation and tests. It passes the same suite as PostgreSQL (tests/contract)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from itertools import islice

import structlog
from msgspec.structs import replace

from bus.contracts.build import BuildQuery, BuildRecord, BuildRequest, BuildState, TimelineEntry
from bus.contracts.drains import DrainMoveState
from bus.contracts.moves import MoveQuery, MoveRecord
from bus.contracts.objects import ChangedObject, ObjectKind, ObjectLogEntry, ObjectLogQuery
from bus.persistence.conflict import PreconditionFailed
from bus.persistence.memory_database import MemoryDatabase, MemoryDatabaseTransaction, MemoryRows, MemorySession
from bus.persistence.outbox import OutboxMessage
from bus.persistence.relay import Relay
from bus.persistence.unit_of_work import Committed, published
from bus.persistence.version_cache import VersionCache
from scheduler_worker.domain.builds import (
    ENDED_WITHOUT_MACHINE,
    BuildDecision,
    BuildStatus,
    BuildUpdate,
    NewBuild,
    RecordedBuild,
    is_search,
)
from scheduler_worker.domain.drains import DrainMove, OpenDrain, drain_of
from scheduler_worker.domain.objects import ChangeAuthor, RecordedObjects
from scheduler_worker.domain.recorded_moves import InstanceRecord, MoveContext, RecordedMove, known_of, record_of
from scheduler_worker.store import drains as drain_rows
from scheduler_worker.store import rows
from scheduler_worker.store.objects import BUILDS_WITH_A_MACHINE, MemoryObjects
from scheduler_worker.store.port import FIRST_UUID, BuildUnit, OperationUnit, Purged
from scheduler_worker.store.unit_of_work import BuildWrites, OptimisticBuildUnit

log = structlog.get_logger(__name__)

OBJECTS = ("objects", "")  # the key of operators' objects, which have one lock


class MemoryBuildTable(MemoryDatabase):
    """The committed requests and the instance-to-cell map; they outlive the schedulers."""

    ROWS = (
        *MemoryDatabase.ROWS,
        "records",
        "recorded",
        "digests",
        "cells",
        "requests",
        "moves",
        "instances",
        "objects",
        "drain_moves",
    )

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self.records: dict[str, BuildRecord] = {}
        self.recorded: dict[str, RecordedBuild] = {}
        self.digests: dict[str, bytes] = {}
        self.cells: dict[str, str] = {}
        self.requests: dict[str, BuildRequest] = {}
        self.moves: dict[str, tuple[RecordedMove, float]] = {}  # and when it was last written
        self.instances: dict[str, InstanceRecord] = {}
        self.objects = MemoryObjects()
        self.drain_moves: dict[tuple[str, str], DrainMove] = {}  # by drain and instance


class MemoryBuildUnit:
    """One transaction, which locks what it reads."""

    def __init__(self, table: MemoryBuildTable, transaction: MemoryDatabaseTransaction) -> None:
        self._table = table
        self._transaction = transaction
        self.outbox: list[OutboxMessage] = []
        self.row: int | None = None

    async def insert(self, builds: Sequence[NewBuild], now: float) -> set[str]:
        """In uuid order; an insert of a row that another transaction is inserting waits for its end."""
        if not builds:
            return set()
        await self._transaction.statement()
        new = {build.build.instance_uuid: build for build in builds}
        # Only rows that are absent: an insert that meets a committed row does not wait.
        await self._lock([uuid for uuid in new if uuid not in self._table.recorded])
        fresh = {uuid: build for uuid, build in new.items() if uuid not in self._table.recorded}
        for uuid, build in fresh.items():
            self._transaction.will(partial(_insert, self._table, build, now), _key(uuid))
        return set(fresh)

    async def read(self, instances: Sequence[str]) -> dict[str, BuildStatus]:
        """Without locks."""
        if not instances:
            return {}
        await self._transaction.statement()
        table = self._table
        return {
            uuid: BuildStatus(
                state=build.state,
                digest=table.digests[uuid],
                delete_requested=build.delete_requested,
                project_id=build.project_id,
                cell=build.cell,
                code=build.code,
            )
            for uuid in instances
            if (build := table.recorded.get(uuid)) is not None
        }

    async def decide(self, decisions: Sequence[BuildDecision], now: float) -> set[str]:
        """The guard is what makes two schedulers with the same request dispatch it once."""
        if not decisions:
            return set()
        await self._transaction.statement()
        recorded = self._table.recorded
        by_uuid = {one.build.instance_uuid: one for one in decisions}
        await self._lock([uuid for uuid in by_uuid if uuid in recorded])
        written = {
            uuid: one for uuid, one in sorted(by_uuid.items()) if uuid in recorded and recorded[uuid].awaits_decision
        }
        for uuid, one in written.items():
            self._transaction.will(partial(_decide, self._table, one, now), _key(uuid))
        return set(written)

    async def lock(self, instances: Sequence[str]) -> dict[str, RecordedBuild]:
        """In uuid order."""
        await self._transaction.statement()
        found = sorted(uuid for uuid in set(instances) if uuid in self._table.recorded)
        await self._lock(found)
        return {uuid: self._table.recorded[uuid] for uuid in found}

    async def update(self, updates: Sequence[BuildUpdate], now: float) -> None:
        """Rows that this unit has locked."""
        if updates:
            await self._transaction.statement()
            for update in updates:
                key = _key(update.build.instance_uuid)
                self._transaction.will(partial(_update, self._table, update.build, update.timeline, now), key)

    def emit(self, message: OutboxMessage) -> None:
        """Kept for the end, in the outbox."""
        self.outbox.append(message)

    async def _lock(self, uuids: Collection[str]) -> None:
        await self._transaction.lock([_key(uuid) for uuid in sorted(uuids)])


class MemoryOperationUnit(MemoryBuildUnit):
    """A build unit that also writes what is rarer than builds."""

    async def first_time(self, handler: str, message_id: str) -> bool:
        """Among the handled messages."""
        return bool(await self._transaction.first_time(handler, [message_id]))

    async def known(self, requests: Mapping[str, str], *, lock: bool = False) -> dict[str, MoveContext]:
        """By the instances' builds, locked in uuid order before anything else is read."""
        await self._transaction.statement()
        table = self._table
        uuids = sorted(uuid for uuid in set(requests.values()) if uuid in table.recorded)
        if lock:
            await self._lock(uuids)
        return known_of(
            requests,
            moves={one: table.moves[one][0] for one in requests if one in table.moves},
            builds={uuid: table.recorded[uuid] for uuid in uuids},
            requested={uuid: table.requests[uuid] for uuid in uuids},
            instances={uuid: table.instances[uuid] for uuid in uuids if uuid in table.instances},
            named=requests.keys() & table.recorded.keys(),
        )

    async def insert_moves(self, moves: Sequence[RecordedMove], now: float) -> set[str]:
        """In order of the ids; an insert of a row that another transaction is inserting waits for its end."""
        await self._transaction.statement()
        await self._transaction.lock([("move", one) for one in sorted(move.request_id for move in moves)])
        new = {one.request_id: (one, now) for one in moves if one.request_id not in self._table.moves}
        self._transaction.will(lambda: self._table.moves.update(new))
        return set(new)

    async def update_moves(self, moves: Sequence[RecordedMove], now: float) -> None:
        """Those of instances that this unit has locked."""
        await self._transaction.statement()
        after = {one.request_id: (one, now) for one in moves}
        self._transaction.will(lambda: self._table.moves.update(after))

    async def put_instances(self, instances: Sequence[InstanceRecord]) -> None:
        """Those that this unit has locked."""
        await self._transaction.statement()
        after = {one.instance_uuid: one for one in instances}
        self._transaction.will(lambda: self._table.instances.update(after))

    async def lock_objects(self) -> RecordedObjects:
        """All of them have one lock."""
        await self._transaction.statement()
        await self._transaction.lock([OBJECTS])
        return self._table.objects.present

    async def write_objects(self, changed: Sequence[ChangedObject], author: ChangeAuthor) -> int:
        """Those that this unit has locked."""
        await self._transaction.statement()
        after = self._table.objects.changed(changed, author)
        self._transaction.will(partial(setattr, self._table, "objects", after), OBJECTS)
        return after.present.revision

    async def lock_drain(self, drain: str, now: float, limit: int) -> OpenDrain | None:
        """By the drain's name."""
        await self._transaction.statement()
        await self._transaction.lock([("drain", drain)])
        stored = self._table.objects.present.objects.get((ObjectKind.DRAIN, drain))
        if stored is None:
            return None
        return drain_rows.opened(drain_of(stored), self._of_drain(drain), now, limit)

    async def put_drain_moves(self, moves: Sequence[DrainMove]) -> None:
        """Those of drains that this unit has locked."""
        await self._transaction.statement()
        after = {(one.drain, one.instance_uuid): one for one in moves}
        self._transaction.will(lambda: self._table.drain_moves.update(after))

    async def drain_moves(self, drain: str, limit: int) -> list[DrainMove]:
        """A scan."""
        await self._transaction.statement()
        return drain_rows.in_order(self._of_drain(drain))[:limit]

    async def drain_counts(self, drains: Sequence[str]) -> dict[str, dict[DrainMoveState, int]]:
        """A scan."""
        await self._transaction.statement()
        found = {drain: Counter(one.state for one in self._of_drain(drain)) for drain in drains}
        return {drain: dict(counts) for drain, counts in found.items() if counts}

    async def drop_drain_moves(self, drains: Sequence[str]) -> None:
        """A scan."""
        await self._transaction.statement()
        self._transaction.will(partial(_drop_drain_moves, self._table, frozenset(drains)))

    def _of_drain(self, drain: str) -> list[DrainMove]:
        return [one for key, one in self._table.drain_moves.items() if key[0] == drain]


class MemoryBuildRows:
    """The rows below an optimistic unit: a transaction that reads, and one that locks, compares and writes."""

    def __init__(self, table: MemoryBuildTable, session: MemorySession) -> None:
        self._table = table
        self._session = session

    async def read(self, keys: Collection[str]) -> Mapping[str, tuple[int, RecordedBuild]]:
        """Records with the versions of their rows, without locks."""
        async with self._session.transaction():
            table = self._table
            return {
                uuid: (table.row_versions[_key(uuid)], table.recorded[uuid])
                for uuid in sorted(keys)
                if uuid in table.recorded
            }

    async def write(self, writes: BuildWrites) -> Committed:
        """Write all of it or nothing."""
        with self._session.flush_by_commit() as commit:
            written = await self._write(writes)
            if writes.durable:
                commit.done()
        return written

    async def _write(self, writes: BuildWrites) -> Committed:
        versions = self._table.row_versions
        async with self._session.transaction() as transaction:
            transaction.durable = writes.durable
            unit = MemoryBuildUnit(self._table, transaction)
            if len(await unit.insert(writes.inserts, writes.at)) != len(writes.inserts):
                raise PreconditionFailed
            if len(await unit.decide(writes.decisions, writes.at)) != len(writes.decisions):
                raise PreconditionFailed
            if writes.versions and len(await unit.lock(list(writes.versions))) != len(writes.versions):
                raise PreconditionFailed
            if any(versions[_key(uuid)] != version for uuid, version in writes.versions.items()):
                raise PreconditionFailed
            await unit.update(writes.updates, writes.at)
            row = await transaction.send_later(writes.outbox)
        return Committed(transaction.number, row)


class MemoryBuilds:
    """One scheduler's view of the requests."""

    def __init__(self, session: MemorySession) -> None:
        assert isinstance(session.database, MemoryBuildTable)
        self._table = session.database
        self._session = session
        self._cache: VersionCache[RecordedBuild] = VersionCache(session)
        self._relay: Relay | None = None
        self.outbox = MemoryRows(session)
        self.deployment = session.database.deployment
        self.ready = False

    async def open(self) -> None:
        """Nothing to migrate."""
        self.ready = True

    async def close(self) -> None:
        """The connections are cut; the rows stay."""
        self.ready = False
        self._session.cut()

    def publish_through(self, relay: Relay) -> None:
        """Set the relay that publishes what units emit."""
        self._relay = relay

    def unit(self, *, durable: bool = True, optimistic: bool = False) -> AbstractAsyncContextManager[BuildUnit]:
        """A transaction; what it emits is published once it has committed."""
        if optimistic:
            rows = MemoryBuildRows(self._table, self._session)
            return published(self._relay, OptimisticBuildUnit(rows, self._cache, durable=durable))
        return published(self._relay, self._locking(durable))

    @asynccontextmanager
    async def _locking(self, durable: bool) -> AsyncIterator[MemoryBuildUnit]:
        async with self._session.transaction() as transaction:
            transaction.durable = durable
            unit = MemoryBuildUnit(self._table, transaction)
            yield unit
            unit.row = await transaction.send_later(unit.outbox)

    def operation(self) -> AbstractAsyncContextManager[OperationUnit]:
        """A transaction; what it emits is published once it has committed."""
        return published(self._relay, self._operation())

    @asynccontextmanager
    async def _operation(self) -> AsyncIterator[MemoryOperationUnit]:
        async with self._session.transaction() as transaction:
            unit = MemoryOperationUnit(self._table, transaction)
            yield unit
            unit.row = await transaction.send_later(unit.outbox)

    async def objects(self, unless: int = -1) -> RecordedObjects | None:
        """Without a lock."""
        async with self._session.transaction():
            present = self._table.objects.present
            return None if present.revision == unless else present

    async def object_log(self, query: ObjectLogQuery) -> list[ObjectLogEntry]:
        """Without a lock."""
        async with self._session.transaction():
            return self._table.objects.log(query)

    async def builds_of(self, flavor: str, limit: int) -> int:
        """A scan that ends at the limit."""
        async with self._session.transaction():
            found = (
                uuid
                for uuid, record in self._table.records.items()
                if record.flavor == flavor and self._table.recorded[uuid].state in BUILDS_WITH_A_MACHINE
            )
            return sum(1 for _ in islice(found, limit))

    async def builds_of_group(self, project: str, group: str, limit: int) -> int:
        """A scan that ends at the limit."""
        table = self._table
        async with self._session.transaction():
            found = (
                uuid
                for uuid, request in table.requests.items()
                if request.project_id == project
                and request.server_group is not None
                and request.server_group.uuid == group
                and table.recorded[uuid].state in BUILDS_WITH_A_MACHINE
            )
            return sum(1 for _ in islice(found, limit))

    async def purge(self, before: float, limit: int, start_at: float = 0.0) -> Purged:
        """Those that no transaction holds."""
        table = self._table
        async with self._session.transaction() as transaction:
            await transaction.statement()
            over = [
                record
                for record in sorted(table.records.values(), key=lambda record: record.created_at)
                if record.created_at >= start_at
                and record.updated_at < before
                and record.state in ENDED_WITHOUT_MACHINE
            ]
            gone = [one for one in over if transaction.is_free(_key(one.instance_uuid))][:limit]
            await transaction.lock([_key(uuid) for uuid in sorted(one.instance_uuid for one in gone)])
            transaction.will(partial(_delete, table, [one.instance_uuid for one in gone]))
            return Purged(len(gone), gone[-1].created_at if gone else start_at)

    async def moves(self, query: MoveQuery) -> list[MoveRecord]:
        """One request, or a page of them, newest first."""
        async with self._session.transaction():
            found = [
                record_of(move, at)
                for move, at in self._table.moves.values()
                if query.request_id in (None, move.request_id)
                and query.instance_uuid in (None, move.instance_uuid)
                and query.project_id in (None, move.project_id)
                and query.under_way in (None, not move.terminal)
            ]
        return sorted(found, key=lambda record: record.created_at, reverse=True)[: query.limit]

    async def open_moves(self, after: str, limit: int) -> list[RecordedMove]:
        """A scan."""
        async with self._session.transaction():
            found = [move for move, _ in self._table.moves.values() if not move.terminal and move.cell is not None]
        return sorted((one for one in found if one.request_id > after), key=lambda one: one.request_id)[:limit]

    async def active_on(
        self, hosts: Sequence[str], cell: str | None, limit: int, *, after: str = FIRST_UUID
    ) -> list[str]:
        """A scan."""
        async with self._session.transaction():
            return sorted(
                uuid
                for uuid, build in self._table.recorded.items()
                if build.host in hosts
                and build.state is BuildState.ACTIVE
                and cell in (None, build.cell)
                and uuid > after
            )[:limit]

    async def purge_moves(self, before: float, limit: int) -> int:
        """The oldest first."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            over = [
                one.request_id
                for one, at in sorted(self._table.moves.values(), key=lambda kept: kept[0].created_at)
                if one.terminal and one.created_at < before and at < before
            ][:limit]
            transaction.will(partial(_drop_moves, self._table, over))
            return len(over)

    async def flush(self) -> None:
        """Return when everything committed is on disk."""
        await self._session.flush()

    @property
    def losses(self) -> int:
        """How many connections to the database have ended by themselves."""
        return self._session.losses

    def flushed(self, losses: int) -> asyncio.Future[None]:
        """Done when everything committed so far is on disk."""
        return self._session.flushed(losses)

    async def builds(self, query: BuildQuery) -> list[BuildRecord]:
        """One build, or a page of them, newest first."""
        async with self._session.transaction():
            found = self._of_query(query)[: rows.MAX_SEARCHED if is_search(query) else query.limit]
            found = [_as_it_is(record, self._table.instances.get(record.instance_uuid)) for record in found]
        return [
            record
            for record in found
            if query.cell in (None, record.cell)
            and query.host in (None, record.host)
            and query.flavor in (None, record.flavor)
            and query.code in (None, record.code)
        ][: query.limit]

    async def searched_to(self, query: BuildQuery) -> float | None:
        """When the last build was requested that such a search looks at; None: it looks at all."""
        async with self._session.transaction():
            found = self._of_query(query)
        return found[rows.MAX_SEARCHED - 1].created_at if len(found) >= rows.MAX_SEARCHED else None

    def _of_query(self, query: BuildQuery) -> list[BuildRecord]:
        """Newest first, by what PostgreSQL has indexes for."""
        found = [
            record
            for record in self._table.records.values()
            if query.instance_uuid in (None, record.instance_uuid)
            and query.project_id in (None, record.project_id)
            and query.state in (None, record.state)
            and (query.before is None or record.created_at < query.before)
            and (query.after is None or record.created_at >= query.after)
            and query.gang in (None, record.gang)
        ]
        return sorted(found, key=lambda record: record.created_at, reverse=True)


def _key(uuid: str) -> tuple[str, str]:
    return "build", uuid


def _as_it_is(record: BuildRecord, instance: InstanceRecord | None) -> BuildRecord:
    """A build's record with what the instance has become since."""
    if instance is None:
        return record
    flavor = instance.flavor or record.flavor
    return replace(record, flavor=flavor, condition=instance.condition.value, under_way=instance.under_way)


def _insert(table: MemoryBuildTable, new: NewBuild, now: float) -> None:
    request = new.request
    uuid = request.instance_uuid
    table.digests[uuid] = new.digest
    table.requests[uuid] = request
    table.records[uuid] = BuildRecord(
        instance_uuid=uuid,
        project_id=request.project_id,
        flavor=request.flavor,
        name=request.name,
        state=new.build.state,
        created_at=now,
        updated_at=now,
        gang=new.gang.uuid if new.gang else None,
        gang_min=new.gang.min_count if new.gang else 0,
    )
    _update(table, new.build, new.timeline, now)


def _decide(table: MemoryBuildTable, decision: BuildDecision, now: float) -> None:
    uuid, cell = decision.build.instance_uuid, decision.build.cell
    _update(table, decision.build, decision.timeline, now)
    table.records[uuid] = replace(table.records[uuid], funnel=decision.funnel)
    if decision.host_uuid is not None and cell is not None and table.cells.setdefault(uuid, cell) != cell:
        log.error("instance.already_mapped", instances=[uuid])


def _update(table: MemoryBuildTable, build: RecordedBuild, timeline: tuple[TimelineEntry, ...], now: float) -> None:
    """A build as it is now, with more of its timeline."""
    record = table.records[build.instance_uuid]
    table.recorded[build.instance_uuid] = build
    table.records[build.instance_uuid] = replace(
        record,
        state=build.state,
        cell=build.cell,
        host=build.host,
        code=build.code,
        reason=build.reason,
        history=build.history,
        timeline=(*record.timeline, *timeline),
        updated_at=now,
    )


def _drop_drain_moves(table: MemoryBuildTable, drains: frozenset[str]) -> None:
    for key in [key for key in table.drain_moves if key[0] in drains]:
        del table.drain_moves[key]


def _drop_moves(table: MemoryBuildTable, requests: Sequence[str]) -> None:
    for one in requests:
        table.moves.pop(one, None)


def _delete(table: MemoryBuildTable, uuids: Sequence[str]) -> None:
    for uuid in uuids:
        for column in (
            table.records,
            table.recorded,
            table.digests,
            table.cells,
            table.requests,
            table.instances,
        ):
            column.pop(uuid, None)
