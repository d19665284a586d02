"""Two replicas of a real placement worker (PostgreSQL, RabbitMQ) while hosts report and claims land."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from bus.bus import Bus
from bus.clock import SystemClock, new_uuid
from bus.contracts.placement import (
    Claim,
    ClaimOutcome,
    ClaimResult,
    Inventory,
    InventoryResult,
    InventoryUpdate,
    ProviderReport,
    Release,
    ReleaseResult,
)
from bus.rabbitmq.transport import RabbitTransport
from bus.service.environment import Environment
from placement_worker.app import build
from placement_worker.config import PlacementConfig
from placement_worker.replica.follower import Follower
from placement_worker.replica.replica import Replica
from placement_worker.replica.request import Query
from placement_worker.replica.search import options, search

pytestmark = [pytest.mark.postgres, pytest.mark.rabbitmq]

TIMEOUT_S = 30.0
CLOCK = SystemClock()
QUERY = Query(resources={"VCPU": 1, "VGPU": 1}, required=(("CUSTOM_FAST",),))


class Site:
    """One placement worker, and a way onto its bus."""

    def __init__(self, url: str, prefix: str, database: str) -> None:
        self.url = url
        self.prefix = prefix
        self.env = Environment(
            "placement-1",
            transports=lambda _: self.transport("placement-1"),
            database_url=database,
            clock=CLOCK,
            rng=random.Random(1),
        )

    def transport(self, name: str) -> RabbitTransport:
        return RabbitTransport(self.url, name=name, prefix=self.prefix)

    @asynccontextmanager
    async def bus(self, process: str) -> AsyncIterator[Bus]:
        bus = Bus("api", self.transport(process), process=process, clock=CLOCK, rng=random.Random(process))
        await bus.open()
        yield bus
        await bus.close()

    @asynccontextmanager
    async def replica(self, process: str) -> AsyncIterator[tuple[Follower, Replica]]:
        async with self.bus(process) as bus:
            follower = Follower(bus, Replica(), clock=CLOCK)
            await follower.start()
            async with asyncio.timeout(TIMEOUT_S):
                await follower.ready.wait()
            yield follower, follower.replica
            await follower.close()


@pytest.fixture
async def site(amqp: tuple[str, str], postgres_url: str) -> AsyncIterator[Site]:
    made = Site(*amqp, postgres_url)
    service = build(made.env, PlacementConfig(), [])
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    async with asyncio.timeout(TIMEOUT_S):
        await service.ready.wait()
    yield made
    stop.set()
    await running


def host(rng: random.Random) -> InventoryUpdate:
    root, device = new_uuid(rng), new_uuid(rng)
    providers = (
        ProviderReport(uuid=root, name=root, inventories={"VCPU": Inventory(total=4)}),
        ProviderReport(
            uuid=device,
            name=device,
            parent_uuid=root,
            inventories={"VGPU": Inventory(total=3)},
            traits=("CUSTOM_FAST",),
        ),
    )
    return InventoryUpdate(reporter="test", version=1, root_uuid=root, providers=providers)


async def boot(bus: Bus, replica: Replica, rng: random.Random) -> ClaimOutcome | None:
    """As a scheduler does it: search, assume, claim, settle. None: the replica has no room."""
    roots = search(replica, QUERY).roots
    if not len(roots):
        return None
    best = options(replica, QUERY, int(rng.choice(roots.tolist())))
    consumer = new_uuid(rng)
    replica.assume(consumer, best[0].allocations)
    claim = Claim(consumer=consumer, options=tuple(best), project_id="p")
    result = await bus.request(claim, ClaimResult, timeout_s=TIMEOUT_S)
    won = result.outcome is ClaimOutcome.CLAIMED
    if won:
        replica.confirm(consumer, result.generations)
    else:
        replica.drop_assumed(consumer)
    if won and rng.random() < 0.3:
        await bus.request(Release(consumer=consumer), ReleaseResult, timeout_s=TIMEOUT_S)
    return result.outcome


def as_published(replica: Replica) -> dict[str, object]:
    rows = replica.members(replica.rows_of_roots())[0].tolist()
    return {
        replica.uuid_of(row): (
            replica.generation[row],
            replica.spec_generation_of(row),
            replica.traits_of(row),
            replica.inventory_of(row),
        )
        for row in rows
    }


async def until(is_met: Callable[[], bool], follower: Follower) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_met():
            await follower.refresh(timeout_s=TIMEOUT_S)


async def test_two_schedulers_fill_the_hosts_and_all_replicas_agree(site: Site) -> None:
    rng = random.Random(7)
    hosts = 20
    async with site.bus("client") as client, site.replica("s1") as one, site.replica("s2") as two:
        reports = [host(rng) for _ in range(hosts)]
        results = await client.request_all(reports, InventoryResult, timeout_s=TIMEOUT_S, causes=[""] * hosts)
        sequence = max(result.sequence for result in results if isinstance(result, InventoryResult))
        for follower, replica in (one, two):
            await until(lambda replica=replica: replica.sequence >= sequence, follower)  # type: ignore[misc]
            assert len(replica) == 2 * hosts

        async def schedule(replica: tuple[Follower, Replica], seed: int) -> list[ClaimOutcome]:
            follower, replica = replica
            dice, outcomes = random.Random(seed), []
            for _ in range(10 * hosts):
                outcome = await boot(client, replica, dice)
                if outcome is None:
                    break
                outcomes.append(outcome)
                if outcome is not ClaimOutcome.CLAIMED:
                    await follower.refresh(timeout_s=TIMEOUT_S)
            return outcomes

        async with asyncio.timeout(3 * TIMEOUT_S):
            seeds = enumerate((one, one, two, two))
            ran = await asyncio.gather(*(schedule(replica, seed) for seed, replica in seeds))
        outcomes = [outcome for part in ran for outcome in part]
        assert outcomes.count(ClaimOutcome.CLAIMED) >= 3 * hosts
        assert set(outcomes) <= {ClaimOutcome.CLAIMED, ClaimOutcome.NO_CAPACITY}, "usage alone never races"
        for follower, replica in (one, two):
            await follower.refresh(timeout_s=TIMEOUT_S)
            await until(lambda replica=replica: not list(replica.assumptions.keys()), follower)  # type: ignore[misc]
        async with site.replica("s3") as (_, fresh):
            truth = as_published(fresh)
            assert as_published(one[1]) == truth
            assert as_published(two[1]) == truth
        roots = one[1].rows_of_roots()
        assert (one[1].usage("VGPU", roots) <= one[1].totals("VGPU", roots)).all()
