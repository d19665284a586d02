"""A hung publish of the outbox holds up only itself, also after a further one has come and gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bus.clock import SystemClock
from bus.contracts.base import Message
from bus.contracts.cell import CellDelete
from bus.persistence.outbox import OutboxMessage
from bus.persistence.relay_lane import LANE_PUBLISHES, NO_LINGERING, Lane, Ticket
from bus.under_way import SLOW_S
from tests.contract.house import boot
from tests.contract.rig import until

SOON_S = 3.0  # sixty times as long as a publish counts as slow after


class HungOnce:
    """A bus whose first publish hangs."""

    name = "c1"

    def __init__(self) -> None:
        self.calls = 0
        self.got: list[str] = []
        self.go_on = asyncio.Event()

    async def publish_all(self, messages: Sequence[tuple[Message, str]], traceparents: Sequence[str] = ()) -> None:
        self.calls += 1
        if self.calls == 1:
            await self.go_on.wait()
        self.got += [cause for _, cause in messages]


async def test_a_hung_publish_of_the_outbox_does_not_hold_up_the_third_row() -> None:
    bus = HungOnce()
    lane = Lane(bus, SystemClock(), lambda items, *, failed=False: None, NO_LINGERING)  # type: ignore[arg-type]
    runners = [asyncio.create_task(lane.run()) for _ in range(LANE_PUBLISHES)]
    message = CellDelete(instance_uuid=boot(1).instance_uuid, project_id="p")

    def put(cause: str) -> None:
        lane.put((Ticket(1, 1, ()), OutboxMessage("c1", message, cause)))

    try:
        put("1")
        await asyncio.sleep(2 * SLOW_S)
        put("2")
        await until(lambda: "2" in bus.got, SOON_S)
        put("3")
        try:
            await until(lambda: "3" in bus.got, SOON_S)
        except TimeoutError:
            pytest.fail(f"the third row was not published within {SOON_S} s beside a hung publish")
    finally:
        bus.go_on.set()
        for runner in runners:
            runner.cancel()
        await asyncio.gather(*runners, return_exceptions=True)
