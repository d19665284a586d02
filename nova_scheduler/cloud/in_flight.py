"""What was chosen for instances and is not in their hosts' rows yet. It counts beside the rows from the choice on until
it is certain to be in them: an error may refuse a host, never use it twice. Pure: rows and sights come in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, Protocol

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.clock import Clock
from nova_scheduler.cloud.host_facts import HostFacts, HostHardware, TakenRead
from nova_scheduler.fit.host_devices import DeviceRequest, HostDevices, Mappings, consumed
from nova_scheduler.fit.numa import HostTopology, Unfit
from nova_scheduler.fit.numa_objects import TopologyUnreadable, parse_host_topology
from nova_scheduler.fit.pci import PciPool, free_devices
from nova_scheduler.fit.pci_pools import PciPoolsUnreadable, parse_pools
from scheduler_worker.selection.request_spec import RequestSpec

log = structlog.get_logger("nova")

IN_FLIGHT_S: Final = 600.0  # that an instance counts on its host without a word of its nova-compute
# A nova-compute names itself as the host of an instance, and then writes its row: within rpc_response_timeout (60 s),
# or it gives the instance up.
WRITTEN_S: Final = 120.0
ASKED_AFTER_S: Final = 10.0  # the age at which placement is asked whether an instance still holds its claim
MAX_PLAIN: Final = 100_000  # instances without devices that count; each with devices holds a claim on some of them
MAX_LOGGED: Final = 20
NOTHING: Final = DeviceRequest()


class Sights(Protocol):
    """What a read of a cell's database shows of instances that are in flight."""

    def __call__(self, instance: str, host: HostHardware) -> bool:
        """Whether the instance is on this host, or moves there."""


class _Chosen(Struct):
    """A host that was chosen for an instance."""

    asked: DeviceRequest
    mappings: Mappings
    reads: int  # of its cell that had begun
    chosen_s: float
    # the first read that showed the instance there, and when it began
    seen: int | None = None
    seen_s: float = 0.0

    @property
    def has_devices(self) -> bool:
        return self.asked is not NOTHING


class _Parsed(Struct, frozen=True):
    """The devices of a row."""

    hardware: HostHardware
    devices: HostDevices


