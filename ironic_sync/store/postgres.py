"""Positions in PostgreSQL: several processes may run, one writes."""

# The writer has a lease, a row with an end by the database's clock. An end that is further away than a lease is long
# was written before that clock was restored, and counts for nothing. A writer that has not noticed yet that another one
# has the lease changes nothing: each write is one statement, which compares the term that each new writer raises. So a
# process that is stopped holds no lock for which the next writer would have to wait.

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import msgspec

from bus.contracts.base import encode
from bus.contracts.placement import ProviderReport
from bus.faults import Transient
from bus.persistence.database import Database, read_identity
from bus.persistence.guarded_statement import GuardedStatement, PreconditionFailed
from ironic_sync.domain.position import Position
from ironic_sync.store.port import LEASE_S, PAGE, NotLeader

MIGRATIONS = "ironic_sync.store.migrations"

_report = msgspec.json.Decoder(ProviderReport)

_LEAD = """
UPDATE leadership SET term = greatest(term + 1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint), since = now(),
    expires_at = clock_timestamp() + make_interval(secs => $1)
WHERE expires_at NOT BETWEEN clock_timestamp() AND clock_timestamp() + make_interval(secs => $1) RETURNING term
"""
_RENEW = "UPDATE leadership SET expires_at = clock_timestamp() + make_interval(secs => $1) WHERE term = $2 RETURNING 1"
_LET_GO = "UPDATE leadership SET expires_at = now() WHERE term = $1"
# Locked: no newer term begins while this one writes.
_OF_TERM = "SELECT FROM leadership WHERE term = {} AND {met} FOR SHARE"
_LOAD = """
SELECT node, version, published, report, problem, state, updated_at, read_at, due_at, absent_since FROM positions
{after} ORDER BY node LIMIT $1
"""
_SAVE = """
INSERT INTO positions AS p (node, version, report, digest, problem, state, updated_at, read_at, due_at, absent_since)
SELECT * FROM unnest({}::uuid[], {}::bigint[], {}::bytea[], {}::text[], {}::text[], {}::text[], {}::text[],
                     {}::float8[], {}::float8[], {}::float8[]) AS n WHERE {met}
ON CONFLICT (node) DO UPDATE SET version = excluded.version, report = excluded.report, digest = excluded.digest,
    problem = excluded.problem, state = excluded.state, updated_at = excluded.updated_at,
    read_at = excluded.read_at, due_at = excluded.due_at, absent_since = excluded.absent_since
WHERE p.version <= excluded.version RETURNING 1
"""
_PUBLISHED = """
UPDATE positions p SET published = greatest(p.published, d.version)
FROM unnest({}::uuid[], {}::bigint[]) AS d(node, version) WHERE p.node = d.node AND {met} RETURNING 1
"""
_PURGE = "DELETE FROM positions WHERE report IS NULL AND published = version AND version < {} AND {met} RETURNING 1"

REPLACED = "another process has become the writer"
POSITION_COLUMNS = ("version", "problem", "state", "updated_at", "read_at", "due_at", "absent_since")


class PostgresPositions:
    """Positions in the schema of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.database_id = ""

    async def open(self) -> None:
        """Migrate, and learn whose it is. Waits for a database that is unavailable."""
        await self._database.open(MIGRATIONS)
        self.database_id = await read_identity(self._database)

    async def close(self) -> None:
        """Close the pool."""
        await self._database.close()

    def become_leader(self) -> AbstractAsyncContextManager[PostgresTerm]:
        """Become the only writer, and let go of the lease at the end. Raises NotLeader at once while another one is."""
        return self._become_leader()

    @asynccontextmanager
    async def _become_leader(self) -> AsyncIterator[PostgresTerm]:
        async with self._database.single() as connection:
            number = await connection.fetchval(_LEAD, LEASE_S)
        if number is None:
            raise NotLeader("another process is the writer")
        try:
            yield PostgresTerm(self._database, number)
        finally:
            with suppress(Transient):  # then it ends by itself
                async with self._database.single() as connection:
                    await connection.execute(_LET_GO, number)


class PostgresTerm:
    """One term of being the only writer."""

    def __init__(self, database: Database, number: int) -> None:
        self._database = database
        self._number = number

    async def load(self) -> tuple[Mapping[str, Position], Mapping[str, int]]:
        """All positions by node, and the version of each that was published. The loop turns between two pages."""
        positions: dict[str, Position] = {}
        published: dict[str, int] = {}
        after: tuple[str, ...] = ()
        while True:
            async with self._database.single() as connection:
                rows = await connection.fetch(_LOAD.format(after="WHERE node > $2" if after else ""), PAGE, *after)
            for row in rows:
                positions[row["node"]], published[row["node"]] = _position(row), row["published"]
            if len(rows) < PAGE:
                break
            after = (rows[-1]["node"],)
        await self.renew()  # a newer writer may have changed what was read
        return positions, published

    async def save(self, positions: Sequence[Position]) -> None:
        """Keep these, all or none."""
        rows = [_row(position) for position in positions]
        await self._write(_SAVE, *zip(*rows, strict=True)) if rows else await self._write()

    async def mark_published(self, versions: Mapping[str, int]) -> None:
        """These were published and confirmed."""
        await self._write(_PUBLISHED, list(versions), list(versions.values()))

    async def purge(self, reported_before: float) -> int:
        """Drop positions of removed nodes."""
        return await self._write(_PURGE, int(reported_before * 1_000_000))

    async def renew(self) -> None:
        """Keep the lease for LEASE_S from now on. Raises NotLeader."""
        async with self._database.single() as connection:
            if await connection.fetchval(_RENEW, LEASE_S, self._number) is None:
                raise NotLeader(REPLACED)

    async def _write(self, written: str = "", *values: object) -> int:
        """One statement of this term, or only the comparison; returns how many rows it wrote. Raises NotLeader."""
        statement = GuardedStatement()
        statement.add("mine", _OF_TERM, self._number, rows=1)
        statement.add("written", written or "SELECT 1 WHERE false AND {met}", *values)
        statement.column("(SELECT count(*) FROM written) AS written")
        try:
            async with self._database.single() as connection:
                row = await statement.execute(connection)
        except PreconditionFailed:
            raise NotLeader(REPLACED) from None
        many: int = row["written"]
        return many


def _position(row: Mapping[str, object]) -> Position:
    fields = {name: row[name] for name in POSITION_COLUMNS}
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
        position.absent_since,
    )
