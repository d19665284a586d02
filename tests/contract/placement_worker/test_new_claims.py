"""New claims that are taken in one round trip are what the general path makes of them, alone and beside others."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence

import asyncpg
import pytest

from bus.clock import new_uuid
from bus.contracts.placement import (
    INSTANCES,
    Claim,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    Inventory,
    InventoryUpdate,
    Migration,
    ProviderReport,
)
from bus.persistence.database import Database
from placement_worker.domain.claim_group import MAX_PLAIN
from placement_worker.operations import audit
from placement_worker.service import PlacementService
from placement_worker.store.postgres_rows import PostgresPlacementRows
from tests.contract.books import HOSTS, VMS, build, roomy_host
from tests.kit.databases import WAITING

pytestmark = pytest.mark.postgres

PATIENCE_S = 60.0
ROUNDS = 400
CLASSES = ("VCPU", "MEMORY_MB", "CUSTOM_GOLD")
ROWS = (
    "SELECT uuid, project_id, user_id, consumer_type, generation, attempt, claim_owner, released_at IS NULL"
    " FROM consumers",
    "SELECT a.consumer, p.uuid, c.name, a.amount FROM allocations a JOIN providers p ON p.id = a.provider_id "
    "JOIN resource_classes c ON c.id = a.class_id",
    "SELECT p.uuid, c.name, i.used FROM inventories i JOIN providers p ON p.id = i.provider_id "
    "JOIN resource_classes c ON c.id = i.class_id",
    "SELECT uuid, generation, spec_generation FROM providers",
    "SELECT u.project_id, c.name, u.amount FROM project_usage u LEFT JOIN resource_classes c ON c.id = u.class_id",
    "SELECT first, last, body FROM changes",
)


class Counting(PostgresPlacementRows):
    """It counts the groups that it has taken, and those that it has not."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.ways: Counter[bool] = Counter()

    async def take_new(self, *arguments: object) -> tuple[int, Sequence[int]] | None:
        taken = await super().take_new(*arguments)  # type: ignore[arg-type]
        self.ways[taken is not None] += 1
        return taken


class Decided(PostgresPlacementRows):
    """It takes nothing at once: each group is decided."""

    async def take_new(self, *_: object) -> None:
        return None


def trees(rng: random.Random, uuids: Sequence[tuple[str, str]], version: int) -> list[InventoryUpdate]:
    """Hosts with a child each, and with inventories of many kinds."""
    updates = []
    for number, (root, child) in enumerate(uuids):
        rooms = {name: inventory(rng) for name in CLASSES if rng.random() < 0.9}
        providers = (
            ProviderReport(uuid=root, name=f"host-{number}", inventories=rooms),
            ProviderReport(
                uuid=child, name=f"child-{number}", parent_uuid=root, inventories={"VGPU": Inventory(total=9)}
            ),
        )
        updates.append(InventoryUpdate(reporter="s", version=version, root_uuid=root, providers=providers))
    return updates


def inventory(rng: random.Random) -> Inventory:
    if rng.random() < 0.8:
        return Inventory(total=rng.randint(20, 80), allocation_ratio=rng.choice([1.0, 1.5]))
    return Inventory(
        total=60, min_unit=rng.choice([1, 2]), max_unit=rng.choice([3, 60]), step_size=rng.choice([1, 2, 3])
    )


def option(rng: random.Random, uuids: Sequence[tuple[str, str]], spec_generations: Mapping[str, int]) -> ClaimOption:
    """Mostly what can be claimed."""
    root, child = rng.choice(uuids)
    allocations = {root: {name: rng.randint(1, 4) for name in rng.sample(CLASSES, rng.randint(1, 2))}}
    odd = rng.random()
    if odd < 0.2:
        allocations[child] = {"VGPU": 1}
    elif odd < 0.25:
        allocations[child] = rng.choice([{"CUSTOM_UNKNOWN": 1}, {"SRIOV_NET_VF": 1}, {}])
    elif odd < 0.27:
        allocations[new_uuid(rng)] = {"VCPU": 1}
    elif odd < 0.35:
        allocations |= option(rng, uuids, spec_generations).allocations
    seen = {uuid: spec_generations.get(uuid, 0) - (rng.random() < 0.05) for uuid in allocations if rng.random() < 0.7}
    return ClaimOption(allocations=allocations, spec_generations=seen)


