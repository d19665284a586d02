"""Which CPUs of a host's cell an instance's dedicated CPUs are pinned to, by its thread policy (Nova 29 to 34,
_pack_instance_onto_cores).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from msgspec import Struct

from nova_scheduler.fit.numa import HYPERTHREADS, THREADS, HostCell, InstanceCell, Unfit

Cores = Sequence[frozenset[int]]  # the free threads of each core


class Pins(Struct, frozen=True):
    """`pinning`: {CPU of the instance: CPU of the host}; `reserved`: CPUs of the host for the emulator."""

    pinning: dict[int, int]
    reserved: frozenset[int] | None = None


def pins(host: HostCell, cell: InstanceCell, reserve: int) -> Pins | Unfit:
    """The pins of a cell on a host's, or why its thread policy cannot be kept. reserve: CPUs for the emulator."""
    cores = host.free_siblings
    threads = max(map(len, host.siblings), default=0) or 1
    if cell.cpu_thread_policy == "isolate":
        return _isolated(host, cell, reserve, [core for core in cores if len(core) >= threads])
    is_required = cell.cpu_thread_policy == "require"
    if is_required and threads <= 1:
        return Unfit(THREADS)
    free = list(chain(*cores))
    for usable, each in _layouts(cores, least=2 if is_required else 1):
        pinning = _pinned(cell, usable, each)
        if pinning is None:
            continue
        reserved = _reserved(pinning, [cpu for cpu in free if cpu not in pinning.values()], reserve)
        if reserved or not reserve:
            return Pins(pinning, reserved)
    return Unfit(THREADS)


def _layouts(cores: Cores, least: int) -> Iterator[tuple[Cores, int]]:
    """The cores to use and how many threads of each, the most threads first; at last each thread as a core."""
    for each in range(max(map(len, cores), default=0), least - 1, -1):
        yield [core for core in cores if len(core) >= each], each
    if least == 1:
        yield [frozenset({cpu}) for core in cores for cpu in core], 1


def _isolated(host: HostCell, cell: InstanceCell, reserve: int, whole: Cores) -> Pins | Unfit:
    """Pins to one thread of each core that is wholly free. With hyperthreads only on a host that keeps no CPUs for
    dedicated use apart (vcpu_pin_set), where the other threads then count as used.
    """
    has_threads = max(map(len, host.siblings), default=0) > 1
    if has_threads and host.pcpuset != host.cpuset:
        return Unfit(HYPERTHREADS)
    pinning = _pinned(cell, whole, 1)
    if not pinning:
        return Unfit(THREADS)
    untouched = [core for core in host.free_siblings if core.isdisjoint(pinning.values())]
    reserved = _reserved(pinning, list(chain(*untouched)), reserve)
    return Pins(pinning, reserved) if reserved or not reserve else Unfit(THREADS)


def _pinned(cell: InstanceCell, cores: Cores, each: int) -> dict[int, int] | None:
    """The dedicated CPUs in order on so many threads of each core, if these suffice."""
    if each * len(cores) < len(cell.pcpuset):
        return None
    threads = chain.from_iterable(list(core)[:each] for core in cores)
    return dict(zip(sorted(cell.pcpuset), threads, strict=False))


def _reserved(pinning: dict[int, int], free: Sequence[int], reserve: int) -> frozenset[int] | None:
    """The first free CPUs; none beside a cell that pins none."""
    return (frozenset(free[:reserve]) if pinning else None) or None
