"""Readings of nodes' sensors, on to the schedulers: gathered for a moment, and dropped when it cannot be published."""

from __future__ import annotations

import asyncio

import structlog

from bus.clock import Clock
from bus.contracts.host_metrics import MAX_READINGS, HostMetrics, HostReading
from bus.faults import Transient
from bus.transport import BusError
from ironic_sync import metrics
from ironic_sync.writer import PublishAll

log = structlog.get_logger(__name__)

BATCH_S = 0.1


class Measurements:
    """Readings by node until they are published; a newer one replaces an older one. At most max_nodes wait."""

    def __init__(self, publish_all: PublishAll, *, clock: Clock, max_nodes: int, reporter: str) -> None:
        self._publish_all = publish_all
        self._clock = clock
        self._max_nodes = max_nodes
        self._reporter = reporter
        self._waiting: dict[str, HostReading] = {}
        self._some = asyncio.Event()

    def add(self, reading: HostReading) -> None:
        """One node's; beyond the most that may wait it is dropped, as the next one is newer."""
        if reading.host_uuid in self._waiting or len(self._waiting) < self._max_nodes:
            self._waiting[reading.host_uuid] = reading
            self._some.set()

    async def run(self) -> None:
        """Publish, until cancelled."""
        while True:
            await self._some.wait()
            await self._clock.sleep(BATCH_S)
            self._some.clear()
            readings, self._waiting = tuple(self._waiting.values()), {}
            pages = [readings[at : at + MAX_READINGS] for at in range(0, len(readings), MAX_READINGS)]
            try:
                await self._publish_all(
                    [(HostMetrics(source=self._reporter, readings=page), self._reporter) for page in pages]
                )
                metrics.MEASURED.inc(len(readings))
            except (BusError, Transient) as fault:
                log.warning("ironic.measurements_dropped", nodes=len(readings), reason=str(fault))
