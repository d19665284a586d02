"""The store on PostgreSQL: a few set-based statements a batch, whatever its size."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import asyncpg
import msgspec
import structlog

from bus import outbox
from bus.contracts.build import AttemptRecord, BuildQuery, BuildRecord, BuildState, FunnelStep, StoryLine
from bus.outbox import Addressed, Relay
from bus.service.database import Database
from scheduler_worker.domain.records import Standing
from scheduler_worker.store.port import OVER, Change, Decided, Forgotten, Kept, NewBuild, OnRecord, Unit

log = structlog.get_logger(__name__)

MIGRATIONS = "scheduler_worker.store.migrations"

_encode = msgspec.json.Encoder().encode
_histories = msgspec.json.Decoder(tuple[AttemptRecord, ...])
_funnels = msgspec.json.Decoder(tuple[FunnelStep, ...])
_stories = msgspec.json.Decoder(StoryLine)

INSERT = """
INSERT INTO build_requests (instance_uuid, project_id, flavor, name, request, digest, state, sequence, terminal,
                            code, reason, story, created_at, updated_at)
SELECT n.*, $13, $13
FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::text[], $8::bigint[],
            $9::boolean[], $10::text[], $11::text[], $12::text[]) n
ON CONFLICT (instance_uuid) DO NOTHING
RETURNING instance_uuid
"""

READ = """
SELECT instance_uuid, state, digest, delete_requested, project_id, cell, code
FROM build_requests WHERE instance_uuid = ANY($1::uuid[])
"""

DECIDE = """
UPDATE build_requests b
SET state = n.state, sequence = n.sequence, terminal = n.terminal, cell = n.cell, host = n.host, code = n.code,
    reason = n.reason, funnel = n.funnel, story = b.story || n.story, updated_at = $11
FROM unnest($1::uuid[], $2::text[], $3::bigint[], $4::boolean[], $5::text[], $6::text[], $7::text[], $8::text[],
            $9::text[], $10::text[])
     n(instance_uuid, state, sequence, terminal, cell, host, code, reason, funnel, story)
WHERE b.instance_uuid = n.instance_uuid AND b.state = 'accepted' AND NOT b.delete_requested
RETURNING b.instance_uuid
"""

MAP = """
INSERT INTO instance_cells (instance_uuid, cell, host_uuid, mapped_at)
SELECT n.*, $4 FROM unnest($1::uuid[], $2::text[], $3::uuid[]) n
ON CONFLICT (instance_uuid) DO NOTHING
RETURNING instance_uuid
"""

LOCK = """
SELECT instance_uuid, project_id, state, sequence, terminal, cell, host, code, reason, history, delete_requested
FROM build_requests WHERE instance_uuid = ANY($1::uuid[]) ORDER BY instance_uuid FOR UPDATE
"""

CHANGE = """
UPDATE build_requests b
SET state = n.state, sequence = n.sequence, terminal = n.terminal, delete_requested = n.delete_requested,
    cell = n.cell, host = n.host, code = n.code, reason = n.reason, history = n.history,
    story = b.story || n.story, updated_at = $12
FROM unnest($1::uuid[], $2::text[], $3::bigint[], $4::boolean[], $5::boolean[], $6::text[], $7::text[], $8::text[],
            $9::text[], $10::text[], $11::text[])
     n(instance_uuid, state, sequence, terminal, delete_requested, cell, host, code, reason, history, story)
WHERE b.instance_uuid = n.instance_uuid
"""

BUILDS = """
SELECT instance_uuid, project_id, flavor, name, state, cell, host, code, reason, funnel, history, story,
       created_at, updated_at
FROM build_requests
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

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self.said: list[Addressed] = []

    async def insert(self, builds: Sequence[NewBuild], now: float) -> set[str]:
        """In uuid order, so that two schedulers given the same requests never wait for each other in a circle."""
        if not builds:
            return set()
        rows = sorted(builds, key=lambda build: build.request.instance_uuid)
        columns = zip(*(_new_row(build) for build in rows), strict=True)
        return {row[0] for row in await self._connection.fetch(INSERT, *columns, now)}

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
        """The guard in the statement is what makes two schedulers with the same request dispatch it once."""
        if not decided:
            return set()
        rows = sorted(decided, key=lambda one: one.instance_uuid)
        columns = zip(*(_decided_row(one) for one in rows), strict=True)
        written = {row[0] for row in await self._connection.fetch(DECIDE, *columns, now)}
        placed = [one for one in rows if one.host_uuid is not None and one.instance_uuid in written]
        if placed:
            mapping = zip(*((one.instance_uuid, one.cell, one.host_uuid) for one in placed), strict=True)
            mapped = await self._connection.fetch(MAP, *mapping, now)
            if len(mapped) != len(placed):
                elsewhere = sorted({one.instance_uuid for one in placed} - {row[0] for row in mapped})
                log.error("instance.already_mapped", instances=elsewhere)
        return written

    async def lock(self, instances: Sequence[str]) -> dict[str, Kept]:
        """In uuid order."""
        rows = await self._connection.fetch(LOCK, sorted(set(instances)))
        return {row["instance_uuid"]: _kept(row) for row in rows}

    async def change(self, changes: Sequence[Change], now: float) -> None:
        """Rows of this unit's own locks."""
        if changes:
            columns = zip(*(_changed_row(change) for change in changes), strict=True)
            await self._connection.execute(CHANGE, *columns, now)

    def say(self, message: Addressed) -> None:
        """Kept in the outbox with everything else of this unit."""
        self.said.append(message)


