"""How many claims a second the book takes: groups of claims against PostgreSQL, and a start-up wave of inventory.

    python lab/benchmarks/claims.py [--url postgresql://...] [--hosts 10000] [--seconds 4] [--workers 2] [--durable]
    python lab/benchmarks/claims.py --quotas --consumers 1000000 --hosts 1000

Without a URL it starts a private PostgreSQL. It prints figures and judges nothing. With --quotas it compares claims
with and without limits, in turn, beside so many consumers that their project has already: the CPU of a single
claim in many short windows (steady on a busy machine too), then rates.
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
from bus.contracts.placement import (
    INSTANCES,
    Claim,
    ClaimOption,
    ClaimResult,
    FeedChanges,
    Inventory,
    InventoryUpdate,
    ProviderReport,
    Release,
)
from bus.persistence.database import Database
from placement_worker.operations.repair import COUNT_USED
from placement_worker.store.limits import COUNT_ANEW
from placement_worker.store.postgres import PostgresStore

RESOURCES = {"VCPU": 1, "MEMORY_MB": 512, "DISK_GB": 1}
REPORT_BATCH = 128
FILL = (
    "INSERT INTO consumers (uuid, project_id, user_id, consumer_type, generation, attempt) "
    "SELECT gen_random_uuid(), 'p', 'u', 'INSTANCE', 1, 1 FROM generate_series(1, $1)",
    "INSERT INTO allocations (consumer, provider_id, class_id, amount) "
    "SELECT c.uuid, p.id, i.class_id, 1 FROM (SELECT uuid, row_number() OVER () AS place FROM consumers) c "
    "JOIN (SELECT id, row_number() OVER () AS place, count(*) OVER () AS many FROM providers) p "
    "ON p.place = 1 + c.place % p.many JOIN inventories i ON i.provider_id = p.id",
)
QUOTA_TURNS = 5
# CPU is compared in many short windows, with and without limits in turn: what else the machine does meets both alike.
CPU_PAIRS = 300
CPU_CLAIMS = 12  # a window
BACKENDS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'placement'"
FILL_S = 3600.0  # more than a client waits otherwise


def report(uuid: str, number: int, version: int) -> InventoryUpdate:
    """One flat host with room for thousands."""
    inventories = {
        "VCPU": Inventory(total=4096, allocation_ratio=4.0),
        "MEMORY_MB": Inventory(total=2**30, reserved=512),
        "DISK_GB": Inventory(total=2**24),
    }
    host = ProviderReport(uuid=uuid, name=f"host-{number}", inventories=inventories, traits=("HW_CPU_X86_AVX2",))
    return InventoryUpdate(source="bench", version=version, root_uuid=uuid, providers=(host,))


async def report_all(store: PostgresStore, hosts: Sequence[str], version: int) -> float:
    """Seconds until every host is in the book."""
    started = time.perf_counter()
    for at in range(0, len(hosts), REPORT_BATCH):
        batch = [report(uuid, at + n, version) for n, uuid in enumerate(hosts[at : at + REPORT_BATCH])]
        results = await store.report(batch)
        assert len(results) == len(batch)
    return time.perf_counter() - started


async def claim_for(
    stores: Sequence[PostgresStore],
    hosts: Sequence[str],
    group: int,
    seconds: float,
    limits: Mapping[str, int] | None = None,
) -> tuple[int, int]:
    """(claims, groups) applied in about that many seconds, one group under way per store."""
    done = groups = 0
    until = time.perf_counter() + seconds

    async def work(store: PostgresStore, rng: random.Random) -> None:
        nonlocal done, groups
        while time.perf_counter() < until:
            claims = [
                Claim(
                    consumer=new_uuid(rng),
                    options=(ClaimOption(allocations={rng.choice(hosts): RESOURCES}),),
                    project_id="p",
                    limits=dict(limits or {}),
                )
                for _ in range(group)
            ]
            results = await store.apply(claims)
            assert all(isinstance(result, ClaimResult) and result.option == 0 for result in results)
            done += group
            groups += 1

    await asyncio.gather(*(work(store, random.Random()) for store in stores))
    return done, groups


async def fill(store: PostgresStore, consumers: int) -> float:
    """Seconds until so many consumers of one project hold something, written past the claims."""
    started = time.perf_counter()
    async with store.database.raw() as connection:
        await connection.execute("SET LOCAL statement_timeout = 0")
        for statement in FILL:
            await connection.execute(statement, *([consumers] if "$1" in statement else []), timeout=FILL_S)
        await connection.execute(COUNT_USED, timeout=FILL_S)
        await connection.execute(COUNT_ANEW, timeout=FILL_S)
    async with store.database.raw() as connection:
        await connection.execute("ANALYZE", timeout=FILL_S)
    return time.perf_counter() - started


async def compare_cpu(store: PostgresStore, hosts: Sequence[str]) -> None:
    """CPU of a single claim with and without limits, PostgreSQL's and this process's; medians over pairs of windows."""
    limits = dict.fromkeys((*RESOURCES, INSTANCES), 2**40)
    rng = random.Random(7)
    async with store.database.raw() as connection:
        backends = [row[0] for row in await connection.fetch(BACKENDS)]
    spent: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    gc.disable()
    for pair in range(CPU_PAIRS):
        for limited in (False, True) if pair % 2 else (True, False):
            claims = [
                Claim(
                    consumer=new_uuid(rng),
                    options=(ClaimOption(allocations={rng.choice(hosts): RESOURCES}),),
                    project_id="p",
                    limits=limits if limited else {},
                )
                for _ in range(CPU_CLAIMS)
            ]
            server, here = cpu_us(backends), time.process_time_ns() / 1000
            for claim in claims:
                await store.apply([claim])
            took = (cpu_us(backends) - server, time.process_time_ns() / 1000 - here)
            spent[limited].append((took[0] / CPU_CLAIMS, took[1] / CPU_CLAIMS))
    gc.enable()
    for number, whose in enumerate(("PostgreSQL", "placement")):
        without, with_limits = ([one[number] for one in spent[limited]] for limited in (False, True))
        ratios = sorted(b / a for a, b in zip(without, with_limits, strict=True))
        print(
            f"CPU of a single claim, {whose}: {statistics.median(without):.0f} us without limits, "
            f"{statistics.median(with_limits):.0f} with; the pairs' ratio: median {statistics.median(ratios):.3f}, "
            f"quartiles {ratios[len(ratios) // 4]:.2f} and {ratios[3 * len(ratios) // 4]:.2f}"
        )


def cpu_us(pids: Sequence[int]) -> float:
    """Microseconds that these processes have run."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1000


