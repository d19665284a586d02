"""How many claims a second placement takes: groups of claims against PostgreSQL, and a start-up wave of inventory.

    python -m lab.benchmarks.claims [--hosts 10000] [--seconds 4] [--workers 2] [--durable]

On a private PostgreSQL. It prints figures and judges nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import time
from collections.abc import Sequence

from berth.up.embedded.postgres import Postgres
from bus.clock import new_uuid
from bus.contracts.feed import FeedChanges
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimResult,
    Inventory,
    InventoryUpdate,
    ProviderReport,
    Release,
)
from bus.persistence.database import Database
from lab.benchmarks.command import measured, positive
from placement_worker.service import PlacementService
from placement_worker.store.postgres_rows import PostgresPlacementRows

RESOURCES = {"VCPU": 1, "MEMORY_MB": 512, "DISK_GB": 1}
REPORT_BATCH = 128


def report(uuid: str, number: int, version: int) -> InventoryUpdate:
    """One flat host with room for thousands."""
    inventories = {
        "VCPU": Inventory(total=4096, allocation_ratio=4.0),
        "MEMORY_MB": Inventory(total=2**30, reserved=512),
        "DISK_GB": Inventory(total=2**24),
    }
    host = ProviderReport(uuid=uuid, name=f"host-{number}", inventories=inventories, traits=("HW_CPU_X86_AVX2",))
    return InventoryUpdate(reporter="bench", version=version, root_uuid=uuid, providers=(host,))


async def report_all(store: PlacementService, hosts: Sequence[str], version: int) -> float:
    """Seconds until every host is in placement."""
    started = time.perf_counter()
    for at in range(0, len(hosts), REPORT_BATCH):
        batch = [report(uuid, at + n, version) for n, uuid in enumerate(hosts[at : at + REPORT_BATCH])]
        results = await store.apply_reports(batch)
        assert len(results) == len(batch)
    return time.perf_counter() - started


def drawn(rng: random.Random, hosts: Sequence[str], count: int) -> list[Claim]:
    """New claims, each on one host."""
    return [
        Claim(
            consumer=new_uuid(rng), options=(ClaimOption(allocations={rng.choice(hosts): RESOURCES}),), project_id="p"
        )
        for _ in range(count)
    ]


async def claim_all(store: PlacementService, claims: Sequence[Claim]) -> None:
    """Apply them as one group, in which each is claimed."""
    results = await store.apply(claims)
    assert all(isinstance(result, ClaimResult) and result.option == 0 for result in results)


async def claim_for(
    stores: Sequence[PlacementService], hosts: Sequence[str], group: int, seconds: float
) -> tuple[int, int]:
    """(claims, groups) applied in about that many seconds, one group under way per store."""
    done = groups = 0
    until = time.perf_counter() + seconds

    async def work(store: PlacementService, rng: random.Random) -> None:
        nonlocal done, groups
        while time.perf_counter() < until:
            await claim_all(store, drawn(rng, hosts, group))
            done += group
            groups += 1

    await asyncio.gather(*(work(store, random.Random()) for store in stores))
    return done, groups


async def release_all(store: PlacementService, hosts: Sequence[str], group: int) -> float:
    """Releases a second, of claims made for this."""
    claims = drawn(random.Random(99), hosts, 5000)
    groups = [claims[at : at + group] for at in range(0, len(claims), group)]
    for part in groups:
        await claim_all(store, part)
    started = time.perf_counter()
    for part in groups:
        await store.apply([Release(consumer=claim.consumer, attempt=1) for claim in part])
    return len(claims) / (time.perf_counter() - started)


async def measure(url: str, arguments: argparse.Namespace) -> None:
    """Everything, printed."""
    stores = [PlacementService(PostgresPlacementRows(Database(url, "placement"))) for _ in range(arguments.workers)]
    for store in stores:
        await store.open()
    gc.freeze()
    rng = random.Random(1)
    hosts = [new_uuid(rng) for _ in range(arguments.hosts)]
    print(f"{len(hosts)} hosts reported, all new:    {await report_all(stores[0], hosts, 1):6.2f} s")
    print(f"{len(hosts)} hosts reported, all as before: {await report_all(stores[0], hosts, 2):6.2f} s")
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
    """Parse, start a server, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=positive, default=10_000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--workers", type=positive, default=2)
    parser.add_argument("--durable", action="store_true")
    arguments = parser.parse_args()
    with Postgres(durable=arguments.durable) as server:
        measured(measure(server.url(), arguments))


if __name__ == "__main__":
    main()
