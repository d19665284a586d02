"""Requests of clients gather while they arrive faster than the broker confirms them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bus.bus import Bus
from bus.clock import SystemClock, new_uuid
from bus.contracts.build import BuildRequest, DeleteRequest
from bus.contracts.catalogue import BY_TYPE
from bus.memory import MemoryBroker, MemoryTransport
from bus.port import Outgoing
from bus.publishing import GATHER, GATHER_AT_MOST_S
from bus.wire import Codec
from tests.kit.virtual_time import on_virtual_time

CONFIRM_S = 0.004
CODEC = Codec([BuildRequest, DeleteRequest])
RNG = random.Random(1)
FULL = BY_TYPE[BuildRequest].max_batch


class Broker:
    """It confirms a message after `confirm_s`. left: when each message left, and the number of requests in it."""

    def __init__(self) -> None:
        self.confirm_s = CONFIRM_S
        self.left: list[tuple[float, int]] = []
        self.transport = MemoryTransport(MemoryBroker(SystemClock()), "t")
        self._publish = self.transport.publish
        self.transport.publish = self._confirmed_late  # type: ignore[method-assign]

    async def _confirmed_late(self, message: Outgoing) -> None:
        now = asyncio.get_running_loop().time()
        self.left.append((round(now, 6), message.body.count(b"instance_uuid")))
        await self._publish(message)
        await asyncio.sleep(self.confirm_s)

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self.left]


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Bus, Broker]]:
    broker = Broker()
    bus = Bus("api", broker.transport, process="t", clock=SystemClock(), rng=RNG)
    await bus.open()
    await bus.declare("scheduler.requests")
    yield bus, broker
    await bus.close()


def build() -> BuildRequest:
    return BuildRequest(instance_uuid=new_uuid(RNG), project_id="p", flavor="m1.tiny")


async def arriving(bus: Bus, count: int, every_s: float) -> None:
    """Each published by a caller of its own."""
    calls = []
    for _ in range(count):
        calls.append(asyncio.create_task(bus.publish(build())))
        await asyncio.sleep(every_s)  # of virtual time
    await asyncio.gather(*calls)


@on_virtual_time
async def test_requests_that_arrive_slower_than_confirms_leave_at_once() -> None:
    async with opened() as (bus, broker):
        began = asyncio.get_running_loop().time()
        await arriving(bus, 5, 2 * CONFIRM_S)
        assert broker.left == [(round(began + number * 2 * CONFIRM_S, 6), 1) for number in range(5)]


@on_virtual_time
async def test_those_that_arrive_faster_gather_for_a_multiple_of_the_confirm() -> None:
    async with opened() as (bus, broker):
        await arriving(bus, 200, CONFIRM_S / 8)
        times = [at for at, _ in broker.left]
        assert broker.sizes[0] == 1 and sum(broker.sizes) == 200
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert min(gaps) >= (1 + GATHER) * CONFIRM_S * 0.99
        assert all(size >= 8 * GATHER for size in broker.sizes[1:-1])


@on_virtual_time
async def test_a_full_message_waits_for_no_more() -> None:
    async with opened() as (bus, broker):
        await asyncio.gather(*(bus.publish(build()) for _ in range(1 + 3 * FULL)))
        assert broker.sizes == [1, FULL, FULL, FULL]
        assert broker.left[1][0] == round(broker.left[0][0] + CONFIRM_S, 6)


@on_virtual_time
async def test_a_slow_broker_makes_no_request_wait_longer_than_the_bound() -> None:
    async with opened() as (bus, broker):
        broker.confirm_s = 1.0
        await arriving(bus, 3, 0.3)
        (first, _), (second, _) = broker.left
        assert round(second - first, 6) == round(broker.confirm_s + GATHER_AT_MOST_S, 6)


@on_virtual_time
async def test_what_gathers_leaves_when_the_bus_is_closed() -> None:
    async with opened() as (bus, broker):
        calls = [asyncio.create_task(bus.publish(build())) for _ in range(3)]
        await asyncio.sleep(CONFIRM_S * 1.5)
        assert broker.sizes == [1]
    await asyncio.gather(*calls)
    assert broker.sizes == [1, 2]


@on_virtual_time
async def test_deletes_do_not_gather() -> None:
    async with opened() as (bus, broker):
        ones = [DeleteRequest(instance_uuid=new_uuid(RNG), project_id="p") for _ in range(3)]
        await asyncio.gather(*(bus.publish(one) for one in ones))
        assert [round(at - broker.left[0][0], 6) for at, _ in broker.left] == [0, CONFIRM_S]
