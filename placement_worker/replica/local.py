"""A replica in the process that owns the book. It is brought up to date from the store before each read.

A read sees every write that was committed before the read began: each read waits for a query of the feed's head that
began after the read. Concurrent reads share one query.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from bus.contracts.feed import FeedHead
from placement_worker.replica.book import Book
from placement_worker.replica.catch_up import CatchUp, FeedSource


class LocalSource(FeedSource, Protocol):
    """The book's own store."""

    async def head(self) -> FeedHead:
        """The number of the newest committed change, and the id of its history."""


class LocalReplica:
    """A book that contains, at each read, everything that was committed before the read."""

    def __init__(self, source: LocalSource) -> None:
        self.book = Book()
        self._source = source
        self._follower = CatchUp(self.book, source)
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def fresh(self) -> Book:
        """Return the book with everything that was committed before this call. Raises Transient."""
        if self._next is not None:
            look = self._next  # it has not queried the head yet
        elif self._running is None or self._running.done():
            look = self._running = asyncio.create_task(self._catch_up(), name="replica catch-up")
        else:
            # A query under way may have begun before this caller's write was committed.
            look = self._next = asyncio.create_task(self._after(self._running), name="replica catch-up")
        await asyncio.shield(look)
        return self.book

    async def _after(self, running: asyncio.Task[None]) -> None:
        await asyncio.wait([running])
        self._running, self._next = self._next, None
        await self._catch_up()

    async def _catch_up(self) -> None:
        if not self._follower.stale:
            head = await self._source.head()
            if (head.history, head.sequence) == (self.book.history, self.book.sequence):
                return
        await self._follower.run()
