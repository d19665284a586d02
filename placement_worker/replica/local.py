"""A replica in the process that owns the book. It is brought up to date from the store before each read.

A read sees every write that was committed before the read began: each read waits for a query of the feed's head that
began after the read. Concurrent reads share one query.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from bus.contracts.placement import ChangesPage, FeedHead, SnapshotPage
from bus.faults import Transient
from placement_worker.replica.book import Book
from placement_worker.replica.loading import Loading, apply

log = structlog.get_logger(__name__)

PAGE = 1000  # providers or changes, decoded in one turn of the event loop

# The snapshots that one read takes, when more changes are committed during each than the feed keeps.
MAX_LOADS = 3


class SnapshotOutrun(Transient):
    """During each snapshot more changes were committed than `placement.feed_retention` keeps."""

    code = "replica.snapshot_outrun"


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
        if not await self._follow(self.book):
            await self._load()

    async def _follow(self, book: Book) -> bool:
        """Bring a book up to the feed's head. False: it cannot be, since the feed does not reach back to it, or has a
        hole. No other method reads changes.
        """
        while True:  # ends: each page brings the book closer to the head that was read with it
            before = book.sequence
            page = await self._source.changes(before, PAGE, book.history)
            if page.too_old or await apply(book, page.changes) is not None:
                return False
            if book.sequence >= page.head:
                return True
            if book.sequence == before:
                return False

    # until: bus (one `CatchUp` loads and follows for this replica and the schedulers' `Follower`)
    async def _load(self) -> None:
        """Replace the book by a snapshot together with the changes that were committed while it was read.

        The pages of a snapshot are of several numbers of the feed: without these changes they are a state that never
        was, so they are read again, and readers keep the former book until then. Raises SnapshotOutrun.
        """
        for _ in range(MAX_LOADS):
            loading, first = await self._read_snapshot()
            loaded = loading.book_at(first.sequence, first.history)
            if await self._follow(loaded):
                loading.finish(self.book, loaded.sequence, loaded.history)
                self._loaded = True
                return
            log.warning("replica.snapshot_outrun", providers=len(loading), sequence=first.sequence)
        raise SnapshotOutrun(f"{len(loading)} providers were read {MAX_LOADS} times")

    async def _read_snapshot(self) -> tuple[Loading, SnapshotPage]:
        """Read the whole book. Returns it with its first page, of the oldest number."""
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
                return loading, first
            after = page.providers[-1].uuid
