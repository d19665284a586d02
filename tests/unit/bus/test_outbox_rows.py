"""When an outbox row is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from bus.bus import Bus
from bus.clock import SystemClock
from bus.contracts.base import Message
from bus.contracts.cell import CellDelete
from bus.persistence.outbox import OutboxMessage
from bus.persistence.relay import Relay

UUID = "0b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e"


class Forgotten:
    """The table of rows: which are deleted, in order."""

    def __init__(self) -> None:
        self.rows: asyncio.Queue[int] = asyncio.Queue()

    async def delete(self, row_ids: Sequence[int]) -> None:
        for row in row_ids:
            self.rows.put_nowait(row)

    async def replace(self, row_id: int, outgoing: Sequence[OutboxMessage]) -> None: ...

    async def claim_stale(
        self, age_s: float, limit: int, closed: Sequence[str], confirmed: Sequence[int] = ()
    ) -> list[tuple[int, bytes]]:
        await asyncio.Event().wait()
        return []

    async def purge_handled(self, keep_s: float, limit: int) -> None:
        await asyncio.Event().wait()


class HeldBus:
    """A bus whose broker confirms on command."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_some, self.confirms = asyncio.Event(), asyncio.Event()

    async def publish_all(self, messages: Sequence[tuple[Message, str]], traceparents: Sequence[str] = ()) -> None:
        self.has_some.set()
        await self.confirms.wait()


async def test_a_row_is_deleted_when_the_last_of_its_messages_is_confirmed() -> None:
    """Found by nothing before: deleted at the first, a crash in between loses the others."""
    table, fast, slow = Forgotten(), HeldBus("c1"), HeldBus("c2")
    buses: dict[str, Bus] = {"c1": fast, "c2": slow}  # type: ignore[dict-item]
    relay = Relay(table, buses, clock=SystemClock())
    running = asyncio.create_task(relay.run())
    message = CellDelete(instance_uuid=UUID, project_id="p")
    relay.send(1, [OutboxMessage("c1", message), OutboxMessage("c2", message)])
    relay.send(2, [OutboxMessage("c1", message)])
    async with asyncio.timeout(30):
        await fast.has_some.wait()
        await slow.has_some.wait()
        fast.confirms.set()
        assert await table.rows.get() == 2
        assert table.rows.empty() and relay.held == 1
        slow.confirms.set()
        assert await table.rows.get() == 1
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
