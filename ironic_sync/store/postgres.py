"""Positions in PostgreSQL: several processes may run, one writes.

The writer holds an advisory lock in a transaction that stays open for its term: when the process or its connection
dies, the server lets the next one in at once; when the process is stopped, after SILENCE_MS. A writer that has not
noticed yet is fenced: every transaction first compares the epoch, which each new writer raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import asyncpg
import msgspec

from bus.contracts.base import encode
from bus.contracts.placement import ProviderReport
from bus.persistence.database import Database, read_identity
from ironic_sync.domain.position import Position
from ironic_sync.store.port import NotLeader

MIGRATIONS = "ironic_sync.store.migrations"

_report = msgspec.json.Decoder(ProviderReport)

_LOCK = "SELECT pg_try_advisory_xact_lock(hashtextextended('berth.ironic_sync.' || current_schema(), 0))"
# A writer that is stopped keeps its connections: one has the lock, another perhaps the epoch's row, in a transaction of
# its own. The server ends them after this silence.
SILENCE_MS = 3_500
_SILENCE = f"set_config('idle_in_transaction_session_timeout', '{SILENCE_MS}', true)"
_RAISE_EPOCH = "UPDATE leadership SET epoch = epoch + 1, since = now() RETURNING epoch"
_EPOCH = f"SELECT epoch, {_SILENCE} FROM leadership FOR SHARE"
_LOAD = "SELECT node, version, published, report, problem, state, updated_at, read_at, due_at FROM positions"
_SAVE = """
INSERT INTO positions AS p (node, version, report, digest, problem, state, updated_at, read_at, due_at)
SELECT * FROM unnest($1::uuid[], $2::bigint[], $3::bytea[], $4::text[], $5::text[], $6::text[], $7::text[],
                     $8::float8[], $9::float8[])
ON CONFLICT (node) DO UPDATE SET version = excluded.version, report = excluded.report, digest = excluded.digest,
    problem = excluded.problem, state = excluded.state, updated_at = excluded.updated_at,
    read_at = excluded.read_at, due_at = excluded.due_at
WHERE p.version <= excluded.version
"""
_PUBLISHED = """
UPDATE positions p SET published = greatest(p.published, d.version)
FROM unnest($1::uuid[], $2::bigint[]) AS d(node, version) WHERE p.node = d.node
"""
_PURGE = "DELETE FROM positions WHERE report IS NULL AND published = version AND version < $1"


class PostgresPositions:
    """Positions in the schema of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.deployment = ""

    async def open(self) -> None:
        """Migrate, and learn whose it is. Waits for a database that is unavailable."""
        await self._database.open(MIGRATIONS)
        self.deployment = await read_identity(self._database)

    async def close(self) -> None:
        """Close the pool."""
        await self._database.close()

    def become_leader(self) -> AbstractAsyncContextManager[PostgresTerm]:
        """Become the only writer. Raises NotLeader at once while another process is."""
        return self._become_leader()

    @asynccontextmanager
    async def _become_leader(self) -> AsyncIterator[PostgresTerm]:
        async with self._database.raw() as holding:
            if not await holding.fetchval(_LOCK):
                raise NotLeader("another process is the writer")
            await holding.execute(f"SELECT {_SILENCE}")
            async with self._database.raw() as connection:
                epoch = await connection.fetchval(_RAISE_EPOCH)
            yield PostgresTerm(self._database, holding, epoch)


class PostgresTerm:
    """One term of being the only writer."""

    def __init__(self, database: Database, holding: asyncpg.Connection, epoch: int) -> None:
        self._database = database
        self._holding = holding
        self._epoch = epoch

    async def load(self) -> tuple[Mapping[str, Position], Mapping[str, int]]:
        """All positions by node, and the version of each that was published."""
        async with self._fenced() as connection:
            rows = await connection.fetch(_LOAD)
        return {row["node"]: _position(row) for row in rows}, {row["node"]: row["published"] for row in rows}

    async def save(self, positions: Sequence[Position]) -> None:
        """Keep these, all or none."""
        rows = [_row(position) for position in positions]
        async with self._fenced() as connection:
            if rows:
                await connection.execute(_SAVE, *zip(*rows, strict=True))

    async def mark_published(self, versions: Mapping[str, int]) -> None:
        """These were published and confirmed."""
        async with self._fenced() as connection:
            await connection.execute(_PUBLISHED, list(versions), list(versions.values()))

    async def purge(self, reported_before: float) -> int:
        """Drop positions of removed nodes."""
        async with self._fenced() as connection:
            status: str = await connection.execute(_PURGE, int(reported_before * 1_000_000))
        return int(status.rpartition(" ")[2])

    async def check(self) -> None:
        """Touch the connection that holds the lock (the server ends one that idles in a transaction)."""
        await self._holding.execute("SELECT 1")
        async with self._fenced():
            pass  # entering compares the epoch

    @asynccontextmanager
    async def _fenced(self) -> AsyncIterator[asyncpg.Connection]:
        async with self._database.raw() as connection:
            if await connection.fetchval(_EPOCH) != self._epoch:
                raise NotLeader("another process has become the writer")
            yield connection


def _position(row: Mapping[str, object]) -> Position:
    fields = {name: row[name] for name in ("version", "problem", "state", "updated_at", "read_at", "due_at")}
    report = row["report"]
    assert report is None or isinstance(report, bytes)
    return msgspec.convert(
        {"uuid": row["node"], "report": None if report is None else _report.decode(report), **fields}, Position
    )


def _row(position: Position) -> tuple[object, ...]:
    report = None if position.report is None else encode(position.report)
    return (
        position.uuid,
        position.version,
        report,
        "" if report is None else hashlib.sha256(report).hexdigest()[:32],
        position.problem,
        position.state,
        position.updated_at,
        position.read_at,
        position.due_at,
    )
