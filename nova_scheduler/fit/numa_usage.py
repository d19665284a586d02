"""A host's topology once an instance uses it, or no longer does (Nova 29 to 34, numa_usage_from_instance_numa)."""

from __future__ import annotations

from msgspec.structs import replace

from nova_scheduler.fit.numa import HostCell, HostTopology, InstanceCell, InstanceTopology, MemoryPages, PinsRefused
from nova_scheduler.fit.numa_cell import KB_OF_MB


def consume(host: HostTopology, instance: InstanceTopology, *, free: bool = False) -> HostTopology:
    """The host with a fitted instance on it; free: without it. Raises PinsRefused: its pins are used, are free, or are
    none of the host's.
    """
    sign = -1 if free else 1
    return HostTopology(cells=tuple(_after(cell, instance, sign) for cell in host.cells))


def _after(host: HostCell, instance: InstanceTopology, sign: int) -> HostCell:
    memory, cpus, pages, pinned = host.memory_usage, host.cpu_usage, host.mempages, host.pinned_cpus
    for cell in instance.cells:
        if cell.id != host.id:
            continue
        memory += sign * cell.memory
        cpus += sign * len(cell.cpuset)
        pages = _pages_after(pages, cell, sign)
        if cell.is_pinned:
            pinned = _pinned_after(host, pinned, _pins_of(host, cell), sign)
    return replace(host, memory_usage=max(0, memory), cpu_usage=max(0, cpus), mempages=pages, pinned_cpus=pinned)


def _pages_after(pages: tuple[MemoryPages, ...], cell: InstanceCell, sign: int) -> tuple[MemoryPages, ...]:
    """The instance's pages are used, those of the smallest size where it has none of its own."""
    size = cell.pagesize or min((one.size_kb for one in pages), default=0)
    return tuple(
        replace(one, used=int(max(0, one.used + sign * cell.memory * KB_OF_MB / one.size_kb)))
        if one.size_kb == size
        else one
        for one in pages
    )


def _pins_of(host: HostCell, cell: InstanceCell) -> frozenset[int]:
    """The CPUs of the host that the cell takes; one that isolates its threads takes whole cores."""
    cpus = frozenset((cell.cpu_pinning or {}).values()) | (cell.cpuset_reserved or frozenset())
    if cell.cpu_thread_policy != "isolate":
        return cpus
    return frozenset().union(*(core for core in host.siblings if cpus & core))


def _pinned_after(host: HostCell, pinned: frozenset[int], cpus: frozenset[int], sign: int) -> frozenset[int]:
    if not cpus <= host.pcpuset:
        raise PinsRefused(f"cell {host.id} has no CPUs {sorted(cpus - host.pcpuset)} for dedicated use")
    wrong = cpus & pinned if sign > 0 else cpus - pinned
    if wrong:
        raise PinsRefused(f"CPUs {sorted(wrong)} of cell {host.id} are {'used' if sign > 0 else 'free'}")
    return pinned | cpus if sign > 0 else pinned - cpus
