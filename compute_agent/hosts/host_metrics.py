"""Publishes the driver's measurements of its hosts (`host.metrics.v1`), periodically, while there are any."""

from __future__ import annotations

import contextlib
import random

from bus.clock import Clock
from bus.contracts.host_metrics import MAX_READINGS, HostMetrics
from bus.faults import Transient
from bus.transport import BusError
from compute_agent import metrics
from compute_agent.driver import DriverUnavailable, MeasuringDriver
from compute_agent.hosts.pending_reports import JITTER, PublishingBus
from compute_agent.hosts.service_name import reporter_name


class Measuring:
    """One service's measurements. One that cannot be made or published now is dropped, as the next one is newer."""

    def __init__(
        self,
        bus: PublishingBus,
        driver: MeasuringDriver,
        *,
        service: str,
        clock: Clock,
        rng: random.Random,
        interval_s: float,
    ) -> None:
        self._bus = bus
        self._driver = driver
        self._service = service
        self._clock = clock
        self._rng = rng
        self._interval_s = interval_s

    async def run(self) -> None:
        """Measure all hosts every interval, until cancelled."""
        while True:
            with contextlib.suppress(BusError, Transient, DriverUnavailable):
                await self._publish()
            await self._clock.sleep(self._interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER))

    async def _publish(self) -> None:
        readings = await self._driver.measure(self._clock.time())
        source = reporter_name(self._service)
        for at in range(0, len(readings), MAX_READINGS):
            page = tuple(readings[at : at + MAX_READINGS])
            await self._bus.publish(HostMetrics(source=source, readings=page))
            metrics.MEASURED.labels(self._service).inc(len(page))
