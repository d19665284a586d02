"""Build requests in memory: for simulation and tests. It passes the same suite as PostgreSQL (tests/contract)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import structlog
from msgspec.structs import replace

from bus.contracts.build import BuildQuery, BuildRecord, BuildState, StoryLine
from bus.outbox import Addressed, Relay
from bus.service.known import Known
from bus.service.memory_database import MemoryDatabase, MemoryRows, Session, Transaction
from bus.service.once import Mistaken
from scheduler_worker.domain.records import Standing
from scheduler_worker.store.believing import Belief, BelievingUnit, Written
from scheduler_worker.store.port import OVER, Change, Decided, Forgotten, Kept, NewBuild, OnRecord, Unit

log = structlog.get_logger(__name__)


class MemoryBuildTable(MemoryDatabase):
    """The committed requests and the instance-to-cell map; they outlive the schedulers."""

    ROWS = (*MemoryDatabase.ROWS, "records", "standings", "digests", "deleting", "cells")

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self.records: dict[str, BuildRecord] = {}
        self.standings: dict[str, Standing] = {}
        self.digests: dict[str, bytes] = {}
        self.deleting: set[str] = set()
        self.cells: dict[str, str] = {}


class MemoryUnit:
    """One transaction."""

    def __init__(self, table: MemoryBuildTable, transaction: Transaction) -> None:
        self._table = table
        self._transaction = transaction
        self.said: list[Addressed] = []

    async def insert(self, builds: Sequence[NewBuild], now: float) -> set[str]:
        """In uuid order; who inserts what another transaction is inserting waits for its end."""
        if not builds:
            return set()
        await self._transaction.statement()
        rows = {build.request.instance_uuid: build for build in builds}
        # Only of rows that are not there: an insert that meets a committed row waits for nobody.
        await self._transaction.lock([("build", uuid) for uuid in sorted(rows) if uuid not in self._table.standings])
        fresh = {uuid: build for uuid, build in rows.items() if uuid not in self._table.standings}
        for uuid, build in fresh.items():
            self._transaction.will(partial(_put, self._table, build, now), ("build", uuid))
        return set(fresh)

    async def read(self, instances: Sequence[str]) -> dict[str, OnRecord]:
        """Without locks."""
        if not instances:
            return {}
        await self._transaction.statement()
        table = self._table
        return {
            uuid: OnRecord(
                state=table.standings[uuid].state,
                digest=table.digests[uuid],
                delete_requested=uuid in table.deleting,
                project_id=table.standings[uuid].project_id,
                cell=table.standings[uuid].cell,
                code=table.standings[uuid].code,
            )
            for uuid in instances
            if uuid in table.standings
        }

    async def decide(self, decided: Sequence[Decided], now: float) -> set[str]:
        """The guard is what makes two schedulers with the same request dispatch it once."""
        if not decided:
            return set()
        await self._transaction.statement()
        table = self._table
        rows = {one.instance_uuid: one for one in decided}
        await self._transaction.lock([("build", uuid) for uuid in sorted(rows) if uuid in table.standings])
        written = {
            uuid: one
            for uuid, one in sorted(rows.items())
            if uuid in table.standings
            and table.standings[uuid].state is BuildState.ACCEPTED
            and uuid not in table.deleting
        }
        for uuid, one in written.items():
            self._transaction.will(partial(_decide, table, one, now), ("build", uuid))
        return set(written)

    async def lock(self, instances: Sequence[str]) -> dict[str, Kept]:
        """In uuid order."""
        await self._transaction.statement()
        table = self._table
        found = [uuid for uuid in sorted(set(instances)) if uuid in table.standings]
        await self._transaction.lock([("build", uuid) for uuid in found])
        return {uuid: Kept(standing=table.standings[uuid], delete_requested=uuid in table.deleting) for uuid in found}

    async def change(self, changes: Sequence[Change], now: float) -> None:
        """Rows of this unit's own locks."""
        if changes:
            await self._transaction.statement()
            for change in changes:
                key = ("build", change.standing.instance_uuid)
                self._transaction.will(partial(_change, self._table, change, now), key)

    def say(self, message: Addressed) -> None:
        """Kept in the outbox with everything else of this unit."""
        self.said.append(message)


class MemoryGround:
    """What a `BelievingUnit` stands on here: one transaction that looks, and one that locks, compares and writes."""

    def __init__(self, table: MemoryBuildTable, session: Session) -> None:
        self._table = table
        self._session = session

    async def look(self, instances: Sequence[str]) -> list[tuple[int, Kept]]:
        """Records with the versions of their rows, without locks."""
        async with self._session.transaction():
            table = self._table
            return [
                (
                    table.row_versions["build", uuid],
                    Kept(standing=table.standings[uuid], delete_requested=uuid in table.deleting),
                )
                for uuid in sorted(instances)
                if uuid in table.standings
            ]

    async def write(self, belief: Belief) -> Written:
        """All of it or nothing."""
        table = self._table
        async with self._session.transaction() as transaction:
            transaction.durable = belief.durable
            unit = MemoryUnit(table, transaction)
            if len(await unit.insert(belief.fresh, belief.at)) != len(belief.fresh):
                raise Mistaken
            if len(await unit.decide(belief.decided, belief.at)) != len(belief.decided):
                raise Mistaken
            if belief.held and len(await unit.lock(list(belief.held))) != len(belief.held):
                raise Mistaken
            if any(table.row_versions["build", uuid] != version for uuid, version in belief.held.items()):
                raise Mistaken
            await unit.change(belief.changed, belief.at)
            row = await transaction.send_later(belief.said)
        return Written(transaction.number, row)


