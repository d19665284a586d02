"""A publish without a confirm: one of the queues that it goes to may hang, and others take what comes after it."""

from __future__ import annotations

import asyncio
import random

from bus.bus import Bus
from bus.clock import SystemClock
from bus.contracts.cell import CellDelete
from bus.gather import SLOW_S
from bus.memory import MemoryBroker, MemoryTransport
from bus.port import Outgoing
from tests.contract.house import boot
from tests.kit.virtual_time import on_virtual_time


class HungOnce(MemoryTransport):
    """Its broker confirms all but the first message."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker, "c1")
        self.calls = 0
        self.began, self.go_on = asyncio.Event(), asyncio.Event()

    async def publish(self, message: Outgoing) -> None:
        self.calls += 1
        if self.calls == 1:
            self.began.set()
            await self.go_on.wait()
        await super().publish(message)


@on_virtual_time
async def test_a_publish_that_hangs_holds_up_no_other_message_of_its_key() -> None:
    """Each row of an outbox waited up to 30 s behind it."""
    clock = SystemClock()
    transport = HungOnce(MemoryBroker(clock))
    bus = Bus("c1", transport, process="t", clock=clock, rng=random.Random(1))
    await bus.open()
    message = CellDelete(instance_uuid=boot(1).instance_uuid, project_id="p")
    await bus.declare("conductor.requests")
    hung = asyncio.create_task(bus.publish(message))
    await transport.began.wait()
    began = clock.monotonic()
    for _ in range(20):
        await bus.publish(message)
    assert clock.monotonic() - began < 2 * SLOW_S
    assert not hung.done()
    transport.go_on.set()
    await hung
    await bus.close()
