"""New claims in one round trip are what the way with locks makes of them, word for word, alone and beside others."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import asyncpg
import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.placement import (
    Change,
    Claim,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    Inventory,
    InventoryUpdate,
    ProviderReport,
)
from bus.persistence.database import Database
from placement_worker.book import ResourceBook
from placement_worker.domain.claim_items import ClaimReply
from placement_worker.operations import audit
from placement_worker.store import fast_path
from placement_worker.store.postgres_rows import PostgresRows

from .conftest import Book

pytestmark = pytest.mark.postgres

MakeClaim = Callable[..., Claim]

PATIENCE_S = 60.0
ROUNDS = 250
CLASSES = ("VCPU", "MEMORY_MB", "CUSTOM_GOLD")
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
HOLD = "UPDATE placement.inventories SET used = used + 3"
MOVE = "UPDATE placement.providers SET generation = generation + 7"


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
        updates.append(InventoryUpdate(source="s", version=version, root_uuid=root, providers=providers))
    return updates


def inventory(rng: random.Random) -> Inventory:
    if rng.random() < 0.8:
        return Inventory(total=rng.randint(20, 80), allocation_ratio=rng.choice([1.0, 1.5]))
    return Inventory(
        total=60, min_unit=rng.choice([1, 2]), max_unit=rng.choice([3, 60]), step_size=rng.choice([1, 2, 3])
    )


def option(rng: random.Random, uuids: Sequence[tuple[str, str]], shapes: Mapping[str, int]) -> ClaimOption:
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
        allocations |= option(rng, uuids, shapes).allocations
    seen = {uuid: shapes.get(uuid, 0) - (rng.random() < 0.05) for uuid in allocations if rng.random() < 0.7}
    return ClaimOption(allocations=allocations, shapes=seen)


def some_claims(
    rng: random.Random, uuids: Sequence[tuple[str, str]], shapes: Mapping[str, int], consumers: list[str]
) -> list[Claim]:
    """A small group, mostly of new consumers, now and then all for one host."""
    claims: dict[str, Claim] = {}
    among = [rng.choice(uuids)] if rng.random() < 0.2 else uuids
    for _ in range(rng.choice([1, 1, 1, 2, 3, fast_path.MAX_ITEMS])):
        consumer = rng.choice(consumers) if consumers and rng.random() < 0.1 else new_uuid(rng)
        consumers.append(consumer)
        claims[consumer] = Claim(
            consumer=consumer,
            attempt=rng.randint(1, 3),
            consumer_generation=1 if rng.random() < 0.05 else None,
            release_first=rng.random() < 0.1,
            options=tuple(option(rng, among, shapes) for _ in range(rng.choice([1, 1, 3]))),
            project_id="p",
        )
    return list(claims.values())


async def with_locks(store: ResourceBook, claims: Sequence[Claim]) -> list[ClaimReply]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fast_path, "MAX_ITEMS", 0)
        return await store.apply(claims)


async def published(store: ResourceBook) -> tuple[Change, ...]:
    return (await store.changes(0, 100_000)).changes


@pytest.fixture
async def second(book: Book) -> AsyncIterator[ResourceBook]:
    """Another process on the same book."""
    store = ResourceBook(PostgresRows(Database(book.url, "placement")))
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def apart(book: Book) -> AsyncIterator[ResourceBook]:
    """A book of its own beside the other."""
    store = ResourceBook(PostgresRows(Database(book.url, "placement_apart")))
    await store.open()
    yield store
    await store.close()


async def test_the_short_way_answers_writes_and_publishes_what_the_way_with_locks_does(
    book: Book, apart: ResourceBook, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuids = [(new_uuid(rng), new_uuid(rng)) for _ in range(12)]
    consumers: list[str] = []
    shapes: dict[str, int] = {}
    ways: Counter[bool] = Counter()
    outcomes: Counter[ClaimOutcome] = Counter()
    apply = fast_path.apply

    async def counted(*arguments: object) -> object:
        replies = await apply(*arguments)  # type: ignore[arg-type]
        ways[replies is not None] += 1
        return replies

    monkeypatch.setattr(fast_path, "apply", counted)
    for number in range(ROUNDS):
        if number % 50 == 0:
            updates = trees(rng, uuids, number + 1)
            assert await book.store.report(updates) == await apart.report(updates)
            shapes = {state.uuid: state.shape for state in (await apart.snapshot(None, 1000)).providers}
        claims = some_claims(rng, uuids, shapes, consumers)
        replies = await book.store.apply(claims)
        assert replies == await with_locks(apart, claims), claims
        outcomes.update(reply.outcome for reply in replies if isinstance(reply, ClaimResult))
    assert await published(book.store) == await published(apart)
    async with apart.database.raw() as connection:
        assert await book.allocations() == await audit.allocations(connection)
        assert await audit.findings(connection) == await book.findings() == []
    assert ways[True] > 60 and ways[False] > 60
    expected = set(ClaimOutcome) - {ClaimOutcome.OVER_LIMIT, ClaimOutcome.RULED_OUT, ClaimOutcome.INCOMPLETE}
    assert set(outcomes) == expected


async def test_what_another_takes_while_a_claim_waits_for_it_is_not_given_twice(
    book: Book, rng: random.Random, make_claim: MakeClaim
) -> None:
    """It waits for the host's lock, and then sees what the lock's last holder left."""
    (host,) = await book.hosts(1, rng, VCPU=6)
    holder, watcher = await asyncpg.connect(book.url), await asyncpg.connect(book.url)
    wanted = [make_claim(new_uuid(rng), {host: {"VCPU": amount}}) for amount in (4, 2)]
    replies: list[ClaimReply] = []
    for claim in wanted:
        holding = holder.transaction()
        await holding.start()
        await holder.execute(MOVE)
        if not replies:
            await holder.execute(HOLD)
        claiming = asyncio.create_task(book.store.apply([claim]))
        async with asyncio.timeout(PATIENCE_S):
            while not await watcher.fetchval(WAITING):
                assert not claiming.done()
        await holding.commit()
        replies += await claiming
    full, claimed = replies
    assert isinstance(full, ClaimResult) and full.outcome is ClaimOutcome.FULL
    assert isinstance(claimed, ClaimResult) and claimed.outcome is ClaimOutcome.CLAIMED
    assert claimed.generations == {host: 1 + 7 + 7 + 1}
    newest = (await published(book.store))[-1]
    assert (newest.sequence, newest.generation, newest.used) == (claimed.sequence, 16, {"VCPU": 5})
    for connection in (holder, watcher):
        await connection.close()


async def test_small_groups_that_name_hosts_in_opposite_orders_do_not_deadlock(
    book: Book, second: ResourceBook, rng: random.Random, make_claim: MakeClaim
) -> None:
    """A third transaction holds the middle host until both wait; in the order of naming they would each hold one end
    by then, and deadlock when it lets go."""
    hosts = await book.hosts(3, rng, VCPU=10)
    holder, watcher = await asyncpg.connect(book.url), await asyncpg.connect(book.url)
    async with holder.transaction():
        await holder.execute(MOVE + " WHERE uuid = $1::text::uuid", hosts[1])
        groups = [[make_claim(new_uuid(rng), {host: {"VCPU": 1}}) for host in way] for way in (hosts, hosts[::-1])]
        both = asyncio.gather(book.store.apply(groups[0]), second.apply(groups[1]))
        async with asyncio.timeout(PATIENCE_S):
            while await watcher.fetchval(WAITING) < 2:
                assert not both.done()
    for replies in await both:
        assert [getattr(reply, "outcome", None) for reply in replies] == [ClaimOutcome.CLAIMED] * 3
    for connection in (holder, watcher):
        await connection.close()


async def test_two_processes_give_the_last_room_of_a_host_to_one(
    book: Book, second: ResourceBook, rng: random.Random, make_claim: MakeClaim
) -> None:
    """Again and again, both at once, each the whole host: one has it, the other is answered full."""
    hosts = await book.hosts(30, rng, VCPU=2)
    for host in hosts:
        wanted = [make_claim(new_uuid(rng), {host: {"VCPU": 2}}) for _ in range(2)]
        mine, theirs = await asyncio.gather(book.store.apply(wanted[:1]), second.apply(wanted[1:]))
        assert Counter(getattr(reply, "outcome", None) for reply in [*mine, *theirs]) == {
            ClaimOutcome.CLAIMED: 1,
            ClaimOutcome.FULL: 1,
        }
    assert await book.over_capacity() == [] and await book.findings() == []


async def test_lost_claims_by_the_short_way_are_one_transaction_that_writes_nothing(
    book: Book, rng: random.Random, make_claim: MakeClaim
) -> None:
    """No number of a transaction is used, so there is nothing to vacuum, and no error is in PostgreSQL's log."""
    (host,) = await book.hosts(1, rng, VCPU=4)
    held, consumer = make_claim(new_uuid(rng), {host: {"VCPU": 3}}), new_uuid(rng)
    one = make_claim(consumer, {host: {"VCPU": 1}})
    await book.store.apply([held])
    lost = {
        ClaimOutcome.FULL: [make_claim(one, {host: {"VCPU": 2}}) for one in (consumer, new_uuid(rng))],
        ClaimOutcome.GONE: [make_claim(consumer, {new_uuid(rng): {"VCPU": 1}})],
        ClaimOutcome.RACED: [replace(one, options=(replace(one.options[0], shapes={host: -1}),))],
        ClaimOutcome.OVER_LIMIT: [replace(one, limits={"VCPU": 3})],
        ClaimOutcome.CONSUMER_CHANGED: [replace(held, project_id="q")],
        ClaimOutcome.CLAIMED: [held],
    }
    async with book.database.raw() as connection:
        for outcome, claims in lost.items():
            replies = await fast_path.apply(connection, claims, book.store.names)
            assert await connection.fetchval("SELECT pg_current_xact_id_if_assigned()") is None, outcome
            assert replies is not None
            assert [getattr(reply, "outcome", None) for reply in replies] == [outcome] * len(claims)
    # Where something else can be claimed instead it takes locks, and still no error.
    other = ClaimOption(allocations={host: {"VCPU": 1}})
    claim = replace(lost[ClaimOutcome.FULL][0], options=(*lost[ClaimOutcome.FULL][0].options, other))
    async with book.database.raw() as connection:
        assert await fast_path.apply(connection, [claim], book.store.names) is None
        assert await connection.fetchval("SELECT pg_current_xact_id_if_assigned()") is None
    (reply,) = await book.store.apply([claim])
    assert isinstance(reply, ClaimResult) and reply.option == 1


async def test_what_is_too_much_for_one_row_of_the_feed_goes_the_other_way(
    book: Book, rng: random.Random, make_claim: MakeClaim, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = await book.hosts(2, rng, VCPU=10, MEMORY_MB=10)
    claim = make_claim(new_uuid(rng), {host: {"VCPU": 1, "MEMORY_MB": 1} for host in hosts})
    monkeypatch.setattr(fast_path, "MAX_HELD", 3)
    async with book.database.single() as connection:
        assert await fast_path.apply(connection, [claim], book.store.names) is None
    assert await book.allocations() == {}
    (reply,) = await book.store.apply([claim])
    assert isinstance(reply, ClaimResult) and reply.outcome is ClaimOutcome.CLAIMED
    assert await book.findings() == []
