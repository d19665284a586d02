"""Two processes write allocations of the same consumers at once: one after the other, each on its own generation."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from bus.clock import new_uuid
from tests.integration.placement_rest.conftest import holding, serving

pytestmark = pytest.mark.postgres

ROUNDS = 10


async def test_of_two_puts_for_one_new_consumer_one_is_refused_as_not_new(postgres_url: str) -> None:
    async with serving(postgres_url) as mine, serving(postgres_url) as theirs:
        hosts = [await mine.host(VCPU=2 * ROUNDS) for _ in range(2)]
        for _ in range(ROUNDS):
            consumer = new_uuid(mine.rng)
            answers = await asyncio.gather(
                mine.claim(consumer, hosts[0], VCPU=1), theirs.claim(consumer, hosts[1], VCPU=1)
            )
            assert Counter(answer.status_code for answer in answers) == {204: 1, 409: 1}
            won = next(host for host, answer in zip(hosts, answers, strict=True) if answer.status_code == 204)
            held = (await theirs.call("GET", f"/allocations/{consumer}", status=200)).json()["allocations"]
            assert list(held) == [won]
        assert await mine.findings() == []


async def test_of_two_posts_that_swap_the_same_consumers_one_does(postgres_url: str) -> None:
    """Named in opposite orders, they do not deadlock either."""
    async with serving(postgres_url) as mine, serving(postgres_url) as theirs:
        hosts = [await mine.host(VCPU=2) for _ in range(2)]
        pair = [new_uuid(mine.rng) for _ in range(2)]
        for consumer, host in zip(pair, hosts, strict=True):
            assert (await mine.claim(consumer, host, VCPU=2)).status_code == 204
        for generation in range(1, ROUNDS):
            there = hosts[::-1] if generation % 2 else hosts
            body = {
                consumer: holding({host: {"resources": {"VCPU": 2}}}, generation)
                for consumer, host in zip(pair, there, strict=True)
            }
            again = dict(reversed(body.items()))
            answers = await asyncio.gather(
                mine.call("POST", "/allocations", body), theirs.call("POST", "/allocations", again)
            )
            assert Counter(answer.status_code for answer in answers) == {204: 1, 409: 1}
        assert await mine.findings() == []