async def compare_quotas(stores: Sequence[PostgresStore], hosts: Sequence[str], seconds: float) -> None:
    """Claims with and without limits in turn: the median ratio of each kind."""
    limits = dict.fromkeys((*RESOURCES, INSTANCES), 2**40)
    for group, under_way in ((1, 1), (1, len(stores)), (100, 1), (100, len(stores))):
        rates: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(QUOTA_TURNS):
            for limited in (False, True):
                started = time.perf_counter()
                done, _ = await claim_for(stores[:under_way], hosts, group, seconds, limits if limited else None)
                rates[limited].append(done / (time.perf_counter() - started))
        without, with_limits = statistics.median(rates[False]), statistics.median(rates[True])
        print(
            f"groups of {group:3d}, {under_way} under way: {without:8.0f} claims/s without limits, "
            f"{with_limits:8.0f} with: {with_limits / without:.2f}"
        )


async def release_all(store: PostgresStore, hosts: Sequence[str], group: int) -> float:
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
    stores = [PostgresStore(Database(url, "placement")) for _ in range(arguments.workers)]
    for store in stores:
        await store.open()
    gc.freeze()
    rng = random.Random(1)
    hosts = [new_uuid(rng) for _ in range(arguments.hosts)]
    print(f"{len(hosts)} hosts reported, all new:    {await report_all(stores[0], hosts, 1):6.2f} s")
    print(f"{len(hosts)} hosts reported, all as before: {await report_all(stores[0], hosts, 2):6.2f} s")
    if arguments.consumers:
        print(f"{arguments.consumers} consumers: {await fill(stores[0], arguments.consumers):6.1f} s")
    if arguments.quotas:
        await compare_cpu(stores[0], hosts)
        await compare_quotas(stores, hosts, arguments.seconds)
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
    parser.add_argument("--consumers", type=int, default=0, help="so many hold something before")
    parser.add_argument("--quotas", action="store_true", help="compare claims with limits and without")
    arguments = parser.parse_args()
    if arguments.url:
        uvloop.run(measure(arguments.url, arguments))
        return
    with Postgres(durable=arguments.durable) as server:
        uvloop.run(measure(server.url("postgres"), arguments))


if __name__ == "__main__":
    main()
