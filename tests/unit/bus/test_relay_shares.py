"""A bus that confirms nothing, or fails what it is given, though it says that it is connected."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from bus.clock import Clock, SystemClock
from bus.contracts.base import Message
from bus.contracts.cell import CellDelete
from bus.persistence.outbox import OutboxMessage, encode_row
from bus.persistence.relay import MAX_ROWS, SWEEP_BATCH, Relay
from bus.persistence.unit_of_work import published
from bus.port import BusUnavailable
from tests.kit.posting import PostedBus
from tests.unit.bus.test_outbox_unavailable import HandClock

UUID = "0b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e"
PATIENCE_S = 30
TURNS = 200  # of the event loop: enough for many sweeps


class Table:
    """The rows that are committed and not deleted. None is old."""

    def __init__(self) -> None:
        self.rows: dict[int, list[OutboxMessage]] = {}

    async def delete(self, row_ids: Sequence[int]) -> None:
        for row in row_ids:
            self.rows.pop(row, None)

    async def claim_stale(
        self,
        age_s: float,
        limit: int,
        closed: Sequence[str],
        confirmed: Sequence[int] = (),
        back: Sequence[int] = (),
    ) -> list[tuple[int, bytes]]:
        await asyncio.sleep(0)
        await self.delete(confirmed)
        taken: Counter[str] = Counter()
        found = []
        for row in sorted(set(back) & self.rows.keys()):
            bus = self.rows[row][0].bus
            if bus not in closed and taken[bus] < limit:
                taken[bus] += 1
                found.append((row, encode_row(self.rows[row])))
        return found

    async def purge_handled(self, keep_s: float, limit: int) -> None: ...


class FailingBus(PostedBus):
    """Loses each message at once, until it is repaired."""

    is_broken = True

    def fault_of(self, message: Message) -> BaseException | None:
        return BusUnavailable("lost") if self.is_broken else None


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class World:
    def __init__(self, clock: Clock, *buses: PostedBus, max_rows: int = MAX_ROWS) -> None:
        self.table = Table()
        named: Any = {bus.name: bus for bus in buses}
        self.relay = Relay(self.table, named, clock=clock, max_rows=max_rows)

    async def commit(self, bus: str, messages: int = 1) -> None:
        """One unit of work, as workers have them."""
        outgoing = [OutboxMessage(bus, CellDelete(instance_uuid=UUID, project_id="p"))] * messages

        @asynccontextmanager
        async def unit() -> AsyncIterator[Any]:
            row = len(self.table.rows) + 1
            self.table.rows[row] = outgoing
            yield SimpleNamespace(rows=[row], outbox=outgoing)

        async with published(self.relay, unit()):
            pass

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.relay.run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.sleep(0)
                yield
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


@pytest.mark.parametrize(("max_rows", "messages"), [(60, 1), (MAX_ROWS, 1_000)])
async def test_a_bus_that_confirms_nothing_leaves_room_for_the_others(max_rows: int, messages: int) -> None:
    """Its rows filled what the relay holds, and no unit of work began any more."""
    mute, other, late = PostedBus("c1"), PostedBus("c2"), PostedBus("c3")
    mute.confirms.clear()
    late.confirms.clear()
    world = World(SystemClock(), mute, other, late, max_rows=max_rows)
    async with world.running():
        for bus in ("c1", "c3"):
            for _ in range(40):
                await world.commit(bus, messages)
        await world.commit("c2")
        await turns()
        assert len(other.got) == 1
        assert 0 < len(late.got) < len(mute.got) < 40 * messages, "each has a share"
        mute.confirms.set()
        late.confirms.set()
        await world.relay.drain(PATIENCE_S)
    assert not world.table.rows
    assert len(mute.got) == len(late.got) == 40 * messages, "what stayed in the table leaves, once"


async def test_rows_that_a_connected_bus_loses_at_once_wait_for_the_next_sweep() -> None:
    """More of them than one statement takes were published again in each turn of the event loop."""
    bus, rows = FailingBus("c1"), 2 * SWEEP_BATCH + 1
    world = World(HandClock(), bus)
    async with world.running():
        for _ in range(rows):
            await world.commit("c1")
        await turns()
        assert len(bus.got) == rows
        bus.come_back()
        await turns()
        assert len(bus.got) == 2 * rows, "once a sweep"
        bus.is_broken = False
        bus.come_back()
        await world.relay.drain(PATIENCE_S)
    assert not world.table.rows
