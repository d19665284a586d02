"""Publishes which builds wait for what manages the hosts (`compute.waiting.v1`), for as long as any does."""

from __future__ import annotations

import contextlib

from bus.clock import Clock
from bus.contracts.waiting_builds import MAX_WAITING, BuildsWaiting
from bus.faults import Transient
from bus.transport import BusError
from compute_agent.driver import DriverFault, WaitingDriver
from compute_agent.hosts.pending_reports import PublishingBus

HOLDS_FOR = 3  # intervals: this many messages may be lost in a row


class WaitingReporter:
    """One service's waiting builds. A message that cannot be published now is dropped, as the next one replaces it."""

    def __init__(
        self, bus: PublishingBus, driver: WaitingDriver, *, service: str, cell: str, clock: Clock, interval_s: float
    ) -> None:
        self._bus = bus
        self._driver = driver
        self._service = service
        self._cell = cell
        self._clock = clock
        self._interval_s = interval_s
        self._had = False

    async def run(self) -> None:
        """Look every interval, until cancelled."""
        while True:
            await self.look()
            await self._clock.sleep(self._interval_s)

    async def look(self) -> None:
        """Publish what waits; nothing, where nothing waits and nothing did at the last look."""
        try:
            waiting = tuple(self._driver.waiting()[:MAX_WAITING])
        except DriverFault:  # logged; the builds go on
            return
        if not waiting and not self._had:
            return
        message = BuildsWaiting(
            service=self._service, cell=self._cell, waiting=waiting, lasts_s=HOLDS_FOR * self._interval_s
        )
        with contextlib.suppress(BusError, Transient):
            await self._bus.publish(message)
            self._had = bool(waiting)
