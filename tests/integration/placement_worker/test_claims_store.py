"""Claims on a real PostgreSQL: races, deadlocks, crashes, repetition. Several stores stand for several processes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace
from sqlalchemy import ARRAY, BigInteger, Integer, bindparam, column, func, select

from bus.clock import new_uuid
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    ConsumerAllocations,
    Release,
    Swap,
)
from bus.faults import DatabaseUnavailable
from bus.persistence.database import Database
from bus.persistence.tables import fetch
from placement_worker.domain.claim_group import ClaimGroup
from placement_worker.domain.claims import ClaimItem
from placement_worker.domain.values import ABOVE_CELLS, is_in_units
from placement_worker.service import PlacementService
from placement_worker.service import claim as apply
from placement_worker.store.postgres_rows import PostgresPlacementRows, PostgresPlacementTransaction
from tests.integration.placement_worker.conftest import PlacementDatabase, claim
from tests.kit.claims import amounts_and_units
from tests.kit.databases import WAITING

pytestmark = pytest.mark.postgres


# --- claims on a real PostgreSQL: races, deadlocks, crashes, repetition. Several stores stand for several processes

PATIENCE_S = 60.0


async def one(store: PlacementService, item: ClaimItem) -> ClaimResult:
    (reply,) = await store.apply([item])
    assert isinstance(reply, ClaimResult)
    return reply


async def test_two_stores_race_for_few_hosts_and_nothing_is_overcommitted(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    hosts = await placement.hosts(4, rng, VCPU=50)
    second = await placement.another()
    wanted = [claim(new_uuid(rng), {rng.choice(hosts): {"VCPU": 1}}) for _ in range(400)]

    async def work(store: PlacementService, mine: Sequence[Claim]) -> list[ClaimOutcome]:
        outcomes = []
        for at in range(0, len(mine), 20):
            replies = await store.apply(mine[at : at + 20])
            outcomes += [reply.outcome for reply in replies if isinstance(reply, ClaimResult)]
        return outcomes

    halves = await asyncio.gather(work(placement.store, wanted[::2]), work(second, wanted[1::2]))
    counted = Counter(outcome for half in halves for outcome in half)
    assert sum(counted.values()) == 400
    assert counted[ClaimOutcome.CLAIMED] == 200
    assert counted[ClaimOutcome.NO_CAPACITY] == 200
    assert await placement.over_capacity() == []
    assert await placement.findings() == []


async def test_the_same_consumer_claimed_by_two_stores_at_once_is_claimed_once(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    hosts = await placement.hosts(2, rng, VCPU=10_000)
    second = await placement.another()
    for _ in range(10):
        consumers = [new_uuid(rng) for _ in range(20)]
        first_group = [claim(c, {hosts[0]: {"VCPU": 1}}) for c in consumers]
        other_group = [claim(c, {hosts[1]: {"VCPU": 1}}) for c in reversed(consumers)]
        mine, theirs = await asyncio.gather(placement.store.apply(first_group), second.apply(other_group))
        held = await placement.allocations()
        for consumer, a, b in zip(consumers, mine, reversed(theirs), strict=True):
            assert isinstance(a, ClaimResult)
            assert isinstance(b, ClaimResult)
            # The later one is answered with what the earlier one got: one allocation, known to both.
            assert a.outcome == b.outcome == ClaimOutcome.CLAIMED
            assert {a.option, b.option} == {0, None}
            assert list(a.generations) == list(b.generations) == list(held[consumer])
    assert await placement.findings() == []


async def test_groups_that_name_consumers_in_opposite_orders_do_not_deadlock(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    """A third transaction holds the middle consumer until both groups wait; in the order of naming they would each
    hold one end by then, and deadlock when it lets go."""
    (host,) = await placement.hosts(1, rng, VCPU=10)
    consumers = sorted(new_uuid(rng) for _ in range(3))
    group = [claim(consumer, {host: {"VCPU": 1}}) for consumer in consumers]
    holder, watcher = await asyncpg.connect(placement.url), await asyncpg.connect(placement.url)
    holding = holder.transaction()
    await holding.start()
    await holder.execute(
        "INSERT INTO placement.consumers (uuid, project_id, user_id, consumer_type, generation, attempt)"
        " VALUES ($1::text::uuid, '', '', '', 0, 0)",
        consumers[1],
    )
    second = await placement.another()
    both = asyncio.gather(placement.store.apply(group), second.apply(group[::-1]))
    async with asyncio.timeout(PATIENCE_S):
        while await watcher.fetchval(WAITING) < 2:
            assert not both.done()
    await holding.rollback()
    mine, theirs = await both
    assert {getattr(reply, "outcome", None) for reply in [*mine, *theirs]} == {ClaimOutcome.CLAIMED}
    for connection in (holder, watcher):
        await connection.close()


def _random_item(rng: random.Random, hosts: Sequence[str], consumers: Sequence[str]) -> ClaimItem:
    kind = rng.random()
    consumer = rng.choice(consumers)
    holds = [{h: {"VCPU": rng.randint(1, 3)} for h in rng.sample(hosts, 2)} for _ in range(2)]
    if kind < 0.5:
        options = tuple(ClaimOption(allocations=hold) for hold in holds)
        generation = rng.choice([None, 1, 2])
        return Claim(
            consumer=consumer,
            attempt=rng.randint(1, 5),
            consumer_generation=generation,
            release_first=rng.random() < 0.3,
            options=options,
            project_id="p",
        )
    if kind < 0.75:
        return Release(consumer=consumer, attempt=rng.choice([None, None, 1, 2]))
    entries = tuple(
        ConsumerAllocations(
            consumer=c,
            consumer_generation=rng.choice([None, 1, 2]),
            allocations=rng.choice([{}, *holds]),
            project_id="p",
        )
        for c in rng.sample(consumers, 2)
    )
    return Swap(consumers=entries)


async def test_random_groups_of_claims_releases_and_swaps_never_deadlock_beside_inventory_updates(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    """No retry anywhere: a deadlock would be raised as Transient and fail the test."""
    hosts = await placement.hosts(6, rng, VCPU=20)
    consumers = [new_uuid(rng) for _ in range(12)]
    stores = [placement.store, await placement.another(), await placement.another()]

    async def claims(store: PlacementService, mine: random.Random) -> None:
        for _ in range(40):
            await store.apply([_random_item(mine, hosts, consumers) for _ in range(mine.randint(1, 12))])

    async def inventory(mine: random.Random) -> None:
        for _ in range(40):
            chosen = mine.sample(hosts, 3)
            await placement.store.apply_reports([placement.host(uuid, VCPU=mine.randint(15, 25)) for uuid in chosen])

    async with asyncio.TaskGroup() as group:
        for number, store in enumerate(stores * 2):
            group.create_task(claims(store, random.Random(number)))
        group.create_task(inventory(random.Random(77)))
    assert await placement.findings() == []


async def test_a_connection_killed_in_the_middle_leaves_nothing_behind(
    placement: PlacementDatabase, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    (host,) = await placement.hosts(1, rng, VCPU=8)
    item = replace(claim(new_uuid(rng), {host: {"VCPU": 2}}), release_first=True)  # taken in no single statement
    head = (await placement.store.head()).sequence
    write = PostgresPlacementTransaction.write_claims

    async def write_and_die(transaction: PostgresPlacementTransaction, *what: Any, **about: Any) -> int:
        number = await write(transaction, *what, **about)
        killer = await asyncpg.connect(placement.url)
        await killer.fetchval("SELECT pg_terminate_backend($1)", transaction.connection.get_server_pid())
        await killer.close()
        return number

    with monkeypatch.context() as patched:
        patched.setattr(PostgresPlacementTransaction, "write_claims", write_and_die)
        with pytest.raises(DatabaseUnavailable):
            await placement.store.apply([item])
    assert (await placement.store.head()).sequence == head
    assert await placement.allocations() == {}
    assert await placement.findings() == []
    reply = await one(placement.store, item)
    assert (reply.outcome, reply.sequence) == (ClaimOutcome.CLAIMED, head + 1)


# --- the rule of units on PostgreSQL

NAMES = ("amount", "min_unit", "max_unit", "step_size")


async def test_postgresql_answers_as_python_does(postgres_url: str) -> None:
    rows = amounts_and_units(2_000, seed=2)
    kinds = (BigInteger, Integer, Integer, Integer)
    arrays = [bindparam(name, type_=ARRAY(kind)) for name, kind in zip(NAMES, kinds, strict=True)]
    columns = [column(name, kind) for name, kind in zip(NAMES, kinds, strict=True)]
    table = func.unnest(*arrays).table_valued(*columns, with_ordinality="place", name="i").render_derived()
    statement = select(is_in_units(*(table.c[name] for name in NAMES))).order_by(table.c.place)
    connection = await asyncpg.connect(postgres_url)
    try:
        found = await fetch(connection, statement, **dict(zip(NAMES, map(list, zip(*rows, strict=True)), strict=True)))
    finally:
        await connection.close()
    assert [row[0] for row in found] == [is_in_units(*row) for row in rows]


# --- claims that were decided before another one of their project committed do not pass its limit

MANY = 3


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside a release"])
async def test_claims_that_wait_for_another_of_their_project_do_not_pass_its_limit(
    placement: PlacementDatabase, rng: random.Random, *, alone: bool
) -> None:
    """Each on a host of its own, each decided while the project held nothing: what is added is compared once more."""
    hosts = await placement.hosts(1 + MANY, rng, VCPU=4)
    stores = [
        PlacementService(PostgresPlacementRows(Database(placement.url, "placement", pool_size=1))) for _ in range(MANY)
    ]

    def claim(host: str) -> Claim:
        option = ClaimOption(allocations={host: {"VCPU": 1}})
        return Claim(consumer=new_uuid(rng), options=(option,), project_id="p", limits={"VCPU": 1})

    async def work(store: PlacementService, host: str) -> str:
        beside = [] if alone else [Release(consumer=new_uuid(rng))]
        *_, reply = await store.apply([*beside, claim(host)])
        return str(reply.outcome)

    watcher = await asyncpg.connect(placement.url)
    try:
        for store in stores:
            await store.open()
        async with placement.database.raw() as first:
            (reply,) = await apply(placement.rows.on(first), ClaimGroup([claim(hosts[0])]), ABOVE_CELLS)
            assert reply.outcome == "claimed"
            others = [asyncio.create_task(work(store, host)) for store, host in zip(stores, hosts[1:], strict=True)]
            async with asyncio.timeout(PATIENCE_S):
                while await watcher.fetchval(WAITING) < MANY:
                    assert not any(one.done() for one in others)
        assert await asyncio.gather(*others) == ["over_quota"] * MANY
    finally:
        await watcher.close()
        for store in stores:
            await store.close()
