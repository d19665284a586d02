"""A replica in the process that owns the book. It is brought up to date from the store before each read.

A read sees every write that was committed before the read began: each read waits for a query of the feed's head that
began after the read. Concurrent reads share one query.
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
        """The number of the newest committed change, and the id of its history."""

    async def changes(self, after: int, limit: int, history: str = "") -> ChangesPage:
        """The committed changes after a number of a history, in order."""

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        """A page of whole providers in the order of their uuids, as of one number of the feed."""


class LocalReplica:
    """A book that contains, at each read, everything that was committed before the read."""

    def __init__(self, source: FeedSource) -> None:
        self.book = Book()
        self._source = source
        self._loaded = False
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
        if not self._loaded:
            await self._load()
            return
        head = await self._source.head()
        if head.history != self.book.history or head.sequence < self.book.sequence:
            await self._load()  # the book was set back: restored, or its standby promoted
            return
        if head.sequence == self.book.sequence:
            return
        while True:  # ends: each page brings the book closer to the head that was read with it
            page = await self._source.changes(self.book.sequence, PAGE, self.book.history)
            if page.too_old or await apply(self.book, page.changes) is not None:
                await self._load()
                return
            if self.book.sequence >= page.head:
                return

    async def _load(self) -> None:
        """Read the whole book, then the changes that were committed meanwhile."""
        loading = Loading()
        first: SnapshotPage | None = None
        after: str | None = None
        while True:  # ends: pages continue by uuid, and the history seldom changes
            page = await self._source.snapshot(after, PAGE)
            if first is not None and page.history != first.history:  # this page begins where the former one ended
                first, after, loading = None, None, Loading()
                continue
            first = first or page
            await loading.add(page.providers)
            if not page.more:
                break
            after = page.providers[-1].uuid
        loading.finish(self.book, first.sequence, first.history)
        self._loaded = True
        page_of_changes = await self._source.changes(self.book.sequence, PAGE, self.book.history)
        while page_of_changes.changes and await apply(self.book, page_of_changes.changes) is None:
            page_of_changes = await self._source.changes(self.book.sequence, PAGE, self.book.history)
