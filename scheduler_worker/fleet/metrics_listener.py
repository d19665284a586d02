"""Numbers about hosts, taken from a bus into the table of host metrics, aged there, and read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bus.bus import API, Bus
from bus.clock import Clock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.host_metrics import HostMetrics, HostMetricsPage, HostMetricsQuery, HostMetricsRecord
from bus.service.service import WorkerRuntime
from scheduler_worker import metrics as metrics_module
from scheduler_worker.hosts.host_metrics import HostMetricsTable
from scheduler_worker.selection.selector import Selector

QUEUE = "scheduler.metrics.{process}"
AGE_STEP_S = 1.0  # numbers age in steps of this


class HostMetricsListener:
    """Takes numbers about hosts from one bus. Dropped numbers are counted, by reason."""

    def __init__(self, table: HostMetricsTable, bus: str, *, clock: Clock, first: asyncio.Event) -> None:
        self._table = table
        self._cell = None if bus == API else bus
        self._clock = clock
        self._first = first

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """In any order: the newest number counts."""
        now, now_s = self._clock.time(), self._clock.monotonic()
        for received in batch:
            if isinstance(received.message, HostMetrics):
                for outcome, count in self._table.apply(received.message, self._cell, now=now, now_s=now_s).items():
                    metrics_module.HOST_METRICS.labels(outcome).inc(count)
        self._first.set()
        return [Done()] * len(batch)


def metrics_consumer(bus: Bus, selector: Selector, measured: asyncio.Event) -> Consumer:
    """The consumer of host metrics on one bus; `measured` is set when the first has arrived."""
    listener = HostMetricsListener(selector.metrics, bus.name, clock=bus.clock, first=measured)
    return Consumer(bus, QUEUE, listener, max_batch=16, concurrency=1, prefetch=16)


def add_host_metrics(service: WorkerRuntime, bus: Bus, selector: Selector) -> asyncio.Event:
    """Have a service take host metrics from a bus, and age them. Returns an event that is set when the first has
    arrived on any bus.
    """
    measured = asyncio.Event()
    service.add_consumer(metrics_consumer(bus, selector, measured))
    service.add_task("host metrics", lambda: age(selector.metrics, measured, bus.clock))
    return measured


async def age(table: HostMetricsTable, first: asyncio.Event, clock: Clock) -> None:
    """Age the numbers, until cancelled; nothing happens before there are any."""
    await first.wait()
    while True:
        table.advance(clock.monotonic())
        await clock.sleep(AGE_STEP_S)


def host_metrics_page(query: HostMetricsQuery, selector: Selector) -> HostMetricsPage:
    """The metrics of the hosts of this name, or of the host with this uuid."""
    table = selector.table
    found = [(uuid, index) for uuid in table.find(query.host) if (index := table.index_of(uuid)) is not None]
    return HostMetricsPage(
        hosts=tuple(
            HostMetricsRecord(
                host_uuid=uuid,
                host=table.names[index],
                cell=table.cells[int(table.cell[index])],
                metrics=selector.metrics.of(index),
            )
            for uuid, index in found
        )
    )
