"""Keeps facts of hosts fresh: reads the cells' databases, and puts what they tell where filters and weighers read."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import structlog

from bus.clock import Clock
from bus.contracts.host_metrics import NUM_INSTANCES, NUM_IO_OPS
from bus.contracts.placement_queries import ConsumerRecord
from bus.faults import Fault
from bus.yielding import YieldingParts
from nova_scheduler.cloud.host_facts import CellRead, HostFacts, HostHardware
from nova_scheduler.cloud.in_flight import InstancesInFlight
from nova_scheduler.cloud.rest import NovaUnavailable
from nova_scheduler.cloud.state import NovaState
from nova_scheduler.filters.pci import PCI_DEVICES
from nova_scheduler.fit.pci import free_devices
from scheduler_worker.hosts.host_metrics import HostMetricsTable
from scheduler_worker.hosts.host_table import Floats, HostTable

log = structlog.get_logger("nova")

SOURCE = "nova"  # of the numbers, beside those that come by the bus
MAX_LOGGED = 20
PARSED_AT_ONCE = 16  # rows in one turn of the event loop: some ms


class CellRows(Protocol):
    """The compute nodes in one cell's database (`CellDatabase`)."""

    cell: str

    async def read(self, instances: Sequence[str] = ()) -> CellRead:
        """What may have changed since the read before, and where these instances are. Raises NovaUnavailable."""


class HeldAllocations(Protocol):
    """What instances hold at placement (`ClaimOwnership`)."""

    async def allocations_of(self, instances: Collection[str]) -> dict[str, ConsumerRecord]:
        """Of those that hold something. Raises PlacementUnavailable, RequestRefused."""


