"""The book as the REST API uses it: groups of writes as transactions, reads as single statements."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import asyncpg

from bus.persistence.database import Database
from placement_worker.domain.allocations import AllocationOutcome, AllocationWrite
from placement_worker.domain.refusal import WriteRefusal
from placement_worker.domain.reshape import Reshape
from placement_worker.domain.trees import AddStock, PutStock, SetStocks, SetTraits, TreeOutcome, TreeWrite
from placement_worker.store import rest_allocations, rest_names, rest_trees
from placement_worker.store.names import NameTable
from placement_worker.store.rest_names import NameRow

CLASSES, TRAITS = "resource_classes", "traits"


class InUse(Exception):
    """A class or trait that some provider has cannot go."""


class RestStore:
    """Shares its pool and its names with the store that serves the bus."""

    def __init__(self, database: Database, names: NameTable) -> None:
        self._database = database
        self._names = names

    @asynccontextmanager
    async def read(self) -> AsyncIterator[asyncpg.Connection]:
        """A connection for one of `rest_reads`."""
        async with self._database.raw() as connection:
            yield connection

    # --- writes

    async def write_trees(self, writes: Sequence[TreeWrite]) -> list[TreeOutcome]:
        """A group of writes of providers, each with its own outcome. Raises Transient."""
        classes: set[str] = set()
        traits: set[str] = set()
        for write in writes:
            if isinstance(write, SetStocks):
                classes.update(write.stocks)
            elif isinstance(write, PutStock | AddStock):
                classes.add(write.resource_class)
            elif isinstance(write, SetTraits):
                traits.update(write.traits)
        await self._know_classes(classes)
        await self.trait_ids(traits)
        return await self._names.write(lambda connection: rest_trees.apply(connection, writes, self._names))

    async def write_allocations(self, items: Sequence[AllocationWrite]) -> list[AllocationOutcome]:
        """A group of writes of allocations, each with its own outcome. Raises Transient."""
        named = {
            name
            for item in items
            for write in getattr(item, "writes", ())
            for resources in write.holding.values()
            for name in resources
        }
        await self._know_classes(named)
        return await self._names.write(lambda connection: rest_allocations.apply(connection, items, self._names))

    async def reshape(self, item: Reshape) -> WriteRefusal | None:
        """One reshape. Raises Transient."""
        named = {name for _, stocks in item.inventories.values() for name in stocks}
        await self._know_classes(named)
        return await self._names.write(lambda connection: rest_allocations.apply_reshape(connection, item, self._names))

    # --- names

    async def _know_classes(self, named: Iterable[str]) -> None:
        """A class that another process has just created is not unknown."""
        if not self._names.class_ids.keys() >= set(named):
            await self._names.refresh()

    async def trait_ids(self, named: Iterable[str]) -> tuple[dict[str, int], list[str]]:
        """({trait: number}, names that are no trait, in order)."""
        wanted = list(dict.fromkeys(named))
        if not self._names.trait_ids.keys() >= set(wanted):
            await self._names.refresh()
        known = self._names.trait_ids
        return {name: known[name] for name in wanted if name in known}, [name for name in wanted if name not in known]

    async def names_moved(self) -> None:
        """Another process has made, renamed or removed a class: read again."""
        await self._names.refresh()

    async def class_ids(self, named: Iterable[str]) -> tuple[dict[str, int], list[str]]:
        """({class: number}, names that are no class, in order)."""
        wanted = list(dict.fromkeys(named))
        await self._names.refresh_if_old()
        await self._know_classes(wanted)
        known = self._names.class_ids
        return {name: known[name] for name in wanted if name in known}, [name for name in wanted if name not in known]

    async def name(self, table: str, name: str) -> NameRow | None:
        """A class or trait by name."""
        async with self.read() as connection:
            return await rest_names.one(connection, table, name)

    async def create_name(self, table: str, name: str) -> bool:
        """Make a class or trait; False when it was there."""
        async with self._database.raw() as connection:
            created = await rest_names.create(connection, table, name)
        if created:
            await self._names.refresh()
        return created

    async def delete_name(self, table: str, name: str) -> bool:
        """Remove a class or trait; False when it was not there. Raises InUse."""
        try:
            async with self._database.raw() as connection:
                deleted = await rest_names.delete(connection, table, name)
        except asyncpg.ForeignKeyViolationError as error:
            raise InUse(name) from error
        await self._names.refresh()
        return deleted

    async def rename_class(self, old: str, new: str) -> bool | None:
        """Give a class another name; False when there is none, None when the name is taken."""
        try:
            async with self._database.raw() as connection:
                renamed = await rest_names.rename_class(connection, old, new)
        except asyncpg.UniqueViolationError:
            return None
        await self._names.refresh()
        return renamed
