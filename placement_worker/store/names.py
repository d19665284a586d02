"""The names and ids of resource classes and traits: a process's cache of two small tables.

An id always means the same name, so a cached pair cannot become wrong. But other processes may add and remove names: a
write with an id that was removed fails on a foreign key and is repeated (`NameTable.write`).
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

# How long names are cached before `refresh_if_old` reads them again.
TRUSTED_FOR_S = 5.0

READ_CLASSES = "SELECT name, id FROM resource_classes"
READ_TRAITS = "SELECT name, id FROM traits"


class StaleNames(Exception):
    """The book has a name that this process does not know, because another one added it."""


class _Numbers(dict[str, int]):
    """Ids by name. A missing name raises StaleNames."""

    def __missing__(self, name: str) -> int:
        raise StaleNames(name)


class NameTable:
    """The ids of class and trait names. The stores call `refresh` before they treat a missing name as unknown."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.class_ids: dict[str, int] = {}
        self.class_names: dict[int, str] = {}
        self.trait_ids: dict[str, int] = {}
        self._read_at = 0.0
        self._reads = 0
        self._newest = 0  # the number of the latest read whose result is in the cache

    async def open(self) -> None:
        """Insert the standard classes and traits of the installed libraries, and read all names."""
        async with self._database.raw() as connection:
            # Processes that start at the same time insert one after the other; otherwise they could deadlock on unique
            # keys.
            await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended('berth.placement.names', 0))")
            await _add(connection, "resource_classes", STANDARD_CLASSES)
            await _add(connection, "traits", os_traits.get_traits())
            await self._read(connection)

    async def refresh(self) -> None:
        """Read the names that other processes have added."""
        async with self._database.raw() as connection:
            await self._read(connection)

    async def refresh_if_old(self) -> None:
        """Read the names again when they have been cached for more than TRUSTED_FOR_S."""
        if monotonic() - self._read_at > TRUSTED_FOR_S:
            await self.refresh()

    async def ensure(self, classes: Iterable[str], traits: Iterable[str]) -> None:
        """Create missing names in a transaction of their own; an unused name does no harm."""
        new_classes = sorted(set(classes) - self.class_ids.keys())
        new_traits = sorted(set(traits) - self.trait_ids.keys())
        if not new_classes and not new_traits:
            return
        async with self._database.raw() as connection:
            await _add(connection, "resource_classes", new_classes)
            await _add(connection, "traits", new_traits)
        # The ids are read after the commit: an id from a transaction that was rolled back would stay in the cache.
        await self.refresh()

    async def write(
        self,
        apply: Callable[[asyncpg.Connection], Awaitable[Written]],
        ahead: Callable[[], Awaitable[None]] | None = None,
    ) -> Written:
        """Run one transaction. When it fails because of stale names, refresh them and run it once more.

        ahead: called before each of the two.
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
        """Return class names by id, at least these: another process may have created a class since the last read."""
        if not self.class_names.keys() >= class_ids:
            # Names are only added here: this transaction may see an older state than the cache, which other tasks use.
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
            return  # a read that began later has already ended, and is newer
        self._newest = number
        self.class_ids = _Numbers(classes)
        self.class_names = {row[1]: row[0] for row in classes}
        self.trait_ids = _Numbers(traits)
        self._read_at = monotonic()


async def _add(connection: asyncpg.Connection, table: str, names: Iterable[str]) -> None:
    await connection.execute(
        f"INSERT INTO {table} (name) SELECT unnest($1::text[]) ON CONFLICT (name) DO NOTHING", sorted(names)
    )
