"""When an outbox row is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress

from bus.bus import Bus
from bus.clock import SystemClock
from bus.contracts.base import Message
from bus.contracts.cell import CellDelete
from bus.persistence.outbox import OutboxMessage
from bus.persistence.relay import Relay
from bus.publishing import Waiter
from tests.kit.posting import PostedBus

UUID = "0b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e"


class Forgotten:
    """The table of rows: which are deleted, in order."""

    def __init__(self) -> None:
        self.rows: asyncio.Queue[int] = asyncio.Queue()

    async def delete(self, row_ids: Sequence[int]) -> None:
        for row in row_ids:
            self.rows.put_nowait(row)

    async def claim_stale(
        self,
        age_s: float,
        limit: int,
        closed: Sequence[str],
        confirmed: Sequence[int] = (),
        back: Sequence[int] = (),
    ) -> list[tuple[int, bytes]]:
        await self.delete(confirmed)
        return []

    async def purge_handled(self, keep_s: float, limit: int) -> None:
        await asyncio.Event().wait()


async def test_each_row_is_deleted_when_all_of_its_messages_are_confirmed() -> None:
    """Found by nothing before: deleted at the first, a crash in between loses the others."""
    table, fast, slow = Forgotten(), PostedBus("c1"), PostedBus("c2")
    fast.confirms.clear()
    slow.confirms.clear()
    buses: dict[str, Bus] = {"c1": fast, "c2": slow}  # type: ignore[dict-item]
    relay = Relay(table, buses, clock=SystemClock())
    running = asyncio.create_task(relay.run())
    message = CellDelete(instance_uuid=UUID, project_id="p")
    relay.send([1, 2], [OutboxMessage("c1", message), OutboxMessage("c2", message), OutboxMessage("c2", message)])
    async with asyncio.timeout(30):
        await fast.has_some.wait()
        await slow.has_some.wait()
        fast.confirms.set()
        assert await table.rows.get() == 1
        assert table.rows.empty() and relay.held == 1
        slow.confirms.set()
        assert await table.rows.get() == 2
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_a_row_of_which_one_message_waits_for_its_confirm_stays() -> None:
    table, bus = Forgotten(), SlowLast("c1")
    relay = Relay(table, {"c1": bus}, clock=SystemClock())  # type: ignore[dict-item]
    running = asyncio.create_task(relay.run())
    await asyncio.sleep(0)  # it runs: a drain waits for it
    message = CellDelete(instance_uuid=UUID, project_id="p")
    relay.send([1], [OutboxMessage("c1", message), OutboxMessage("c1", message)])
    async with asyncio.timeout(30):
        first, last = bus.waiters
        first.settle(None)
        await relay.drain(0.05)
        assert table.rows.empty() and relay.held == 1
        last.settle(None)
        await relay.drain(30)
        assert await table.rows.get() == 1
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


class SlowLast(PostedBus):
    """A bus whose confirms the test gives one by one."""

    def post_all(
        self,
        messages: Sequence[tuple[Message, str]],
        traceparents: Sequence[str],
        waiters: Sequence[Waiter],
        line: Callable[[Message], Hashable],
    ) -> None:
        for waiter in waiters:
            waiter.pending += 1
        self.waiters = list(waiters)
