"""Keyed rows in the cell's schema, and the leader of its leases."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
from msgspec import structs

from bus.persistence.database import Database
from bus.persistence.guarded_statement import Conflict, GuardedStatement, PreconditionFailed
from cell_conductor.state.desired_state import AT_REST, EVACUATED, phases_as_sql
from cell_conductor.state.lease import Leader, Lease
from cell_conductor.store import tables
from cell_conductor.store.keyed import DatabaseIdentity, Key, KeyedTable, Lock, Unrecognised, Value

# As `evacuation_proof.may_run_after_evacuation`.
NEEDED = f"""
SELECT EXISTS (
    SELECT FROM instances
    WHERE (source_host_uuid = $1 OR (source_host_uuid IS NULL AND host_uuid = $1))
    AND record #>> '{{action,kind}}' = 'evacuate' AND state IN ({phases_as_sql(EVACUATED)}))
"""
# The states are a partial index's condition. Instances that are over hold nothing there.
TOUCHING = f"""
SELECT uuid FROM instances
WHERE (host_uuid = $1 OR source_host_uuid = $1) AND uuid > $2::uuid
    AND state NOT IN ({phases_as_sql(AT_REST)})
ORDER BY uuid LIMIT $3
"""
LEADER = "SELECT process, term, until, extract(epoch FROM clock_timestamp())::float8 FROM leader"
WRITE_LEADER = """
UPDATE leader SET process = {}, term = {}, until = {}
WHERE process = {} AND term = {} AND until = {} AND {met} RETURNING 1
"""
# Locked: no newer term begins while this one writes.
OF_TERM = "SELECT FROM leader WHERE term = {} AND {met} FOR SHARE"
RECORD_LEASES = """
INSERT INTO leases (service, record) SELECT * FROM unnest({}::text[], {}::text[]::json[]) AS n WHERE {met}
ON CONFLICT (service) DO UPDATE SET record = excluded.record RETURNING 1
"""
DELETE_LEASES = "DELETE FROM leases WHERE service = ANY({}::text[]) AND {met} RETURNING 1"


class PostgresKeyedRows:
    """The rows of one transaction on this connection. seen: None in a command, which has seen no earlier state."""

    def __init__(self, connection: asyncpg.Connection, seen: DatabaseIdentity | None = None) -> None:
        self._connection = connection
        self._seen = seen

    async def read(self, table: KeyedTable[Key, Value], limit: int | None = None) -> list[Value]:
        """One statement."""
        statement = f"SELECT {row_of(table)} FROM {table.name} ORDER BY {', '.join(table.columns)} LIMIT $1"
        return list(values_of(table, await self._connection.fetch(statement, limit)).values())

    async def find(
        self, table: KeyedTable[Key, Value], keys: Collection[Key], lock: Lock = Lock.NONE
    ) -> dict[Key, Value]:
        """One statement."""
        columns, arrays = ", ".join(table.columns), ", ".join(_types(table))
        statement = f"""
SELECT {row_of(table)} FROM {table.name} t JOIN unnest({arrays}) AS n ({columns}) USING ({columns})
ORDER BY {columns} {lock}
"""
        return values_of(table, await self._connection.fetch(statement, *_arrays(table, keys)))

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

    async def expect_same_database(self) -> None:
        """One statement. Raises Unrecognised."""
        if (seen := self._seen) is None:
            return
        if not await self._connection.fetchval(tables.SAME_DATABASE.format("$1", "$2"), *seen.state):
            raise Unrecognised

    async def incarnation(self) -> int:
        """One statement. Raises Unrecognised."""
        incarnation: int | None = await self._connection.fetchval(tables.INCARNATION)
        if incarnation is None:
            raise Unrecognised
        return incarnation

    async def is_needed(self, fence_of: str) -> bool:
        """One statement."""
        return bool(await self._connection.fetchval(NEEDED, fence_of))

    async def touching(self, host_uuid: str, after: str, limit: int) -> list[str]:
        """One statement."""
        return [row[0] for row in await self._connection.fetch(TOUCHING, host_uuid, after, limit)]


def row_of(table: KeyedTable[Any, Any]) -> str:
    """The columns of `values_of`."""
    return ", ".join([*(f"{one}::text" for one in table.columns), "record"])


def values_of(table: KeyedTable[Key, Value], rows: Iterable[Sequence[str]]) -> dict[Key, Value]:
    """The values of these rows, by their keys."""
    keyed: Any = {(row[0] if len(table.columns) == 1 else tuple(row[:-1])): row[-1] for row in rows}
    return {key: table.decoded(key, record) for key, record in keyed.items()}


def _types(table: KeyedTable[Any, Any], *more: str) -> list[str]:
    """The parameters of a statement that has arrays of keys, and of these types."""
    of_keys = ["uuid[]" if one.endswith("_uuid") else "text[]" for one in table.columns]
    return [f"${at}::{one}" for at, one in enumerate([*of_keys, *more], 1)]


def _arrays(table: KeyedTable[Key, Any], keys: Collection[Key]) -> list[Sequence[str]]:
    """An array of each part of the keys, for `unnest`."""
    parts = [key if isinstance(key, tuple) else (key,) for key in keys]
    return list(zip(*parts, strict=True)) or [()] * len(table.columns)


class PostgresKeyed:
    """The adapter in the cell's schema. seen: None in a command, which keeps no leases."""

    def __init__(self, database: Database, seen: DatabaseIdentity | None = None) -> None:
        self._database = database
        self._seen = seen

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[PostgresKeyedRows]:
        """Commits at the end, rolls back on an exception."""
        async with self._database.raw() as connection:
            yield PostgresKeyedRows(connection, self._seen)

    async def leader(self) -> tuple[Leader, float]:
        """One row, which is made with the schema: a database without it has been emptied."""
        async with self._database.single() as connection:
            *leader, now = await connection.fetchrow(LEADER) or ("", 0, 0.0, 0.0)
        return Leader(*leader), now

    async def write_leader(self, before: Leader, after: Leader) -> bool:
        """Compared with what was read."""
        statement = self._guarded()
        statement.add("kept", WRITE_LEADER, *structs.astuple(after), *structs.astuple(before), rows=1)
        return await self._is_met(statement)

    async def record(self, term: int, leases: Mapping[str, Lease], removed: Collection[str]) -> bool:
        """Each is written over what is on record."""
        statement = self._guarded()
        statement.add("mine", OF_TERM, term, rows=1)
        statement.add("recorded", RECORD_LEASES, list(leases), [*map(tables.encode, leases.values())])
        statement.add("gone", DELETE_LEASES, removed)
        return await self._is_met(statement)

    def _guarded(self) -> GuardedStatement:
        assert self._seen is not None
        statement = GuardedStatement()
        statement.expect(f"EXISTS ({tables.SAME_DATABASE})", *self._seen.state)
        return statement

    async def _is_met(self, statement: GuardedStatement) -> bool:
        with suppress(PreconditionFailed):
            async with self._database.single() as connection:
                await statement.execute(connection)
                return True
        return False
