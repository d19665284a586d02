"""Each project's total is kept beside its consumers, on both stores: always their sum, whatever moves them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.placement import (
    INSTANCES,
    Claim,
    ClaimOption,
    ConsumerAllocations,
    Inventory,
    InventoryUpdate,
    Migration,
    ProviderReport,
    Release,
    Revert,
    Swap,
)
from bus.contracts.placement_queries import ProjectUsageQuery
from placement_worker.domain.allocations import AllocationWrite, Remove, Replace, Reshape
from placement_worker.domain.claim_ledger import ConsumerWrite
from placement_worker.domain.claims import ClaimItem
from placement_worker.domain.migration import MIGRATION_TYPE
from placement_worker.domain.values import StoredInventory
from placement_worker.operations import audit
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from placement_worker.store.postgres_rows import PostgresPlacementRows
from tests.contract.books import HOSTS, VMS, Placements, roomy_host

PROJECTS = ("p", "q", "r")
Amounts = dict[tuple[str, str], int]
KEPT = """
SELECT u.project_id, coalesce(c.name, 'INSTANCES'), u.amount FROM project_usage u
LEFT JOIN resource_classes c ON c.id = u.class_id WHERE u.amount <> 0
"""
HELD = """
SELECT c.project_id, n.name, sum(a.amount)::bigint FROM consumers c JOIN allocations a ON a.consumer = c.uuid
JOIN resource_classes n ON n.id = a.class_id GROUP BY 1, 2
UNION ALL SELECT c.project_id, 'INSTANCES', count(DISTINCT c.uuid) FROM consumers c
JOIN allocations a ON a.consumer = c.uuid WHERE c.consumer_type <> 'MIGRATION' GROUP BY 1
"""


async def kept_and_held(store: PlacementService) -> tuple[Amounts, Amounts]:
    """The total of each project and class, and its consumers' allocations."""
    if isinstance(store.rows, PostgresPlacementRows):
        async with store.rows.database.raw() as connection:
            kept, held = await connection.fetch(KEPT), await connection.fetch(HELD)
        return {(row[0], row[1]): row[2] for row in kept}, {(row[0], row[1]): row[2] for row in held}
    assert isinstance(store.rows, MemoryPlacementRows)
    table = store.rows.table
    sums: Counter[tuple[str, str]] = Counter()
    for row in table.consumers.values():
        project = row.consumer.project_id
        if row.consumer.allocations and row.consumer.consumer_type != MIGRATION_TYPE:
            sums[project, INSTANCES] += 1
        for resources in row.consumer.allocations.values():
            for name, amount in resources.items():
                sums[project, name] += amount
    rows = {(p, name): n for p, amounts in table.project_usage.items() for name, n in amounts.items() if n}
    return rows, dict(sums)


def holding(rng: random.Random) -> dict[str, dict[str, int]]:
    hosts = rng.sample(HOSTS, rng.choice((1, 1, 2)))
    return {
        host: {name: rng.randint(1, 9) for name in rng.sample(("VCPU", "DISK_GB"), rng.choice((1, 2)))}
        for host in hosts
    }


def moving(rng: random.Random, vms: Sequence[str]) -> Migration:
    return Migration(uuid=rng.choice(vms), source=holding(rng))


def item(rng: random.Random, vms: Sequence[str]) -> ClaimItem:
    vm, project = rng.choice(vms), rng.choice(PROJECTS)
    generation = rng.choice((None, None, 1, 2, 3))
    match rng.randrange(7):
        case 0:
            return Release(consumer=vm, attempt=rng.choice((None, 1, 2)))
        case 1:
            entries = tuple(
                ConsumerAllocations(
                    consumer=one,
                    consumer_generation=rng.choice((None, 1, 2, 3)),
                    allocations=holding(rng) if rng.random() < 0.7 else {},
                    project_id=rng.choice(PROJECTS),
                    consumer_type=rng.choice(("INSTANCE", MIGRATION_TYPE)),
                )
                for one in rng.sample(vms, rng.choice((1, 2)))
            )
            return Swap(consumers=entries)
        case 2:
            return Revert(consumer=vm, migration=moving(rng, vms), source_attempt=1, attempt=rng.randint(1, 5))
        case _:
            return Claim(
                consumer=vm,
                attempt=rng.randint(1, 5),
                consumer_generation=generation,
                release_first=rng.random() < 0.3,
                options=tuple(ClaimOption(allocations=holding(rng)) for _ in range(rng.choice((1, 2)))),
                project_id=project,
                limits=rng.choice(({}, {"VCPU": 12}, {"INSTANCES": 2, "DISK_GB": 30})),
                migration=moving(rng, vms) if rng.random() < 0.3 else None,
            )


def nested(uuid: str, version: int) -> InventoryUpdate:
    """The same host, whose disks are a child's from now on: what is held of them moves there."""
    root = ProviderReport(uuid=uuid, name=f"host-{uuid[0]}", inventories={"VCPU": Inventory(total=100)})
    child = ProviderReport(
        uuid=uuid[:-1] + "f", name=f"child-{uuid[0]}", parent_uuid=uuid, receives_from=uuid,
        inventories={"DISK_GB": Inventory(total=100)},
    )  # fmt: skip
    return InventoryUpdate(reporter="s", version=version, root_uuid=uuid, providers=(root, child))


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_kept_of_a_project_is_what_its_consumers_hold(store: PlacementService, seed: int) -> None:
    rng = random.Random(seed)
    held: Amounts = {}
    most: Counter[str] = Counter()
    for turn in range(60):
        if turn % 13 == 12:
            host = rng.choice(HOSTS)
            update = nested(host, turn + 2) if rng.random() < 0.5 else replace(roomy_host(host), version=turn + 2)
            await store.apply_reports([update])
        replies = await store.apply([item(rng, VMS[:12]) for _ in range(rng.choice((1, 1, 2, 5, 12)))])
        most.update(str(reply.outcome) for reply in replies)
        kept, held = await kept_and_held(store)
        assert kept == held
    assert held
    assert min(most[one] for one in ("claimed", "released", "over_quota", "consumer_conflict")) > 0


