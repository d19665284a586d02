"""Keeps a replica up to date: loads a snapshot, then applies the change feed, and requests missing changes.

The queue is bound before the snapshot is requested, so no change is missed in between. The follower requests changes
from placement after a hole in the numbers, a head that stays ahead of the replica, another incarnation (placement's
database was restored, or its standby promoted), silence, and a lost connection, with which the broker has deleted the
private queue. It requests a new snapshot when the feed no longer reaches back to the replica, or has another
incarnation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import structlog
from prometheus_client import Counter, Gauge, Histogram

from bus.clock import Clock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.feed import Change, ChangesPage, ChangesRequest, FeedChanges, FeedHead, SnapshotPage, SnapshotRequest
from bus.faults import RequestRefused
from bus.retrying import UNTIL_AVAILABLE, Retrying, is_transient
from placement_worker.replica.catch_up import CatchUp, SnapshotOutrun, apply
from placement_worker.replica.replica import Replica

if TYPE_CHECKING:
    from bus.bus import Bus

log = structlog.get_logger("replica.follower")

QUEUE = "scheduler.feed.{process}"

_sequence = Gauge("berth_replica_sequence", "Number of the last change folded into the replica")
_lag = Gauge("berth_replica_lag_changes", "Changes between the replica and the newest number received")
_providers = Gauge("berth_replica_providers", "Providers in the replica")
_applied = Counter("berth_replica_changes_total", "Changes folded in")
_delay = Histogram(
    "berth_replica_delay_seconds",
    "From the publication of a change to its being in the replica",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0),
)
_resyncs = Counter("berth_replica_resyncs_total", "Times that changes of the feed had to be requested", ["reason"])
_snapshots = Counter("berth_replica_snapshots_total", "Snapshots loaded")


MAX_BUFFERED = 100_000  # changes that wait for earlier ones; above this bound they are dropped and requested
REQUEST_TIMEOUT_S = 5.0
HEAD_LAG_S = 2.0  # how long the head may stay ahead of the replica
SILENCE_S = 5.0  # without messages, after which changes are requested
WATCH_S = 0.5  # between two checks for silence


class PlacementFeed:
    """The feed, as placement answers requests for it over the bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def changes(self, after: int, limit: int, incarnation: str = "") -> ChangesPage:
        """Request a page of changes."""
        requested = ChangesRequest(after=after, limit=limit, incarnation=incarnation)
        return await self._bus.request(requested, ChangesPage, timeout_s=REQUEST_TIMEOUT_S, cause="replica.changes")

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        """Request a page of the snapshot."""
        requested = SnapshotRequest(after=after, limit=limit)
        return await self._bus.request(requested, SnapshotPage, timeout_s=REQUEST_TIMEOUT_S, cause="replica.snapshot")


