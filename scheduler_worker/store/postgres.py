"""The store on PostgreSQL: a few set-based statements a batch, whatever its size."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import asyncpg
import structlog

from bus import outbox
from bus.contracts.build import BuildQuery, BuildRecord, BuildState
from bus.outbox import Addressed, Relay
from bus.service.database import Database
from bus.service.known import Known
from scheduler_worker.store import rows
from scheduler_worker.store.believing import BelievingUnit
from scheduler_worker.store.one_statement import OneStatement
from scheduler_worker.store.port import OVER, Change, Decided, Forgotten, Kept, NewBuild, OnRecord, Unit

log = structlog.get_logger(__name__)

MIGRATIONS = "scheduler_worker.store.migrations"

INSERT = rows.numbered(rows.INSERT)
DECIDE = rows.numbered(rows.DECIDE)
MAP = rows.numbered(rows.MAP)
CHANGE = rows.numbered(rows.CHANGE)

LOCK = f"SELECT {rows.KEPT} FROM build_requests WHERE instance_uuid = ANY($1::uuid[]) ORDER BY instance_uuid FOR UPDATE"

# Whatever plan an UPDATE gets: of a large batch it may go along the table, and lock in that order.
LOCK_ONLY = "SELECT FROM build_requests WHERE instance_uuid = ANY($1::uuid[]) ORDER BY instance_uuid FOR UPDATE"

READ = """
SELECT instance_uuid, state, digest, delete_requested, project_id, cell, code
FROM build_requests WHERE instance_uuid = ANY($1::uuid[])
"""

BUILDS = f"""
SELECT {rows.RECORD} FROM build_requests
WHERE ($1::uuid IS NULL OR instance_uuid = $1) AND ($2::text IS NULL OR project_id = $2)
  AND ($3::text IS NULL OR state = $3) AND ($4::double precision IS NULL OR created_at < $4)
ORDER BY created_at DESC LIMIT $5
"""


# Along the index on created_at: an index on what changes would make every write of a build dearer. What lives long
# is passed over, once a pass.
FORGET = """
WITH gone AS (
    DELETE FROM build_requests WHERE instance_uuid IN (
        SELECT instance_uuid FROM build_requests
        WHERE created_at >= $3 AND created_at < $1 AND updated_at < $1 AND state = ANY($4::text[])
        ORDER BY created_at LIMIT $2 FOR UPDATE SKIP LOCKED)
    RETURNING instance_uuid, created_at
), unmapped AS (
    DELETE FROM instance_cells c USING gone WHERE c.instance_uuid = gone.instance_uuid
)
SELECT count(*), coalesce(max(created_at), $3) FROM gone
"""


class PostgresUnit:
    """One transaction on one connection."""

    def __init__(self, connection: asyncpg.Connection, known: Known[Kept]) -> None:
        self._connection = connection
        self._known = known
        self.said: list[Addressed] = []

    async def insert(self, builds: Sequence[NewBuild], now: float) -> set[str]:
        """In uuid order, so that two schedulers given the same requests never wait for each other in a circle."""
        if not builds:
            return set()
        ordered = sorted(builds, key=lambda build: build.request.instance_uuid)
        return {row[0] for row in await self._connection.fetch(INSERT, *rows.new(ordered), now)}

    async def read(self, instances: Sequence[str]) -> dict[str, OnRecord]:
        """Without locks."""
        if not instances:
            return {}
        return {
            row["instance_uuid"]: OnRecord(
                state=BuildState(row["state"]),
                digest=row["digest"],
                delete_requested=row["delete_requested"],
                project_id=row["project_id"],
                cell=row["cell"],
                code=row["code"],
            )
            for row in await self._connection.fetch(READ, instances)
        }

    async def decide(self, decided: Sequence[Decided], now: float) -> set[str]:
        """The guard in the statement is what makes two schedulers with the same request dispatch it once.

        Locked by uuid first, so that those two never wait for each other in a circle.
        """
        if not decided:
            return set()
        ordered = sorted(decided, key=lambda one: one.instance_uuid)
        if len(ordered) > 1:
            await self._connection.execute(LOCK_ONLY, [one.instance_uuid for one in ordered])
        written = {row[0] for row in await self._connection.fetch(DECIDE, *rows.decided(ordered), now)}
        self._known.forget(written)
        placed = [one for one in ordered if one.host_uuid is not None and one.instance_uuid in written]
        if placed:
            mapped = await self._connection.fetch(MAP, *rows.mapping(placed), now)
            if len(mapped) != len(placed):
                elsewhere = sorted({one.instance_uuid for one in placed} - {row[0] for row in mapped})
                log.error("instance.already_mapped", instances=elsewhere)
        return written

    async def lock(self, instances: Sequence[str]) -> dict[str, Kept]:
        """In uuid order."""
        found = await self._connection.fetch(LOCK, sorted(set(instances)))
        return {row["instance_uuid"]: rows.kept(row) for row in found}

    async def change(self, changes: Sequence[Change], now: float) -> None:
        """Rows of this unit's own locks."""
        if changes:
            self._known.forget([change.standing.instance_uuid for change in changes])
            await self._connection.execute(CHANGE, *rows.changed(changes), now)

    def say(self, message: Addressed) -> None:
        """Kept in the outbox with everything else of this unit."""
        self.said.append(message)


class PostgresStore:
    """Schema `scheduler` of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: Known[Kept] = Known(database)
        self._relay: Relay | None = None
        self.outbox = outbox.PostgresRows(database)

    @property
    def ready(self) -> bool:
        """Whether it is open."""
        return self._database.ready

    async def open(self) -> None:
        """Migrate. Waits for a database that is away."""
        await self._database.open(MIGRATIONS)

    async def close(self) -> None:
        """Close the pool."""
        await self._database.close()

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
        async with self._database.single() as connection:
            unit = BelievingUnit(OneStatement(connection), self._known)
            yield unit
            await unit.write(durable=durable)
        self._relay.send(unit.row, unit.said)

    @asynccontextmanager
    async def _unit(self, durable: bool) -> AsyncIterator[Unit]:
        assert self._relay is not None, "publish_through() first"
        await self._relay.room()
        async with self._database.raw() as connection:
            if not durable:
                await connection.execute("SET LOCAL synchronous_commit = off")
            unit = PostgresUnit(connection, self._known)
            yield unit
            row = await outbox.add(connection, unit.said)
        self._relay.send(row, unit.said)

    async def forget(self, before: float, limit: int, start: float = 0.0) -> Forgotten:
        """One bounded statement."""
        async with self._database.raw() as connection:
            row = await connection.fetchrow(FORGET, before, limit, start, [state.value for state in OVER])
        return Forgotten(row[0], row[1])

    async def flush(self) -> None:
        """Return when all that was committed is on disk."""
        await self._database.flush()

    async def builds(self, query: BuildQuery) -> list[BuildRecord]:
        """One build with its whole story; a page of many comes with it too, at most `limit`."""
        state = query.state.value if query.state is not None else None
        async with self._database.raw() as connection:
            found = await connection.fetch(
                BUILDS, query.instance_uuid, query.project_id, state, query.before, query.limit
            )
        return [rows.record(row) for row in found]
