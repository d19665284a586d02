"""The operations on the rows of the book in PostgreSQL, within one transaction.

This module has only statements and their rows; `placement_worker.book` decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import asyncpg
import msgspec
from sqlalchemy import ARRAY, Text, bindparam, delete, exists, func, literal, select, update
from sqlalchemy.dialects.postgresql import insert

from bus.contracts.feed import Change, FeedHead, FeedRow
from bus.contracts.placement import ClaimHolder
from bus.persistence.tables import fetch
from bus.turns import turn_for
from placement_worker.domain.claim_group import WantedMembers
from placement_worker.domain.claim_ledger import Decision, Lacking
from placement_worker.domain.report_group import Key, ReportSource, Sources
from placement_worker.domain.trees import WantedTrees
from placement_worker.domain.values import ConsumerState, GroupKey, Members, Provider
from placement_worker.store import claims, feed, holders, members, trees
from placement_worker.store.names import NameTable
from placement_worker.store.port import (
    NO_LIMITS,
    NO_SOURCES,
    Leaving,
    Locked,
    Named,
    NameExists,
    NameInUse,
    NameKind,
)
from placement_worker.store.rows import CLASSES, NAMES, providers_after, read_providers
from placement_worker.store.tables import (
    allocations,
    inventories,
    project_usage,
    providers,
    resource_classes,
    traits,
)

# Processes that start at the same time insert one after the other; otherwise they could deadlock on unique keys.
ONE_WRITER_OF_NAMES = select(func.pg_advisory_xact_lock(func.hashtextextended("berth.placement.names", 0)))
HAVING = (
    select(providers.c.id)
    .where(
        exists().where(
            inventories.c.provider_id == providers.c.id,
            inventories.c.class_id == CLASSES.id,
            CLASSES.name == bindparam("name"),
        )
    )
    .order_by(providers.c.id)
    .with_for_update(key_share=True, of=providers)
)


class PostgresBookTransaction:
    """`BookTransaction` on one connection."""

    def __init__(self, connection: asyncpg.Connection, names: NameTable) -> None:
        self.connection = connection
        self._names = names
        self._ids: dict[str, int] = {}  # the row ids of the providers that were read or created
        self._new_ids: list[int] = []

    @property
    def class_ids(self) -> Named:
        """The classes that this process knows."""
        return self._names.class_ids

    @property
    def trait_ids(self) -> Named:
        """The traits that this process knows."""
        return self._names.trait_ids

    # --- claims

    async def lock_groups(self, keys: Sequence[GroupKey]) -> None:
        """Lock server groups."""
        await members.lock(self.connection, keys)

    async def lock_claims(
        self,
        expected: Mapping[str, ConsumerState],
        wanted: Collection[str] | None,
        *,
        limited: Sequence[str] = (),
        alone: bool = False,
    ) -> Locked:
        """Lock and read consumers, then providers. New consumers are inserted as they are expected to be written."""
        rows = await claims.lock(self.connection, expected, wanted, limited=limited, alone=alone)
        await turn_for(len(rows[0]) + len(rows[1]) + len(rows[2]) + len(expected))
        class_names = await self._names.names_of(self, claims.classes_used(rows))
        self._ids.update((row[1], row[0]) for row in rows[2])
        return claims.as_locked(rows, expected, class_names)

    async def members(self, wanted: WantedMembers) -> Mapping[GroupKey, Members]:
        """The members that a decision needs."""
        return await members.read(self.connection, wanted)

    async def newest_holders(self, lost: Mapping[int, tuple[str, Lacking]]) -> Mapping[int, tuple[ClaimHolder, ...]]:
        """The newest consumers that hold what claims lacked."""
        return await holders.newest(self.connection, lost, self.class_ids)

    async def join(self, joined: Mapping[GroupKey, Collection[str]]) -> None:
        """Insert the new members of server groups."""
        await members.write(self.connection, joined)

    async def write_claims(
        self,
        decision: Decision,
        locked: Locked,
        changes: Sequence[Change] = (),
        most: Mapping[tuple[str, str], int] = NO_LIMITS,
    ) -> int:
        """Write a decision about the locked rows."""
        held = (consumer.holding for consumer in decision.consumers.values() if consumer is not None)
        await self.ids_of({provider for holding in held for provider in holding})
        return await claims.write(
            self.connection,
            decision,
            locked,
            changes,
            most,
            ids=self._ids,
            class_ids=self.class_ids,
        )

    async def ids_of(self, uuids: Collection[str]) -> Mapping[str, int]:
        """The row ids of providers, at least of those of these that exist."""
        missing = [uuid for uuid in uuids if uuid not in self._ids]
        if missing:
            self._ids.update(await self.connection.fetch(trees.READ_IDS, missing))
        return self._ids

    # --- trees

    async def lock_sources(self, roots: Collection[str]) -> tuple[Sources, Mapping[str, str | None]]:
        """Become the only writer of trees, and read the last reports of the sources of these roots."""
        rows = await self.connection.fetch(trees.LOCK_SOURCES, list(roots))
        return {(row[0], row[1]): ReportSource(*row[3:]) for row in rows}, {row[0]: row[2] for row in rows}

    async def retired_sources(self, limit: int) -> Sources:
        """The sources that have removed a tree which was in use and is not any more."""
        rows = await fetch(self.connection, trees.retired(limit))
        return {(row[0], row[1]): ReportSource(*row[2:]) for row in rows}

    async def release_sources(self, source: str, roots: Sequence[str], cell: str) -> None:
        """Record that another compute service may take over these roots of a source, those of the cell."""
        await fetch(self.connection, trees.release(source, roots, cell))

    async def holders(self, leaving: Sequence[Leaving]) -> list[str]:
        """The consumers that hold allocations of these classes of these providers."""
        known = [(uuid, self.class_ids[name]) for uuid, name in leaving if name in self.class_ids]
        rows = await self.connection.fetch(trees.HOLDERS, [uuid for uuid, _ in known], [number for _, number in known])
        return [row[0] for row in rows]

    async def lock_free(self, consumers: Sequence[str]) -> bool:
        """Lock consumers without waiting. Returns whether all are locked now."""
        return len(await self.connection.fetch(trees.LOCK_WITHOUT_WAITING, consumers)) == len(consumers)

    async def lock_trees(self, wanted: WantedTrees) -> tuple[int, dict[str, Provider]]:
        """Become the only writer of trees, and lock and read providers."""
        answer: str = await self.connection.fetchval(
            trees.LOCK, list(wanted.uuids), list(wanted.names), list(wanted.whole), list(wanted.creating)
        )
        shape, new_ids, ids, before = trees.loaded(answer)
        self._ids.update(ids)
        self._new_ids += new_ids
        return shape, before

    async def write_trees(
        self,
        before: Mapping[str, Provider],
        after: Mapping[str, Provider],
        changes: Sequence[Change] = (),
        *,
        sources: Mapping[Key, ReportSource] = NO_SOURCES,
        disowned: Sequence[str] = (),
    ) -> int:
        """Write the differences between `before` and `after`, and the last reports of sources."""
        new = [uuid for uuid in after if uuid not in before and uuid not in self._ids]
        self._ids.update(zip(new, self._new_ids, strict=False))
        del self._new_ids[: len(new)]
        await self.ids_of(trees.named_above(before, after))
        await turn_for(len(before) + len(after))
        rows = trees.rows_of(self._ids, before, after, (self.class_ids, self.trait_ids))
        rows |= {"sources": trees.rows_of_sources(sources)} if sources else {}
        rows |= {"disowned": list(disowned)} if disowned else {}
        if not rows:
            return 0
        numbered = feed.rows(changes) if changes else ([], [], [])
        number: int = await self.connection.fetchval(trees.WRITE, msgspec.json.encode(rows).decode(), *numbered)
        return number

    async def append(self, changes: Sequence[Change]) -> int:
        """Number the changes, as the last step of the transaction."""
        return await feed.append(self.connection, changes)

    # --- names

    async def read_names(self) -> tuple[Named, Named]:
        """The numbers of (all classes, all traits)."""
        classes, names = [
            dict(await fetch(self.connection, select(table.c.name, table.c.id))) for table in (resource_classes, traits)
        ]
        return classes, names

    async def add_names(self, classes: Sequence[str], traits: Sequence[str]) -> int:
        """Insert the names that are missing."""
        await fetch(self.connection, ONE_WRITER_OF_NAMES)
        added = 0
        for kind, names in ((NameKind.CLASS, classes), (NameKind.TRAIT, traits)):
            if names:
                wanted = select(func.unnest(literal(sorted(names), ARRAY(Text))))
                new = insert(NAMES[kind]).from_select(["name"], wanted).on_conflict_do_nothing(index_elements=["name"])
                added += len(await fetch(self.connection, new.returning(NAMES[kind].c.id)))
        return added

    async def delete_name(self, kind: NameKind, name: str) -> bool:
        """Remove a class or trait. Raises NameInUse."""
        table = NAMES[kind]
        try:  # a foreign key refuses it while a provider has the class or trait
            return bool(await fetch(self.connection, delete(table).where(table.c.name == name).returning(table.c.id)))
        except asyncpg.ForeignKeyViolationError as error:
            raise NameInUse(name) from error

    async def rename_class(self, old: str, new: str) -> dict[str, Provider] | None:
        """Give a class another name. Returns the providers that have it. Raises NameExists.

        The renamed class gets a new id, because other processes cache names by id and an id must always mean the same
        name. They can no longer write the old id, and they look up the new one, which they have not cached.
        """
        having = [row[0] for row in await fetch(self.connection, HAVING, name=old)]
        former = [row[0] for row in await fetch(self.connection, select(CLASSES.id).where(CLASSES.name == old))]
        if not former:
            return None
        try:
            [(number,)] = await fetch(self.connection, insert(resource_classes).values(name=new).returning(CLASSES.id))
        except asyncpg.UniqueViolationError as error:
            raise NameExists(new) from error
        for table in (inventories, allocations, project_usage):
            moved = update(table).where(table.c.class_id == former[0]).values(class_id=number)
            await fetch(self.connection, moved)
        await self.delete_name(NameKind.CLASS, old)
        return (await read_providers(self.connection, ids=having))[1]

    # --- the feed

    async def head(self) -> FeedHead:
        """The number of the newest committed change, and the id of its history."""
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
        return list((await read_providers(self.connection, providers_after(after, limit)))[1].values())
