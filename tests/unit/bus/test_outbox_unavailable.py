"""A bus that is unavailable is logged when it goes, now and then while it stays away, and when it is back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import structlog

from bus.bus import Bus
from bus.clock import SystemClock
from bus.contracts.base import Message
from bus.contracts.cell import CellDelete
from bus.persistence.outbox import OutboxMessage
from bus.persistence.relay import Relay
from bus.persistence.relay_lane import LANE_PUBLISHES, UNAVAILABLE_LOG_INTERVAL_S
from bus.port import BusUnavailable

OUTAGE_S = 200.0
UUID = "0b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e"


class QuickClock(SystemClock):
    """Time passes as it is slept."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


class NoRows:
    async def delete(self, row_ids: Sequence[int]) -> None: ...

    async def replace(self, row_id: int, outgoing: Sequence[OutboxMessage]) -> None: ...

    async def claim_stale(
        self, age_s: float, limit: int, closed: Sequence[str], confirmed: Sequence[int] = ()
    ) -> list[tuple[int, bytes]]:
        await asyncio.Event().wait()
        return []

    async def purge_handled(self, keep_s: float, limit: int) -> None:
        await asyncio.Event().wait()


class UnavailableBus:
    name = "c1"

    def __init__(self, clock: QuickClock) -> None:
        self._clock = clock
        self.tries = 0
        self.done = asyncio.Event()

    async def publish_all(self, messages: Sequence[tuple[Message, str]], traceparents: Sequence[str] = ()) -> None:
        self.tries += 1
        if self._clock.now < OUTAGE_S:
            raise BusUnavailable("unavailable")
        self.done.set()


async def test_an_outage_is_logged_when_it_begins_at_intervals_and_when_it_ends() -> None:
    clock = QuickClock()
    bus = UnavailableBus(clock)
    named: dict[str, Bus] = {"c1": bus}  # type: ignore[dict-item]
    relay = Relay(NoRows(), named, clock=clock)
    with structlog.testing.capture_logs() as lines:
        running = asyncio.create_task(relay.run())
        for row in range(LANE_PUBLISHES):
            relay.send(row + 1, [OutboxMessage("c1", CellDelete(instance_uuid=UUID, project_id="p"))])
            await asyncio.sleep(0)  # each of the lane's publishers has something in hand
        async with asyncio.timeout(60):
            await bus.done.wait()
            await relay.drain(5.0)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    counts = Counter(line["event"] for line in lines)
    assert bus.tries > 50
    assert 2 <= counts["outbox.bus_unavailable"] <= OUTAGE_S / UNAVAILABLE_LOG_INTERVAL_S + 1
    assert counts["outbox.bus_back"] == 1
