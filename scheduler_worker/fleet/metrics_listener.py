"""Numbers about hosts, taken from a bus into the table of host metrics, aged there, and read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bus.bus import API
from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.host_metrics import HostMetrics, HostMetricsPage, HostMetricsQuery, HostMetricsRecord
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
