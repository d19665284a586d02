"""A provider whose row had to be waited for is found as its last holder left it, and not left out of the group."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import asyncpg
import pytest

from bus.clock import new_uuid
from bus.contracts.placement import Claim, ClaimOutcome, ClaimResult
from placement_worker.domain.trees import SetTraits
from placement_worker.domain.values import Provider

from .conftest import Book

pytestmark = pytest.mark.postgres

PATIENCE_S = 60.0
MOVE = "UPDATE placement.providers SET generation = generation + 7"
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@asynccontextmanager
async def moved_by_another(book: Book) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Another transaction has moved every provider; what is yielded waits until it is waited for, and commits."""
    holder, watcher = await asyncpg.connect(book.url), await asyncpg.connect(book.url)
    holding = holder.transaction()
    await holding.start()
    await holder.execute(MOVE)

    async def let_go() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await watcher.fetchval(WAITING):
                pass
        await holding.commit()

    yield let_go
    for connection in (holder, watcher):
        await connection.close()


async def test_a_group_of_rest_writes_finds_a_provider_that_it_had_to_wait_for(book: Book, rng: random.Random) -> None:
    """It answered 404: the locking statement's UNION ALL was false for a row that had changed while it waited."""
    hosts = await book.hosts(4, rng, VCPU=8)
    rest = book.store
    async with moved_by_another(book) as let_go:
        writing = asyncio.create_task(rest.write_trees([SetTraits(host, ("COMPUTE_NODE",)) for host in hosts]))
        await let_go()
        outcomes = await writing
    assert [outcome.generation for outcome in outcomes if isinstance(outcome, Provider)] == [9] * 4


async def test_a_claim_finds_a_provider_that_it_had_to_wait_for(
    book: Book, rng: random.Random, make_claim: Callable[..., Claim]
) -> None:
    hosts = await book.hosts(4, rng, VCPU=8)
    claims = [make_claim(new_uuid(rng), {host: {"VCPU": 1}}) for host in hosts]
    async with moved_by_another(book) as let_go:
        claiming = asyncio.create_task(book.store.apply(claims))
        await let_go()
        replies = await claiming
    outcomes = [(reply.outcome, reply.generations) for reply in replies if isinstance(reply, ClaimResult)]
    assert outcomes == [(ClaimOutcome.CLAIMED, {host: 9}) for host in hosts]


async def test_a_report_finds_the_trees_that_it_had_to_wait_for(book: Book, rng: random.Random) -> None:
    hosts = await book.hosts(4, rng, VCPU=8)
    updates = [book.host(host, VCPU=9) for host in hosts]
    async with moved_by_another(book) as let_go:
        reporting = asyncio.create_task(book.store.report(updates))
        await let_go()
        results = await reporting
    assert [getattr(result, "outcome", result) for result in results] == ["applied"] * 4
    assert await book.findings() == []
