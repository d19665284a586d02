"""The instances that wait for `SourceLookup`."""

from __future__ import annotations

import asyncio

from bus.contracts.cell import MAX_LOOKUP


class PendingLookups:
    """One conductor's. At most MAX_LOOKUP of a kind wait; one beyond them comes again."""

    def __init__(self) -> None:
        self._sources: set[str] = set()  # instances whose sources are to be looked for
        self._adoptions: set[str] = set()  # instances with a machine in quarantine to adopt
        self._due = asyncio.Event()

    def add_source(self, instance: str) -> None:
        """Its move is to be rolled back, if its source is there. It comes again with its deadline."""
        self._add(self._sources, instance)

    def add_adoption(self, instance: str) -> None:
        """A machine in quarantine is this instance's by an operator's decision. It comes again with each report of its
        host.
        """
        self._add(self._adoptions, instance)

    def _add(self, waiting: set[str], instance: str) -> None:
        if len(waiting) < MAX_LOOKUP:
            waiting.add(instance)
            self._due.set()

    async def take(self) -> tuple[list[str], list[str]]:
        """Wait for some; returns the sources and the adoptions, each in order, which wait no more."""
        await self._due.wait()
        self._due.clear()
        sources, self._sources = sorted(self._sources), set()
        adoptions, self._adoptions = sorted(self._adoptions), set()
        return sources, adoptions
