"""Two machines' clocks may be minutes apart: a request is answered, and given up, by the time that passes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import BuildAccepted, BuildRequest
from bus.memory import MemoryBroker, MemoryTransport

REQUEST = BuildRequest(instance_uuid="5f1bd4b0-6a3e-4c27-9a6f-4d0d1e2d7d11", flavor="m1.small", project_id="p")


class Ahead(SystemClock):
    """A clock that is off."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def time(self) -> float:
        return super().time() + self._ahead_s


@pytest.mark.parametrize("ahead_s", [240.0, -240.0])
async def test_a_request_is_answered_by_a_worker_whose_clock_is_minutes_off(ahead_s: float) -> None:
    """It was dropped as too late by every worker ahead of the asker by more than the asker's patience."""
    broker = MemoryBroker(SystemClock())
    asker, server = (
        Bus("api", MemoryTransport(broker, name), process=name, clock=clock, rng=random.Random(1))
        for name, clock in (("asker", SystemClock()), ("server", Ahead(ahead_s)))
    )

    async def answer(batch: Sequence[Received]) -> Sequence[Outcome]:
        return [Done(BuildAccepted(instance_uuid=REQUEST.instance_uuid)) for _ in batch]

    await asker.open()
    await server.open()
    consumer = server.consumer("scheduler.requests", answer)
    await consumer.start()
    try:
        reply = await asker.request(REQUEST, BuildAccepted, timeout_s=60.0)
        assert reply.instance_uuid == REQUEST.instance_uuid
    finally:
        await consumer.drain(1.0)
        await asker.close()
        await server.close()
