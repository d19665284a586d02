"""Members of server groups are not trimmed while they join again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import asyncpg
import pytest

from bus.clock import new_uuid
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import Claim, ClaimOption, ConsumerAllocations, LocateRequest, Release, Swap
from placement_worker.book import claim
from placement_worker.domain.claim_group import ClaimGroup
from placement_worker.domain.claims import ClaimItem
from placement_worker.domain.values import ABOVE_CELLS

from .conftest import Book

pytestmark = pytest.mark.postgres

PATIENCE_S = 60.0
APART = ServerGroup(uuid="e0000000-0000-4000-8000-000000000000", policy=GroupPolicy.ANTI_AFFINITY)
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


async def until_it_waits(book: Book, is_over: Callable[[], bool]) -> None:
    watcher = await asyncpg.connect(book.url)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not is_over() and not await watcher.fetchval(WAITING):
                pass
    finally:
        await watcher.close()


async def test_a_member_that_joins_again_while_members_are_trimmed_stays_one(book: Book, rng: random.Random) -> None:
    """PostgreSQL 16.2 deleted the row that the claim had just written: the rule held no more for its host."""
    (host,) = await book.hosts(1, rng, VCPU=8)
    option = ClaimOption(allocations={host: {"VCPU": 1}}, host=host)
    consumer = new_uuid(rng)

    def member(uuid: str, attempt: int = 1) -> Claim:
        return Claim(consumer=uuid, attempt=attempt, options=(option,), project_id="p", server_group=APART)

    await book.store.apply([member(consumer)])
    await book.store.apply([Release(consumer=consumer, attempt=1)])
    async with book.database.raw() as forgetting:  # its fence is purged first: only then is the member one to trim
        await forgetting.execute("DELETE FROM consumers WHERE uuid = $1", consumer)
    async with book.database.raw() as claiming:
        (reply,) = await claim(book.rows.on(claiming), ClaimGroup([member(consumer, 2)]), ABOVE_CELLS)
        assert reply.outcome == "claimed"
        trimming = asyncio.create_task(
            book.store.trim(keep_changes=1000, keep_fences_s=1e6, keep_sources_s=1e6, limit=100)
        )
        await until_it_waits(book, trimming.done)
    await trimming
    assert (await book.store.reads.locate([LocateRequest(project_id="p", server_group=APART.uuid)]))[0].members == {
        host: 1
    }
    (other,) = await book.store.apply([member(new_uuid(rng))])
    assert other.outcome == "ruled_out"


@pytest.mark.parametrize("released", [False, True], ids=["holds again", "held again, and is kept for a revert"])
async def test_a_member_that_is_on_record_again_between_the_two_looks_is_not_trimmed(
    book: Book, rng: random.Random, *, released: bool
) -> None:
    """A swap names no group, so it does not wait for the member's row, which the trimming has locked by then."""
    (host,) = await book.hosts(1, rng, VCPU=8)
    consumer = new_uuid(rng)
    option = ClaimOption(allocations={host: {"VCPU": 1}}, host=host)
    await book.store.apply([Claim(consumer=consumer, options=(option,), project_id="p", server_group=APART)])
    await book.store.apply([Release(consumer=consumer, attempt=1)])
    back = Swap(consumers=(ConsumerAllocations(consumer=consumer, allocations=option.allocations, project_id="p"),))
    came: Sequence[ClaimItem] = [back, Release(consumer=consumer, attempt=1)] if released else [back]
    async with book.database.raw() as other:
        await other.execute("DELETE FROM consumers WHERE uuid = $1", consumer)
    async with book.database.raw() as holding:  # a lock that a DELETE waits for, and SELECT FOR UPDATE does not
        await holding.execute("LOCK TABLE group_members IN SHARE MODE")
        trimming = asyncio.create_task(
            book.store.trim(keep_changes=1000, keep_fences_s=1e6, keep_sources_s=1e6, limit=100)
        )
        await until_it_waits(book, trimming.done)
        assert not trimming.done()
        for item in came:
            (reply,) = await book.store.apply([item])
            assert str(reply.outcome) in ("claimed", "released")
    await trimming
    async with book.database.raw() as other:
        assert await other.fetchval("SELECT count(*) FROM group_members WHERE consumer = $1", consumer) == 1
