"""A conductor's periodic work: passed deadlines, machine searches, purging, requests for reports."""

from __future__ import annotations

import asyncio
import math

import structlog

from bus.bus import Bus
from bus.clock import CLOCKS_APART_S, Clock
from bus.contracts.cell import ReportHosts
from bus.faults import Transient
from bus.retrying import REPORT_REQUEST, Retrying
from bus.transport import BusError
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import Engine
from cell_conductor.machine_search import SourceLookup
from cell_conductor.state.desired_state import PURGEABLE, PURGEABLE_FAILED
from cell_conductor.store.port import InstanceStore

FENCE_PROVES_S = 30 * 86_400.0  # a host that is fenced for longer keeps no record of what ended in its cell

log = structlog.get_logger(__name__)

UNAVAILABLE_PAUSE_S = 2.0  # a server that the cell depends on is unavailable: the next sweep may wait


async def sweep_forever(engine: Engine, clock: Clock, config: ConductorConfig) -> None:
    """Look for passed deadlines every `sweep_interval_s`; a full batch is followed by the next at once."""
    # Conductors share the work: each takes rows that no other has locked.
    while True:
        try:
            swept = await engine.sweep()
        except (Transient, BusError) as fault:
            log.warning("sweep.waiting", code=fault.code, reason=str(fault))
            await clock.sleep(UNAVAILABLE_PAUSE_S)
            continue
        if swept < config.sweep_batch:
            await clock.sleep(config.sweep_interval_s)


async def look_up_forever(lookup: SourceLookup, clock: Clock) -> None:
    """Look for the sources of moves that are to be rolled back, one search at a time."""
    # An instance that is not searched now comes again with its deadline.
    while True:
        try:
            await lookup.look_up()
        except (Transient, BusError) as fault:
            log.warning("search.waiting", code=fault.code, reason=str(fault))
            await clock.sleep(UNAVAILABLE_PAUSE_S)


async def purge_forever(store: InstanceStore, clock: Clock, config: ConductorConfig) -> None:
    """Drop instances that were deleted or failed long ago, and fences that were ended long ago. A full batch is
    followed by the next at once.
    """
    # What ended after the oldest fence in force is kept: it proves a machine there over. Not for a host that is off for
    # FENCE_PROVES_S, or should have been back long ago: it may be scrapped, and what it has then is quarantined.
    while True:
        deleted = failed = 0
        if store.is_recovering:  # what is over may prove something yet
            await clock.sleep(config.purge_interval_s)
            continue
        try:
            before, failed_before = (clock.time() - s for s in (config.deleted_retention_s, config.failed_retention_s))
            fences = await store.fences.fences()
            repaired = clock.time() - FENCE_PROVES_S
            awaited = (
                one.since for one in fences if (one.at > failed_before if one.unfencing else one.since > repaired)
            )
            oldest = min(awaited, default=math.inf) - CLOCKS_APART_S
            deleted = await store.purge(PURGEABLE, min(before, oldest), config.purge_batch)
            await store.fences.purge_ended(failed_before, config.purge_batch)
            failed = await store.purge(PURGEABLE_FAILED, min(failed_before, oldest), config.purge_batch)
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
        bus.transport.on_reconnect(self._due.set)

    async def run(self) -> None:
        """Until cancelled. The reports come to the queue that `HostHandlers` reads."""
        self._due.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tick())
            group.create_task(self._ask())

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(self._config.report_interval_s)
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
        await self._bus.publish(ReportHosts())
