"""Whether one cell of an instance fits one of a host: memory, numbers of CPUs, pins, limits (Nova 29 to 34,
_numa_fit_instance_cell).
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from nova_scheduler.fit.numa import (
    ANY,
    CPU_RATIO,
    LARGE,
    MEMORY,
    PAGES,
    PCPUS,
    RAM_RATIO,
    SMALL,
    VCPUS,
    HostCell,
    InstanceCell,
    MemoryPages,
    NumaLimits,
    Unfit,
)
from nova_scheduler.fit.numa_cores import pins

KB_OF_MB = 1024


class CellFit(Struct, frozen=True):
    """A try to fit a cell: `cell` as it leaves it, even where it fails, for the next try begins with that, as in Nova;
    `reason` why it failed.
    """

    cell: InstanceCell
    reason: str | None = None


def fit_cell(host: HostCell, cell: InstanceCell, limits: NumaLimits | None = None, reserve: int = 0) -> CellFit:
    """Try it. limits: None where a host may overcommit without bound. reserve: CPUs for the emulator."""
    if cell.pagesize:
        size = page_size(host, cell)
        if size is None:
            return CellFit(cell, PAGES)
        cell = replace(cell, pagesize=size)
    elif not _has_memory(host, cell):
        return CellFit(cell, MEMORY)
    if cell.is_pinned and len(cell.pcpuset) + reserve > len(host.pcpuset):
        return CellFit(cell, PCPUS)
    if cell.is_floating and len(cell.cpuset) > len(host.cpuset):
        return CellFit(cell, VCPUS)
    if cell.is_pinned:
        if len(cell.pcpuset) + reserve > len(host.free_pcpus):
            return CellFit(cell, PCPUS)
        found = pins(host, cell, reserve)
        if isinstance(found, Unfit):
            return CellFit(cell, found.reason)
        pinning = {**(cell.cpu_pinning or {}), **found.pinning} if found.pinning else cell.cpu_pinning
        cell = replace(cell, id=host.id, cpu_pinning=pinning, cpuset_reserved=found.reserved)
    reason = _beyond(host, cell, limits) if cell.is_floating and limits is not None else None
    return CellFit(cell if reason else replace(cell, id=host.id), reason)


def page_size(host: HostCell, cell: InstanceCell) -> int | None:
    """The size in KB of the host's pages that the cell gets: the largest with room of those that it wants."""
    sizes = sorted((pages.size_kb for pages in host.mempages), reverse=True)
    wanted = {SMALL: sizes[-1:], LARGE: sizes[:-1], ANY: sizes}.get(cell.pagesize or ANY)
    if wanted is None:
        wanted = [cell.pagesize or 0]
    return next((size for size in wanted if _fits(_pages(host, size), cell)), None)


def _pages(host: HostCell, size_kb: int) -> MemoryPages | None:
    return next((pages for pages in host.mempages if pages.size_kb == size_kb), None)


def _fits(pages: MemoryPages | None, cell: InstanceCell, *, overcommitted: bool = False) -> bool:
    """Whether the cell's memory is a number of whole pages that are free; overcommitted: that exist."""
    wanted = cell.memory * KB_OF_MB
    if pages is None or wanted % pages.size_kb:
        return False
    return wanted <= (pages.total if overcommitted else pages.free) * pages.size_kb


def _has_memory(host: HostCell, cell: InstanceCell) -> bool:
    """Whether there is memory for a cell that wants no page size: smallest pages, where the host states sizes. Pinned
    instances overcommit no memory; others do, but not against themselves.
    """
    if host.mempages:
        smallest = min(pages.size_kb for pages in host.mempages)
        return _fits(_pages(host, smallest), cell, overcommitted=not cell.is_pinned)
    return cell.memory <= (host.avail_memory if cell.is_pinned else host.memory)


def _beyond(host: HostCell, cell: InstanceCell, limits: NumaLimits) -> str | None:
    """Which ratio of overcommitment the cell would exceed."""
    if host.cpu_usage + len(cell.cpuset) > len(host.cpuset) * limits.cpu_allocation_ratio:
        return CPU_RATIO
    if host.memory_usage + cell.memory > host.memory * limits.ram_allocation_ratio:
        return RAM_RATIO
    return None
