"""Does the instance's NUMA topology fit the host's?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final

import numpy as np
from msgspec import Struct

from nova_scheduler.filters.pci import requests_of
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
from nova_scheduler.fit.numa_fit import fit_instance_to_host
from nova_scheduler.fit.numa_usage import consume
from nova_scheduler.fit.pci import PciPool, view_of
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import FilterResult
from scheduler_worker.selection.request_spec import RequestSpec

UNKNOWN: Final = "numa.unknown"
INCONSISTENT: Final = "numa.inconsistent"


class NumaRequest(Struct, frozen=True, kw_only=True):
    """What a call of Nova asks of a host's NUMA nodes; one of `RequestSpec.devices`."""

    topology: InstanceTopology | None = None
    networks: NetworkMetadata | None = None
    # by the extra specs or the image: dedicated CPUs that are threads of a core
    needs_threads: bool = False


class HostNuma(Struct, frozen=True, kw_only=True):
    """What is known of a host: its row, less what was chosen there and is not in the row yet."""

    topology: HostTopology | None  # None: it has none
    cpu_allocation_ratio: float
    ram_allocation_ratio: float
    pools: Sequence[PciPool] = ()  # its PCI devices

    def limits(self, asked: NumaRequest) -> NumaLimits:
        """The limits that a Selection has for this host."""
        return NumaLimits(
            cpu_allocation_ratio=self.cpu_allocation_ratio,
            ram_allocation_ratio=self.ram_allocation_ratio,
            network_metadata=asked.networks,
        )


# By the uuid of a host; None: not known, or too old.
NumaOf = Callable[[str], HostNuma | None]
Mappings = Mapping[str, Sequence[str]]  # the providers (uuids) of each group of the request, of an allocation candidate


class NUMATopologyFilter:
    """Passes hosts whose NUMA nodes take the instance's, as Nova's filter of this name. A host of which they are not
    known is rejected. pack: as of `fit_instance_to_host`.
    """

    name: ClassVar[str] = "NUMATopologyFilter"

    def __init__(self, numa_of: NumaOf, *, pack: bool = False) -> None:
        self._numa_of = numa_of
        self._pack = pack

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to requests with a topology, or for threads."""
        asked = numa_request_of(spec)
        return asked is not None and (asked.needs_threads or _has_cells(asked))

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """One host after the other: each has its own topology. Nova's own devices are judged without placement's."""
        reasons = [self.rejection_reason(uuid, spec) for uuid in view.replica.uuids_of(view.rows)]
        passed = np.array([reason is None for reason in reasons], dtype=np.bool_)
        return FilterResult(passed, Counter(reason for reason in reasons if reason is not None))

    def suiting(self, host: str, spec: RequestSpec, candidates: Sequence[Mappings]) -> list[int]:
        """Which of a host's allocation candidates do. host: its uuid."""
        return [number for number, one in enumerate(candidates) if self.rejection_reason(host, spec, one) is None]

    def rejection_reason(self, host: str, spec: RequestSpec, mapping: Mappings | None = None) -> str | None:
        """Why the host (uuid) may not take the instance, with this allocation candidate."""
        found = self.fitted(host, spec, mapping)
        return found.reason if isinstance(found, Unfit) else None

    def fitted(self, host: str, spec: RequestSpec, mapping: Mappings | None = None) -> InstanceTopology | Unfit | None:
        """The instance's topology on this host (uuid), with pins; None: it has none."""
        asked, numa = numa_request_of(spec), self._numa_of(host)
        if asked is None:
            return None
        if numa is None:
            return Unfit(UNKNOWN)
        if asked.needs_threads and numa.topology is not None and not numa.topology.has_threads:
            return Unfit(THREADS)
        if asked.topology is None or not asked.topology.cells:
            return None
        if numa.topology is None:
            return Unfit(NO_TOPOLOGY)
        sockets = {cell.id: cell.socket for cell in numa.topology.cells}
        pci = view_of(numa.pools, requests_of(spec), mapping, sockets)
        found = fit_instance_to_host(numa.topology, asked.topology, numa.limits(asked), pci, pack=self._pack)
        return found if isinstance(found, Unfit) else _consistent(numa.topology, found)


def numa_request_of(spec: RequestSpec) -> NumaRequest | None:
    """What a call of Nova asks of NUMA nodes, if it does."""
    return next((one for one in spec.devices if isinstance(one, NumaRequest)), None)


def _has_cells(asked: NumaRequest) -> bool:
    return asked.topology is not None and bool(asked.topology.cells)


def _consistent(host: HostTopology, found: InstanceTopology) -> InstanceTopology | Unfit:
    """Nova's fit may return pins of a cell that it tried before: then its nova-compute refuses the instance."""
    try:
        consume(host, found)
    except PinsRefused:
        return Unfit(INCONSISTENT)
    return found
