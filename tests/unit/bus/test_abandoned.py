"""A consumer whose loop is gone is collected without a word."""

from __future__ import annotations

import asyncio
import random

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.memory import MemoryBroker, MemoryTransport
from tests.kit.turns import unfinished


async def started() -> Consumer:
    clock = SystemClock()
    transport = MemoryTransport(MemoryBroker(clock), "api")
    bus = Bus("api", transport, process="p", clock=clock, rng=random.Random(1))

    async def handle(received: list[Received]) -> list[Outcome]:
        return [Done()] * len(received)

    await bus.open()
    consumer = bus.consumer("scheduler.requests", handle, max_batch=1, concurrency=1)  # type: ignore[arg-type]
    await consumer.start()
    return consumer


def test_a_consumer_that_is_collected_waits_for_nothing() -> None:
    loop = asyncio.new_event_loop()
    running = (loop.run_until_complete(started())).run()
    task = loop.create_task(running)
    loop.run_until_complete(asyncio.sleep(0))
    tasks = asyncio.all_tasks(loop)
    loop.close()
    running.close()  # as the garbage collector does; RuntimeError when it awaits something
    assert not task.done()
    assert unfinished()  # this test's own
    for left in tasks:
        left._log_destroy_pending = False  # type: ignore[attr-defined]
