"""Takes the announcements of one cell's hosts and services into the scheduler's tables."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress

from bus.bus import Bus
from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.cell import BuildsWaiting, ComputeHosts, ReportHosts, ServiceGone, ServiceOutdated, ServicesDigest
from bus.contracts.workers import WorkerHeartbeat
from bus.port import BusError
from bus.turns import next_turn
from scheduler_worker import metrics
from scheduler_worker.domain.hosts import HostTable
from scheduler_worker.domain.waiting import WaitingTable
from scheduler_worker.domain.workers import WorkerTable

RECONNECT_CHECK_S = 0.5  # how soon after a reconnect announcements are requested
# Announced hosts that are taken in one turn of the event loop: 1.5 to 2.5 ms for a thousand. A cell's services may
# answer a request for announcements all at once.
HOSTS_AT_ONCE = 2_000
DOUBT_S = 15.0  # between two requests while more services count as up here than in the cell's digest


class HostsListener:
    """Keeps the host table: applies announcements and digests, and requests announcements when some may be missing."""

    def __init__(
        self,
        bus: Bus,
        table: HostTable,
        workers: WorkerTable,
        waiting: WaitingTable,
        *,
        clock: Clock,
        rng: random.Random,
        again_s: float,
    ) -> None:
        self._bus = bus
        self._table = table
        self._workers = workers
        self._waiting = waiting
        self._clock = clock
        self._rng = rng
        self._again_s = again_s
        self._requested = True

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Queue `scheduler.hosts.{process}` of one cell. A service announces hosts of its own cell only."""
        now_s = self._clock.monotonic()
        outdated: dict[str, int] = {}
        # The whole batch has been decoded in this turn.
        hosts = sum(len(one.message.hosts) for one in batch if isinstance(one.message, ComputeHosts))
        for received in batch:
            message = received.message
            announced = len(message.hosts) if isinstance(message, ComputeHosts) else 0
            hosts += announced
            if hosts > HOSTS_AT_ONCE:
                hosts = announced
                await next_turn()
            if isinstance(message, ComputeHosts | ServicesDigest) and message.cell == self._bus.name:
                is_applied = self._table.apply(message, now_s)
                if isinstance(message, ComputeHosts) and not is_applied:
                    outdated[message.service] = message.epoch
            elif isinstance(message, ServiceGone) and message.cell == self._bus.name:
                self._table.forget_service(message, now_s)
            elif isinstance(message, BuildsWaiting) and message.cell == self._bus.name:
                self._waiting.apply(message, now_s)
            elif isinstance(message, WorkerHeartbeat):
                self._workers.apply(message, self._bus.name, now_s)
        metrics.KNOWN_HOSTS.set(len(self._table))
        await self._announce_outdated(outdated)
        if hosts > HOSTS_AT_ONCE // 2:
            await asyncio.sleep(0)  # the next batch may be decoded and taken without another wait
        return [Done()] * len(batch)

    async def _announce_outdated(self, received: Mapping[str, int]) -> None:
        """A service whose announcements count for nothing here receives the epoch that it has to exceed.

        The cell's conductor announces it, too, if it has received the higher one; it may have been away.
        """
        for service, epoch in received.items():
            newest = self._table.epoch_of(self._bus.name, service)
            if epoch < newest:
                with suppress(BusError):  # the next announcement repeats it
                    await self._bus.publish(ServiceOutdated(service=service, cell=self._bus.name, epoch=newest))

    def on_reconnected(self) -> None:
        """The private queue was deleted with the connection, and so were the announcements in it."""
        self._requested = False

    async def run(self) -> None:
        """Request announcements at start, soon after each reconnect, and periodically, with a jitter of its own in each
        scheduler.

        Sooner when the cell's digest counts fewer services than count as up here.
        """
        while True:
            self._requested = await self.request_reports()
            requested_at = self._clock.monotonic()
            due = requested_at + self._pause()
            while True:
                await self._clock.sleep(RECONNECT_CHECK_S)
                now_s = self._clock.monotonic()
                doubts = now_s - requested_at >= DOUBT_S and self._table.knows_more(self._bus.name)
                if not self._requested or now_s >= due or doubts:
                    break

    async def request_reports(self) -> bool:
        """Request every compute service of the cell to announce its hosts now. False: the bus is unavailable."""
        try:
            await self._bus.publish(ReportHosts(why="a scheduler listens"))
        except BusError:
            return False
        self._table.count_request(self._bus.name, self._clock.monotonic())
        return True

    def _pause(self) -> float:
        return self._again_s * self._rng.uniform(0.75, 1.25)
