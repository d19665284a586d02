"""Publishes the change feed: soon after this process's commits, and periodically what a process that died has left."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.base import Message
from bus.contracts.feed import FeedChanges, changes_in
from bus.faults import Transient
from bus.transport import BusError, BusForbidden, PublishRefused
from placement_worker import metrics
from placement_worker.config import PlacementConfig
from placement_worker.service import PlacementService

log = structlog.get_logger("placement.feed")

MAX_NAMED_ROOTS = 10  # roots in one line of the log, at most
STALL_S = 0.5  # wait between attempts while the database or the bus is unavailable
TAKEN_WAIT_S = 0.02  # wait before checking whether the publishing process has published this one's changes, too


class FeedPublisher:
    """Publishes for one placement process. The store lets one process publish at a time, in order."""

    def __init__(self, store: PlacementService, bus: Bus, *, clock: Clock, config: PlacementConfig) -> None:
        self._store = store
        self._bus = bus
        self._clock = clock
        self._config = config
        self._committed = asyncio.Event()
        self._at_once = False

    def wake(self, *, at_once: bool = True) -> None:
        """Record that changes were committed. at_once: publish without lingering; False after claims, so that their
        replies leave first.
        """
        self._at_once |= at_once
        self._committed.set()

    async def run(self) -> None:
        """Publish whenever changes were committed, until cancelled.

        After a pause the changes are published at once (but see `wake`). While commits continue, they are published at
        the interval, because a turn takes two round trips, for one change or a thousand.
        """
        while True:
            await self._committed.wait()
            if not self._at_once:
                await self._clock.sleep(self._config.feed_linger_s)
            self._committed.clear()
            self._at_once = False
            try:
                await self._publish_all()
            except (Transient, BusError) as error:
                await self._stall(error)
                self._committed.set()
            await self._clock.sleep(self._config.feed_gap_s)

    async def announce(self) -> None:
        """Publish the newest number at intervals, and look for changes that other processes left unpublished, until
        cancelled.
        """
        while True:
            try:
                newest = await self._store.newest()
                if newest.renewed:
                    log.warning("feed.new_incarnation")  # restored, or its standby promoted: replicas load snapshots
                metrics.HEAD.set(newest.head.sequence)
                await self._publish(newest.head)
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
                    keep_ended_attempts_s=config.ended_attempt_retention_s,
                    keep_reporters_s=config.reporter_retention_s,
                    limit=config.trim_batch,
                )
                more |= await self._remove_retired_trees()
            except Transient as error:
                more = False
                await self._stall(error)

    async def _remove_retired_trees(self) -> bool:
        kept_s = self._config.reporter_retention_s
        removed = await self._store.remove_retired_trees(self._config.trim_batch, keep_given_s=kept_s)
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
        # Only rows of REST writes name causes: the others are not decoded.
        caused = [row for row in changes.rows if b'"causes"' in msgspec.json.encode(row.changes)]
        causes = {cause for change in changes_in(caused) for cause in change.causes or ("",)}
        causes |= {""} if len(caused) < len(changes.rows) else set()
        # A message names one cause or none; each change in it names its own.
        cause = causes.pop() if len(causes) == 1 else ""
        await self._publish(changes, cause)

    async def _publish(self, message: Message, cause: str = "") -> None:
        """Where one queue is full, the others have it; and who has missed some reads them from placement."""
        with suppress(PublishRefused):
            await self._bus.publish(message, cause=cause)

    async def _stall(self, error: Transient | BusError) -> None:
        if isinstance(error, BusForbidden):
            raise error  # a wait does not help: the process must log the error and stop
        metrics.FEED_STALLS.labels(error.code).inc()
        log.warning("feed.waits", code=error.code, reason=str(error))
        await self._clock.sleep(STALL_S)
