"""The cost of the replica: loading, memory, folding in changes, searching, assuming."""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from msgspec import structs

from bus.contracts.placement import Change, ProviderState
from placement_worker.replica.book import Book
from placement_worker.replica.search import Query, options, search

INVENTORIES = {
    "VCPU": (512.0, 1, 64, 1, 32, 0, 16.0),
    "MEMORY_MB": (196_608.0, 1, 131_072, 1, 131_072, 0, 1.5),
    "DISK_GB": (2000.0, 1, 2000, 1, 2000, 0, 1.0),
}
TRAITS = ("COMPUTE_NODE", "HW_CPU_X86_AVX", "HW_CPU_X86_AVX2", "COMPUTE_TRUSTED_CERTS")
BOOT = {"VCPU": 2, "MEMORY_MB": 4096, "DISK_GB": 20}


def uuid(number: int) -> str:
    """A readable uuid."""
    return f"00000000-0000-4000-8000-{number:012d}"


def host(number: int) -> ProviderState:
    """A flat host."""
    return ProviderState(
        uuid=uuid(number),
        name=f"host{number}",
        root_uuid=uuid(number),
        generation=1,
        shape=1,
        inventories=INVENTORIES,
        used={"VCPU": number % 128, "MEMORY_MB": number % 90_000, "DISK_GB": number % 900},
        traits=TRAITS if number % 10 else (*TRAITS, "CUSTOM_GOLD"),
        aggregates=(f"agg{number % 20}",),
    )


def numa_host(number: int) -> list[ProviderState]:
    """A root with two NUMA cells and four devices."""
    root = uuid(8 * number)
    cell = {"VCPU": INVENTORIES["VCPU"], "MEMORY_MB": INVENTORIES["MEMORY_MB"]}
    members = [({"DISK_GB": INVENTORIES["DISK_GB"]}, TRAITS), (cell, ("HW_NUMA_ROOT",)), (cell, ("HW_NUMA_ROOT",))]
    members += [({"VGPU": (8.0, 1, 8, 1, 8, 0, 1.0)}, ("CUSTOM_VGPU_A",))] * 4
    return [
        ProviderState(
            uuid=uuid(8 * number + place),
            name=f"host{number}.{place}",
            root_uuid=root,
            parent_uuid=root if place else None,
            generation=1,
            shape=1,
            inventories=inventories,
            traits=traits,
        )
        for place, (inventories, traits) in enumerate(members)
    ]


