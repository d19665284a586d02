"""A worker's side task on a cell's bus, when the cell goes away in the very moment in which it has been reached."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from bus.bus import Bus
from bus.cell_link import CellLink
from bus.cell_links import REOPEN_S, CellLinks
from bus.clock import SystemClock
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.cells import LinkState
from bus.contracts.objects import CellBus
from bus.contracts.placement import Release, ReleaseResult
from bus.memory import MemoryBroker, MemoryTransport
from bus.port import BusForbidden
from tests.kit.virtual_time import on_virtual_time

PATIENCE_S = 60.0
RELEASE = Release(consumer="00000000-0000-4000-8000-000000000001")


class Fickle(MemoryBroker):
    """Goes down when its queues are declared for the first time."""

    fell = False

    def declare(self, planned: object, owner: object) -> None:
        if not self.fell:
            self.fell = True
            self.stop()
        super().declare(planned, owner)  # type: ignore[arg-type]


async def test_a_cell_that_disconnects_again_at_once_is_served_when_it_comes() -> None:
    clock = SystemClock()
    broker = Fickle(clock)
    theirs = Bus("c1", MemoryTransport(broker, "c1"), process="worker", clock=clock, rng=random.Random(1))

    async def answer(batch: Sequence[Received]) -> Sequence[Outcome]:
        return [Done(ReleaseResult(outcome="absent"))] * len(batch)

    link = CellLink(theirs, [theirs.consumer("placement.requests", answer)])
    running = asyncio.create_task(link.run())
    async with asyncio.timeout(PATIENCE_S):
        while not broker.fell:  # noqa: ASYNC110  (a broker does not announce it)
            await asyncio.sleep(0)
        broker.start()
        await link.up.wait()
    asker = Bus("c1", MemoryTransport(broker, "c1"), process="asker", clock=clock, rng=random.Random(2))
    await asker.open()
    assert (await asker.request(RELEASE, ReleaseResult, timeout_s=PATIENCE_S)).outcome == "absent"
    await link.drain(1.0)
    await running
    await link.close()
    await asker.close()


class Refusing(MemoryTransport):
    """A bus whose broker refuses the credentials of the first connection to it."""

    connections = 0

    async def open(self) -> None:
        Refusing.connections += 1
        if Refusing.connections == 1:
            raise BusForbidden("vhost not found")
        await super().open()


@on_virtual_time
async def test_a_cell_of_the_settings_whose_broker_refuses_is_entered_when_it_no_longer_does() -> None:
    clock = SystemClock()
    broker = MemoryBroker(clock)

    async def answer(batch: Sequence[Received]) -> Sequence[Outcome]:
        return [Done()] * len(batch)

    def reach(name: str, _: CellBus | None) -> Bus:
        return Bus(name, Refusing(broker, name), process="worker", clock=clock, rng=random.Random(1))

    links = CellLinks(lambda bus: CellLink(bus, [bus.consumer("placement.requests", answer)]), clock=clock, reach=reach)
    links.configure(reach("c1", None))
    running = asyncio.create_task(links.hold("c1"))
    try:
        await clock.sleep(1.0)
        assert not running.done(), "it ended the worker"
        assert links.state_of("c1") == (LinkState.CONNECTING, "vhost not found")
        assert links.reached("c1").unavailable_reason == "vhost not found"
        await clock.sleep(REOPEN_S)
        assert links.state_of("c1") == (LinkState.UP, "")
        assert links.reached("c1").unavailable_reason == ""
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await links.close_cell("c1")
