"""Queue `scheduler.status`: hosts, host metrics, compute services and workers, from this scheduler's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Message
from bus.contracts.build import HostsQuery
from bus.contracts.host_metrics import HostMetricsQuery
from bus.contracts.operations import ServiceRecord, ServicesPage, ServicesQuery
from bus.contracts.workers import WorkersQuery
from scheduler_worker.domain.hosts import HostTable
from scheduler_worker.domain.selector import Selector
from scheduler_worker.domain.workers import WorkerTable
from scheduler_worker.host_metrics import host_metrics_page
from scheduler_worker.host_records import hosts_page
from scheduler_worker.objects import ObjectRegistry


class StatusHandler:
    """Handles queue `scheduler.status`. No answer waits for the database."""

    def __init__(self, selector: Selector, workers: WorkerTable, objects: ObjectRegistry, *, clock: Clock) -> None:
        self._selector = selector
        self._workers = workers
        self._objects = objects
        self._clock = clock

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Answer one query after another; each is rare."""
        return [Done(reply=await self._answer(received.message)) for received in batch]

    async def _answer(self, query: Message) -> Message:
        if isinstance(query, WorkersQuery):
            return self._workers.page(query, self._clock.monotonic())
        if isinstance(query, ServicesQuery):
            return self.services(query)
        if isinstance(query, HostsQuery):
            return await hosts_page(query, self._selector, self._objects.fences)
        assert isinstance(query, HostMetricsQuery), query
        return host_metrics_page(query, self._selector)

    def services(self, query: ServicesQuery) -> ServicesPage:
        """The compute services that have announced themselves, or that their cells list as down, by cell and name."""
        table, now_s = self._selector.table, self._clock.monotonic()
        known = len(table)
        usable = table.enabled[:known] & (table.admin[:known] == 0)
        # One index more at the front: hosts without a service (NO_SERVICE is -1).
        managed = np.bincount(table.service[:known] + 1, minlength=len(table.services) + 1)
        enabled = np.bincount(table.service[:known] + 1, weights=usable, minlength=len(table.services) + 1)
        in_book = np.bincount(table.service[self._selector.announced_in_book()] + 1, minlength=len(table.services) + 1)
        announced = [
            ServiceRecord(
                name=one.name,
                cell=one.cell,
                up=one.down is None,
                epoch=one.epoch,
                code="" if one.down is None else one.down.code,
                reason="" if one.down is None else one.down.reason,
                since=0.0 if one.down is None else one.down.since,
                last_seen_s=max(0.0, now_s - one.last_seen_s),
                hosts=int(managed[index + 1]),
                enabled=int(enabled[index + 1]),
                in_book=int(in_book[index + 1]),
            )
            for index, one in enumerate(table.services)
            if not one.forgotten
        ]
        found = sorted((*announced, *_dead_unannounced(table)), key=lambda one: (one.cell, one.name))
        requested = [one for one in found if query.cell in (None, one.cell) and query.up in (None, one.up)]
        return ServicesPage(services=tuple(requested[: query.limit]))


def _dead_unannounced(table: HostTable) -> list[ServiceRecord]:
    """Services that have been dead since before this scheduler's start."""
    found = [(cell, table.down_of(cell, name)) for cell, name in table.dead_unannounced()]
    return [
        ServiceRecord(
            name=down.service,
            cell=cell,
            up=False,
            epoch=down.epoch,
            code=down.code,
            reason=down.reason,
            since=down.since,
            announced=False,
        )
        for cell, down in found
    ]
