"""Claims that wait for each other see what the other has left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable

import asyncpg
import pytest

from bus.clock import new_uuid
from bus.contracts.feed import Change
from bus.contracts.placement import Claim, ClaimOutcome, ClaimResult
from bus.persistence.database import Database
from placement_worker.book import ResourceBook
from placement_worker.domain.claim_group import ClaimReply
from placement_worker.store.postgres_rows import PostgresBookRows

from .conftest import Book

pytestmark = pytest.mark.postgres

MakeClaim = Callable[..., Claim]

PATIENCE_S = 60.0
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
HOLD = "UPDATE placement.inventories SET used = used + 3"
MOVE = "UPDATE placement.providers SET generation = generation + 7"


async def published(store: ResourceBook) -> tuple[Change, ...]:
    return (await store.changes(0, 100_000)).changes


@pytest.fixture
async def second(book: Book) -> AsyncIterator[ResourceBook]:
    """Another process on the same book."""
    store = ResourceBook(PostgresBookRows(Database(book.url, "placement")))
    await store.open()
    yield store
    await store.close()


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
