"""Random hosts and instances of all kinds that Nova's NUMA fit tells apart; about a half of them fit."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from nova_scheduler.fit.numa import (
    ANY,
    LARGE,
    SMALL,
    HostCell,
    HostTopology,
    InstanceCell,
    InstanceTopology,
    MemoryPages,
    NetworkMetadata,
    NumaLimits,
)
from nova_scheduler.fit.numa_objects import primitive_of

SMALLEST_KB, HUGE_KB, GIANT_KB = 4, 2_048, 1_048_576
NETWORKS = ("physnet0", "physnet1", "physnet2")


def drawn(rng: random.Random) -> dict[str, Any]:
    """A case as both sides take it, in Nova's own words."""
    host = drawn_host(rng)
    instance = drawn_instance(rng, host)
    limits = drawn_limits(rng) if rng.random() < 0.7 else None
    if rng.random() < 0.01:
        instance = replace(instance, cells=())
    pci = None
    if rng.random() < 0.5:
        ids = [cell.id for cell in host.cells]
        pools = [[rng.choice((*ids, *ids, None)), rng.randint(0, 3)] for _ in range(rng.randint(0, 5))]
        near = [one for one in ids if rng.random() < 0.7]
        pci = {"pools": pools, "near": near, "requested": rng.random() < 0.5}
    return {
        "host": json.dumps(shuffled(rng, primitive_of(host))) if rng.random() < 0.99 else None,
        "instance": unset(rng, shuffled(rng, primitive_of(instance)), "emulator_threads_policy"),
        "limits": limits and unset(rng, primitive_of(limits), "physnets", "tunneled"),
        "pci": pci,
        "pack": rng.random() < 0.3,
        "placed": primitive_of(drawn_placed(rng, host)),
    }


def unset(rng: random.Random, value: Any, *fields: str) -> Any:
    """The same where one of these fields may not be set."""
    data = value["nova_object.data"]
    for holder in (data, (data.get("network_metadata") or {}).get("nova_object.data", {})):
        for field in fields:
            if holder.get(field, True) in (None, False, []) and rng.random() < 0.3:
                holder.pop(field, None)
    return value


def shuffled(rng: random.Random, value: Any) -> Any:
    """The same with each list of numbers in another order, which a set may keep."""
    if isinstance(value, dict):
        return {key: shuffled(rng, one) for key, one in value.items()}
    if isinstance(value, list):
        if all(isinstance(one, int) for one in value):
            return rng.sample(value, len(value))
        return [shuffled(rng, one) for one in value]
    return value


class Kind(Struct, frozen=True):
    """How the cells of a host are alike: use of its CPUs, page sizes, share of CPUs that is pinned."""

    use: str
    sizes: Sequence[int]
    pinned: float


class Wanted(Struct, frozen=True):
    """How the cells of an instance are alike."""

    policy: Any
    threads: Any
    pagesize: int | None


def drawn_host(rng: random.Random) -> HostTopology:
    """Cells are alike in cores, threads and kind; not in what is free."""
    count, cores, threads = rng.choice((1, 2, 2, 3, 4, 4)), rng.randint(1, 8), rng.choice((1, 2, 2, 2, 4))
    # As the kernel counts: a core's threads side by side, or far apart.
    apart = rng.choice((1, count * cores, 56))
    use = rng.choice(("dedicated", "dedicated", "split", "split", "legacy", "shared"))
    sizes = rng.choice(((), (SMALLEST_KB,), (SMALLEST_KB, HUGE_KB), (SMALLEST_KB, HUGE_KB), (4, HUGE_KB, GIANT_KB)))
    first = rng.choice((0, 0, 0, 1))
    kind = Kind(use, sizes, rng.choice((0.0, 0.0, 0.2, 0.6)))
    cells = []
    for number in range(count):
        numbers = range(number * cores, (number + 1) * cores)
        siblings = [
            [core * threads + one if apart == 1 else core + one * max(apart, count * cores) for one in range(threads)]
            for core in numbers
        ]
        cells.append(drawn_cell(rng, first + number, siblings, kind))
    return HostTopology(cells=tuple(cells))


def drawn_cell(rng: random.Random, number: int, siblings: list[list[int]], kind: Kind) -> HostCell:
    use, used = kind.use, kind.pinned
    cpus = frozenset(cpu for core in siblings for cpu in core)
    if use == "split":
        floating = frozenset(cpu for core in siblings if rng.random() < 0.4 for cpu in core)
        if rng.random() < 0.2:
            floating = frozenset(cpu for cpu in cpus if rng.random() < 0.4)
        dedicated = cpus - floating
    else:
        dedicated = frozenset() if use == "shared" else cpus
        floating = frozenset() if use == "dedicated" else cpus
    pinned = frozenset(cpu for core in siblings if rng.random() < used for cpu in core) & dedicated
    if rng.random() < 0.4:
        pinned = frozenset(cpu for cpu in dedicated if rng.random() < used)
    own = [core for core in siblings if not floating.issuperset(core)] if rng.random() < 0.3 else siblings
    if rng.random() < 0.01:
        own = own[1:]  # some CPUs are of no core
    memory = rng.choice((2_048, 4_096, 8_192, 8_192))
    networks = None
    if rng.random() < 0.5:
        physnets = frozenset(one for one in NETWORKS if rng.random() < 0.4)
        networks = NetworkMetadata(physnets=physnets, tunneled=rng.random() < 0.4)
    return HostCell(
        id=number,
        cpuset=floating,
        pcpuset=dedicated,
        memory=memory,
        cpu_usage=rng.choice((0, 0, 2, len(floating))),
        memory_usage=rng.choice((0, 0, 512, 1_024, memory)),
        pinned_cpus=pinned,
        siblings=tuple(frozenset(core) for core in own),
        mempages=tuple(drawn_pages(rng, size, memory) for size in rng.sample(kind.sizes, len(kind.sizes))),
        socket=rng.choice((0, 1, None)),
        network_metadata=networks,
    )


