"""How the worker forgets: often enough to keep up, a batch at a time."""

from __future__ import annotations

import asyncio
import random

from bus.bus import API, Bus
from bus.contracts.feed import FeedChanges
from bus.contracts.placement import Claim, ClaimOption, Inventory, InventoryUpdate, ProviderReport, Release
from bus.memory import MemoryBroker, MemoryTransport
from placement_worker.book import ResourceBook
from placement_worker.config import PlacementConfig
from placement_worker.publisher import TAKEN_WAIT_S, FeedPublisher
from placement_worker.store.memory_rows import MemoryBookRows
from placement_worker.store.memory_table import MemoryBookTable
from tests.unit.front.world import HandClock

HOST = "10000000-0000-4000-8000-000000000000"

USER = "c0000000-0000-4000-8000-000000000000"


async def test_a_full_batch_is_followed_by_the_next_at_once() -> None:
    clock = HandClock()
    table = MemoryBookTable(clock)
    store = ResourceBook(MemoryBookRows(table.session()))
    bus = Bus(API, MemoryTransport(MemoryBroker(clock), API), process="p", clock=clock, rng=random.Random(1))
    config = PlacementConfig(trim_batch=100, fence_retention_s=3600.0, trim_interval_s=7200.0)
    report = ProviderReport(uuid=HOST, name="h", inventories={"VCPU": Inventory(total=1000)})
    await store.report([InventoryUpdate(source="s", version=1, root_uuid=HOST, providers=(report,))])
    consumers = [f"c0000000-0000-4000-8000-{number:012d}" for number in range(450)]
    option = ClaimOption(allocations={HOST: {"VCPU": 1}})
    await store.apply([Claim(consumer=uuid, options=(option,), project_id="p") for uuid in consumers])
    await store.apply([Release(consumer=uuid, attempt=1) for uuid in consumers])
    started = clock.monotonic()
    trimming = asyncio.create_task(FeedPublisher(store, bus, clock=clock, config=config).trim())
    async with asyncio.timeout(20):
        while table.consumers:  # noqa: ASYNC110  (whatever it is, it needs only turns of the loop)
            await asyncio.sleep(0)
    trimming.cancel()
    await asyncio.gather(trimming, return_exceptions=True)
    assert clock.monotonic() - started < 2 * config.trim_interval_s


async def test_trimming_removes_retired_trees_that_are_unused() -> None:
    clock = HandClock()
    table = MemoryBookTable(clock)
    store = ResourceBook(MemoryBookRows(table.session()))
    bus = Bus(API, MemoryTransport(MemoryBroker(clock), API), process="p", clock=clock, rng=random.Random(1))
    report = ProviderReport(uuid=HOST, name="h", inventories={"VCPU": Inventory(total=4)})
    await store.report([InventoryUpdate(source="s", version=1, root_uuid=HOST, providers=(report,))])
    option = ClaimOption(allocations={HOST: {"VCPU": 1}})
    await store.apply([Claim(consumer=USER, options=(option,), project_id="p")])
    await store.report([InventoryUpdate(source="s", version=2, root_uuid=HOST)])
    await store.apply([Release(consumer=USER)])
    trimming = asyncio.create_task(FeedPublisher(store, bus, clock=clock, config=PlacementConfig()).trim())
    async with asyncio.timeout(20):
        while table.providers:  # noqa: ASYNC110  (whatever it is, it needs only turns of the loop)
            await asyncio.sleep(0)
    trimming.cancel()
    await asyncio.gather(trimming, return_exceptions=True)


async def test_who_finds_another_publishing_looks_again_for_what_it_has_left() -> None:
    clock = HandClock()
    table = MemoryBookTable(clock)
    other, store = ResourceBook(MemoryBookRows(table.session())), ResourceBook(MemoryBookRows(table.session()))
    bus = Bus(API, MemoryTransport(MemoryBroker(clock), API), process="p", clock=clock, rng=random.Random(1))
    publisher = FeedPublisher(store, bus, clock=clock, config=PlacementConfig())
    sending, confirmed = asyncio.Event(), asyncio.Event()
    sent: list[int] = []

    async def send(published: FeedChanges) -> None:
        changes = published.changes
        sent.extend(change.sequence for change in changes)
        sending.set()
        await confirmed.wait()

    async def note(published: FeedChanges) -> None:
        changes = published.changes
        sent.extend(change.sequence for change in changes)

    async def report(version: int) -> None:
        inventory = ProviderReport(uuid=HOST, name="h", inventories={"VCPU": Inventory(total=version)})
        await store.report([InventoryUpdate(source="s", version=version, root_uuid=HOST, providers=(inventory,))])

    publisher._send = note  # type: ignore[method-assign]
    async with asyncio.timeout(20):
        await report(1)
        turn = asyncio.create_task(other.publish(send, 1))
        await sending.wait()
        await report(2)
        started = clock.now
        running = asyncio.create_task(publisher.run())
        publisher.wake()
        while clock.now < started + TAKEN_WAIT_S:  # noqa: ASYNC110  (whatever it is, it needs only turns of the loop)
            await asyncio.sleep(0)
        confirmed.set()
        await turn
        while len(sent) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert sent == [1, 2]


async def test_the_event_of_a_claim_waits_for_its_answer_to_leave_and_all_other_events_for_nothing() -> None:
    clock = HandClock()
    store = ResourceBook(MemoryBookRows(MemoryBookTable(clock).session()))
    bus = Bus(API, MemoryTransport(MemoryBroker(clock), API), process="p", clock=clock, rng=random.Random(1))
    config = PlacementConfig(feed_linger_s=0.5, feed_gap_s=0.0)
    publisher = FeedPublisher(store, bus, clock=clock, config=config)
    published_at: list[float] = []

    async def publish_all() -> None:
        published_at.append(clock.monotonic())

    publisher._publish_all = publish_all  # type: ignore[method-assign]
    running = asyncio.create_task(publisher.run())
    started = clock.monotonic()
    publisher.wake()
    async with asyncio.timeout(20):
        while len(published_at) < 1:  # noqa: ASYNC110  (whatever it is, it needs only turns of the loop)
            await asyncio.sleep(0)
        publisher.wake(at_once=False)
        while len(published_at) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert published_at == [started, started + config.feed_linger_s]
