"""The whole worker: messages in on the API bus and a cell's bus, replies and the feed out, on a real database."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from bus.bus import Bus
from bus.clock import SystemClock, new_uuid
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Message, Meta
from bus.contracts.feed import Change, ChangesPage, ChangesRequest, FeedChanges, FeedHead, SnapshotPage, SnapshotRequest
from bus.contracts.placement import (
    Claim,
    ClaimAll,
    ClaimAllResult,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    Inventory,
    InventoryResult,
    InventoryUpdate,
    ProviderReport,
    Release,
    ReleaseResult,
)
from bus.faults import RequestRefused
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from placement_worker.app import build
from placement_worker.config import PlacementConfig
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


# --- the whole worker: messages in on the API bus and a cell's bus, replies and the feed out, on a real database

TIMEOUT_S = 60.0


class Listener:
    """Collects the feed, and lets a test wait for a number."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.heads: list[int] = []
        self._changed = asyncio.Event()

    async def handle(self, batch: Sequence[Received]) -> list[Outcome]:
        for received in batch:
            if isinstance(received.message, FeedChanges):
                self.changes.extend(received.message.changes)
            elif isinstance(received.message, FeedHead):
                self.heads.append(received.message.sequence)
        self._changed.set()
        return [Done() for _ in batch]

    async def reached(self, sequence: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not self.changes or self.changes[-1].sequence < sequence:
                self._changed.clear()
                await self._changed.wait()


async def test_inventory_claims_feed_and_reads_over_the_bus(postgres_url: str, rng: random.Random) -> None:
    clock = SystemClock()
    brokers = {"api": MemoryBroker(clock), "c1": MemoryBroker(clock)}
    env = Environment(
        "placement-1",
        transports=lambda name: MemoryTransport(brokers[name], "placement-1"),
        database_url=postgres_url,
        cells=("c1",),
        clock=clock,
        rng=rng,
    )
    service = build(env, PlacementConfig(), ["c1"])
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    api, cell = (
        Bus(name, MemoryTransport(brokers[name], "client"), process="client", clock=clock, rng=random.Random(n))
        for n, name in enumerate(("api", "c1"))
    )
    await api.open()
    await cell.open()
    listener = Listener()
    consumer = Consumer(api, "scheduler.feed.{process}", listener.handle)
    await consumer.start()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.wait({running, asyncio.ensure_future(service.ready.wait())}, return_when="FIRST_COMPLETED")
    assert not running.done(), running
    assert service.not_ready() == []

    host, consumer_uuid = new_uuid(rng), new_uuid(rng)
    report = ProviderReport(uuid=host, name="h1", inventories={"VCPU": Inventory(total=4)})
    update = InventoryUpdate(reporter="c1-compute", version=1, root_uuid=host, providers=(report,))
    result = await cell.request(update, InventoryResult, timeout_s=TIMEOUT_S, cause="boot")
    assert result.outcome == "applied"

    options = (ClaimOption(allocations={host: {"VCPU": 3}}),)
    requests = [
        Claim(consumer=consumer_uuid, options=options, project_id="p"),
        Claim(consumer=new_uuid(rng), options=options, project_id="p"),
    ]
    claimed, full = await api.request_all(requests, ClaimResult, timeout_s=TIMEOUT_S, causes=["a", "b"])
    assert isinstance(claimed, ClaimResult)
    assert isinstance(full, ClaimResult)
    assert (claimed.outcome, claimed.option, full.outcome) == (ClaimOutcome.CLAIMED, 0, ClaimOutcome.NO_CAPACITY)
    released = await cell.request(Release(consumer=consumer_uuid, attempt=1), ReleaseResult, timeout_s=TIMEOUT_S)
    assert released.outcome == "released"

    await listener.reached(released.sequence)
    numbers = [change.sequence for change in listener.changes]
    assert numbers == list(range(1, released.sequence + 1))
    assert listener.changes[0].state is not None
    assert [change.used for change in listener.changes[1:]] == [{"VCPU": 3}, {"VCPU": 0}]

    page = await api.request(SnapshotRequest(), SnapshotPage, timeout_s=TIMEOUT_S)
    assert (page.sequence, [state.uuid for state in page.providers], page.more) == (released.sequence, [host], False)
    changes = await api.request(ChangesRequest(after=1), ChangesPage, timeout_s=TIMEOUT_S)
    assert [change.sequence for change in changes.changes] == numbers[1:]

    bad = InventoryUpdate(reporter="c1-compute", version=2, root_uuid=new_uuid(rng), providers=(report,))
    with pytest.raises(RequestRefused) as refused:
        await api.request(bad, InventoryResult, timeout_s=TIMEOUT_S)
    assert refused.value.code == "inventory.root"

    await consumer.drain(1)
    stop.set()
    await running
    await api.close()
    await cell.close()


# --- batches of large messages: no turn of the loop that applies them takes many calls

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
    return InventoryUpdate(reporter="reporter", version=1, root_uuid=uuids[0], providers=providers)


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