def timed_us(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """p50 and p99 of one call, in microseconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - began) / 1000)
    return statistics.median(times), sorted(times)[int(0.99 * (len(times) - 1))]


def weight_mb(book: Book) -> float:
    """Columns, strings and the index, by their own sizes (rows in use; untouched pages cost nothing)."""
    arrays = [value for value in vars(book).values() if isinstance(value, np.ndarray)]
    for name in book.resource_classes():
        column = book.column(name)
        assert column is not None
        arrays += [column.kind, column.used, column.free, column.root_free]
    strings = sum(sys.getsizeof(text) for text in (*book._uuids, *book._names))
    tables = sys.getsizeof(book._rows) + sys.getsizeof(book._uuids) + sys.getsizeof(book._names)
    return (sum(array.itemsize * book.top for array in arrays) + strings + tables) / 1e6


def print_figures(what: str, figures: str) -> None:
    """One line."""
    print(f"  {what:<72}{figures}")


def loaded(states: list[ProviderState]) -> Book:
    """A book with these providers, measured."""
    gc.collect()
    book = Book()
    began = time.perf_counter()
    book.load(states, 0)
    took = time.perf_counter() - began
    figures = f"{took * 1000:.0f} ms, {len(states) / took:,.0f} /s, {weight_mb(book):.1f} MB"
    print_figures(f"load {len(states):,} providers", figures)
    return book


def boots(book: Book, query: Query, what: str, repeats: int) -> None:
    """Search, choose, take the best option, assume: as a scheduler does; each search sees what the last one took."""
    count = [0]

    def boot() -> None:
        roots = search(book, query).roots
        root = int(roots[count[0] * 7919 % len(roots)])
        book.assume(f"k{count[0]}", options(book, query, root, limit=1)[0].allocations)
        count[0] += 1

    first = timed_us(lambda: search(book, query), 1)[0]
    alone = timed_us(lambda: search(book, query), repeats)
    whole = timed_us(boot, repeats)
    print_figures(f"{what}: first search (nothing remembered)", f"{first:,.0f} us")
    print_figures(f"{what}: search, nothing moved", f"p50 {alone[0]:.1f} us, p99 {alone[1]:.1f} us")
    print_figures(
        f"{what}: search + option + assume, each after the last", f"p50 {whole[0]:.1f} us, p99 {whole[1]:.1f} us"
    )
    began = time.perf_counter_ns()
    for number in range(count[0]):
        book.forget(f"k{number}")
    print_figures(f"{what}: settle", f"{(time.perf_counter_ns() - began) / 1000 / count[0]:.1f} us")


def searches(book: Book, hosts: int, repeats: int) -> None:
    """The cost of searching."""
    plain = Query(resources=BOOT)
    picky = Query(
        resources=BOOT, required=(("CUSTOM_GOLD",),), forbidden=("CUSTOM_BAD",), member_of=(("agg0", "agg10"),)
    )
    boots(book, plain, "plain", repeats)
    boots(book, picky, "traits and aggregates", repeats)
    moved = [0]

    def after_64_moves() -> object:
        for _ in range(64):
            moved[0] += 1
            number = moved[0] * 7919 % hosts
            book.apply(
                [
                    Change(
                        sequence=book.sequence + 1,
                        provider=uuid(number),
                        generation=moved[0] + 1,
                        used={"VCPU": moved[0] % 512, "MEMORY_MB": 4096, "DISK_GB": 20},
                    )
                ]
            )
        began = time.perf_counter_ns()
        search(book, plain)
        times.append((time.perf_counter_ns() - began) / 1000)
        return None

    times: list[float] = []
    for _ in range(max(20, repeats // 20)):
        after_64_moves()
    print_figures("plain: search after the feed moved 64 hosts", f"p50 {statistics.median(times):.1f} us")
    none = Query(resources={"VCPU": 2, "CUSTOM_NOBODY": 1})
    print_figures(
        "no host at all, explained", f"p50 {timed_us(lambda: search(book, none, explain=True), 200)[0]:.1f} us"
    )
    roots = book.rows_of_roots()
    print_figures("free() of all roots, one class", f"p50 {timed_us(lambda: book.free('VCPU', roots), 200)[0]:.1f} us")


def feed(book: Book, hosts: int, changes: int) -> None:
    """The cost of following the feed."""
    batch = [
        Change(
            sequence=book.sequence + 1 + number,
            provider=uuid(number * 7919 % hosts),
            generation=1_000_000 + number,
            used={"VCPU": number % 500, "MEMORY_MB": number % 190_000, "DISK_GB": number % 1900},
        )
        for number in range(changes)
    ]
    began = time.perf_counter()
    book.apply(batch)
    took = time.perf_counter() - began
    print_figures(
        "apply usage changes (3 classes each)", f"{changes / took:,.0f} /s, {took / changes * 1e6:.1f} us each"
    )
    batch = [
        Change(
            sequence=book.sequence + 1 + number,
            provider=uuid(number),
            generation=3_000_000,
            state=structs.replace(host(number), generation=3_000_000, shape=2),
        )
        for number in range(min(hosts, 5000))
    ]
    began = time.perf_counter()
    book.apply(batch)
    took = time.perf_counter() - began
    print_figures("apply whole states", f"{len(batch) / took:,.0f} /s, {took / len(batch) * 1e6:.1f} us each")


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--nested", type=int, nargs="*", default=[1_000, 10_000])
    parser.add_argument("--repeats", type=int, default=2000)
    requested = parser.parse_args()
    print(f"numpy {np.__version__}")
    for hosts in requested.hosts:
        print(f"{hosts:,} flat hosts")
        states = [host(number) for number in range(hosts)]
        book = loaded(states)
        del states
        searches(book, hosts, requested.repeats)
        feed(book, hosts, 20_000)
    for hosts in requested.nested:
        print(f"{hosts:,} nested hosts of 7 providers")
        book = loaded([state for number in range(hosts) for state in numa_host(number)])
        query = Query(resources={**BOOT, "VGPU": 1}, required=(("CUSTOM_VGPU_A",), ("HW_NUMA_ROOT",)))
        boots(book, query, "VCPU, MEMORY_MB, DISK_GB, VGPU", requested.repeats // 4)


if __name__ == "__main__":
    main()