class HostFactsPoller:
    """Of one process. `first`: each database was read once, or could not be."""

    def __init__(
        self,
        databases: Sequence[CellRows],
        facts: HostFacts,
        in_flight: InstancesInFlight,
        nova_state: NovaState,
        metrics: HostMetricsTable,
        *,
        table: HostTable,
        weighed: Sequence[str],  # names of metrics
        held: HeldAllocations,
        interval_s: float,
        hosts_known: asyncio.Event,  # no database is read before
        clock: Clock,
    ) -> None:
        self._databases = databases
        self._facts = facts
        self._in_flight = in_flight
        in_flight.on_change = self._count
        self._held = held
        self._nova_state = nova_state
        self._table = table
        self._metrics = metrics
        self._weighed = weighed
        self._interval_s = interval_s
        self._hosts_known = hosts_known
        self._clock = clock
        self._unread = {one.cell for one in databases}  # neither read nor found out of reach
        self._unreadable: dict[str, dict[str, tuple[str, ...]]] = {}  # {cell: {uuid: columns}}, as it was logged
        self._without: frozenset[str] = frozenset()  # cells with hosts and without a database, as they were logged
        self.first = asyncio.Event()

    async def run(self) -> None:
        """Read until cancelled, each cell for itself: one that is slow holds none of the others up."""
        await self._hosts_known.wait()
        async with asyncio.TaskGroup() as tasks:
            for one in self._databases:
                tasks.create_task(self._follow(one), name=f"facts of {one.cell}")

    async def _follow(self, database: CellRows) -> None:
        while True:
            await self.read(database)
            await self._clock.sleep(self._interval_s)

    async def read(self, database: CellRows) -> None:
        """Read one database now. When that fails, what it told last counts until it is too old."""
        cell, began_s = database.cell, self._clock.monotonic()
        number = self._facts.begin(cell)
        try:
            read = await database.read(self._in_flight.watched(cell))
        except NovaUnavailable as fault:
            log.warning("nova.facts_unread", cell=cell, code=fault.code, why=fault.reason)
        else:
            taken = self._facts.put(cell, number, read, began_s)
            self._in_flight.settle(cell, taken, partial(_is_seen, read))
            self._nova_state.put_hardware(self._facts.hardware)
            self._nova_state.announce(self._clock.monotonic())
            hosts = self._facts.all_of(cell)
            async for part in YieldingParts(hosts, PARSED_AT_ONCE):
                for uuid in part:
                    self._in_flight.devices_of(uuid)  # parsed before a call needs it
            self._publish(hosts, began_s + self._facts.max_age_s)
            self._log_unreadable(cell, hosts)
            self._log_without()
            await self._release(cell)
        self._metrics.advance(self._clock.monotonic())
        self._unread.discard(cell)
        if not self._unread:
            self.first.set()

    async def _release(self, cell: str) -> None:
        """Ask placement for what is in flight for long. While it does not answer, that counts on."""
        asked_s = self._clock.monotonic()
        if not (instances := self._in_flight.doubtful(cell, asked_s)):
            return
        try:
            found = await self._held.allocations_of(instances)
        except Fault as fault:
            log.warning("nova.claims_unread", code=fault.code, why=fault.reason, count=len(instances))
            return
        hosts = {one: found[one].hosts if one in found else () for one in instances}
        self._in_flight.held(cell, hosts, asked_s)

    def _count(self, host: str, instances: int, devices: int) -> None:
        """What is in flight on a host has changed by so much."""
        if (at := self._table.index_of(host)) is not None:
            for name in (NUM_INSTANCES, NUM_IO_OPS):
                self._metrics.increment(name, at, instances)
            if devices:
                self._metrics.increment(PCI_DEVICES, at, devices)

    def _publish(self, hosts: Mapping[str, HostHardware], expires_s: float) -> None:
        announced = {uuid: at for uuid in hosts if (at := self._table.index_of(uuid)) is not None}
        index = np.fromiter(announced.values(), dtype=np.intp, count=len(announced))
        told = [hosts[uuid] for uuid in announced]
        in_flight = np.array([self._in_flight.count(uuid) for uuid in announced], dtype=np.float64)
        stats = [one.stats for one in told]
        columns = {
            NUM_INSTANCES: _column([None if one is None else one.num_instances for one in stats]) + in_flight,
            NUM_IO_OPS: _column([None if one is None else one.num_io_ops for one in stats]) + in_flight,
            PCI_DEVICES: _column([self._free_devices(uuid) for uuid in announced]),
        }
        now = self._clock.time()
        for name, values in columns.items():
            self._metrics.put_column(name, index, values, at=now, source=SOURCE, expires_s=expires_s)
        for name in self._weighed:  # a metric that Nova does not tell may come by the bus
            values = _column([(one.metrics or {}).get(name) for one in told])
            known = ~np.isnan(values)
            self._metrics.put_column(name, index[known], values[known], at=now, source=SOURCE, expires_s=expires_s)

    def _free_devices(self, uuid: str) -> float | None:
        found = self._in_flight.devices_of(uuid)
        return None if found is None or not found.knows_pools else free_devices(found.pools)

    def _log_without(self) -> None:
        """Name the cells that have hosts and no database: a filter that reads it rejects these hosts."""
        without = self._nova_state.cells() - set(self._facts.cells)
        if without and without != self._without:
            log.warning("nova.cell_without_database", cells=sorted(without)[:MAX_LOGGED], count=len(without))
        self._without = without

    def _log_unreadable(self, cell: str, hosts: Mapping[str, HostHardware]) -> None:
        found = {uuid: one.unreadable for uuid, one in hosts.items() if one.unreadable}
        if found and found != self._unreadable.get(cell):
            named = {hosts[uuid].nodename: columns for uuid, columns in sorted(found.items())[:MAX_LOGGED]}
            log.warning("nova.facts_unreadable", cell=cell, hosts=named, count=len(found))
        self._unreadable[cell] = found


def _is_seen(read: CellRead, instance: str, host: HostHardware) -> bool:
    return (host.host, host.nodename) in read.sights.get(instance, ())


def _column(numbers: Sequence[float | None]) -> Floats:
    return np.array([np.nan if one is None else one for one in numbers], dtype=np.float64)
