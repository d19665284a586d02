"""The NUMA cells and PCI devices of one host: whether an instance fits there, and what it leaves of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from nova_scheduler.fit.numa import (
    NO_TOPOLOGY,
    THREADS,
    HostTopology,
    InstanceTopology,
    NetworkMetadata,
    NumaLimits,
    PinsRefused,
    Unfit,
)
from nova_scheduler.fit.numa_fit import Arrangements, fit_instance_to_host
from nova_scheduler.fit.numa_usage import consume as consume_numa
from nova_scheduler.fit.pci import PciPool, PciRefusal, PciRequest, affinity_of, view_of
from nova_scheduler.fit.pci import consume as consume_pci

INCONSISTENT = "numa.inconsistent"
Mappings = Mapping[str, Sequence[str]]  # the providers (uuids) of each group of the request, of an allocation candidate


class NumaRequest(Struct, frozen=True, kw_only=True):
    """What a call of Nova asks of a host's NUMA nodes; one of `RequestSpec.devices`, as each PciRequest is."""

    topology: InstanceTopology | None = None
    networks: NetworkMetadata | None = None
    # by the extra specs or the image: dedicated CPUs that are threads of a core
    needs_threads: bool = False

    @property
    def has_cells(self) -> bool:
        """Whether the instance has a topology."""
        return self.topology is not None and bool(self.topology.cells)


class DeviceRequest(Struct, frozen=True, kw_only=True):
    """All that a call of Nova asks of a host's NUMA nodes and PCI devices."""

    numa: NumaRequest | None = None
    pci: tuple[PciRequest, ...] = ()

    @classmethod
    def of(cls, devices: Sequence[object]) -> DeviceRequest:
        """What is in `RequestSpec.devices`."""
        numa = next((one for one in devices if isinstance(one, NumaRequest)), None)
        return cls(numa=numa, pci=tuple(one for one in devices if isinstance(one, PciRequest)))


class HostDevices(Struct, frozen=True, kw_only=True):
    """What is known of a host: its row, less what was chosen there and is not in the row yet."""

    topology: HostTopology | None = None  # None: it has none
    pools: Sequence[PciPool] = ()
    cpu_allocation_ratio: float
    ram_allocation_ratio: float
    # knows_topology, knows_pools: whether these can be read
    knows_topology: bool = True
    knows_pools: bool = True
    # what was chosen there does not fit its row any more: no instance may get what another counts on
    is_overdrawn: bool = False

    def limits(self, asked: NumaRequest) -> NumaLimits:
        """The limits that a Selection has for this host."""
        return NumaLimits(
            cpu_allocation_ratio=self.cpu_allocation_ratio,
            ram_allocation_ratio=self.ram_allocation_ratio,
            network_metadata=asked.networks,
        )

    @property
    def sockets(self) -> dict[int, int | None]:
        """{id of each NUMA cell: its socket}."""
        return {} if self.topology is None else {cell.id: cell.socket for cell in self.topology.cells}


def fitted(
    host: HostDevices,
    asked: DeviceRequest,
    mapping: Mappings | None = None,
    *,
    pack: bool = False,
    allowed: Arrangements | None = None,
) -> InstanceTopology | Unfit | None:
    """The instance's topology on a host, with pins; None: it has none. mapping: of an allocation candidate; None:
    devices are judged without Placement's choice. pack, allowed: as of `fit_instance_to_host`.
    """
    numa = asked.numa
    if numa is None:
        return None
    if numa.needs_threads and host.topology is not None and not host.topology.has_threads:
        return Unfit(THREADS)
    if numa.topology is None or not numa.has_cells:
        return None
    if host.topology is None:
        return Unfit(NO_TOPOLOGY)
    pci = view_of(host.pools, asked.pci, mapping, host.sockets)
    found = fit_instance_to_host(host.topology, numa.topology, host.limits(numa), pci, pack=pack, allowed=allowed)
    if isinstance(found, Unfit):
        return found
    try:
        consume_numa(host.topology, found)
    except PinsRefused:  # Nova's fit may return pins of a cell that it tried before: its nova-compute refuses these
        return Unfit(INCONSISTENT)
    return found


def consumed(
    host: HostDevices, asked: DeviceRequest, mapping: Mappings | None = None, *, pack: bool = False
) -> HostDevices | Unfit:
    """What an instance leaves of a host. As in Nova a host without NUMA nodes loses none."""
    found = fitted(host, asked, mapping, pack=pack) if host.topology is not None else None
    if isinstance(found, Unfit):
        return found
    if found is not None and host.topology is not None:
        host = replace(host, topology=consume_numa(host.topology, found))
    if asked.pci:
        affinity = None if found is None else affinity_of((cell.id for cell in found.cells), host.sockets)
        after = consume_pci(host.pools, asked.pci, mapping, affinity)
        if isinstance(after, PciRefusal):
            return Unfit(after.reason)
        host = replace(host, pools=after.pools)
    return host