def drawn_pages(rng: random.Random, size_kb: int, memory: int) -> MemoryPages:
    total = memory * 1_024 // size_kb // rng.choice((1, 1, 2))
    used, reserved = rng.choice((0, 0, 0, 0, total // 2, total)), rng.choice((0, 0, 0, total // 4))
    return MemoryPages(size_kb=size_kb, total=total, used=used, reserved=reserved)


def drawn_instance(rng: random.Random, host: HostTopology) -> InstanceTopology:
    """Of the kind that the host mostly is for."""
    most = len(host.cells)
    count = rng.choice((1, 1, min(2, most), min(2, most), most, most + (rng.random() < 0.1)))
    has_shared = any(cell.cpuset for cell in host.cells)
    has_dedicated = any(cell.pcpuset for cell in host.cells)
    policies = ["mixed"] * (has_shared and has_dedicated) + ["dedicated"] * has_dedicated * 2
    policies += ["shared"] * has_shared
    policy = rng.choice(policies or ["shared"]) if rng.random() < 0.9 else rng.choice(("dedicated", "shared", "mixed"))
    threads = rng.choice((None, None, "prefer", "isolate", "require"))
    sizes = [pages.size_kb for pages in host.cells[0].mempages]
    has_sizes = len(sizes) > 1
    pagesize = rng.choice((None, None, *sizes, *[SMALL, ANY] * bool(sizes), *[LARGE, ANY] * has_sizes))
    if rng.random() < 0.08:
        pagesize = rng.choice((SMALL, LARGE, ANY, HUGE_KB, 16))
    memory = rng.choice((512, 512, 512, 1_024, 1_024, 2_048, 1_025, 4_096))
    width = rng.choice((1, 1, 2, 2, 3, 4, 6))
    wanted = Wanted(policy, threads, pagesize)
    cells, at = [], 0
    first = rng.choice((0, 0, 0, 0, 1, -1))
    for number in range(count):
        own = range(at, at + width + rng.choice((0, 0, 0, 1)))
        at = own.stop
        own_memory = memory if rng.random() < 0.8 else rng.choice((512, 1_024, 2_048))
        cells.append(drawn_instance_cell(rng, max(number + first, -1), own, wanted, own_memory))
    emulator = rng.choice((None, None, "share", "isolate")) if policy != "shared" else None
    return InstanceTopology(cells=tuple(cells), emulator_threads_policy=emulator)


def drawn_instance_cell(rng: random.Random, number: int, own: range, wanted: Wanted, memory: int) -> InstanceCell:
    policy, threads = wanted.policy, wanted.threads
    pinned = frozenset(own) if policy == "dedicated" else frozenset[int]()
    if policy == "mixed":
        pinned = frozenset(cpu for cpu in own if rng.random() < 0.6)
    if policy == "shared":
        threads, policy = None, rng.choice((None, "shared"))
    stale = {own[0]: 1} if pinned and rng.random() < 0.05 else None
    return InstanceCell(
        id=number,
        cpuset=frozenset(own) - pinned,
        pcpuset=pinned,
        memory=memory,
        pagesize=wanted.pagesize,
        cpu_policy=policy,
        cpu_thread_policy=threads,
        cpu_pinning=stale,
    )


def drawn_limits(rng: random.Random) -> NumaLimits:
    networks = None
    if rng.random() < 0.5:
        physnets = frozenset(one for one in (*NETWORKS, "physnet9") if rng.random() < 0.3)
        networks = NetworkMetadata(physnets=physnets, tunneled=rng.random() < 0.4)
    cpus, memory = rng.choice((1.0, 1.5, 16.0)), rng.choice((1.0, 1.5, 2.0))
    return NumaLimits(cpu_allocation_ratio=cpus, ram_allocation_ratio=memory, network_metadata=networks)


def drawn_placed(rng: random.Random, host: HostTopology) -> InstanceTopology:
    """An instance that is said to be on the host, with pins that are mostly all free or all used."""
    cells = []
    for cell in rng.sample(host.cells, rng.randint(0, len(host.cells))):
        some = sorted(rng.choice((cell.free_pcpus, cell.pinned_cpus)) or cell.pcpuset)[: rng.randint(0, 4)]
        if rng.random() < 0.1:
            some.append(rng.choice((0, 9, 200)))
        reserved = frozenset(some[:1]) if rng.random() < 0.2 else None
        policy = rng.choice(("dedicated", "dedicated", "mixed", "shared", None))
        cells.append(
            InstanceCell(
                id=cell.id,
                cpuset=frozenset(range(rng.randint(1, 2))),
                pcpuset=frozenset(range(len(some))),
                memory=rng.choice((512, 1_024, 1_025)),
                pagesize=rng.choice((None, 4, HUGE_KB, 16)),
                cpu_policy=policy,  # type: ignore[arg-type]
                cpu_thread_policy=rng.choice((None, "isolate", "prefer")),  # type: ignore[arg-type]
                cpu_pinning=dict(enumerate(some)) if some else None,
                cpuset_reserved=reserved,
            )
        )
    return InstanceTopology(cells=tuple(cells))
