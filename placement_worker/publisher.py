"""Publishes the change feed: soon after this process's commits, and periodically what a process that died has left."""

from __future__ import annotations

import asyncio

import structlog

from bus.bus import Bus
from bus.clock import Clock, shared_delay_s
from bus.contracts.placement import FeedChanges
from bus.faults import Transient
from bus.port import BusError, BusForbidden
from placement_worker import metrics
from placement_worker.config import PlacementConfig
from placement_worker.store.port import PlacementStore

log = structlog.get_logger("placement.feed")

MAX_NAMED_ROOTS = 10  # roots in one line of the log, at most
STALL_S = 0.5  # wait between attempts while the database or the bus is unavailable
MANY_CLAIMS = 16  # so many claims that are not published end the wait for further ones
TAKEN_WAIT_S = 0.02  # wait before checking whether the publishing process has published this one's changes, too


class FeedPublisher:
    """Publishes for one placement process. The store lets one process publish at a time, in order."""

    def __init__(self, store: PlacementStore, bus: Bus, *, clock: Clock, config: PlacementConfig) -> None:
        self._store = store
        self._bus = bus
        self._clock = clock
        self._config = config
        self._committed = asyncio.Event()
        self._at_once = False
        self._claims = 0  # committed since the last turn began
        self._gathering: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Record that changes were committed that are published at once."""
        self._at_once = True
        self._committed.set()
        self._end_gathering()

    def wake_later(self, claims: int) -> None:
        """Record that so many claims were committed. Their replies leave first, and their changes wait for others."""
        self._claims += claims
        self._committed.set()
        if self._claims >= MANY_CLAIMS:
            self._end_gathering()

    async def run(self) -> None:
        """Publish whenever changes were committed, until cancelled.

        After a pause the changes are published at once, but those of claims linger. While commits continue, they are
        published at the interval, because a turn takes two round trips, for one change or a thousand.
        """
        while True:
            await self._committed.wait()
            if not self._at_once:
                await self._linger()
            self._committed.clear()
            self._at_once, self._claims = False, 0
            try:
                await self._publish_all()
            except (Transient, BusError) as error:
                await self._stall(error)
                self._committed.set()
            await self._clock.sleep(self._config.feed_gap_s)

    async def _linger(self) -> None:
        """Wait for the shorter time, and while few claims have come for the longer one."""
        config = self._config
        await self._clock.sleep(config.feed_linger_s)
        if self._at_once or self._claims >= MANY_CLAIMS or config.feed_gather_s <= config.feed_linger_s:
            return
        left_s = shared_delay_s(self._clock.monotonic(), config.feed_gather_s - config.feed_linger_s)
        self._gathering = asyncio.create_task(self._clock.sleep(left_s))
        try:
            await asyncio.wait([self._gathering])
        finally:
            self._end_gathering()

    def _end_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    async def announce(self) -> None:
        """Publish the newest number at intervals, and look for changes that other processes left unpublished, until
        cancelled.
        """
        while True:
            try:
                newest = await self._store.newest()
                if newest.renewed:
                    log.warning("feed.new_history")  # restored, or its standby promoted: replicas load snapshots
                metrics.HEAD.set(newest.head.sequence)
                await self._bus.publish(newest.head)
                if newest.unpublished:
                    self.wake()
            except (Transient, BusError) as error:
                await self._stall(error)
                self.wake()
            await self._clock.sleep(self._config.head_interval_s)

    async def trim(self) -> None:
        """Purge rows that are no longer needed, until cancelled. After a full batch the next one follows at once."""
        config = self._config
        more = False
        while True:
            if not more:
                await self._clock.sleep(config.trim_interval_s)
            try:
                more = await self._store.trim(
                    keep_changes=config.feed_retention,
                    keep_fences_s=config.fence_retention_s,
                    keep_sources_s=config.source_retention_s,
                    limit=config.trim_batch,
                )
                more |= await self._remove_retired_trees()
            except Transient as error:
                more = False
                await self._stall(error)

    async def _remove_retired_trees(self) -> bool:
        removed = await self._store.remove_retired_trees(self._config.trim_batch)
        if removed:
            log.info("inventory.retired_trees_removed", roots=removed[:MAX_NAMED_ROOTS], count=len(removed))
            self.wake()
        return len(removed) >= self._config.trim_batch

    async def drain(self, grace_s: float) -> None:
        """Publish committed changes within the grace time (seconds). Another process publishes the rest."""
        try:
            async with asyncio.timeout(grace_s):
                await self._publish_all()
        except (Transient, BusError, TimeoutError) as error:
            log.warning("feed.left_over", reason=str(error))

    async def _publish_all(self) -> None:
        while True:
            published = await self._store.publish(self._send, self._config.feed_page)
            metrics.PUBLISHED.inc(published.count)
            if published.taken:
                await self._clock.sleep(TAKEN_WAIT_S)
            elif not published.more:
                return

    async def _send(self, changes: FeedChanges) -> None:
        causes = {cause for change in changes.changes for cause in change.causes or ("",)}
        # A message names one cause or none; each change in it names its own.
        cause = causes.pop() if len(causes) == 1 else ""
        await self._bus.publish(changes, cause=cause)

    async def _stall(self, error: Transient | BusError) -> None:
        if isinstance(error, BusForbidden):
            raise error  # a wait does not help: the process must log the error and stop
        metrics.FEED_STALLS.labels(error.code).inc()
        log.warning("feed.waits", code=error.code, reason=str(error))
        await self._clock.sleep(STALL_S)
