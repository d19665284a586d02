"""A replica in the process that owns the book: brought up to date before each read, straight from the store.

A read that begins after a write was committed sees it: every read waits for a look at the feed's head that began after
the read did. Reads that come together share one look.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from bus.contracts.placement import ChangesPage, FeedHead, SnapshotPage
from placement_worker.replica.book import Book
from placement_worker.replica.loading import Loading, apply

PAGE = 1000  # providers or changes, decoded in one turn of the event loop


class FeedSource(Protocol):
    """The book's own store."""

    async def head(self) -> FeedHead:
        """The newest committed change's number, and the history that it is of."""

    async def changes(self, after: int, limit: int, history: str = "") -> ChangesPage:
        """Committed changes after a number of a history, in order."""

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        """A page of whole providers by uuid, true at one feed number."""


class LocalReplica:
    """A book that is never behind the commits before it was read."""

    def __init__(self, source: FeedSource) -> None:
        self.book = Book()
        self._source = source
        self._loaded = False
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def fresh(self) -> Book:
        """The book with everything that was committed before this call. Raises Transient."""
        if self._next is not None:
            look = self._next  # it has not looked yet
        elif self._running is None or self._running.done():
            look = self._running = asyncio.create_task(self._catch_up(), name="replica catch-up")
        else:
            # One under way may have looked before this caller's write was there.
            look = self._next = asyncio.create_task(self._after(self._running), name="replica catch-up")
        await asyncio.shield(look)
        return self.book

    async def _after(self, running: asyncio.Task[None]) -> None:
        await asyncio.wait([running])
        self._running, self._next = self._next, None
        await self._catch_up()

    async def _catch_up(self) -> None:
        if not self._loaded:
            await self._load()
            return
        head = await self._source.head()
        if head.history != self.book.history or head.sequence < self.book.sequence:
            await self._load()  # the book was set back: restored, or a stand-by promoted
            return
        if head.sequence == self.book.sequence:
            return
        while True:  # ends: each page brings the book closer to a head that was read with it
            page = await self._source.changes(self.book.sequence, PAGE, self.book.history)
            if page.too_old or await apply(self.book, page.changes) is not None:
                await self._load()
                return
            if self.book.sequence >= page.head:
                return

    async def _load(self) -> None:
        """Take the whole book, then what changed while it was read."""
        loading = Loading()
        first: SnapshotPage | None = None
        after: str | None = None
        while True:  # ends: pages go on by uuid, and histories do not change all the time
            page = await self._source.snapshot(after, PAGE)
            if first is None or page.history != first.history:
                first, after = page, None
                loading = Loading()
            await loading.add(page.providers)
            if not page.more:
                break
            after = page.providers[-1].uuid
        loading.finish(self.book, first.sequence, first.history)
        self._loaded = True
        page_of_changes = await self._source.changes(self.book.sequence, PAGE, self.book.history)
        while page_of_changes.changes and await apply(self.book, page_of_changes.changes) is None:
            page_of_changes = await self._source.changes(self.book.sequence, PAGE, self.book.history)
