"""Reports of hosts and digests of their services, taken into the scheduler's host table."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np

from bus.bus import Bus
from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.cell import HostStates, ReportHosts, ServiceRemoved, ServiceStates
from bus.contracts.drains import MAX_DRAINED
from bus.contracts.placement_queries import ServiceHostsPage, ServiceHostsQuery
from bus.contracts.waiting_builds import BuildsWaiting
from bus.contracts.workers import WorkerHeartbeat
from bus.faults import Transient
from bus.transport import BusError
from bus.yielding import yield_to_loop
from scheduler_worker import metrics as metrics_module
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.hosts.service_directory import NO_SERVICE
from scheduler_worker.hosts.waiting_builds import WaitingTable
from scheduler_worker.hosts.worker_table import WorkerTable
from scheduler_worker.placement_client import PlacementUnavailable, answer_or_raise
from scheduler_worker.selection.selector import Selector

RECONNECT_CHECK_S = 0.5  # how soon after a reconnect reports are requested
# Reported hosts that are taken in one turn of the event loop: 1.5 to 2.5 ms for a thousand. A cell's services may
# answer a request for reports all at once.
HOSTS_AT_ONCE = 2_000
RECONNECT_GRACE_S = 15.0  # between two requests while more services count as up here than in the cell's digest


class HostsListener:
    """Keeps the host table: applies reports and digests, and requests reports when some may be missing."""

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
        """Queue `scheduler.hosts.{process}` of one cell. A service reports hosts of its own cell only."""
        now_s = self._clock.monotonic()
        # The whole batch has been decoded in this turn.
        hosts = sum(len(one.message.hosts) for one in batch if isinstance(one.message, HostStates))
        for received in batch:
            message = received.message
            reported = len(message.hosts) if isinstance(message, HostStates) else 0
            hosts += reported
            if hosts > HOSTS_AT_ONCE:
                hosts = reported
                await yield_to_loop()
            if isinstance(message, HostStates | ServiceStates) and message.cell == self._bus.name:
                self._table.apply(message, now_s)
            elif isinstance(message, ServiceRemoved) and message.cell == self._bus.name:
                self._table.delete_service(message, now_s)
            elif isinstance(message, BuildsWaiting) and message.cell == self._bus.name:
                self._waiting.apply(message, now_s)
            elif isinstance(message, WorkerHeartbeat):
                self._workers.apply(message, self._bus.name, now_s)
        metrics_module.KNOWN_HOSTS.set(len(self._table))
        if hosts > HOSTS_AT_ONCE // 2:
            await asyncio.sleep(0)  # the next batch may be decoded and taken without another wait
        return [Done()] * len(batch)

    def on_reconnected(self) -> None:
        """The private queue was deleted with the connection, and so were the reports in it."""
        self._requested = False

    async def run(self) -> None:
        """Request reports at start, after each reconnect, and periodically with a jitter; sooner when the cell's digest
        counts fewer services than count as up here.
        """
        while True:
            self._requested = await self.request_reports()
            requested_at = self._clock.monotonic()
            due = requested_at + self._pause()
            while True:
                await self._clock.sleep(RECONNECT_CHECK_S)
                now_s = self._clock.monotonic()
                may_lack = now_s - requested_at >= RECONNECT_GRACE_S and self._table.services.knows_more(self._bus.name)
                if not self._requested or now_s >= due or may_lack:
                    break

    async def request_reports(self) -> bool:
        """Request every compute service of the cell to report its hosts now. False: the bus is unavailable."""
        try:
            await self._bus.publish(ReportHosts())
        except BusError:
            return False
        self._table.services.count_request(self._bus.name, self._clock.monotonic())
        return True

    def _pause(self) -> float:
        return self._again_s * self._rng.uniform(0.75, 1.25)


MAX_SERVICE_HOSTS = MAX_DRAINED + 1  # of one service, that placement is queried about
SERVICES_AT_ONCE = 50


async def hosts_of_services(
    selector: Selector, api: Bus, cell: str, services: Sequence[str], *, timeout_s: float
) -> dict[str, str]:
    """The hosts ({uuid: name}) that these compute services of a cell have, or may have had when they died: as reported,
    and of a service that is not up also those placement has of it. api: the bus to placement. Raises
    PlacementUnavailable, or RequestRefused.
    """
    # This scheduler may have been started after the service died. The cell of hosts that are not reported is known from
    # then on.
    table, indexes = selector.table, {name: selector.table.services.index_of(cell, name) for name in services}
    rows = selector.reported_in_placement()
    last = np.isin(table.last_service[rows], [index for index in indexes.values() if index != NO_SERVICE])
    found = {table.uuids[row]: table.names[row] for row in rows[last].tolist()}
    states = table.services.states
    silent = [one for one, index in indexes.items() if index == NO_SERVICE or states[index].down is not None]
    for start in range(0, len(silent), SERVICES_AT_ONCE):
        part = silent[start : start + SERVICES_AT_ONCE]
        queries = [ServiceHostsQuery(service=one, cell=cell, limit=MAX_SERVICE_HOSTS) for one in part]
        try:
            pages = await api.request_all(queries, ServiceHostsPage, timeout_s=timeout_s, causes=part)
        except (BusError, Transient) as error:
            raise PlacementUnavailable(str(error)) from error
        for page in map(answer_or_raise, pages):
            for uuid in page.hosts:
                table.learn_cell(uuid, cell)
            found |= page.hosts
    return found


class Warmup:
    """Of one process. It has no end before it begins: before, nothing was received."""

    def __init__(self, selector: Selector, *, clock: Clock) -> None:
        self._selector = selector
        self._clock = clock
        self._since_s: float | None = None

    async def begin(self) -> None:
        """Count from now on: the objects on record are in force, and the cells in reach have been connected to."""
        self._since_s = self._clock.monotonic()

    def is_on(self) -> bool:
        """Whether services that are up may not have reported all of their hosts to this process yet."""
        since_s = self._since_s
        return since_s is None or self._clock.monotonic() - since_s < self._selector.config.settings.hosts_warmup_s
