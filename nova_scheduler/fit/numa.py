"""Topologies of a host's NUMA nodes and of an instance's, named as in Nova 34 (`nova/objects/numa.py` and
`nova/objects/instance_numa.py`). Memory is in MB, a page in KB; a CPU is its number on the host, or in the instance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

from bus.faults import Fault

MAX_CELLS = 64  # the most NUMA nodes that Linux is built for on a PC, by default
MAX_CPUS = 8_192  # the most CPUs that Linux can be built for
MAX_PAGE_SIZES = 16
MAX_NETWORKS = 1_000
_MAX = 2**31 - 1

Cpu = Annotated[int, Meta(ge=0, lt=MAX_CPUS)]
Cpus = Annotated[frozenset[Cpu], Meta(max_length=MAX_CPUS)]
Count = Annotated[int, Meta(ge=0, le=_MAX)]
Positive = Annotated[int, Meta(ge=1, le=_MAX)]
CellId = Annotated[int, Meta(ge=0, le=_MAX)]
Ratio = Annotated[float, Meta(ge=0)]
PhysicalNetworks = Annotated[frozenset[Annotated[str, Meta(max_length=255)]], Meta(max_length=MAX_NETWORKS)]
CpuPolicy = Literal["dedicated", "shared", "mixed"]
ThreadPolicy = Literal["prefer", "isolate", "require"]
EmulatorThreadsPolicy = Literal["share", "isolate"]

# What an instance wants of page sizes, beside a size in KB (`hw:mem_page_size`).
SMALL, LARGE, ANY = -1, -2, -3

# Why an instance does not fit: the reasons in a funnel.
NO_TOPOLOGY: Final = "numa.no_topology"
TOO_FEW_CELLS: Final = "numa.too_few_cells"
PAGES: Final = "numa.pages"
MEMORY: Final = "numa.memory"
VCPUS: Final = "numa.vcpus"
PCPUS: Final = "numa.pcpus"
THREADS: Final = "numa.threads"
HYPERTHREADS: Final = "numa.hyperthreads"
CPU_RATIO: Final = "numa.cpu_ratio"
RAM_RATIO: Final = "numa.ram_ratio"
PCI: Final = "numa.pci"
NETWORKS: Final = "numa.networks"
TOO_MANY_ARRANGEMENTS: Final = "numa.too_many_arrangements"


class PinsRefused(Fault):
    """An instance's pins are not those of free CPUs of the host."""

    code = "numa.pins_refused"


class MemoryPages(Struct, frozen=True, kw_only=True):
    """`NUMAPagesTopology`: the pages of one size of a host's cell."""

    size_kb: Positive
    total: Count
    used: Count = 0
    reserved: Count = 0

    @property
    def free(self) -> int:
        """How many are neither used nor reserved; below 0 where more are used than there are."""
        return self.total - self.used - self.reserved


class NetworkMetadata(Struct, frozen=True, kw_only=True):
    """The networks that a host's cell is near to, or that an instance uses."""

    physnets: PhysicalNetworks = frozenset()  # names of physical networks
    tunneled: bool = False


class HostCell(Struct, frozen=True, kw_only=True):
    """`NUMACell`: a NUMA node of a host. cpuset, pcpuset: its CPUs for shared and for dedicated use."""

    id: CellId
    cpuset: Cpus
    pcpuset: Cpus
    memory: Count
    cpu_usage: Count = 0
    memory_usage: Count = 0
    pinned_cpus: Cpus = frozenset()
    siblings: Annotated[tuple[Cpus, ...], Meta(max_length=MAX_CPUS)] = ()  # the threads of each core
    mempages: Annotated[tuple[MemoryPages, ...], Meta(max_length=MAX_PAGE_SIZES)] = ()
    socket: int | None = None
    network_metadata: NetworkMetadata | None = None

    @property
    def free_pcpus(self) -> frozenset[int]:
        """The CPUs for dedicated use that nothing is pinned to."""
        return self.pcpuset - self.pinned_cpus

    @property
    def free_siblings(self) -> tuple[frozenset[int], ...]:
        """The threads of each core that are in `free_pcpus`."""
        free = self.free_pcpus
        return tuple(core & free for core in self.siblings)

    @property
    def avail_memory(self) -> int:
        """MB, below 0 where memory is overcommitted."""
        return self.memory - self.memory_usage


class HostTopology(Struct, frozen=True, kw_only=True):
    """`NUMATopology`. The ids of its cells are distinct."""

    cells: Annotated[tuple[HostCell, ...], Meta(max_length=MAX_CELLS)]

    @property
    def has_threads(self) -> bool:
        """Whether some core has more than one thread."""
        return any(len(core) > 1 for cell in self.cells for core in cell.siblings)


class InstanceCell(Struct, frozen=True, kw_only=True):
    """`InstanceNUMACell`: a NUMA node of an instance. id: its own number, once it is fitted that of the host's cell.
    cpuset, pcpuset: the instance's CPUs that float, and that are pinned (real-time ones are).
    """

    id: Annotated[int, Meta(ge=-1, le=_MAX)]
    cpuset: Cpus
    pcpuset: Cpus
    memory: Count
    pagesize: Annotated[int, Meta(ge=ANY, le=_MAX)] | None = None
    cpu_policy: CpuPolicy | None = None
    cpu_thread_policy: ThreadPolicy | None = None
    # {CPU of the instance: CPU of the host}
    cpu_pinning: Annotated[Mapping[Cpu, Cpu], Meta(max_length=MAX_CPUS)] | None = field(
        name="cpu_pinning_raw", default=None
    )
    cpuset_reserved: Cpus | None = None  # CPUs of the host for the emulator

    @property
    def is_pinned(self) -> bool:
        """Whether it has dedicated CPUs."""
        return self.cpu_policy in ("dedicated", "mixed")

    @property
    def is_floating(self) -> bool:
        """Whether it has shared CPUs, by its policy."""
        return self.cpu_policy != "dedicated"


class InstanceTopology(Struct, frozen=True, kw_only=True):
    """`InstanceNUMATopology`."""

    cells: Annotated[tuple[InstanceCell, ...], Meta(max_length=MAX_CELLS)]
    emulator_threads_policy: EmulatorThreadsPolicy | None = None


class NumaLimits(Struct, frozen=True, kw_only=True):
    """`NUMATopologyLimits`: how far shared CPUs and memory of a cell may be overcommitted; the instance's networks."""

    cpu_allocation_ratio: Ratio
    ram_allocation_ratio: Ratio
    network_metadata: NetworkMetadata | None = None


class PciView(Struct, frozen=True, kw_only=True):
    """A host's PCI devices as the fit sees them. fits: whether the requested devices can be had together with these
    cells, of which the ids count; None: none is requested.
    """

    free_by_node: Mapping[int | None, int] = {}  # devices by NUMA node (None: of no node)
    fits: Callable[[Sequence[InstanceCell]], bool] | None = None


class Unfit(Struct, frozen=True):
    """Why an instance does not fit; of several arrangements the one that got furthest."""

    reason: str