async def test_processes_that_move_between_projects_at_once_keep_the_sums(
    make: Placements, store: PlacementService
) -> None:
    """Each with consumers of its own, in another order: the projects' rows alone are common to them."""
    stores = [store, make(), make(), make()]
    for other in stores[1:]:
        await other.open()

    async def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(25):
            await stores[number].apply(
                [item(rng, VMS[10 * number : 10 * number + 10]) for _ in range(rng.choice((1, 4)))]
            )

    await asyncio.gather(*(work(number) for number in range(4)))
    kept, held = await kept_and_held(store)
    assert kept == held != {}
    if isinstance(store.rows, PostgresPlacementRows):
        assert await deadlocks(store) == 0
        async with store.rows.database.raw() as connection:
            assert await audit.findings(connection) == []


async def test_processes_with_the_same_projects_in_other_orders_do_not_deadlock(
    make: Placements, store: PlacementService
) -> None:
    """Each on a host of its own: nothing before the projects' rows makes one wait for the other."""
    stores = [store, make()]
    await stores[1].open()
    projects = [f"project-{n}" for n in range(9)]

    async def work(number: int) -> None:
        rng = random.Random(number)
        option = ClaimOption(allocations={HOSTS[number]: {"VCPU": 1}})
        for _ in range(11):
            group = [Claim(consumer=new_uuid(rng), options=(option,), project_id=name) for name in projects]
            replies = await stores[number].apply(group[:: 1 if number else -1])
            assert {str(reply.outcome) for reply in replies} == {"claimed"}

    await asyncio.gather(work(0), work(1))
    kept, held = await kept_and_held(store)
    assert kept == held
    assert kept[projects[0], "VCPU"] == 22
    if isinstance(store.rows, PostgresPlacementRows):
        assert await deadlocks(store) == 0


async def deadlocks(store: PlacementService) -> int:
    found = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    async with store.rows.database.raw() as connection:
        await connection.execute("SELECT pg_stat_force_next_flush()")
    async with store.rows.database.raw() as connection:
        count: int = await connection.fetchval(found)
        return count


async def test_a_project_that_holds_nothing_any_more_leaves_no_row(store: PlacementService) -> None:
    option = ClaimOption(allocations={HOSTS[0]: {"VCPU": 1}})
    await store.apply([Claim(consumer=VMS[0], options=(option,), project_id="p"), Release(consumer=VMS[1])])
    await store.apply([Claim(consumer=VMS[1], options=(option,), project_id="q", attempt=1)])
    await store.apply([Release(consumer=VMS[0])])
    await store.trim(keep_changes=100, keep_ended_attempts_s=1e6, keep_reporters_s=1e6, limit=10)
    if isinstance(store.rows, PostgresPlacementRows):
        async with store.rows.database.raw() as connection:
            rows = await connection.fetch("SELECT project_id FROM project_usage")
            assert "p" not in {row[0] for row in rows}
    else:
        assert isinstance(store.rows, MemoryPlacementRows)
        assert "p" not in store.rows.table.project_usage


# --- each way to hold less


def put(vcpus: int, project: str = "p") -> ConsumerWrite:
    """The first instance as a PUT writes it; zero VCPUs: it holds nothing."""
    return ConsumerWrite(VMS[0], {HOSTS[0]: {"VCPU": vcpus}} if vcpus else {}, project, "u", "INSTANCE", 1)


def claim(vm: int, vcpus: int, at: int = 0, **fields: object) -> Claim:
    option = ClaimOption(allocations={HOSTS[at]: {"VCPU": vcpus}})
    return Claim(consumer=VMS[vm], options=(option,), project_id="p", **fields)  # type: ignore[arg-type]


INVENTORIES = {name: StoredInventory(100, 0, 1, 100, 1, 1.0, 100) for name in ("VCPU", "DISK_GB")}
WAYS: dict[str, tuple[AllocationWrite | Reshape, int]] = {  # and the VCPUs that are left of four
    "PUT of less": (Replace((put(1),)), 1),
    "PUT of nothing": (Replace((put(0),)), 0),
    "PUT into another project": (Replace((put(4, "q"),)), 0),
    "DELETE": (Remove(VMS[0]), 0),
    "reshaped": (Reshape({HOSTS[0]: (3, INVENTORIES)}, (put(1),)), 1),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_project_uses_less_as_soon_as_an_instance_holds_less(store: PlacementService, way: str) -> None:
    written, left = WAYS[way]
    await store.apply([claim(0, 4), claim(1, 2)])
    if isinstance(written, Reshape):
        assert await store.reshape(written) is None
    else:
        assert await store.write_allocations([written]) == [None]
    page = await store.reads.usage(ProjectUsageQuery(projects=("p",)))
    assert page.usage == {"p": {INSTANCES: 1 + (left > 0), "VCPU": 2 + left}}