class MemoryBuilds:
    """One scheduler's view of the requests."""

    def __init__(self, session: Session) -> None:
        assert isinstance(session.database, MemoryBuildTable)
        self._table = session.database
        self._session = session
        self._known: Known[Kept] = Known(session)
        self._relay: Relay | None = None
        self.outbox = MemoryRows(session)
        self.ready = False

    async def open(self) -> None:
        """Nothing to migrate."""
        self.ready = True

    async def close(self) -> None:
        """The connections go; the rows stay."""
        self.ready = False
        self._session.cut()

    def publish_through(self, relay: Relay) -> None:
        """Who publishes what units say."""
        self._relay = relay

    def unit(self, *, durable: bool = True, believing: bool = False) -> AbstractAsyncContextManager[Unit]:
        """A transaction; the relay gets what it said once it has committed."""
        return self._believing(durable) if believing else self._unit(durable)

    @asynccontextmanager
    async def _believing(self, durable: bool) -> AsyncIterator[Unit]:
        assert self._relay is not None, "publish_through() first"
        await self._relay.room()
        unit = BelievingUnit(MemoryGround(self._table, self._session), self._known)
        yield unit
        await unit.write(durable=durable)
        self._relay.send(unit.row, unit.said)

    @asynccontextmanager
    async def _unit(self, durable: bool) -> AsyncIterator[Unit]:
        assert self._relay is not None, "publish_through() first"
        await self._relay.room()
        async with self._session.transaction() as transaction:
            transaction.durable = durable
            unit = MemoryUnit(self._table, transaction)
            yield unit
            row = await transaction.send_later(unit.said)
        self._relay.send(row, unit.said)

    async def forget(self, before: float, limit: int, start: float = 0.0) -> Forgotten:
        """Those that nobody holds."""
        table = self._table
        async with self._session.transaction() as transaction:
            await transaction.statement()
            over = [
                record
                for record in sorted(table.records.values(), key=lambda record: record.created_at)
                if record.created_at >= start and record.updated_at < before and record.state in OVER
            ]
            gone = [one for one in over if transaction.is_free(("build", one.instance_uuid))][:limit]
            await transaction.lock([("build", uuid) for uuid in sorted(one.instance_uuid for one in gone)])
            transaction.will(partial(_forget, table, [one.instance_uuid for one in gone]))
            return Forgotten(len(gone), gone[-1].created_at if gone else start)

    async def flush(self) -> None:
        """Return when all that was committed is on disk."""
        await self._session.flush()

    async def builds(self, query: BuildQuery) -> list[BuildRecord]:
        """One build, or a page of them, newest first."""
        async with self._session.transaction():
            found = [
                record
                for record in self._table.records.values()
                if query.instance_uuid in (None, record.instance_uuid)
                and query.project_id in (None, record.project_id)
                and query.state in (None, record.state)
                and (query.before is None or record.created_at < query.before)
            ]
        return sorted(found, key=lambda record: record.created_at, reverse=True)[: query.limit]


def _forget(table: MemoryBuildTable, uuids: Sequence[str]) -> None:
    for uuid in uuids:
        for column in (table.records, table.standings, table.digests, table.cells):
            column.pop(uuid, None)
        table.deleting.discard(uuid)


def _put(table: MemoryBuildTable, build: NewBuild, now: float) -> None:
    request = build.request
    uuid = request.instance_uuid
    table.standings[uuid] = Standing(
        instance_uuid=uuid,
        project_id=request.project_id,
        state=build.state,
        sequence=build.sequence,
        terminal=build.terminal,
        cell=None,
        code=build.code,
        reason=build.reason,
    )
    table.digests[uuid] = build.digest
    table.records[uuid] = BuildRecord(
        instance_uuid=uuid,
        project_id=request.project_id,
        flavor=request.flavor,
        name=request.name,
        state=build.state,
        code=build.code,
        reason=build.reason,
        created_at=now,
        updated_at=now,
        story=build.story,
    )


def _decide(table: MemoryBuildTable, one: Decided, now: float) -> None:
    uuid = one.instance_uuid
    table.standings[uuid] = replace(
        table.standings[uuid],
        state=one.state,
        sequence=one.sequence,
        terminal=one.terminal,
        cell=one.cell,
        host=one.host,
        code=one.code,
        reason=one.reason,
    )
    table.records[uuid] = replace(_told(table, uuid, now, one.story), funnel=one.funnel)
    if one.host_uuid is not None and one.cell is not None and table.cells.setdefault(uuid, one.cell) != one.cell:
        log.error("instance.already_mapped", instances=[uuid])


def _change(table: MemoryBuildTable, change: Change, now: float) -> None:
    uuid = change.standing.instance_uuid
    table.standings[uuid] = change.standing
    if change.delete_requested:
        table.deleting.add(uuid)
    else:
        table.deleting.discard(uuid)
    table.records[uuid] = _told(table, uuid, now, change.story)


def _told(table: MemoryBuildTable, uuid: str, now: float, story: tuple[StoryLine, ...]) -> BuildRecord:
    """The record as the standing has it now, with more of its story."""
    standing, record = table.standings[uuid], table.records[uuid]
    return replace(
        record,
        state=standing.state,
        cell=standing.cell,
        host=standing.host,
        code=standing.code,
        reason=standing.reason,
        history=standing.history,
        story=(*record.story, *story),
        updated_at=now,
    )
