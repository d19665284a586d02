"""A worker's side task on a cell's bus, when the cell goes away in the very moment in which it has been reached."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from uuid import UUID

import pytest

from bus.bus import API, Bus
from bus.cell_links import REOPEN_S, CellLink, CellLinks
from bus.clock import SystemClock
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import BuildRequest
from bus.contracts.catalogue import BY_QUEUE, lane_of
from bus.contracts.cells import LinkState
from bus.contracts.objects import CellBus
from bus.contracts.placement import Release, ReleaseResult
from bus.memory import MemoryBroker, MemoryTransport
from bus.memory.transport import MemorySubscription
from bus.port import BusForbidden, BusUnavailable, Delivery
from tests.kit.virtual_time import on_virtual_time

PATIENCE_S = 60.0
RELEASE = Release(consumer="00000000-0000-4000-8000-000000000001")


class Fickle(MemoryBroker):
    """Goes down when its queues are declared for the first time."""

    fell = False

    def declare(self, planned: object, owner: object) -> None:
        if not self.fell:
            self.fell = True
            self.stop()
        super().declare(planned, owner)  # type: ignore[arg-type]


async def test_a_cell_that_disconnects_again_at_once_is_served_when_it_comes() -> None:
    clock = SystemClock()
    broker = Fickle(clock)
    theirs = Bus("c1", MemoryTransport(broker, "c1"), process="worker", clock=clock, rng=random.Random(1))

    async def answer(batch: Sequence[Received]) -> Sequence[Outcome]:
        return [Done(ReleaseResult(outcome="absent"))] * len(batch)

    link = CellLink(theirs, [theirs.consumer("placement.requests", answer)])
    running = asyncio.create_task(link.run())
    async with asyncio.timeout(PATIENCE_S):
        while not broker.fell:  # noqa: ASYNC110  (a broker does not announce it)
            await asyncio.sleep(0)
        broker.start()
        await link.up.wait()
    asker = Bus("c1", MemoryTransport(broker, "c1"), process="asker", clock=clock, rng=random.Random(2))
    await asker.open()
    assert (await asker.request(RELEASE, ReleaseResult, timeout_s=PATIENCE_S)).outcome == "absent"
    await link.drain(1.0)
    await running
    await link.close()
    await asker.close()


class Refusing(MemoryTransport):
    """A bus whose broker refuses the credentials of the first connection to it."""

    connections = 0

    async def open(self) -> None:
        Refusing.connections += 1
        if Refusing.connections == 1:
            raise BusForbidden("vhost not found")
        await super().open()


@on_virtual_time
async def test_a_cell_of_the_settings_whose_broker_refuses_is_entered_when_it_no_longer_does() -> None:
    clock = SystemClock()
    broker = MemoryBroker(clock)

    async def answer(batch: Sequence[Received]) -> Sequence[Outcome]:
        return [Done()] * len(batch)

    def reach(name: str, _: CellBus | None) -> Bus:
        return Bus(name, Refusing(broker, name), process="worker", clock=clock, rng=random.Random(1))

    links = CellLinks(lambda bus: CellLink(bus, [bus.consumer("placement.requests", answer)]), clock=clock, reach=reach)
    links.configure(reach("c1", None))
    running = asyncio.create_task(links.hold("c1"))
    try:
        await clock.sleep(1.0)
        assert not running.done(), "it ended the worker"
        assert links.state_of("c1") == (LinkState.CONNECTING, "vhost not found")
        assert links.reached("c1").unavailable_reason == "vhost not found"
        await clock.sleep(REOPEN_S)
        assert links.state_of("c1") == (LinkState.UP, "")
        assert links.reached("c1").unavailable_reason == ""
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await links.close_cell("c1")


class Slow(MemoryTransport):
    """Each queue of it is consumed a turn of the loop after `go_on`."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker, "c1")
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def consume(
        self, queue: str, on_delivery: Callable[[Delivery], None], *, prefetch: int
    ) -> MemorySubscription:
        self.asked.set()
        await self.go_on.wait()
        return await super().consume(queue, on_delivery, prefetch=prefetch)


async def test_a_consumer_that_is_starting_when_its_link_is_drained_takes_nothing() -> None:
    clock = SystemClock()
    broker = MemoryBroker(clock)
    transport = Slow(broker)
    bus = Bus("c1", transport, process="worker", clock=clock, rng=random.Random(1))
    taken: list[Received] = []

    async def take(batch: Sequence[Received]) -> Sequence[Outcome]:
        taken.extend(batch)
        return [Done()] * len(batch)

    link = CellLink(bus, [bus.consumer(queue, take) for queue in ("placement.requests", "placement.inventory")])
    running = asyncio.create_task(link.run())
    await transport.asked.wait()
    await link.drain(1.0)
    transport.go_on.set()
    await asyncio.wait_for(running, PATIENCE_S)
    await bus.publish(RELEASE)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not taken and await transport.depth("placement.requests") == 1
    delivery = await transport.get("placement.requests")
    assert delivery is not None and not delivery.redelivered
    await link.close()


class Once(MemoryTransport):
    """A connection that is lost while the second queue is consumed for the first time."""

    asked = 0

    async def consume(
        self, queue: str, on_delivery: Callable[[Delivery], None], *, prefetch: int
    ) -> MemorySubscription:
        self.asked += 1
        if self.asked == 2:
            raise BusUnavailable("lost")
        return await super().consume(queue, on_delivery, prefetch=prefetch)


async def test_a_consumer_whose_start_was_interrupted_starts_the_rest_and_nothing_twice() -> None:
    """It counted as started with the first of its queues, and the others were never consumed."""
    clock = SystemClock()
    broker = MemoryBroker(clock)
    bus = Bus(API, Once(broker, API), process="worker", clock=clock, rng=random.Random(1))
    await bus.open()
    taken: list[Received] = []

    async def take(batch: Sequence[Received]) -> Sequence[Outcome]:
        taken.extend(batch)
        return [Done()] * len(batch)

    consumer = bus.consumer("scheduler.requests", take)
    with pytest.raises(BusUnavailable):
        await consumer.start()
    assert not consumer.started
    await consumer.start()
    running = asyncio.create_task(consumer.run())
    lanes = {lane_of(project): project for project in map(str, range(500))}
    for number, project in enumerate(lanes.values()):
        await bus.publish(BuildRequest(instance_uuid=str(UUID(int=number)), flavor="small", project_id=project))
    async with asyncio.timeout(PATIENCE_S):
        while len(taken) < len(lanes):  # noqa: ASYNC110  (a broker does not announce it)
            await asyncio.sleep(0)
    queues = [broker.queue(row.name) for row in BY_QUEUE["scheduler.requests"].queues]
    assert [len(queue.consumers) for queue in queues] == [1] * len(queues)
    await consumer.drain(1.0)
    await running
    await bus.close()
