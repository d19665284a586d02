"""The book for the REST API in PostgreSQL. A group of writes is one transaction, and each read is one statement."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence, Set
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import asyncpg

from bus.persistence.database import Database
from placement_worker.domain.allocations import (
    AllocationOutcome,
    AllocationWrite,
    classes_of_allocations,
    entries_of_allocations,
)
from placement_worker.domain.refusal import WriteRefusal
from placement_worker.domain.reshape import Reshape
from placement_worker.domain.trees import (
    TreeOutcome,
    TreeWrite,
    classes_of_trees,
    entries_of_tree,
    traits_of_trees,
)
from placement_worker.offload import OffloadThread, run_sized
from placement_worker.store import rest_allocations, rest_names, rest_reads, rest_trees
from placement_worker.store.names import NameTable
from placement_worker.store.rest_port import (
    AllocationRow,
    InventoryRecord,
    Listing,
    NameInUse,
    NameKind,
    NameRow,
    Unstorable,
    UsageRow,
)

Written = TypeVar("Written")

# More than the transactions at once: a group of each kind, and a reshape on each other connection.
MAX_WRITERS = 1000


class PostgresRest:
    """`RestStore` on PostgreSQL. It shares the connection pool and the cached names with the store that serves
    the bus.
    """

    def __init__(self, database: Database, names: NameTable) -> None:
        self._database = database
        self._names = names
        self._offload = OffloadThread("write", max_waiting=MAX_WRITERS)

    # --- writes

    async def write_trees(self, writes: Sequence[TreeWrite]) -> list[TreeOutcome]:
        """A group of writes of providers, in order, each with its own outcome."""
        size = sum(map(entries_of_tree, writes))
        await self._know_classes(await run_sized(self._offload, size, lambda: classes_of_trees(writes)))
        await self._know_traits(await run_sized(self._offload, size, lambda: traits_of_trees(writes)))
        return await self._write(lambda connection: rest_trees.apply(connection, writes, self._names, self._offload))

    async def write_allocations(self, items: Sequence[AllocationWrite]) -> list[AllocationOutcome]:
        """A group of writes of allocations, in order, each with its own outcome."""
        size = sum(map(entries_of_allocations, items))
        await self._know_classes(await run_sized(self._offload, size, lambda: classes_of_allocations(items)))
        return await self._write(
            lambda connection: rest_allocations.apply(connection, items, self._names, self._offload)
        )

    async def reshape(self, item: Reshape) -> WriteRefusal | None:
        """Apply one reshape."""
        await self._know_classes(name for _, inventories in item.inventories.values() for name in inventories)
        return await self._write(
            lambda connection: rest_allocations.apply_reshape(connection, item, self._names, self._offload)
        )

    async def _write(self, apply: Callable[[asyncpg.Connection], Awaitable[Written]]) -> Written:
        with _storable():
            return await self._names.write(apply)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[asyncpg.Connection]:
        with _storable():
            async with self._database.raw() as connection:
                yield connection

    # --- names

    async def _know_classes(self, named: Iterable[str]) -> None:
        """Refresh the names when the writes name a class that is not cached: another process may have created it."""
        if not self._names.class_ids.keys() >= set(named):
            await self._names.refresh()

    async def _know_traits(self, named: Set[str]) -> None:
        if not self._names.trait_ids.keys() >= named:
            await self._names.refresh()

    async def unknown_classes(self, named: Iterable[str]) -> list[str]:
        """The names among these that are no class of the book, in order."""
        wanted = list(dict.fromkeys(named))
        await self._names.refresh_if_old()
        await self._know_classes(wanted)
        return [name for name in wanted if name not in self._names.class_ids]

    async def unknown_traits(self, named: Iterable[str]) -> list[str]:
        """The names among these that are no trait of the book, in order."""
        wanted = list(dict.fromkeys(named))
        await self._know_traits(set(wanted))
        return [name for name in wanted if name not in self._names.trait_ids]

    async def refresh_names(self) -> None:
        """Read the names that other processes have changed."""
        await self._names.refresh()

    async def name(self, kind: NameKind, name: str) -> NameRow | None:
        """A class or trait by name."""
        async with self._connection() as connection:
            return await rest_names.one(connection, kind, name)

    async def create_name(self, kind: NameKind, name: str) -> bool:
        """Create a class or trait. Returns False when it exists."""
        async with self._connection() as connection:
            created = await rest_names.create(connection, kind, name)
        if created:
            await self._names.refresh()
        return created

    async def delete_name(self, kind: NameKind, name: str) -> bool:
        """Remove a class or trait. Returns False when it does not exist. Raises NameInUse."""
        try:
            async with self._connection() as connection:
                deleted = await rest_names.delete(connection, kind, name)
        except asyncpg.ForeignKeyViolationError as error:
            raise NameInUse(name) from error
        await self._names.refresh()
        return deleted

    async def rename_class(self, old: str, new: str) -> bool | None:
        """Give a class another name. Returns False when the class does not exist, None when the name is taken."""
        try:
            async with self._connection() as connection:
                renamed = await rest_names.rename_class(connection, old, new)
        except asyncpg.UniqueViolationError:
            return None
        await self._names.refresh()
        return renamed

    async def resource_classes(self) -> list[NameRow]:
        """All classes, standard ones first."""
        async with self._connection() as connection:
            return await rest_names.classes(connection)

    async def trait_names(self, names: list[str] | None, prefix: str | None, associated: bool | None) -> list[NameRow]:
        """All traits with one of these names, with this prefix, that some provider has, or that none has."""
        async with self._connection() as connection:
            return await rest_names.traits(connection, names, prefix, associated)

    # --- reads

    async def providers(self, listing: Listing) -> Sequence[Sequence[Any]]:
        """Return the providers that meet the conditions, oldest first. Each is a sequence of the fields of
        ProviderRow.
        """
        async with self._connection() as connection:
            return await rest_reads.providers(connection, listing, self._names)

    async def inventories(self, uuid: str) -> tuple[int, list[InventoryRecord]] | None:
        """(generation, inventories by class) of a provider, None when there is none."""
        async with self._connection() as connection:
            return await rest_reads.inventories(connection, uuid)

    async def usages(self, uuid: str) -> tuple[int, dict[str, int]] | None:
        """(generation, {class: used}) of a provider, None when there is none."""
        async with self._connection() as connection:
            return await rest_reads.usages(connection, uuid)

    async def traits(self, uuid: str) -> tuple[int, dict[str, float]] | None:
        """(generation, {trait: when it was made}) of a provider, None when there is none."""
        async with self._connection() as connection:
            return await rest_reads.traits(connection, uuid)

    async def aggregates(self, uuid: str) -> tuple[int, list[str]] | None:
        """(generation, aggregates) of a provider, None when there is none."""
        async with self._connection() as connection:
            return await rest_reads.aggregates(connection, uuid)

    async def allocations_of_consumer(self, uuid: str) -> list[AllocationRow]:
        """The allocations of a consumer, by provider and class."""
        async with self._connection() as connection:
            return await rest_reads.allocations_of_consumer(connection, uuid)

    async def allocations_of_provider(self, uuid: str) -> tuple[int, list[AllocationRow]] | None:
        """(generation, allocations of a provider, by consumer and class), None when it does not exist."""
        async with self._connection() as connection:
            return await rest_reads.allocations_of_provider(connection, uuid)

    async def totals(self, project_id: str, user_id: str | None, consumer_type: str | None) -> Sequence[UsageRow]:
        """The amounts that a project's (and user's, and type's) consumers hold, by type and class.

        "" is the unknown type.
        """
        async with self._connection() as connection:
            return await rest_reads.totals(connection, project_id, user_id, consumer_type)


@contextmanager
def _storable() -> Iterator[None]:
    try:
        yield
    except asyncpg.DataError as error:
        raise Unstorable(str(error)) from error