def some_claims(
    rng: random.Random, uuids: Sequence[tuple[str, str]], spec_generations: Mapping[str, int], consumers: list[str]
) -> list[Claim]:
    """A small group, mostly of new consumers, now and then all for one host."""
    claims: list[Claim] = []
    among = [rng.choice(uuids)] if rng.random() < 0.2 else uuids
    for _ in range(rng.choice([1, 1, 1, 2, 3, MAX_PLAIN])):
        consumers.append(rng.choice(consumers) if consumers and rng.random() < 0.1 else new_uuid(rng))
        limits = {} if rng.random() < 0.5 else {"VCPU": rng.randint(100, 500), INSTANCES: rng.choice([20, 1000])}
        moved = rng.random() < 0.03
        source = Migration(uuid=rng.choice(consumers[-2:]), source={rng.choice(uuids)[0]: {"VCPU": 1}})
        claims.append(
            Claim(
                consumer=consumers[-1],
                attempt=rng.randint(1, 3),
                owner=rng.choice([None, "run"]),
                consumer_generation=1 if rng.random() < 0.05 else None,
                release_first=rng.random() < 0.1,
                external=rng.random() < 0.05,
                options=tuple(option(rng, among, spec_generations) for _ in range(rng.choice([1, 1, 3]))),
                project_id=rng.choice(["p", "p", "q"]),
                consumer_type=rng.choice(["INSTANCE"] * 9 + ["MIGRATION"]),
                limits=limits,
                migration=source if moved else None,
            )
        )
    return claims


@pytest.fixture
async def opened(postgres_url: str) -> AsyncIterator[list[PlacementService]]:
    """Two processes on one placement, and one on a copy of it."""
    rows = [
        Counting(Database(postgres_url, "placement")),
        PostgresPlacementRows(Database(postgres_url, "placement")),
        Decided(Database(postgres_url, "placement_apart")),
    ]
    made = [PlacementService(one) for one in rows]
    for service in made:
        await service.open()
    yield made
    for service in made:
        await service.close()


async def rows_of(service: PlacementService) -> list[list[str]]:
    assert isinstance(service.rows, PostgresPlacementRows)
    async with service.rows.database.raw() as connection:
        return [sorted(map(str, await connection.fetch(statement))) for statement in ROWS]


async def test_what_is_taken_at_once_is_what_is_decided(opened: list[PlacementService]) -> None:
    """The same replies, rows, and bytes in the feed."""
    rng = random.Random(1)
    service, _, copy = opened
    assert isinstance(service.rows, Counting)
    uuids = [(new_uuid(rng), new_uuid(rng)) for _ in range(24)]
    consumers: list[str] = []
    spec_generations: dict[str, int] = {}
    outcomes: Counter[ClaimOutcome] = Counter()
    for number in range(ROUNDS):
        if number % 50 == 0:
            updates = trees(rng, uuids, number + 1)
            assert await service.apply_reports(updates) == await copy.apply_reports(updates)
            spec_generations = {
                state.uuid: state.spec_generation for state in (await copy.snapshot(None, 1000)).providers
            }
        claims = some_claims(rng, uuids, spec_generations, consumers)
        replies = await service.apply(claims)
        assert replies == await copy.apply(claims), claims
        outcomes.update(reply.outcome for reply in replies if isinstance(reply, ClaimResult))
    assert await rows_of(service) == await rows_of(copy)
    async with service.rows.database.raw() as connection:
        assert await audit.findings(connection) == []
    assert service.rows.ways[True] > 40 and service.rows.ways[False] > 20, service.rows.ways
    assert set(outcomes) == set(ClaimOutcome) - {ClaimOutcome.POLICY_VIOLATED, ClaimOutcome.INCOMPLETE}


