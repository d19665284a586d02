"""Batches of large messages: no turn of the loop that applies them takes many calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bus.clock import SystemClock, new_uuid
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Message, Meta
from bus.contracts.placement import (
    Claim,
    ClaimAll,
    ClaimAllResult,
    ClaimOption,
    ClaimOutcome,
    Inventory,
    InventoryResult,
    InventoryUpdate,
    ProviderReport,
)
from placement_worker.handlers import (
    MAX_CLAIMED,
    MAX_REPORTED,
    PlacementHandlers,
    entries_of_claim,
    entries_of_report,
    parts,
)
from tests.integration.placement_rest.conftest import Placement, serving
from tests.integration.placement_rest.test_turn_cost import AMOUNTS, Turns, filled

pytestmark = pytest.mark.postgres

GANGS, MEMBERS, OPTIONS = 32, 100, 10
NESTED, CHILDREN, TRAITS = 16, 64, 50
# A quarter more than a part of the largest size takes: 87,000 for gangs, 48,000 for reports.
MOST_CLAIM_CALLS, MOST_REPORT_CALLS = 110_000, 60_000


def claim(placement: Placement, hosts: Sequence[str], number: int) -> Claim:
    options = tuple(
        ClaimOption(allocations={(host := hosts[(number * 7 + n) % len(hosts)]): AMOUNTS}, host=host)
        for n in range(OPTIONS)
    )
    return Claim(consumer=new_uuid(placement.rng), attempt=1, options=options, project_id="p")


def nested(placement: Placement) -> InventoryUpdate:
    uuids = [new_uuid(placement.rng) for _ in range(CHILDREN)]
    providers = tuple(
        ProviderReport(
            uuid=uuid,
            name=uuid,
            parent_uuid=uuids[0] if number else None,
            inventories={name: Inventory(total=100) for name in AMOUNTS},
            traits=tuple(f"CUSTOM_TRAIT_{trait}" for trait in range(TRAITS)),
        )
        for number, uuid in enumerate(uuids)
    )
    return InventoryUpdate(source="reporter", version=1, root_uuid=uuids[0], providers=providers)


def received(messages: Sequence[Message]) -> list[Received]:
    return [Received(one, Meta(id=str(number)), "api", "q") for number, one in enumerate(messages)]


def replies(outcomes: Sequence[Outcome]) -> list[Message | None]:
    assert all(isinstance(one, Done) for one in outcomes)
    return [one.reply for one in outcomes if isinstance(one, Done)]


def test_messages_are_parted_in_order_and_none_is_cut() -> None:
    assert parts([3, 3, 3, 9, 1, 1], lambda count: count, 6) == [[3, 3], [3], [9], [1, 1]]
    assert parts([], lambda count: count, 6) == []


async def test_item_16_no_turn_of_a_batch_of_large_messages_takes_many_calls(postgres_url: str) -> None:
    """32 gangs were 49 ms of the loop at once, and a batch may have 256."""
    async with serving(postgres_url) as placement:
        hosts = await filled(placement)
        handlers = PlacementHandlers(placement.store, clock=SystemClock(), committed=lambda: None, claimed=lambda: None)
        gangs = [
            ClaimAll(claims=tuple(claim(placement, hosts, gang * MEMBERS + n) for n in range(MEMBERS)))
            for gang in range(GANGS)
        ]
        assert sum(map(entries_of_claim, gangs)) > 8 * MAX_CLAIMED
        turns = Turns()
        with turns.counted():
            answers = replies(await asyncio.create_task(handlers.requests(received(gangs))))
        for answer in answers:
            assert isinstance(answer, ClaimAllResult)
            assert {one.outcome for one in answer.results} == {ClaimOutcome.CLAIMED}
        assert len(answers) == GANGS and turns.most < MOST_CLAIM_CALLS, turns.most

        reports = [nested(placement) for _ in range(NESTED)]
        assert sum(map(entries_of_report, reports)) > 6 * MAX_REPORTED
        turns = Turns()
        with turns.counted():
            answers = replies(await asyncio.create_task(handlers.inventory(received(reports))))
        assert [one.outcome for one in answers if isinstance(one, InventoryResult)] == ["applied"] * NESTED
        assert turns.most < MOST_REPORT_CALLS, turns.most
        assert await placement.findings() == []
