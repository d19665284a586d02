"""Brings a replica up to the head of the feed: by changes, after a snapshot where they do not reach back.

A snapshot is loaded page by page, with turns of the event loop in between. Its pages are of several numbers of the
feed: until the changes that were committed meanwhile are applied to them, they are a state that never was. So the
replica keeps its former content for readers until then, and claims in flight are still added to it and dropped from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from bus.contracts.feed import Change, ChangesPage, FeedHead, SnapshotPage
from bus.faults import Transient
from bus.yielding import YieldingParts, yield_to_loop
from placement_worker.replica.replica import Gap, Replica
from placement_worker.replica.sharing import sharing_of

log = structlog.get_logger(__name__)

# The providers or changes that are applied in one turn of the event loop, which takes some 4 ms.
AT_ONCE = 256

PAGE = 1000  # providers or changes in one request, decoded in one turn of the event loop
MAX_PAGES = 5000  # of one snapshot

# The snapshots that one round takes, when more changes are committed during each than the feed keeps.
MAX_LOADS = 3


class SnapshotOutrun(Transient):
    """During each snapshot more changes were committed than `placement.feed_retention` keeps."""

    code = "replica.snapshot_outrun"


class SnapshotEndless(Exception):
    """A snapshot did not end within the bound of pages, or a page did not continue the one before: the sender is
    broken.
    """

    code = "replica.snapshot_endless"


class FeedClient(Protocol):
    """Where the replica and its feed are read."""

    async def changes(self, after: int, limit: int, incarnation: str = "") -> ChangesPage:
        """The committed changes after a number of an incarnation, in order."""

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        """A page of whole providers in the order of their uuids, as of one number of the feed."""


class CatchUp:
    """Brings one replica up to date, one round at a time.

    stale: the replica is to be loaded; until then it gets no changes. on_stale: called when the feed does not reach
    back to the replica any more. on_page: called when changes up to this head have been applied to the replica, or when
    a load has replaced its content (True).
    """

    def __init__(self, replica: Replica, feed: FeedClient) -> None:
        self.replica = replica
        self.stale = True
        self.on_stale: Callable[[], None] = lambda: None
        self.on_page: Callable[[int, bool], Awaitable[None]] | None = None
        self._feed = feed
        self._loaded: Replica | None = None  # complete, but not up to date

    async def run(self) -> None:
        """Bring the replica up to the feed's head. Raises SnapshotOutrun, SnapshotEndless and what the feed raises; the
        next round goes on from there.
        """
        if not self.stale:
            if await self._follow(self.replica, self.on_page):
                return
            self.stale = True
            self.on_stale()
        for _ in range(MAX_LOADS):
            loaded = self._loaded = self._loaded or await self._read_snapshot()
            followed = await self._follow(loaded)
            self._loaded = None
            if followed:
                self.replica.apply_snapshot(loaded)
                self.replica.rows_of_roots()  # every search needs this and the next table
                sharing_of(self.replica)
                self.stale = False
                if self.on_page is not None:
                    await self.on_page(self.replica.sequence, True)
                return
            log.warning("replica.snapshot_outrun", providers=len(loaded), sequence=loaded.sequence)
        raise SnapshotOutrun(f"{len(loaded)} providers were read {MAX_LOADS} times")

    async def _follow(self, replica: Replica, on_page: Callable[[int, bool], Awaitable[None]] | None = None) -> bool:
        """Apply the changes up to the head that is read with them. False: the feed does not reach back to the replica
        (it was trimmed, or restored and has another incarnation), has a hole, or ends below its head.
        """
        while True:  # ends: each page advances the replica
            after = replica.sequence
            page = await self._feed.changes(after, PAGE, replica.incarnation)
            is_other = bool(replica.incarnation) and page.incarnation not in ("", replica.incarnation)
            if page.too_old or is_other or page.head < after:
                log.info("replica.stale", too_old=page.too_old, head=page.head, sequence=after)
                return False
            await apply(replica, page.changes)
            if replica.sequence == after < page.head:
                log.warning("replica.answer_gap", head=page.head, sequence=after)
                return False
            if on_page is not None:
                await on_page(page.head, False)
            if replica.sequence >= page.head:
                return True

    async def _read_snapshot(self) -> Replica:
        """Read all of placement. It is of the number of its first page, the oldest one."""
        loaded, after = Replica(), None
        for _ in range(MAX_PAGES):
            page = await self._feed.snapshot(after, PAGE)
            if after is None:
                loaded.sequence, loaded.incarnation = page.sequence, page.incarnation
            elif page.incarnation != loaded.incarnation:  # this page begins where the former one ended
                loaded, after = Replica(), None
                continue
            async for part in YieldingParts(page.providers, AT_ONCE):
                loaded.add(part)
            await yield_to_loop()
            if not page.more:
                return loaded
            if not page.providers or (after is not None and page.providers[-1].uuid <= after):
                break
            after = page.providers[-1].uuid
        raise SnapshotEndless(f"after {len(loaded)} providers")


async def apply(replica: Replica, changes: Sequence[Change]) -> Gap | None:
    """Apply changes as `Replica.apply` does, with turns of the event loop in between."""
    for start in range(0, len(changes), AT_ONCE):
        gap = replica.apply(changes[start : start + AT_ONCE])
        if gap is not None:
            return gap
        if len(changes) > AT_ONCE:
            await yield_to_loop()
    return None


class LocalFeed(FeedClient, Protocol):
    """The replica's own store."""

    async def head(self) -> FeedHead:
        """The number of the newest committed change, and the id of its incarnation."""


class LocalReplica:
    """A replica that contains, at each read, everything that was committed before the read."""

    def __init__(self, feed: LocalFeed) -> None:
        self.replica = Replica()
        self._feed = feed
        self._follower = CatchUp(self.replica, feed)
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def fresh(self) -> Replica:
        """Return the replica with everything that was committed before this call. Raises Transient."""
        if self._next is not None:
            look = self._next  # it has not queried the head yet
        elif self._running is None or self._running.done():
            look = self._running = asyncio.create_task(self._catch_up(), name="replica catch-up")
        else:
            # A query under way may have begun before this caller's write was committed.
            look = self._next = asyncio.create_task(self._after(self._running), name="replica catch-up")
        await asyncio.shield(look)
        return self.replica

    async def _after(self, running: asyncio.Task[None]) -> None:
        await asyncio.wait([running])
        self._running, self._next = self._next, None
        await self._catch_up()

    async def _catch_up(self) -> None:
        if not self._follower.stale:
            head = await self._feed.head()
            if (head.incarnation, head.sequence) == (self.replica.incarnation, self.replica.sequence):
                return
        await self._follower.run()
