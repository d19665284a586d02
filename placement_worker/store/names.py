"""The names and numbers of resource classes and traits: a process's cache of two small tables.

A number always means the same name, so a cached pair cannot become wrong. But other processes may add and remove names:
a write with a number that was removed raises StaleNames and is repeated (`PlacementService`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import os_traits

from bus.clock import Clock
from placement_worker.domain.values import STANDARD_CLASSES

# How long names are cached before `refresh_if_old` reads them again.
TRUSTED_FOR_S = 5.0


class StaleNames(Exception):
    """A write names a class or trait that placement does not have, or this process does not know: another process has
    removed or added it.
    """


class Numbers(dict[str, int]):
    """Numbers by name. A missing name raises StaleNames."""

    def __missing__(self, name: str) -> int:
        raise StaleNames(name)


class NameRows(Protocol):
    """The operations on the rows of names within one transaction."""

    async def read_names(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """The numbers of (all classes, all traits)."""

    async def add_names(self, classes: Sequence[str], traits: Sequence[str]) -> int:
        """Insert the names that are missing. Returns how many were."""


class NameTable:
    """The numbers of class and trait names. Placement calls `refresh` before it treats a missing name as unknown."""

    def __init__(self, transaction: Callable[[], AbstractAsyncContextManager[NameRows]], clock: Clock) -> None:
        self._transaction = transaction
        self._clock = clock
        self.class_ids: dict[str, int] = {}
        self.class_names: dict[int, str] = {}
        self.trait_ids: dict[str, int] = {}
        self._read_at = 0.0
        self._reads = 0
        self._newest = 0  # the number of the latest read whose result is in the cache

    async def open(self) -> None:
        """Insert the standard classes and traits of the installed libraries, and read all names."""
        async with self._transaction() as rows:
            await rows.add_names(sorted(STANDARD_CLASSES), sorted(os_traits.get_traits()))
            await self._read(rows)

    async def refresh(self) -> None:
        """Read the names that other processes have added."""
        async with self._transaction() as rows:
            await self._read(rows)

    async def refresh_if_old(self) -> None:
        """Read the names again when they have been cached for more than TRUSTED_FOR_S."""
        if self._clock.monotonic() - self._read_at > TRUSTED_FOR_S:
            await self.refresh()

    async def ensure(self, classes: Iterable[str], traits: Iterable[str]) -> None:
        """Create missing names in a transaction of their own; an unused name does no harm."""
        new_classes = sorted(set(classes) - self.class_ids.keys())
        new_traits = sorted(set(traits) - self.trait_ids.keys())
        if not new_classes and not new_traits:
            return
        async with self._transaction() as rows:
            await rows.add_names(new_classes, new_traits)
        # The numbers are read after the commit: one of a transaction that was rolled back would stay in the cache.
        await self.refresh()

    async def names_of(self, rows: NameRows, class_ids: set[int]) -> dict[int, str]:
        """Return class names by number, at least these: another process may have created a class since the last
        read.
        """
        if not self.class_names.keys() >= class_ids:
            # Names are only added here: this transaction may see an older state than the cache, which other tasks use.
            classes, traits = await rows.read_names()
            self.class_names |= {number: name for name, number in classes.items()}
            self.class_ids = Numbers({**classes, **self.class_ids})
            self.trait_ids = Numbers({**traits, **self.trait_ids})
        return self.class_names

    async def _read(self, rows: NameRows) -> None:
        self._reads += 1
        number = self._reads
        classes, traits = await rows.read_names()
        if number < self._newest:
            return  # a read that began later has already ended, and is newer
        self._newest = number
        self.class_ids = Numbers(classes)
        self.class_names = {number: name for name, number in classes.items()}
        self.trait_ids = Numbers(traits)
        self._read_at = self._clock.monotonic()
