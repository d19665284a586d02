"""Claims that were decided before another one of their project committed do not pass its limit."""

from __future__ import annotations

import asyncio
import random

import asyncpg
import pytest

from bus.clock import new_uuid
from bus.contracts.placement import Claim, ClaimOption, Release
from bus.persistence.database import Database
from placement_worker.book import ResourceBook
from placement_worker.book import claim as apply
from placement_worker.domain.claim_group import ClaimGroup
from placement_worker.domain.values import ABOVE_CELLS
from placement_worker.store.postgres_rows import PostgresBookRows
from tests.integration.placement.conftest import Book

pytestmark = pytest.mark.postgres

PATIENCE_S = 60.0
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
MANY = 3


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside a release"])
async def test_claims_that_wait_for_another_of_their_project_do_not_pass_its_limit(
    book: Book, rng: random.Random, *, alone: bool
) -> None:
    """Each on a host of its own, each decided while the project held nothing: what is added is compared once more."""
    hosts = await book.hosts(1 + MANY, rng, VCPU=4)
    stores = [ResourceBook(PostgresBookRows(Database(book.url, "placement", pool_size=1))) for _ in range(MANY)]

    def claim(host: str) -> Claim:
        option = ClaimOption(allocations={host: {"VCPU": 1}})
        return Claim(consumer=new_uuid(rng), options=(option,), project_id="p", limits={"VCPU": 1})

    async def work(store: ResourceBook, host: str) -> str:
        beside = [] if alone else [Release(consumer=new_uuid(rng))]
        *_, reply = await store.apply([*beside, claim(host)])
        return str(reply.outcome)

    watcher = await asyncpg.connect(book.url)
    try:
        for store in stores:
            await store.open()
        async with book.database.raw() as first:
            (reply,) = await apply(book.rows.on(first), ClaimGroup([claim(hosts[0])]), ABOVE_CELLS)
            assert reply.outcome == "claimed"
            others = [asyncio.create_task(work(store, host)) for store, host in zip(stores, hosts[1:], strict=True)]
            async with asyncio.timeout(PATIENCE_S):
                while await watcher.fetchval(WAITING) < MANY:
                    assert not any(one.done() for one in others)
        assert await asyncio.gather(*others) == ["over_limit"] * MANY
    finally:
        await watcher.close()
        for store in stores:
            await store.close()
