"""The rows of the book in PostgreSQL, on one schema that any number of processes may use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
from sqlalchemy import delete, exists, func, or_, select, tuple_
from sqlalchemy.sql.dml import ReturningDelete

from bus.clock import SystemClock
from bus.contracts.feed import FeedHead
from bus.persistence.database import Database
from bus.persistence.identity import read_identity
from bus.persistence.tables import fetch
from placement_worker.store import feed, limits, members
from placement_worker.store.names import NameTable, StaleNames
from placement_worker.store.port import NewestHead, Taken, Unstorable
from placement_worker.store.postgres_reads import PostgresReads
from placement_worker.store.postgres_transaction import PostgresBookTransaction
from placement_worker.store.tables import changes, consumers, feed_head, feed_position, providers, sources

MIGRATIONS = "placement_worker.store.migrations"
REPEATABLE = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"


def _purge_changes(keep: int, limit: int) -> ReturningDelete[Any]:
    head = select(feed_head.c.number).scalar_subquery()
    published = select(feed_position.c.number).scalar_subquery()
    old = changes.alias("old").c
    some = select(old.last).where(old.last <= func.least(head - keep, published)).order_by(old.last).limit(limit)
    return delete(changes).where(changes.c.last.in_(some)).returning(changes.c.last)


def _purge_fences(keep_s: float, limit: int) -> ReturningDelete[Any]:
    fence = consumers.alias("fence").c
    some = (
        select(fence.uuid)
        .where(fence.released_at < func.now() - timedelta(seconds=keep_s))
        .order_by(fence.released_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    return delete(consumers).where(consumers.c.uuid.in_(some)).returning(consumers.c.uuid)


def _purge_sources(keep_s: float, limit: int) -> ReturningDelete[Any]:
    """A source's row holds the version that later reports are compared with and the providers that the source may
    remove. So a row is deleted only if its root no longer exists, or if a newer report of another source covers these
    providers.
    """
    silent, newer = sources.alias("silent").c, sources.alias("newer").c
    exist = exists().where(providers.c.uuid == silent.root)
    covered = exists().where(
        newer.root == silent.root, newer.updated_at > silent.updated_at, newer.providers.op("@>")(silent.providers)
    )
    some = (
        select(silent.root, silent.source)
        .where(silent.updated_at < func.now() - timedelta(seconds=keep_s), or_(~exist, covered))
        .limit(limit)
        .with_for_update(skip_locked=True, of=silent.root.table)
    )
    return delete(sources).where(tuple_(sources.c.root, sources.c.source).in_(some)).returning(sources.c.root)


class PostgresBookRows:
    """`BookRows` on one PostgreSQL schema."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.clock = SystemClock()
        self.names = NameTable(self.transaction, self.clock)
        self.reads = PostgresReads(self.transaction, self.snapshot, self.names)
        self.deployment = ""

    @property
    def ready(self) -> bool:
        """Whether it is open."""
        return self.database.ready

    async def open(self) -> None:
        """Migrate. Waits while the database is unavailable."""
        await self.database.open(MIGRATIONS)
        self.deployment = await read_identity(self.database)

    async def close(self) -> None:
        """Close the pool."""
        await self.database.close()

    def on(self, connection: asyncpg.Connection) -> PostgresBookTransaction:
        """The operations within a transaction that the caller has opened."""
        return PostgresBookTransaction(connection, self.names)

    def transaction(self) -> AbstractAsyncContextManager[PostgresBookTransaction]:
        """A transaction that commits at the end and rolls back on an exception."""
        return self._transaction()

    def snapshot(self) -> AbstractAsyncContextManager[PostgresBookTransaction]:
        """A transaction whose reads are all of one moment."""
        return self._transaction(REPEATABLE)

    @asynccontextmanager
    async def _transaction(self, first: str = "") -> AsyncIterator[PostgresBookTransaction]:
        try:
            async with self.database.raw() as connection:
                if first:
                    await connection.execute(first)
                yield self.on(connection)
        except asyncpg.ForeignKeyViolationError as error:
            raise StaleNames(str(error)) from error
        except asyncpg.DataError as error:
            raise Unstorable(str(error)) from error

    async def head(self) -> FeedHead:
        """The number of the newest committed change, and the id of its history."""
        async with self.database.single() as connection:
            return await feed.head(connection)

    async def newest(self, seen: FeedHead | None) -> NewestHead:
        """Return the newest head, of a new history when the database was restored or promoted, or is behind `seen`."""
        async with self.database.single() as connection:
            return await feed.newest(connection, seen)

    async def take_changes(self, limit: int, lease_s: float, lease: Any) -> Taken | None:
        """Take the next unpublished changes."""
        async with self.database.single() as connection:
            found = await connection.fetch(feed.TAKE, min(limit, feed.ROWS_AT_ONCE), lease_s, lease)
            if not found:
                return None
            history, until = found[0]["history"], found[0]["until"]
            if until is None:
                return Taken((), True, history, None)
            rows, more = await feed.read(connection, found[0]["number"], limit, found)
            return Taken(rows, more, history, until)

    async def move_position(self, number: int, lease: Any) -> None:
        """Record that the changes up to this number are published, and end the lease."""
        async with self.database.single() as connection:
            await connection.fetchval(feed.MOVE, number, lease)

    async def trim(self, *, keep_changes: int, keep_fences_s: float, keep_sources_s: float, limit: int) -> bool:
        """Delete rows that are no longer needed, with one bounded transaction for each kind."""
        more = False
        for statement in (
            _purge_changes(keep_changes, limit),
            _purge_fences(keep_fences_s, limit),
            _purge_sources(keep_sources_s, limit),
            limits.purge_empty(limit),
        ):
            async with self.database.raw() as connection:
                more |= len(await fetch(connection, statement)) >= limit
        async with self.database.raw() as connection:
            more |= await members.purge(connection, limit) >= limit
        return more
