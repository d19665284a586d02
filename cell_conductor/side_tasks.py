"""A conductor's periodic tasks: apply passed deadlines, and request reports of hosts."""

from __future__ import annotations

import asyncio

import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.cell import ReportHosts
from bus.faults import Transient
from bus.port import BusError
from bus.retrying import REPORT_REQUEST, Retrying

from .config import ConductorConfig
from .engine import Engine
from .store.port import InstanceStore

log = structlog.get_logger(__name__)

UNAVAILABLE_PAUSE_S = 2.0  # a server that the cell depends on is unavailable: the next sweep may wait


async def sweep_forever(engine: Engine, clock: Clock, config: ConductorConfig) -> None:
    """Look for passed deadlines every `sweep_interval_s`; a full batch is followed by the next at once.

    Conductors share the work: each takes rows that no other has locked.
    """
    while True:
        try:
            swept = await engine.sweep()
        except (Transient, BusError) as fault:
            log.warning("sweep.waiting", code=fault.code, reason=str(fault))
            await clock.sleep(UNAVAILABLE_PAUSE_S)
            continue
        if swept < config.sweep_batch:
            await clock.sleep(config.sweep_interval_s)


async def search_forever(engine: Engine, clock: Clock) -> None:
    """Search for machines that a database which was set back may have forgotten, one search at a time.

    An instance that is not searched now comes again with its deadline.
    """
    while True:
        try:
            await engine.search()
        except (Transient, BusError) as fault:
            log.warning("search.waiting", code=fault.code, reason=str(fault))
            await clock.sleep(UNAVAILABLE_PAUSE_S)


async def purge_forever(store: InstanceStore, clock: Clock, config: ConductorConfig) -> None:
    """Drop instances that were deleted or failed long ago; a full batch is followed by the next at once."""
    while True:
        deleted = failed = 0
        try:
            deleted = await store.purge_deleted(clock.time() - config.deleted_retention_s, config.purge_batch)
            failed = await store.purge_failed(clock.time() - config.failed_retention_s, config.purge_batch)
        except Transient as fault:
            log.warning("purge.waiting", code=fault.code, reason=str(fault))
        if max(deleted, failed) < config.purge_batch:
            await clock.sleep(config.purge_interval_s)


class ReportRequester:
    """Requests a report of every compute service: at start, when the bus is back, and at intervals."""

    def __init__(self, bus: Bus, clock: Clock, config: ConductorConfig) -> None:
        self._bus = bus
        self._clock = clock
        self._config = config
        self._due = asyncio.Event()
        self._why = "conductor started"
        bus.transport.on_reconnect(self._reconnected)

    def _reconnected(self) -> None:
        self._why = "conductor reconnected"
        self._due.set()

    async def run(self) -> None:
        """Until cancelled. The reports come to the queue that `HostHandlers` reads."""
        self._due.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tick())
            group.create_task(self._ask())

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(self._config.report_interval_s)
            self._why = "reconciliation"
            self._due.set()

    async def _ask(self) -> None:
        while True:
            await self._due.wait()
            await Retrying(REPORT_REQUEST, self._clock).call(
                self._publish,
                lambda error: isinstance(error, BusError),
                on_failure=lambda error, _: log.warning(
                    "report.not_requested", code=getattr(error, "code", ""), reason=str(error)
                ),
            )

    async def _publish(self) -> None:
        self._due.clear()  # every request that was due is covered by this one
        await self._bus.publish(ReportHosts(why=self._why))
