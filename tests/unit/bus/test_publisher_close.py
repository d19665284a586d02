"""A publisher that is closed begins nothing more, and ends every message that it was given."""

from __future__ import annotations

import asyncio
import random

import pytest

from bus.bus import Bus, BusLimits
from bus.clock import SystemClock
from bus.contracts.cell import CellDelete
from bus.memory import MemoryBroker, MemoryTransport
from bus.port import BusUnavailable, Outgoing
from bus.publishing import Waiter
from tests.contract.house import boot
from tests.kit.virtual_time import on_virtual_time

MESSAGES = [CellDelete(instance_uuid=boot(number).instance_uuid, project_id="p") for number in range(5)]


class HungTransport(MemoryTransport):
    """Its broker confirms nothing."""

    calls = 0

    async def publish(self, message: Outgoing) -> None:
        self.calls += 1
        await asyncio.Event().wait()


def post(bus: Bus, waiters: list[Waiter]) -> None:
    bus.post_all([(one, "") for one in MESSAGES], [""] * len(MESSAGES), waiters, lambda _: None)


@pytest.mark.parametrize("began", [True, False])
async def test_a_publisher_that_closes_begins_nothing_and_ends_all_it_has(began: bool) -> None:
    """What was cancelled made room for the next, which ran beside the close of the connection and was never awaited."""
    transport = HungTransport(MemoryBroker(SystemClock()), "c1")
    limits = BusLimits(batch_items=1, link_in_flight=1, full_in_flight=1, close_s=0.0)
    bus = Bus("c1", transport, process="t", clock=SystemClock(), rng=random.Random(1), limits=limits)
    await bus.open()
    waiters = [Waiter() for _ in MESSAGES]
    post(bus, waiters)
    if began:
        await asyncio.sleep(0)
    await asyncio.wait_for(bus.close(), 30)
    ended = [isinstance(waiter.error, BusUnavailable) for waiter in waiters]
    calls = transport.calls
    await asyncio.sleep(0)
    assert (transport.calls, ended) == (calls, [True] * len(MESSAGES))
    assert calls <= 1


@on_virtual_time
async def test_a_publisher_that_closes_while_nothing_can_leave_leaves_the_loop_to_others() -> None:
    """The simulation's seed 26: it looked again and again for messages on their way."""
    clock = SystemClock()
    transport = MemoryTransport(MemoryBroker(clock), "c1")
    bus = Bus("c1", transport, process="t", clock=clock, rng=random.Random(1), limits=BusLimits(in_flight=0))
    await bus.open()
    waiters = [Waiter() for _ in MESSAGES]
    post(bus, waiters)
    await asyncio.sleep(0)
    await bus.close()
    assert [type(waiter.error) for waiter in waiters] == [BusUnavailable] * len(MESSAGES)