class Follower:
    """Applies the change feed of the API bus to one replica.

    start() declares and consumes the queue and returns; `ready` is set when the replica is complete for the first time.
    run() ends when the follower is closed, or raises the fault that stopped it.
    """

    def __init__(self, bus: Bus, replica: Replica, *, process: str | None = None, clock: Clock) -> None:
        self.replica = replica
        self.ready = asyncio.Event()
        self._bus = bus
        self._clock = clock
        self._rng = bus.rng
        # One batch at a time, so that changes are applied in the order in which they arrive.
        self._consumer = Consumer(bus, QUEUE, self.handle, concurrency=1, prefetch=1024, process=process or bus.process)
        self._catch_up = CatchUp(replica, PlacementFeed(bus))
        self._kept: list[Change] = []
        self._catch_up.on_stale = (
            self._kept.clear
        )  # the replica was restored, or the snapshot will contain these changes
        self._catch_up.on_page = self._caught_up
        self._buffered_incarnation = ""
        self._wanted = asyncio.Event()
        self._begun = self._ended = 0  # the number of rounds of requests begun and ended
        self._head = 0
        self._off_since: float | None = None  # the time since which the head and the replica differ
        self._off_target = 0
        self._received_at = 0.0
        self._callbacks: list[Callable[[], None]] = []
        self._round_ended = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    # --- life

    async def start(self) -> None:
        """Bind and consume the queue, then load a snapshot in the background."""
        self._received_at = self._clock.monotonic()
        self._bus.transport.on_reconnect(lambda: self._request_catch_up("reconnected"))
        await self._consumer.start()
        self._request_catch_up("start")
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(part()) for part in (self._consumer.run, self._poll_feed, self._watch)]

    async def run(self) -> None:
        """Wait until the follower is closed. Raises the fault that stopped it."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():
                task.result()

    async def close(self) -> None:
        """Stop following. The replica stays as it is."""
        await self._consumer.drain(0.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- what users ask

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call this function after changes or a snapshot have been applied. It runs in the event loop and must not
        block.
        """
        self._callbacks.append(callback)

    @property
    def lag(self) -> int:
        """The number of changes by which the replica is behind the newest known number."""
        return max(0, self._head - self.replica.sequence)

    async def refresh(self, *, timeout_s: float) -> bool:
        """Request the newest changes from placement now. Concurrent callers share one request. Returns False when there
        is no answer in time (seconds).
        """
        target = self._begun + 1
        self._request_catch_up("asked")
        try:
            async with asyncio.timeout(timeout_s), self._round_ended:
                return await self._round_ended.wait_for(lambda: self._ended >= target)
        except TimeoutError:
            return False

    # --- the feed

    async def handle(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Handler of the feed's queue."""
        self._received_at = self._clock.monotonic()
        for received in batch:
            message = received.message
            if isinstance(message, FeedChanges | FeedHead) and self._has_other_incarnation(message.incarnation):
                self._request_catch_up("incarnation")  # the snapshot contains its changes
            elif isinstance(message, FeedChanges):
                self._take(message.changes, message.incarnation)
                _delay.observe(max(0.0, self._clock.time() - received.meta.sent_at))
            elif isinstance(message, FeedHead):
                self._head = message.sequence
                self._compare()
        self._log_catch_up()
        return [Done()] * len(batch)

    def _has_other_incarnation(self, incarnation: str) -> bool:
        """Whether a message has another incarnation than the replica. A message without an incarnation counts as one of
        the same.
        """
        return bool(self.replica.incarnation) and incarnation not in ("", self.replica.incarnation)

    def _take(self, changes: Sequence[Change], incarnation: str) -> None:
        """Apply the changes that come next, buffer the others, and request those in between."""
        self._head = max(self._head, changes[-1].sequence)
        if self._catch_up.stale or self._kept:
            if incarnation != self._buffered_incarnation:
                self._kept.clear()
                self._buffered_incarnation = incarnation
            self._buffer(changes)
            return
        before = self.replica.sequence
        gap = self.replica.apply(changes)
        _applied.inc(self.replica.sequence - before)
        if gap is not None:
            log.info("replica.gap", expected=gap.expected, got=gap.got)
            self._buffered_incarnation = incarnation
            self._buffer([change for change in changes if change.sequence >= gap.got])
            self._request_catch_up("gap")

    def _buffer(self, changes: Sequence[Change]) -> None:
        self._kept += changes
        if len(self._kept) > MAX_BUFFERED:
            log.warning("replica.buffer_full", dropped=len(self._kept))
            self._kept.clear()
            self._request_catch_up("overflow")

    async def _apply_buffered(self) -> None:
        """Apply the buffered changes that come next after an answer of placement, in whatever order they arrived.
        Changes that arrive meanwhile are buffered, too.
        """
        gap = None
        while self._kept and gap is None:  # ends: each round applies what is there, or finds a hole
            gap = await apply(self.replica, sorted(self._kept, key=lambda change: change.sequence))
            self._kept[:] = [change for change in self._kept if change.sequence > self.replica.sequence]

    def _compare(self) -> None:
        """Request changes when the head has differed from the replica for long: the last changes were lost, so no later
        one shows a hole.
        """
        now, sequence = self._clock.monotonic(), self.replica.sequence
        if self._head == sequence:
            self._off_since = None
        elif self._off_since is None or sequence >= self._off_target > 0:
            self._off_since = now
            self._off_target = self._head if self._head > sequence else 0
        elif now - self._off_since >= HEAD_LAG_S:
            self._off_since = None
            self._request_catch_up("behind" if self._head > sequence else "ahead")

    def _log_catch_up(self) -> None:
        _sequence.set(self.replica.sequence)
        _lag.set(self.lag)
        _providers.set(len(self.replica))
        for callback in self._callbacks:
            callback()

    # --- requests to placement

    def _request_catch_up(self, reason: str) -> None:
        _resyncs.labels(reason).inc()
        self._wanted.set()

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(WATCH_S)
            if self._clock.monotonic() - self._received_at >= SILENCE_S:
                self._received_at = self._clock.monotonic()
                self._request_catch_up("silence")

    async def _poll_feed(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            self._begun += 1
            await self._retry_until_answered()
            self._ended = self._begun
            self.ready.set()
            self._log_catch_up()
            async with self._round_ended:
                self._round_ended.notify_all()

    async def _retry_until_answered(self) -> None:
        """Run one round of requests, and repeat it while placement or the bus is unavailable."""

        def may_pass(error: BaseException) -> bool:
            return is_transient(error) or isinstance(error, RequestRefused | SnapshotOutrun)

        def log_failure(error: BaseException, _failures: int) -> None:
            code = getattr(error, "code", "")
            log.warning("replica.waits", code=code, reason=str(error), sequence=self.replica.sequence)

        # Until there is an answer, the replica is not ready, or reports that it is out of date.
        await Retrying(UNTIL_AVAILABLE, self._clock, self._rng).call(
            self._catch_up.run, may_pass, on_failure=log_failure
        )

    async def _caught_up(self, head: int, is_loaded: bool) -> None:
        """Apply what is buffered, after an answer of placement or a load."""
        before = self.replica.sequence
        if is_loaded:
            if self._has_other_incarnation(self._buffered_incarnation):
                self._kept.clear()
            self._head = head
            self._off_since = None
            _snapshots.inc()
            log.info("replica.loaded", providers=len(self.replica), sequence=head)
        self._head = max(self._head, head)
        await self._apply_buffered()
        _applied.inc(self.replica.sequence - before)
        self._log_catch_up()
        if self.replica.sequence >= head:
            # Buffered changes above this head were committed after the answer. They are requested when the next head
            # arrives.
            self._kept.clear()
