"""The cost of a candidate search, without HTTP: `python lab/benchmarks/candidates.py [--roots 1000]`."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

from bus.contracts.placement import ProviderState
from placement_worker.replica.book import Book
from placement_worker.replica.candidates import CandidatesRequest, Group, candidates

VCPU = (512.0, 1, 64, 1, 32, 0, 16.0)
MEMORY = (196_608.0, 1, 131_072, 1, 131_072, 0, 1.5)
DISK = (2000.0, 1, 2000, 1, 2000, 0, 1.0)
TRAITS = ("COMPUTE_NODE", "HW_CPU_X86_AVX", "HW_CPU_X86_AVX2")
BOOT = {"VCPU": 2, "MEMORY_MB": 4096, "DISK_GB": 20}


def uuid(number: int) -> str:
    """A readable uuid."""
    return f"00000000-0000-4000-8000-{number:012d}"


def flat(count: int) -> Book:
    """Hosts without children, each used a little differently."""
    book = Book()
    book.load(
        [
            ProviderState(
                uuid=uuid(number),
                name=f"host{number}",
                root_uuid=uuid(number),
                generation=1,
                shape=1,
                inventories={"VCPU": VCPU, "MEMORY_MB": MEMORY, "DISK_GB": DISK},
                used={"VCPU": number % 128, "MEMORY_MB": number % 90_000, "DISK_GB": number % 900},
                traits=TRAITS if number % 10 else (*TRAITS, "CUSTOM_GOLD"),
                aggregates=(f"agg{number % 20}",),
            )
            for number in range(count)
        ],
        1,
    )
    return book


def nested(count: int) -> Book:
    """Hosts of a root, two NUMA cells, and two network devices under each."""
    states = []
    for number in range(count):
        root = 10 * number
        places = [(0, None), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)]
        for place, parent in places:
            if place == 0:
                has, used = {"DISK_GB": DISK}, {"DISK_GB": number % 900}
            elif place < 3:
                has = {"VCPU": VCPU, "MEMORY_MB": MEMORY}
                used = {"VCPU": (number + place) % 128, "MEMORY_MB": (number * place) % 90_000}
            else:
                has, used = {"SRIOV_NET_VF": (8.0, 1, 8, 1, 8, 0, 1.0)}, {"SRIOV_NET_VF": (number + place) % 7}
            states.append(
                ProviderState(
                    uuid=uuid(root + place),
                    name=f"host{number}.{place}",
                    root_uuid=uuid(root),
                    parent_uuid=None if parent is None else uuid(root + parent),
                    generation=1,
                    shape=1,
                    inventories=has,
                    used=used,
                    traits=TRAITS if place == 0 else ("HW_NUMA_ROOT",) if place < 3 else ("CUSTOM_NET",),
                )
            )
    book = Book()
    book.load(states, 1)
    return book


def devices(count: int) -> Book:
    """One host with so many like devices."""
    book = Book()
    root = ProviderState(
        uuid=uuid(0), name="host", root_uuid=uuid(0), generation=1, shape=1, inventories={"VCPU": VCPU}
    )
    like = [
        ProviderState(
            uuid=uuid(number),
            name=f"dev{number}",
            root_uuid=uuid(0),
            parent_uuid=uuid(0),
            generation=1,
            shape=1,
            inventories={"SRIOV_NET_VF": (8.0, 1, 8, 1, 8, 0, 1.0)},
        )
        for number in range(1, count + 1)
    ]
    book.load([root, *like], 1)
    return book


def shared(count: int) -> Book:
    """Flat hosts without disk, and one in fifty of them a storage pool that shares with an aggregate."""
    states = []
    for number in range(count):
        pool = number % 50 == 0
        states.append(
            ProviderState(
                uuid=uuid(number),
                name=f"host{number}",
                root_uuid=uuid(number),
                generation=1,
                shape=1,
                inventories={"DISK_GB": DISK} if pool else {"VCPU": VCPU, "MEMORY_MB": MEMORY},
                traits=("MISC_SHARES_VIA_AGGREGATE",) if pool else TRAITS,
                aggregates=(f"agg{number // 50}",),
            )
        )
    book = Book()
    book.load(states, 1)
    return book


def p50(name: str, run: Callable[[], int], times: int = 15) -> None:
    """Print the median of some runs."""
    took = []
    found = 0
    for _ in range(times):
        started = time.perf_counter()
        found = run()
        took.append(time.perf_counter() - started)
    sys.stdout.write(f"{name:64} {statistics.median(took) * 1e3:9.2f} ms  ({found} candidates)\n")


def groups(*resources: dict[str, int]) -> tuple[Group, ...]:
    """Numbered groups."""
    return tuple(Group(suffix=f"_{number}", resources=requested) for number, requested in enumerate(resources))


def main() -> None:
    """All cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flat", type=int, default=10_000)
    parser.add_argument("--roots", type=int, default=1000)
    arguments = parser.parse_args()

    def measure(name: str, book: Book, request: CandidatesRequest, limit: int) -> None:
        p50(name, lambda: len(candidates(book, request, limit=limit).columns()[0]))

    hosts = flat(arguments.flat)
    plain = CandidatesRequest(groups=(Group(resources=BOOT),))
    gold = Group(resources=BOOT, required=(("CUSTOM_GOLD",),), member_of=(("agg0", "agg1"),))
    impossible = Group(resources=BOOT, required=(("CUSTOM_NOBODY",),))
    measure(f"{arguments.flat} flat, limit 1000", hosts, plain, 1000)
    measure(f"{arguments.flat} flat, limit 1", hosts, plain, 1)
    measure(f"{arguments.flat} flat, all of them", hosts, plain, 10**9)
    measure(f"{arguments.flat} flat, trait and member_of", hosts, CandidatesRequest(groups=(gold,)), 1000)
    measure(f"{arguments.flat} flat, none", hosts, CandidatesRequest(groups=(impossible,)), 1000)

    trees = nested(arguments.roots)
    compute = {"VCPU": 4, "MEMORY_MB": 4096}
    subtree = CandidatesRequest(
        groups=(Group(resources={"DISK_GB": 20}), *groups(compute, {"SRIOV_NET_VF": 1})),
        group_policy="none",
        same_subtree=(("_0", "_1"),),
    )
    isolate = CandidatesRequest(
        groups=(Group(resources={"DISK_GB": 20}), *groups(compute, {"SRIOV_NET_VF": 1}, {"SRIOV_NET_VF": 1})),
        group_policy="isolate",
    )
    measure(f"{arguments.roots} roots x 7, same_subtree, limit 1000", trees, subtree, 1000)
    measure(f"{arguments.roots} roots x 7, isolate, limit 1000", trees, isolate, 1000)
    measure(f"{arguments.roots} roots x 7, un-numbered, limit 1000", trees, plain, 1000)
    measure(f"{arguments.roots} roots x 7, isolate, limit 1", trees, isolate, 1)
    measure(f"{arguments.roots} roots x 7, isolate, all of them", trees, isolate, 10**9)

    eight = CandidatesRequest(groups=groups(*[{"SRIOV_NET_VF": 1}] * 8), group_policy="isolate")
    measure("8 like devices, 8 groups, isolate, limit 1000", devices(8), eight, 1000)
    measure("7 like devices, 8 groups, isolate (none)", devices(7), eight, 1000)
    measure("16 like devices, 8 groups, none, limit 1000", devices(16), eight, 1000)
    measure(f"{arguments.flat} hosts and shared storage, limit 1000", shared(arguments.flat), plain, 1000)


if __name__ == "__main__":
    main()
