"""Keyed rows in the cell's schema, and the keeper of its leases."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import msgspec

from bus.persistence.database import Database
from bus.persistence.guarded_statement import Conflict
from cell_conductor.domain.desires import AT_REST, EVACUATED, EVACUATED_IN_DOUBT, in_sql
from cell_conductor.domain.leases import Lease

from . import tables
from .keyed import Key, KeyedTable, Lock, Value

# As `domain.move_steps.is_evacuated_from`.
NEEDED = f"""
SELECT EXISTS (SELECT FROM fence_losses WHERE host_uuid = $1) OR EXISTS (
    SELECT FROM instances WHERE source_host_uuid = $1 AND record #>> '{{move,kind}}' = 'evacuate' AND (
        state IN ({in_sql(EVACUATED)})
        OR (state IN ({in_sql(EVACUATED_IN_DOUBT)}) AND record ->> 'doubted' = 'true')))
"""
# It reads the whole table, and fences are rare. Instances that are over hold nothing there; the remains of a lost one
# are a loss already.
TOUCHING = f"""
SELECT uuid FROM instances
WHERE (host_uuid = $1 OR source_host_uuid = $1) AND uuid > $2::uuid
    AND state NOT IN ({in_sql(AT_REST)})
ORDER BY uuid LIMIT $3
"""
KEEP_KEEPER = """
INSERT INTO lease_keeper AS k (process, term, until)
VALUES ($1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint, clock_timestamp() + $2 * interval '1 s')
ON CONFLICT (one) DO UPDATE SET
    term = CASE WHEN k.process = $1 AND k.term = $3 AND k.until >= clock_timestamp() THEN k.term
                ELSE greatest(k.term + 1, $3 + 1, excluded.term) END,
    process = $1, until = excluded.until
WHERE k.process = $1 OR k.until < clock_timestamp()
RETURNING term
"""
# The keeper's row is locked: no newer term begins while this one writes.
MINE = "WITH mine AS MATERIALIZED (SELECT FROM lease_keeper WHERE term = $1 FOR SHARE)"
RECORD_LEASES = f"""
{MINE}, recorded AS (
    INSERT INTO leases (service, record)
    SELECT n.* FROM unnest($2::text[], $3::text[]::json[]) AS n WHERE EXISTS (SELECT FROM mine)
    ON CONFLICT (service) DO UPDATE SET record = excluded.record)
SELECT EXISTS (SELECT FROM mine)
"""
# In a database that was set back, recognised or not, every service is to be asked what the record has forgotten.
PURGE_LEASES = f"""
{MINE}, permitted AS (
    SELECT FROM mine, identity WHERE set_back_at = 0 AND origin = origin_of('instances')),
purged AS (DELETE FROM leases WHERE service = ANY($2::text[]) AND EXISTS (SELECT FROM permitted))
SELECT EXISTS (SELECT FROM permitted)
"""


class PostgresKeyedRows:
    """The rows of one transaction on this connection."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def read(self, table: KeyedTable[Key, Value], limit: int | None = None) -> list[Value]:
        """One statement."""
        order = [f"(record ->> '{table.by}')::float8"] if table.by else []
        statement = f"SELECT record FROM {table.name} ORDER BY {', '.join([*order, *table.columns])} LIMIT $1"
        return [msgspec.json.decode(row[0], type=table.type) for row in await self._connection.fetch(statement, limit)]

    async def find(
        self, table: KeyedTable[Key, Value], keys: Collection[Key], lock: Lock = Lock.NONE
    ) -> dict[Key, Value]:
        """One statement."""
        columns, arrays = ", ".join(table.columns), ", ".join(_types(table))
        statement = f"""
SELECT record FROM {table.name} t JOIN unnest({arrays}) AS n ({columns}) USING ({columns}) ORDER BY {columns} {lock}
"""
        found = await self._connection.fetch(statement, *_arrays(table, keys))
        values = [msgspec.json.decode(row[0], type=table.type) for row in found]
        return {table.key(value): value for value in values}

    async def put(self, table: KeyedTable[Key, Value], values: Iterable[Value], over: Mapping[Key, Value]) -> None:
        """One statement. Raises Conflict."""
        rows = {table.key(value): tables.encode(value) for value in values}
        is_known = [key in over for key in rows]
        columns, arrays = ", ".join(table.columns), ", ".join(_types(table, "text[]::json[]", "bool[]"))
        statement = f"""
WITH n AS (SELECT * FROM unnest({arrays}) AS n ({columns}, record, is_known)),
updated AS (
    UPDATE {table.name} t SET record = n.record FROM n
    WHERE is_known AND {" AND ".join(f"t.{one} = n.{one}" for one in table.columns)})
INSERT INTO {table.name} ({columns}, record) SELECT {columns}, record FROM n WHERE NOT is_known
ORDER BY {columns} ON CONFLICT DO NOTHING
"""
        status = await self._connection.execute(statement, *_arrays(table, rows), list(rows.values()), is_known)
        if int(status.rpartition(" ")[2]) < is_known.count(False):
            raise Conflict

    async def delete(self, table: KeyedTable[Key, Any], keys: Collection[Key]) -> None:
        """One statement."""
        columns, arrays = ", ".join(table.columns), ", ".join(_types(table))
        statement = f"DELETE FROM {table.name} WHERE ({columns}) IN (SELECT * FROM unnest({arrays}))"
        await self._connection.execute(statement, *_arrays(table, keys))

    async def is_needed(self, fence_of: str) -> bool:
        """One statement."""
        return bool(await self._connection.fetchval(NEEDED, fence_of))

    async def touching(self, host_uuid: str, after: str, limit: int) -> list[str]:
        """One statement."""
        return [row[0] for row in await self._connection.fetch(TOUCHING, host_uuid, after, limit)]


def _types(table: KeyedTable[Any, Any], *more: str) -> list[str]:
    """The parameters of a statement that has arrays of keys, and of these types."""
    of_keys = ["uuid[]" if one.endswith("_uuid") else "text[]" for one in table.columns]
    return [f"${at}::{one}" for at, one in enumerate([*of_keys, *more], 1)]


def _arrays(table: KeyedTable[Key, Any], keys: Collection[Key]) -> list[Sequence[str]]:
    """An array of each part of the keys, for `unnest`."""
    parts = [key if isinstance(key, tuple) else (key,) for key in keys]
    return list(zip(*parts, strict=True)) or [()] * len(table.columns)


class PostgresKeyed:
    """In the cell's schema."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[PostgresKeyedRows]:
        """Commits at the end, rolls back on an exception."""
        async with self._database.raw() as connection:
            yield PostgresKeyedRows(connection)

    async def keep(self, process: str, for_s: float, term: int | None) -> int | None:
        """Who becomes or remains the keeper."""
        kept: int | None = await self._decide(KEEP_KEEPER, process, for_s, term)
        return kept

    async def record(self, term: int, leases: Mapping[str, Lease]) -> bool:
        """Each is written over what is on record."""
        return bool(await self._decide(RECORD_LEASES, term, list(leases), [*map(tables.encode, leases.values())]))

    async def purge(self, term: int, services: Collection[str]) -> bool:
        """A database without its identity has been emptied: nothing is purged there."""
        return bool(await self._decide(PURGE_LEASES, term, services))

    async def _decide(self, statement: str, *values: object) -> Any:
        """One statement, which is a transaction of its own."""
        async with self._database.single() as connection:
            return await connection.fetchval(statement, *values)
