"""Names and numbers of resource classes and traits: a process's cache of two small tables.

A number means one name for ever, so a fact about a number stays true; but another process may add names, and take
them away. A write with a name that has gone fails on a foreign key; see `NameTable.write`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from time import monotonic
from typing import TypeVar

import asyncpg
import os_traits

from bus.persistence.database import Database
from placement_worker.domain.names import STANDARD_CLASSES

Written = TypeVar("Written")

# How long names may be cached that another process has perhaps removed meanwhile.
TRUSTED_FOR_S = 5.0

READ_CLASSES = "SELECT name, id FROM resource_classes"
READ_TRAITS = "SELECT name, id FROM traits"


class StaleNames(Exception):
    """The book has a name that this process does not know, because another one added it."""


class _Numbers(dict[str, int]):
    """Numbers by name."""

    def __missing__(self, name: str) -> int:
        raise StaleNames(name)


class NameTable:
    """The numbers of class and trait names. A name that is missing is looked up again before it is called unknown."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.class_ids: dict[str, int] = {}
        self.class_names: dict[int, str] = {}
        self.trait_ids: dict[str, int] = {}
        self._read_at = 0.0
        self._reads = 0
        self._newest = 0  # of the reads, by when they began

    async def open(self) -> None:
        """Write down the standard classes and traits of the installed libraries, and read all."""
        async with self._database.raw() as connection:
            # One at a time: processes that start together would wait for each other's unique keys in any order.
            await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended('berth.placement.names', 0))")
            await _add(connection, "resource_classes", STANDARD_CLASSES)
            await _add(connection, "traits", os_traits.get_traits())
            await self._read(connection)

    async def refresh(self) -> None:
        """Read the names that other processes have added."""
        async with self._database.raw() as connection:
            await self._read(connection)

    async def refresh_if_old(self) -> None:
        """Read them again when they have been cached for long enough."""
        if monotonic() - self._read_at > TRUSTED_FOR_S:
            await self.refresh()

    async def ensure(self, classes: Iterable[str], traits: Iterable[str]) -> None:
        """Create missing names, in a transaction of its own: a name left unused is harmless."""
        new_classes = sorted(set(classes) - self.class_ids.keys())
        new_traits = sorted(set(traits) - self.trait_ids.keys())
        if not new_classes and not new_traits:
            return
        async with self._database.raw() as connection:
            await _add(connection, "resource_classes", new_classes)
            await _add(connection, "traits", new_traits)
        # Read when it is committed: a number seen in a transaction that was lost would be trusted for ever.
        await self.refresh()

    async def write(
        self,
        apply: Callable[[asyncpg.Connection], Awaitable[Written]],
        ahead: Callable[[], Awaitable[None]] | None = None,
    ) -> Written:
        """One transaction; when it went by names that are no longer so, once more with those that are.

        ahead: called before it, and before each retry.
        """
        if ahead is not None:
            await ahead()
        try:
            async with self._database.raw() as connection:
                return await apply(connection)
        except (asyncpg.ForeignKeyViolationError, StaleNames):
            await self.refresh()
        if ahead is not None:
            await ahead()
        async with self._database.raw() as connection:
            return await apply(connection)

    async def names_of(self, connection: asyncpg.Connection, class_ids: set[int]) -> dict[int, str]:
        """Class names by number, with at least these in it: another process may have created one since."""
        if not self.class_names.keys() >= class_ids:
            # Only added: this transaction may see an older state than the cache, which other tasks may already use.
            classes = await connection.fetch(READ_CLASSES)
            traits = await connection.fetch(READ_TRAITS)
            self.class_names |= {row[1]: row[0] for row in classes}
            self.class_ids = _Numbers({**dict(classes), **self.class_ids})
            self.trait_ids = _Numbers({**dict(traits), **self.trait_ids})
        return self.class_names

    async def _read(self, connection: asyncpg.Connection) -> None:
        self._reads += 1
        number = self._reads
        classes = await connection.fetch(READ_CLASSES)
        traits = await connection.fetch(READ_TRAITS)
        if number < self._newest:
            return  # a reader that began later was done sooner, and has seen more
        self._newest = number
        self.class_ids = _Numbers(classes)
        self.class_names = {row[1]: row[0] for row in classes}
        self.trait_ids = _Numbers(traits)
        self._read_at = monotonic()


async def _add(connection: asyncpg.Connection, table: str, names: Iterable[str]) -> None:
    await connection.execute(
        f"INSERT INTO {table} (name) SELECT unnest($1::text[]) ON CONFLICT (name) DO NOTHING", sorted(names)
    )
