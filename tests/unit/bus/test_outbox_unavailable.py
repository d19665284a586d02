"""A bus that is unavailable is logged when it goes, now and then while it stays away, and when it is back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import structlog
from msgspec import structs

from bus.clock import SystemClock
from bus.contracts.cell import CellDelete
from bus.persistence.outbox import OutboxMessage, encode_row
from bus.persistence.relay import UNAVAILABLE_LOG_INTERVAL_S, Relay
from tests.kit.posting import PostedBus
from tests.kit.virtual_time import on_virtual_time

OUTAGE_S = 200.0
OUTGOING = [OutboxMessage("c1", CellDelete(instance_uuid="0b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e", project_id="p"))]


class HandClock(SystemClock):
    """Its sleeps never end."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.Event().wait()


class LeftRows:
    """The table: the rows that stayed, which are taken when their bus is back."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    async def delete(self, row_ids: Sequence[int]) -> None:
        self.rows -= set(row_ids)

    async def claim_stale(
        self,
        age_s: float,
        limit: int,
        closed: Sequence[str],
        confirmed: Sequence[int] = (),
        back: Sequence[int] = (),
    ) -> list[tuple[int, bytes]]:
        self.rows -= set(confirmed)
        return [(row, encode_row(OUTGOING)) for row in sorted(self.rows & set(back))][:limit]

    async def purge_handled(self, keep_s: float, limit: int) -> None: ...


async def test_an_outage_is_logged_when_it_begins_at_intervals_and_when_it_ends() -> None:
    clock, bus, table = HandClock(), PostedBus("c1"), LeftRows()
    bus.go()
    relay = Relay(table, {"c1": bus}, clock=clock)  # type: ignore[dict-item]
    with structlog.testing.capture_logs() as lines:
        running = asyncio.create_task(relay.run())
        while clock.now < OUTAGE_S:
            clock.now += 1.0
            table.rows.add(int(clock.now))
            relay.send([int(clock.now)], OUTGOING)
        assert relay.held == 0 and not bus.batches, "the rows stay in the table"
        bus.come_back()
        await asyncio.wait_for(relay.drain(60.0), 60)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    counts = Counter(line["event"] for line in lines)
    assert 2 <= counts["outbox.bus_unavailable"] <= OUTAGE_S / UNAVAILABLE_LOG_INTERVAL_S + 1
    assert counts["outbox.bus_back"] == 1
    assert len(bus.got) == OUTAGE_S and not table.rows


@on_virtual_time
async def test_a_drain_does_not_wait_for_a_bus_that_is_away_but_for_what_goes_on_others() -> None:
    """A worker that stopped while one of its cells was away took its whole grace time."""
    away, there, table = PostedBus("c1"), PostedBus("c2"), LeftRows()
    there.confirms.clear()
    relay = Relay(table, {"c1": away, "c2": there}, clock=SystemClock())  # type: ignore[dict-item]
    running = asyncio.create_task(relay.run())
    away.go()
    relay.send([1], OUTGOING)
    relay.send([2], [structs.replace(OUTGOING[0], bus="c2")])
    draining = asyncio.create_task(relay.drain(60.0))
    await there.has_some.wait()
    await asyncio.sleep(10.0)
    assert not draining.done(), "a row may still be confirmed"
    there.confirms.set()
    began = asyncio.get_running_loop().time()
    await draining
    assert asyncio.get_running_loop().time() - began < 1.0 and not relay.held
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