async def test_what_another_takes_while_a_claim_waits_for_it_is_not_given_twice(
    opened: list[PlacementService], postgres_url: str
) -> None:
    """It waits for the host's lock, and then sees what the lock's last holder left."""
    service = opened[0]
    assert isinstance(service.rows, Counting)
    await service.apply_reports([roomy_host(HOSTS[0])])
    holder, watcher = await asyncpg.connect(postgres_url), await asyncpg.connect(postgres_url)
    found = []
    for vm, (amount, taken) in enumerate(((40, 70), (20, 0))):
        async with holder.transaction():
            await holder.execute("UPDATE placement.providers SET generation = generation + 7")
            await holder.execute("UPDATE placement.inventories SET used = used + $1", taken)
            claiming = asyncio.create_task(service.apply([build(vm, 0, amount)]))
            async with asyncio.timeout(PATIENCE_S):
                while not await watcher.fetchval(WAITING):
                    assert not claiming.done()
        found += await claiming
    full, claimed = found
    assert isinstance(full, ClaimResult) and full.outcome is ClaimOutcome.NO_CAPACITY
    assert isinstance(claimed, ClaimResult) and claimed.outcome is ClaimOutcome.CLAIMED
    assert claimed.generations == {HOSTS[0]: 1 + 7 + 7 + 1}
    newest = (await service.changes(0, 100)).changes[-1]
    assert (newest.sequence, newest.generation, newest.used["VCPU"]) == (claimed.sequence, 16, 90)
    assert service.rows.ways == {False: 1, True: 1}
    for connection in (holder, watcher):
        await connection.close()


async def test_small_groups_that_name_hosts_in_opposite_orders_do_not_deadlock(
    opened: list[PlacementService], postgres_url: str
) -> None:
    """A third transaction holds the middle host until both wait; in the order of naming they would each hold one end
    by then, and deadlock when it lets go.
    """
    await opened[0].apply_reports([roomy_host(host) for host in HOSTS[:3]])
    holder, watcher = await asyncpg.connect(postgres_url), await asyncpg.connect(postgres_url)
    async with holder.transaction():
        await holder.execute("UPDATE placement.providers SET generation = 9 WHERE uuid = $1", HOSTS[1])
        ways = [[build(at, at) for at in (0, 1, 2)], [build(at + 3, at) for at in (2, 1, 0)]]
        both = asyncio.gather(*(service.apply(way) for service, way in zip(opened, ways, strict=False)))
        async with asyncio.timeout(PATIENCE_S):
            while await watcher.fetchval(WAITING) < 2:
                assert not both.done()
    for replies in await both:
        assert [getattr(reply, "outcome", None) for reply in replies] == [ClaimOutcome.CLAIMED] * 3
    for connection in (holder, watcher):
        await connection.close()


async def test_two_processes_give_the_last_room_of_a_project_to_one(opened: list[PlacementService]) -> None:
    """Again and again, both at once, each with the whole limit: one has it, the other is answered that it is over."""
    await opened[0].apply_reports([roomy_host(host) for host in HOSTS[:2]])
    for number in range(0, len(VMS), 2):
        wanted = [build(number + at, at, 1, limits={INSTANCES: number // 2 + 1}) for at in (0, 1)]
        replies = await asyncio.gather(*(service.apply([one]) for service, one in zip(opened, wanted, strict=False)))
        assert Counter(getattr(reply, "outcome", None) for (reply,) in replies) == {
            ClaimOutcome.CLAIMED: 1,
            ClaimOutcome.OVER_QUOTA: 1,
        }