class InstancesInFlight:
    """`InFlight` of one process. on_change: (host, instances, free devices), as these have changed."""

    def __init__(
        self,
        facts: HostFacts,
        clock: Clock,
        *,
        pack: bool = False,  # as of `fit_instance_to_host`
        claims: bool = True,  # False: another scheduler claims, and what is chosen here counts in its own round alone
    ) -> None:
        self._facts = facts
        self._clock = clock
        self._pack = pack
        self._claims = claims
        self.on_change: Callable[[str, int, int], None] = lambda host, instances, devices: None
        self._assumed: dict[str, tuple[str, _Chosen]] = {}  # by instance: its host
        self._claimed: dict[str, dict[str, _Chosen]] = {}  # by host and instance
        self._on: dict[str, list[_Chosen]] = {}  # what counts on each host, the oldest first
        self._plain = 0
        self._parsed: dict[str, _Parsed] = {}
        self._left: dict[str, HostDevices] = {}  # less what is in flight

    # --- choices

    def assume(self, instance: str, host: str, spec: RequestSpec, mappings: Mappings) -> None:
        """A host (uuid) was chosen, instead of an earlier choice."""
        self.drop(instance)
        if (chosen := self._new(host, spec, mappings)) is not None:
            self._assumed[instance] = (host, chosen)
            self._add(host, chosen)

    def claimed(self, instance: str, host: str, spec: RequestSpec, mappings: Mappings) -> None:
        """The instance holds a claim on a host, whatever was assumed."""
        self.drop(instance)
        if self._claims and (chosen := self._new(host, spec, mappings)) is not None:
            self._forget(host, instance)
            self._count_on(host, instance, chosen)

    def drop(self, instance: str) -> None:
        """What was assumed is not claimed."""
        if (held := self._assumed.pop(instance, None)) is not None:
            self._remove(*held)

    def _new(self, host: str, spec: RequestSpec, mappings: Mappings) -> _Chosen | None:
        cell = self._facts.cell_of(host)
        asked = DeviceRequest.of(spec.devices) if spec.devices else NOTHING
        if asked is NOTHING and (cell is None or self._plain >= MAX_PLAIN):
            return None
        return _Chosen(asked, mappings, self._facts.begun(cell), self._clock.monotonic())

    def _count_on(self, host: str, instance: str, chosen: _Chosen) -> None:
        self._claimed.setdefault(host, {})[instance] = chosen
        self._add(host, chosen)

    def _add(self, host: str, chosen: _Chosen) -> None:
        self._on.setdefault(host, []).append(chosen)
        self._plain += not chosen.has_devices
        self._changed(host, 1, chosen)

    def _remove(self, host: str, chosen: _Chosen) -> None:
        self._on[host] = [one for one in self._on[host] if one is not chosen]
        if not self._on[host]:
            del self._on[host]
        self._plain -= not chosen.has_devices
        self._changed(host, -1, chosen)

    def _changed(self, host: str, instances: int, chosen: _Chosen) -> None:
        before = self._left.get(host) if chosen.has_devices else None
        if chosen.has_devices:
            self._left.pop(host, None)
        after = self.devices_of(host) if before is not None else None
        freed = free_devices(after.pools) - free_devices(before.pools) if before is not None and after else 0
        self.on_change(host, instances, freed)

    def _forget(self, host: str, instance: str) -> None:
        of_host = self._claimed.get(host, {})
        if (chosen := of_host.pop(instance, None)) is not None:
            if not of_host:
                del self._claimed[host]
            self._remove(host, chosen)

    # --- what counts

    def count(self, host: str) -> int:
        """How many instances count beside those of a host's row."""
        return len(self._on.get(host, ()))

    def devices_of(self, host: str) -> HostDevices | None:
        """What is left of a host (uuid) for another instance; None: its row is not known, or too old."""
        if self._facts.of(host, self._clock.monotonic()) is None or (row := self.row_of(host)) is None:
            return None
        left = self._left.get(host)
        if left is None:
            left = self._left[host] = self._less(row, self._on.get(host, ()))
        return left

    def row_of(self, host: str) -> HostDevices | None:
        """The devices of a host's row, as it was read last; None: it is not known."""
        hardware = self._facts.hardware.get(host)
        if hardware is None:
            return None
        parsed = self._parsed.get(host)
        if parsed is None or parsed.hardware is not hardware:
            before, parsed = parsed, _Parsed(hardware, _devices(hardware, parsed))
            self._parsed[host] = parsed
            if before is None or parsed.devices is not before.devices:
                self._left.pop(host, None)
        return parsed.devices

    def _less(self, devices: HostDevices, in_flight: Collection[_Chosen]) -> HostDevices:
        for one in in_flight:
            if not one.has_devices:
                continue
            after = consumed(devices, one.asked, one.mappings, pack=self._pack)
            if isinstance(after, Unfit):  # another has what it counts on, or it is in the row already
                return replace(devices, pools=(), is_overdrawn=True)
            devices = after
        return devices

    # --- what the cells and placement tell

    def watched(self, cell: str) -> list[str]:
        """The instances with devices that a read of this cell's database is to show."""
        return sorted({instance for _, instance, one in self._all(cell) if one.has_devices})

    def settle(self, cell: str, taken: TakenRead, sees: Sights) -> None:
        """A read of a cell is complete."""
        # An instance with devices is in the row once a read has shown it on the host, and the row was written after
        # that. Numbers alone may be wrong for a while: they need no sight.
        expired: Counter[str] = Counter()
        number, read_s = taken.number, taken.read_s
        for host, instance, one in list(self._all(cell)):
            hardware = self._facts.hardware.get(host)
            if not one.has_devices:
                is_over = hardware is None or (host in taken.written and one.reads < taken.before)
            else:
                is_over = one.seen is not None and (host in taken.written or read_s - one.seen_s >= WRITTEN_S)
                if one.seen is None and hardware is not None and one.reads < number and sees(instance, hardware):
                    one.seen, one.seen_s = number, read_s
            if not is_over and read_s - one.chosen_s >= IN_FLIGHT_S:
                is_over = True
                expired[host] += one.has_devices
            if is_over:
                self._forget(host, instance)
        if expired := +expired:
            known = [self._facts.hardware[host].nodename for host in expired if host in self._facts.hardware]
            log.warning("nova.in_flight_expired", cell=cell, hosts=sorted(known)[:MAX_LOGGED], count=expired.total())
        for host in self._parsed.keys() - self._facts.hardware.keys():
            del self._parsed[host]
            self._left.pop(host, None)

    def doubtful(self, cell: str, now_s: float) -> list[str]:
        """The instances with devices of which placement is to be asked what they hold."""
        due = now_s - ASKED_AFTER_S
        return sorted({instance for _, instance, one in self._all(cell) if one.has_devices and one.chosen_s <= due})

    def held(self, cell: str, hosts: Mapping[str, Collection[str]], asked_s: float) -> None:
        """What placement has answered of instances: {instance: the hosts (uuids) on which it holds something}. What is
        held no more is released; what Nova has claimed instead, on an alternate, counts there.
        """
        for host, instance, one in list(self._all(cell)):
            found = hosts.get(instance)
            if found is None or host in found or one.chosen_s > asked_s - ASKED_AFTER_S:
                continue
            self._forget(host, instance)
            for other in found:
                if self._facts.cell_of(other) is not None and instance not in self._claimed.get(other, ()):
                    self._count_on(other, instance, replace(one, mappings={}, seen=None))

    def _all(self, cell: str) -> Iterator[tuple[str, str, _Chosen]]:
        for host, of_host in self._claimed.items():
            if self._facts.cell_of(host) in (cell, None):
                for instance, one in of_host.items():
                    yield host, instance, one


def _devices(hardware: HostHardware, before: _Parsed | None) -> HostDevices:
    """The devices of a row, those of the one before it where they have not changed."""
    if before is not None and _texts(before.hardware) == _texts(hardware):
        return before.devices
    topology: HostTopology | None = None
    pools: tuple[PciPool, ...] = ()
    knows_topology, knows_pools = hardware.numa_topology is not None, hardware.pci_pools is not None
    try:
        topology = parse_host_topology(hardware.numa_topology)
    except TopologyUnreadable as fault:
        knows_topology = False
        log.warning("nova.numa_topology_unreadable", host=hardware.nodename, why=fault.reason)
    try:
        pools = parse_pools(hardware.pci_pools)
    except PciPoolsUnreadable as fault:
        knows_pools = False
        log.warning("nova.pci_pools_unreadable", host=hardware.nodename, why=fault.reason)
    return HostDevices(
        topology=topology,
        pools=pools,
        cpu_allocation_ratio=hardware.cpu_allocation_ratio,
        ram_allocation_ratio=hardware.ram_allocation_ratio,
        knows_topology=knows_topology,
        knows_pools=knows_pools,
    )


def _texts(hardware: HostHardware) -> tuple[object, ...]:
    ratios = hardware.cpu_allocation_ratio, hardware.ram_allocation_ratio
    return hardware.numa_topology, hardware.pci_pools, *ratios
