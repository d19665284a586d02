"""How many claims a second the book takes: groups of claims against PostgreSQL, and a start-up wave of inventory.

    python -m lab.benchmarks.claims [--url postgresql://...] [--hosts 10000] [--seconds 4] [--workers 2] [--durable]
    python -m lab.benchmarks.claims --quotas

Without a URL it starts a private PostgreSQL. It prints figures and judges nothing. With --quotas it compares single
claims whose project has limits with others, in many short windows in turn: what else the machine does meets both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvloop

from berth.trial.embedded.postgres import Postgres
from bus.clock import new_uuid
from bus.contracts.feed import FeedChanges
from bus.contracts.placement import (
    INSTANCES,
    Claim,
    ClaimOption,
    ClaimResult,
    Inventory,
    InventoryUpdate,
    ProviderReport,
    Release,
)
from bus.persistence.database import Database
from placement_worker.book import ResourceBook
from placement_worker.store.postgres_rows import PostgresBookRows

RESOURCES = {"VCPU": 1, "MEMORY_MB": 512, "DISK_GB": 1}
REPORT_BATCH = 128
LIMITS = dict.fromkeys((*RESOURCES, INSTANCES), 2**40)
WINDOWS = 300  # of each kind, in turn
WINDOW_CLAIMS = 12
BACKENDS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'placement'"


def report(uuid: str, number: int, version: int) -> InventoryUpdate:
    """One flat host with room for thousands."""
    inventories = {
        "VCPU": Inventory(total=4096, allocation_ratio=4.0),
        "MEMORY_MB": Inventory(total=2**30, reserved=512),
        "DISK_GB": Inventory(total=2**24),
    }
    host = ProviderReport(uuid=uuid, name=f"host-{number}", inventories=inventories, traits=("HW_CPU_X86_AVX2",))
    return InventoryUpdate(source="bench", version=version, root_uuid=uuid, providers=(host,))


async def report_all(store: ResourceBook, hosts: Sequence[str], version: int) -> float:
    """Seconds until every host is in the book."""
    started = time.perf_counter()
    for at in range(0, len(hosts), REPORT_BATCH):
        batch = [report(uuid, at + n, version) for n, uuid in enumerate(hosts[at : at + REPORT_BATCH])]
        results = await store.report(batch)
        assert len(results) == len(batch)
    return time.perf_counter() - started


def drawn(rng: random.Random, hosts: Sequence[str], count: int, limits: Mapping[str, int] = {}) -> list[Claim]:
    """New claims, each on one host."""
    return [
        Claim(
            consumer=new_uuid(rng),
            options=(ClaimOption(allocations={rng.choice(hosts): RESOURCES}),),
            project_id="p",
            limits=dict(limits),
        )
        for _ in range(count)
    ]


async def claim_all(store: ResourceBook, claims: Sequence[Claim]) -> None:
    """Apply them as one group, in which each is claimed."""
    results = await store.apply(claims)
    assert all(isinstance(result, ClaimResult) and result.option == 0 for result in results)


async def compare_quotas(store: ResourceBook, database: Database, hosts: Sequence[str]) -> None:
    """The rate and the CPU of single claims, with limits and without: medians over the windows."""
    rng = random.Random(7)
    async with database.raw() as connection:
        backends = [Path(f"/proc/{row[0]}/schedstat") for row in await connection.fetch(BACKENDS)]

    def server_us() -> float:
        return sum(int(each.read_text().split()[0]) for each in backends) / 1000

    figures: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for window in range(2 * WINDOWS):
        limited = window % 2 == 0
        claims = drawn(rng, hosts, WINDOW_CLAIMS, LIMITS if limited else {})
        began, server, here = time.perf_counter(), server_us(), time.process_time()
        for claim in claims:
            await claim_all(store, [claim])
        took, used_us = time.perf_counter() - began, 1e6 * (time.process_time() - here)
        figures[limited].append((WINDOW_CLAIMS / took, (server_us() - server) / WINDOW_CLAIMS, used_us / WINDOW_CLAIMS))
    for limited, name in ((False, "without limits"), (True, "with limits")):
        rate, postgres_us, placement_us = (statistics.median(column) for column in zip(*figures[limited], strict=True))
        print(
            f"single claims {name:14}: {rate:6.0f} /s, CPU of a claim: PostgreSQL {postgres_us:5.0f} us, "
            f"placement {placement_us:5.0f} us"
        )


async def claim_for(
    stores: Sequence[ResourceBook], hosts: Sequence[str], group: int, seconds: float
) -> tuple[int, int]:
    """(claims, groups) applied in about that many seconds, one group under way per store."""
    done = groups = 0
    until = time.perf_counter() + seconds

    async def work(store: ResourceBook, rng: random.Random) -> None:
        nonlocal done, groups
        while time.perf_counter() < until:
            await claim_all(store, drawn(rng, hosts, group))
            done += group
            groups += 1

    await asyncio.gather(*(work(store, random.Random()) for store in stores))
    return done, groups


async def release_all(store: ResourceBook, hosts: Sequence[str], group: int) -> float:
    """Releases a second, of claims made for this."""
    rng = random.Random(99)
    consumers = [new_uuid(rng) for _ in range(5000)]
    for at in range(0, len(consumers), 100):
        options = (ClaimOption(allocations={rng.choice(hosts): RESOURCES}),)
        await store.apply([Claim(consumer=c, options=options, project_id="p") for c in consumers[at : at + 100]])
    started = time.perf_counter()
    for at in range(0, len(consumers), group):
        await store.apply([Release(consumer=consumer, attempt=1) for consumer in consumers[at : at + group]])
    return len(consumers) / (time.perf_counter() - started)


async def measure(url: str, arguments: argparse.Namespace) -> None:
    """Everything, printed."""
    databases = [Database(url, "placement") for _ in range(arguments.workers)]
    stores = [ResourceBook(PostgresBookRows(database)) for database in databases]
    for store in stores:
        await store.open()
    gc.freeze()
    rng = random.Random(1)
    hosts = [new_uuid(rng) for _ in range(arguments.hosts)]
    print(f"{len(hosts)} hosts reported, all new:    {await report_all(stores[0], hosts, 1):6.2f} s")
    print(f"{len(hosts)} hosts reported, all as before: {await report_all(stores[0], hosts, 2):6.2f} s")
    if arguments.quotas:
        await compare_quotas(stores[0], databases[0], hosts)
        for store in stores:
            await store.close()
        return
    for group in (1, 10, 50, 100, 200):
        for under_way in sorted({1, len(stores)}):
            started = time.perf_counter()
            done, groups = await claim_for(stores[:under_way], hosts, group, arguments.seconds)
            took = time.perf_counter() - started
            print(
                f"groups of {group:3d}, {under_way} under way: {done / took:8.0f} claims/s, "
                f"{1000 * took * under_way / groups:6.2f} ms a group"
            )
    print(f"releases in groups of 100: {await release_all(stores[0], hosts, 100):8.0f} /s")

    published = 0

    async def send(sent: FeedChanges) -> None:
        nonlocal published
        published += len(sent.changes)

    started = time.perf_counter()
    while (await stores[0].publish(send, 1000)).more:
        pass
    print(f"feed read and numbered: {published / (time.perf_counter() - started):8.0f} changes/s")
    for store in stores:
        await store.close()


def main() -> None:
    """Parse, start a server when none is given, measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url")
    parser.add_argument("--hosts", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--durable", action="store_true")
    parser.add_argument("--quotas", action="store_true", help="compare claims with limits and without, and no more")
    arguments = parser.parse_args()
    if arguments.url:
        uvloop.run(measure(arguments.url, arguments))
        return
    with Postgres(durable=arguments.durable) as server:
        uvloop.run(measure(server.url("postgres"), arguments))


if __name__ == "__main__":
    main()