class PostgresStore:
    """Schema `scheduler` of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
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

    def unit(self, *, durable: bool = True) -> AbstractAsyncContextManager[Unit]:
        """A transaction; the relay gets what it said once it has committed."""
        return self._unit(durable)

    @asynccontextmanager
    async def _unit(self, durable: bool) -> AsyncIterator[Unit]:
        assert self._relay is not None, "publish_through() first"
        await self._relay.room()
        async with self._database.raw() as connection:
            if not durable:
                await connection.execute("SET LOCAL synchronous_commit = off")
            unit = PostgresUnit(connection)
            yield unit
            row = await outbox.add(connection, unit.said)
        self._relay.send(row, unit.said)

    async def forget(self, before: float, limit: int, start: float = 0.0) -> Forgotten:
        """One bounded statement."""
        async with self._database.raw() as connection:
            row = await connection.fetchrow(FORGET, before, limit, start, [state.value for state in OVER])
        return Forgotten(row[0], row[1])

    async def builds(self, query: BuildQuery) -> list[BuildRecord]:
        """One build with its whole story; a page of many comes with it too, at most `limit`."""
        state = query.state.value if query.state is not None else None
        async with self._database.raw() as connection:
            rows = await connection.fetch(
                BUILDS, query.instance_uuid, query.project_id, state, query.before, query.limit
            )
        return [_build(row) for row in rows]


def story_text(lines: Sequence[StoryLine]) -> str:
    """Story lines as they are appended."""
    return "".join(_encode(line).decode() + "\n" for line in lines)


def _new_row(build: NewBuild) -> tuple[Any, ...]:
    request = build.request
    return (
        request.instance_uuid,
        request.project_id,
        clean(request.flavor),
        clean(request.name),
        clean(_encode(request).decode()),
        build.digest,
        build.state.value,
        build.sequence,
        build.terminal,
        build.code,
        clean(build.reason),
        story_text(build.story),
    )


def _decided_row(one: Decided) -> tuple[Any, ...]:
    return (
        one.instance_uuid,
        one.state.value,
        one.sequence,
        one.terminal,
        one.cell,
        one.host and clean(one.host),
        clean(one.code),
        clean(one.reason),
        _encode(one.funnel).decode(),
        story_text(one.story),
    )


def _changed_row(change: Change) -> tuple[Any, ...]:
    standing = change.standing
    return (
        standing.instance_uuid,
        standing.state.value,
        standing.sequence,
        standing.terminal,
        change.delete_requested,
        standing.cell,
        standing.host and clean(standing.host),
        clean(standing.code),
        clean(standing.reason),
        _encode(standing.history).decode(),
        story_text(change.story),
    )


def clean(text: str) -> str:
    """Text that PostgreSQL takes: it has no room for the NUL character."""
    return text.replace("\x00", "")


def _kept(row: asyncpg.Record) -> Kept:
    standing = Standing(
        instance_uuid=row["instance_uuid"],
        project_id=row["project_id"],
        state=BuildState(row["state"]),
        sequence=row["sequence"],
        terminal=row["terminal"],
        cell=row["cell"],
        host=row["host"],
        code=row["code"],
        reason=row["reason"],
        history=_histories.decode(row["history"]),
    )
    return Kept(standing=standing, delete_requested=row["delete_requested"])


def _build(row: asyncpg.Record) -> BuildRecord:
    return BuildRecord(
        instance_uuid=row["instance_uuid"],
        project_id=row["project_id"],
        flavor=row["flavor"],
        state=BuildState(row["state"]),
        name=row["name"],
        cell=row["cell"],
        host=row["host"],
        code=row["code"],
        reason=row["reason"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        funnel=_funnels.decode(row["funnel"]),
        history=_histories.decode(row["history"]),
        story=tuple(_stories.decode_lines(row["story"])) if row["story"] else (),
    )
