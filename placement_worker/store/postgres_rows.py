"""The rows of placement in PostgreSQL, on one schema that any number of processes may use: the operations within a
transaction, and those that are one of their own. This module has only statements and their rows;
`placement_worker.service` decides.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.dml import ReturningDelete

from bus.clock import SystemClock
from bus.contracts.base import DatabaseMark
from bus.contracts.feed import Change, FeedHead, FeedRow
from bus.contracts.placement import MAX_CONFLICTING_CONSUMERS, ConflictingConsumer
from bus.faults import BrokenInvariant
from bus.persistence.database import Database, read_identity
from bus.persistence.marks import raise_mark
from bus.persistence.tables import fetch
from bus.yielding import yield_for
from placement_worker.domain.claim_group import MembersToLock
from placement_worker.domain.claim_ledger import Lacking
from placement_worker.domain.report_group import Key, LastReport, LastReports
from placement_worker.domain.trees import TreesToLock
from placement_worker.domain.values import ConsumerState, GroupKey, Members, Provider
from placement_worker.store import claims, feed, members, port, trees
from placement_worker.store.names import NameTable, StaleNames
from placement_worker.store.postgres_reads import PostgresReads
from placement_worker.store.rows import CLASSES, NAMES, read_providers, transposed
from placement_worker.store.tables import (
    allocations,
    changes,
    consumers,
    feed_head,
    feed_position,
    inventories,
    project_usage,
    providers,
    reporters,
    resource_classes,
    traits,
)

# Processes that start at the same time insert one after the other; otherwise they could deadlock on unique keys.
ONE_WRITER_OF_NAMES = sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended("berth.placement.names", 0)))
HAVING = (
    sa.select(providers.c.id)
    .where(
        sa.exists().where(
            inventories.c.provider_id == providers.c.id,
            inventories.c.class_id == CLASSES.id,
            CLASSES.name == sa.bindparam("name"),
        )
    )
    .order_by(providers.c.id)
    .with_for_update(key_share=True, of=providers)
)


class PostgresPlacementTransaction:
    """`PlacementTransaction` on one connection."""

    def __init__(self, connection: asyncpg.Connection, names: NameTable) -> None:
        self.connection = connection
        self.names = names
        self._ids: dict[str, int] = {}  # the row ids of the providers that were read or created
        self._new_ids: list[int] = []
        self._roots: set[str] = set()  # those whose reporters were read
        self._complete: set[Key] = set()  # the reporters of these roots whose last reports were complete

    # --- claims

    async def raise_mark(self, cell: str, mark: DatabaseMark) -> int:
        """Record what is above the mark on record. Returns the highest incarnation."""
        return await raise_mark(self.connection, cell, mark)

    async def lock_groups(self, keys: Sequence[GroupKey]) -> None:
        """Lock server groups."""
        hashed = await self.connection.fetch(members.HASHED, ["/".join(key) for key in keys])
        await self.connection.execute(members.LOCK, [row["key"] for row in hashed])

    async def lock_claims(self, wanted: port.ClaimsToLock) -> port.Locked:
        """Lock and read consumers, then providers. New consumers are inserted as they are expected to be written."""
        expected = wanted.expected
        columns = claims.columns(sorted(expected.items()))
        providers = None if wanted.providers is None else list(wanted.providers)
        locks = (*columns, providers, wanted.limited, wanted.alone, wanted.cell)
        rows = claims.decode(await self.connection.fetchval(claims.LOCK, *locks))
        await yield_for(len(rows[0]) + len(rows[1]) + len(rows[2]) + len(expected))
        class_names = await self.names.names_of(self, claims.classes_used(rows))
        self._ids.update((row[1], row[0]) for row in rows[2])
        return claims.as_locked(rows, expected, class_names)

    async def members(self, wanted: MembersToLock) -> Mapping[GroupKey, Members]:
        """The members that a decision needs."""
        found: dict[GroupKey, dict[str, Sequence[str]]] = {}
        for project, group, consumer, hosts in await self.connection.fetch(members.READ, *members.columns(wanted)):
            found.setdefault((project, group), {})[consumer] = hosts
        return found

    async def enroll(self, enrolled: Mapping[GroupKey, Collection[str]]) -> None:
        """Insert the members that hold something and are missing."""
        rows = [(*key, consumer) for key, consumers in enrolled.items() for consumer in sorted(consumers)]
        await self.connection.execute(members.ENROLL, *transposed(rows, 3))

    async def newest_consumers(
        self, lost: Mapping[int, tuple[str, Lacking]]
    ) -> Mapping[int, tuple[ConflictingConsumer, ...]]:
        """The newest consumers that hold what claims lacked."""
        rows = [
            (place, consumer, provider, self.names.class_ids[name])
            for place, (consumer, lacking) in lost.items()
            for provider, name in lacking
        ]
        found: dict[int, tuple[ConflictingConsumer, ...]] = {}
        for place, consumer, project in await self.connection.fetch(
            claims.NEWEST, *transposed(rows, 4), claims.MAX_ALLOCATIONS, MAX_CONFLICTING_CONSUMERS
        ):
            found[place] = (*found.get(place, ()), ConflictingConsumer(consumer=consumer, project_id=project))
        return found

    async def join(self, joined: Mapping[GroupKey, Collection[str]]) -> None:
        """Insert the new members of server groups."""
        rows = [(*key, consumer) for key, consumers in joined.items() for consumer in consumers]
        await self.connection.execute(members.WRITE, *transposed(rows, 3))

    async def write_claims(self, writes: port.ClaimWrites) -> int:
        """Write a decision about the locked rows. Raises LimitExceeded and BrokenInvariant."""
        decision, locked = writes.decision, writes.locked
        held = (consumer.allocations for consumer in decision.consumers.values() if consumer is not None)
        await self.ids_of({provider for holding in held for provider in holding})
        size = len(decision.consumers) + len(decision.used) + len(locked.inserted)
        await yield_for(size)
        columns = claims.written_columns(decision, locked, self._ids, self.names.class_ids)
        if not any(columns) and not writes.changes:
            return 0
        usage = transposed(claims.usage_rows(locked.found, decision.consumers, self.names.class_ids, writes.most), 4)
        numbered = feed.rows(writes.changes)
        await yield_for(size)
        try:
            sequence, written = await self.connection.fetchval(claims.WRITE, *columns, *numbered, *usage)
        except asyncpg.RaiseError as error:
            raise port.LimitExceeded from error
        wanted = sum(map(len, decision.used.values()))
        if written != wanted:
            raise BrokenInvariant(f"usage past capacity, or an inventory is gone: {written} of {wanted}")
        number: int = sequence
        return number

    async def ids_of(self, uuids: Collection[str]) -> Mapping[str, int]:
        """The row ids of providers, at least of those of these that exist."""
        missing = [uuid for uuid in uuids if uuid not in self._ids]
        if missing:
            self._ids.update(await self.connection.fetch(trees.READ_IDS, missing))
        return self._ids

    # --- trees

    async def lock_reporters(self, roots: Collection[str]) -> tuple[LastReports, Mapping[str, str | None]]:
        """Become the only writer of trees, and read the last reports of the reporters of these roots."""
        rows = await self.connection.fetch(trees.LOCK_REPORTERS, list(roots))
        found = {(row[0], row[1]): LastReport(*row[3:]) for row in rows}
        self._roots.update(roots)
        self._complete.update(key for key, last in found.items() if last.complete)
        return found, {row[0]: row[2] for row in rows}

    async def retired_reporters(self, limit: int, keep_given_s: float) -> LastReports:
        """The reporters that have removed a tree which is not in use any more."""
        rows = await fetch(self.connection, trees.retired(limit, keep_given_s))
        return {(row[0], row[1]): LastReport(*row[2:]) for row in rows}

    async def release_reporters(self, reporter: str, roots: Sequence[str], cell: str) -> None:
        """Record that another compute service may take over these roots of a reporter, those of the cell."""
        await fetch(self.connection, trees.release(reporter, roots, cell))

    async def repeat_reports(self, versions: Mapping[Key, int]) -> None:
        """Record newer versions of the last reports of these reporters."""
        columns = transposed([(*key, version) for key, version in versions.items()], 3)
        await self.connection.execute(trees.REPEAT, *columns)

    async def consumers_of(self, leaving: Sequence[port.Leaving]) -> list[str]:
        """The consumers that hold allocations of these classes of these providers."""
        known = [(uuid, self.names.class_ids[name]) for uuid, name in leaving]
        rows = await self.connection.fetch(
            trees.CONSUMERS, [uuid for uuid, _ in known], [number for _, number in known]
        )
        return [row[0] for row in rows]

    async def lock_trees(self, wanted: TreesToLock) -> tuple[int, dict[str, Provider]]:
        """Become the only writer of trees, and lock and read providers."""
        answer: str = await self.connection.fetchval(
            trees.LOCK, list(wanted.uuids), list(wanted.names), list(wanted.whole), list(wanted.creating)
        )
        spec_generation, new_ids, ids, before = trees.loaded(answer)
        self._ids.update(ids)
        self._new_ids += new_ids
        return spec_generation, before

    async def write_trees(self, writes: port.TreeWrites) -> int:
        """Write the differences between `before` and `after`, and the last reports of reporters."""
        before, after = writes.before, writes.after
        new = [uuid for uuid in after if uuid not in before and uuid not in self._ids]
        self._ids.update(zip(new, self._new_ids, strict=False))
        del self._new_ids[: len(new)]
        await self.ids_of(trees.ancestors_of(before, after))
        await yield_for(len(before) + len(after))
        numbers = (self.names.class_ids, self.names.trait_ids)
        reported = self._roots.difference(root for root, _ in self._complete - writes.last_reports.keys())
        rows = trees.rows_of(self._ids, writes, numbers, reported)
        if not rows:
            return 0
        written = [msgspec.json.encode(of_kind).decode() for of_kind in rows.values()]
        number: int = await self.connection.fetchval(trees.WRITE, list(rows), written, *feed.rows(writes.changes))
        return number

    async def append(self, changes: Sequence[Change]) -> int:
        """Number the changes, as the last step of the transaction."""
        return await feed.append(self.connection, changes)

    # --- names

    async def read_names(self) -> tuple[port.Named, port.Named]:
        """The numbers of (all classes, all traits)."""
        classes, names = [
            dict(await fetch(self.connection, sa.select(table.c.name, table.c.id)))
            for table in (resource_classes, traits)
        ]
        return classes, names

    async def add_names(self, classes: Sequence[str], traits: Sequence[str]) -> int:
        """Insert the names that are missing."""
        await fetch(self.connection, ONE_WRITER_OF_NAMES)
        added = 0
        for kind, names in ((port.NameKind.CLASS, classes), (port.NameKind.TRAIT, traits)):
            if names:
                wanted = sa.select(sa.func.unnest(sa.literal(sorted(names), sa.ARRAY(sa.Text))))
                new = insert(NAMES[kind]).from_select(["name"], wanted).on_conflict_do_nothing(index_elements=["name"])
                added += len(await fetch(self.connection, new.returning(NAMES[kind].c.id)))
        return added

    async def delete_name(self, kind: port.NameKind, name: str) -> bool:
        """Remove a class or trait. Raises NameInUse."""
        table = NAMES[kind]
        try:  # a foreign key refuses it while a provider has the class or trait
            return bool(
                await fetch(self.connection, sa.delete(table).where(table.c.name == name).returning(table.c.id))
            )
        except asyncpg.ForeignKeyViolationError as error:
            raise port.NameInUse(name) from error

    async def rename_class(self, old: str, new: str) -> dict[str, Provider] | None:
        """Give a class another name. Returns the providers that have it. Raises NameExists.

        The renamed class gets a new id, because other processes cache names by id and an id must always mean the same
        name. They can no longer write the old id, and they look up the new one, which they have not cached.
        """
        having = [row[0] for row in await fetch(self.connection, HAVING, name=old)]
        former = [row[0] for row in await fetch(self.connection, sa.select(CLASSES.id).where(CLASSES.name == old))]
        if not former:
            return None
        try:
            [(number,)] = await fetch(self.connection, insert(resource_classes).values(name=new).returning(CLASSES.id))
        except asyncpg.UniqueViolationError as error:
            raise port.NameExists(new) from error
        for table in (inventories, allocations, project_usage):
            moved = sa.update(table).where(table.c.class_id == former[0]).values(class_id=number)
            await fetch(self.connection, moved)
        await self.delete_name(port.NameKind.CLASS, old)
        after = await read_providers(self.connection, having)
        await self.connection.execute(trees.MARK_INCOMPLETE, sorted({provider.root for provider in after.values()}))
        return after

    # --- the feed

    async def head(self) -> FeedHead:
        """The number of the newest committed change, and the id of its incarnation."""
        return await feed.head(self.connection)

    async def oldest(self) -> int | None:
        """The number of the oldest change that is kept."""
        number: int | None = await self.connection.fetchval(feed.OLDEST)
        return number

    async def changes(self, after: int, limit: int) -> list[FeedRow]:
        """The rows of the changes after a number, in order; fewer than the limit when they are large."""
        return (await feed.read(self.connection, after, limit))[0]

    async def providers_after(self, after: str | None, limit: int) -> list[Provider]:
        """Whole providers in the order of their uuids."""
        found = sa.select(providers.c.id).order_by(providers.c.uuid).limit(limit)
        rows = await fetch(self.connection, found if after is None else found.where(providers.c.uuid > after))
        found_of = await read_providers(self.connection, [row[0] for row in rows])
        return [found_of[uuid] for uuid in sorted(found_of)]


MIGRATIONS = "placement_worker.store.migrations"
REPEATABLE = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"


def _purge_changes(keep: int, limit: int) -> ReturningDelete[Any]:
    head = sa.select(feed_head.c.number).scalar_subquery()
    published = sa.select(feed_position.c.number).scalar_subquery()
    old = changes.alias("old").c
    some = sa.select(old.last).where(old.last <= sa.func.least(head - keep, published)).order_by(old.last).limit(limit)
    return sa.delete(changes).where(changes.c.last.in_(some)).returning(changes.c.last)


def _purge_ended_attempts(keep_s: float, limit: int) -> ReturningDelete[Any]:
    released = consumers.alias("released").c
    some = (
        sa.select(released.uuid)
        .where(released.released_at < sa.func.now() - timedelta(seconds=keep_s))
        .order_by(released.released_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    return sa.delete(consumers).where(consumers.c.uuid.in_(some)).returning(consumers.c.uuid)


def _purge_reporters(keep_s: float, limit: int) -> ReturningDelete[Any]:
    """A reporter's row holds the version that later reports are compared with and the providers that the reporter may
    remove. So a row is deleted only if its root no longer exists, or if it has no such providers.
    """
    silent = reporters.alias("silent").c
    exist = sa.exists().where(providers.c.uuid == silent.root)
    is_over = sa.or_(~exist, sa.func.cardinality(silent.providers) == 0)
    some = (
        sa.select(silent.root, silent.reporter)
        .where(silent.updated_at < sa.func.now() - timedelta(seconds=keep_s), is_over)
        .limit(limit)
        .with_for_update(skip_locked=True, of=silent.root.table)
    )
    return (
        sa.delete(reporters)
        .where(sa.tuple_(reporters.c.root, reporters.c.reporter).in_(some))
        .returning(reporters.c.root)
    )


class PostgresPlacementRows:
    """`PlacementRows` on one PostgreSQL schema."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.clock = SystemClock()
        self.names = NameTable(self.transaction, self.clock)
        self.reads = PostgresReads(self.transaction, self.snapshot, self.names)
        self.database_id = ""

    @property
    def ready(self) -> bool:
        """Whether it is open."""
        return self.database.ready

    async def open(self) -> None:
        """Migrate. Waits while the database is unavailable."""
        await self.database.open(MIGRATIONS)
        self.database_id = await read_identity(self.database)

    async def close(self) -> None:
        """Close the pool."""
        await self.database.close()

    def on(self, connection: asyncpg.Connection) -> PostgresPlacementTransaction:
        """The operations within a transaction that the caller has opened."""
        return PostgresPlacementTransaction(connection, self.names)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[PostgresPlacementTransaction]:
        """A transaction that commits at the end and rolls back on an exception. Raises StaleNames, Unstorable."""
        try:
            async with self.database.raw() as connection:
                yield self.on(connection)
        except asyncpg.ForeignKeyViolationError as error:
            raise StaleNames(str(error)) from error
        except asyncpg.DataError as error:
            raise port.Unstorable(str(error)) from error

    async def take_new(
        self, consumers: Mapping[str, ConsumerState], spec_generations: Mapping[str, int | None], most: port.Limits
    ) -> tuple[int, Sequence[int]] | None:
        """Write new consumers with what they hold, or nothing."""
        columns = claims.new_columns(consumers, spec_generations, self.names.class_ids, most)
        async with self.database.single() as connection:
            try:
                taken = await connection.fetchval(claims.TAKE_NEW, *columns)
            except (asyncpg.RaiseError, asyncpg.DataError):
                return None
        return None if taken is None else (taken[0], taken[1:])

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[PostgresPlacementTransaction]:
        """A transaction whose reads are all of one moment."""
        async with self.transaction() as transaction:
            await transaction.connection.execute(REPEATABLE)
            yield transaction

    async def head(self) -> FeedHead:
        """The number of the newest committed change, and the id of its incarnation."""
        async with self.database.single() as connection:
            return await feed.head(connection)

    async def newest(self, seen: FeedHead | None) -> port.NewestHead:
        """Return the newest head, of a new incarnation when the database was restored or promoted, or is behind
        `seen`.
        """
        async with self.database.single() as connection:
            return await feed.newest(connection, seen)

    async def take_changes(self, limit: int, lease_s: float, lease: Any) -> port.LeasedChanges | None:
        """Take the next unpublished changes."""
        async with self.database.single() as connection:
            found = await connection.fetch(feed.TAKE, min(limit, feed.ROWS_AT_ONCE), lease_s, lease)
            if not found:
                return None
            incarnation, until = found[0]["incarnation"], found[0]["until"]
            if until is None:
                return port.LeasedChanges((), True, incarnation, None)
            rows, more = await feed.read(connection, found[0]["number"], limit, found)
            return port.LeasedChanges(rows, more, incarnation, until)

    async def advance_position(self, number: int, lease: Any) -> None:
        """Record that the changes up to this number are published, and end the lease."""
        async with self.database.single() as connection:
            await connection.fetchval(feed.MOVE, number, lease)

    async def trim(
        self, *, keep_changes: int, keep_ended_attempts_s: float, keep_reporters_s: float, limit: int
    ) -> bool:
        """Delete rows that are no longer needed, with one bounded transaction for each kind."""
        more = False
        for statement in (
            _purge_changes(keep_changes, limit),
            _purge_ended_attempts(keep_ended_attempts_s, limit),
            claims.purge_empty(limit),
        ):
            async with self.database.raw() as connection:
                more |= len(await fetch(connection, statement)) >= limit
        async with self.database.raw() as connection:
            await fetch(connection, trees.ONE_WRITER_OF_TREES)  # a report that it has read is not trimmed under it
            more |= len(await fetch(connection, _purge_reporters(keep_reporters_s, limit))) >= limit
        async with self.database.raw() as connection:
            left = await connection.fetch(members.LOCK_LEFT, limit)
            await connection.execute(members.DELETE_LEFT, *transposed(left, 3))
            more |= len(left) >= limit
        return more
