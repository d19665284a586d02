"""What the stores of fences, leases, breakers and unexplained machines have in common: values under keys, in the tables
of one cell. Each method is one transaction.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Any, Generic, TypeVar

import asyncpg

from bus.persistence.database import Database
from bus.persistence.memory_database import MemoryDatabaseTransaction, MemorySession

Tables = TypeVar("Tables")
Key = TypeVar("Key", bound="str | tuple[str, ...]")
Value = TypeVar("Value")


class PostgresKeyed:
    """In the cell's schema."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def _fetch(self, statement: str, *values: object) -> list[asyncpg.Record]:
        async with self._database.raw() as connection:
            found: list[asyncpg.Record] = await connection.fetch(statement, *values)
        return found

    async def _fetchval(self, statement: str, *values: object) -> Any:
        async with self._database.raw() as connection:
            return await connection.fetchval(statement, *values)


def columns(rows: Iterable[object], *names: str) -> list[Sequence[object]]:
    """An array of each of these fields, for `unnest`."""
    return list(zip(*map(attrgetter(*names), rows), strict=True)) or [()] * len(names)


class MemoryKeyed(Generic[Tables]):
    """In a cell's tables: the committed rows."""

    def __init__(self, table: Tables, session: MemorySession) -> None:
        self._table = table
        self._session = session

    @asynccontextmanager
    async def _begun(self, *keys: Hashable) -> AsyncIterator[MemoryDatabaseTransaction]:
        """A transaction after its first statement, which locks these rows in order."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            await transaction.lock(keys)
            yield transaction

    async def _read(self, rows: Mapping[Key, Value]) -> list[Value]:
        """All of a table, in the order of its keys."""
        async with self._begun():
            return [value for _, value in sorted(rows.items(), key=lambda item: item[0])]


def drop(rows: dict[Key, Value], keys: Iterable[Key]) -> None:
    """Delete these, where they are on record."""
    for key in keys:
        rows.pop(key, None)
