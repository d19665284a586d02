"""The whole worker: messages in on the API bus and a cell's bus, replies and the feed out, on a real database."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from bus.bus import Bus
from bus.clock import SystemClock, new_uuid
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.feed import Change, ChangesPage, ChangesRequest, FeedChanges, FeedHead, SnapshotPage, SnapshotRequest
from bus.contracts.placement import (
    Claim,
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

pytestmark = pytest.mark.postgres

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
    consumer = api.consumer("scheduler.feed.{process}", listener.handle)
    await consumer.start()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.wait({running, asyncio.ensure_future(service.ready.wait())}, return_when="FIRST_COMPLETED")
    assert not running.done(), running
    assert service.not_ready() == []

    host, consumer_uuid = new_uuid(rng), new_uuid(rng)
    report = ProviderReport(uuid=host, name="h1", inventories={"VCPU": Inventory(total=4)})
    update = InventoryUpdate(source="c1-compute", version=1, root_uuid=host, providers=(report,))
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
    assert (claimed.outcome, claimed.option, full.outcome) == (ClaimOutcome.CLAIMED, 0, ClaimOutcome.FULL)
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

    bad = InventoryUpdate(source="c1-compute", version=2, root_uuid=new_uuid(rng), providers=(report,))
    with pytest.raises(RequestRefused) as refused:
        await api.request(bad, InventoryResult, timeout_s=TIMEOUT_S)
    assert refused.value.code == "inventory.root"

    await consumer.drain(1)
    stop.set()
    await running
    await api.close()
    await cell.close()
