"""Several Ironics side by side, one for each cell: each is followed by an ironic-sync of its own name."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest

import ironic_sync.app
import placement_worker.app
import scheduler_worker.app
from berth.in_process import InProcessWorkers
from berth.ironic_stand_in import IronicStandIn, MemoryAnnouncer
from bus.clock import SystemClock
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from ironic_sync.config import IronicSyncConfig
from placement_worker.config import PlacementConfig
from placement_worker.replica.book import Book
from scheduler_worker.config import SchedulerConfig

pytestmark = pytest.mark.postgres

PATIENCE_S = 60.0
POLL_S = 0.01
CELLS = ("east", "west")
SHARED = "8296eb22-b44b-4cba-95b1-3a66b31189a4"
CLASS = "CUSTOM_BAREMETAL_GOLD"


class Regions:
    """An Ironic for each cell, all on one bus and one database, and the replica of a running scheduler."""

    def __init__(self, database_url: str) -> None:
        self._brokers = {name: MemoryBroker(SystemClock()) for name in ("api", *CELLS)}
        self._database_url = database_url
        self.book = Book()
        api = self._brokers["api"]
        self.ironics = {
            cell: IronicStandIn(MemoryAnnouncer(api, f"ironic-{cell}"), clock=SystemClock(), rng=random.Random(cell))
            for cell in CELLS
        }
        self.workers = InProcessWorkers()

    def environment(self, process: str) -> Environment:
        return Environment(
            process,
            transports=lambda name: MemoryTransport(self._brokers[name], f"{process} {name}"),
            database_url=self._database_url,
            cells=CELLS,
            pool_size=5,
        )

    async def start(self) -> None:
        placement = placement_worker.app.build(self.environment("placement"), PlacementConfig(), CELLS)
        scheduler = scheduler_worker.app.build(self.environment("scheduler"), SchedulerConfig(), CELLS, book=self.book)
        await self.workers.start(("placement", placement))
        await self.workers.start(("scheduler", scheduler))

    async def follow(self, cell: str) -> None:
        """Start the ironic-sync of one cell."""
        config = IronicSyncConfig(
            name=cell,
            cell=cell,
            url=await self.ironics[cell].start(),
            exchange=f"ironic-{cell}",
            bind_retry_s=0.05,
            resync_interval_s=3600.0,
        )
        process = f"ironic-sync-{cell}"
        await self.workers.start((process, ironic_sync.app.build(self.environment(process), config)))

    async def stop(self) -> None:
        await self.workers.stop()
        for ironic in self.ironics.values():
            await ironic.stop()

    def free(self) -> set[str]:
        """Nodes that a scheduler can place on."""
        column = self.book.column(CLASS)
        return set() if column is None else {self.book.uuid_of(int(row)) for row in column.root_free.nonzero()[0]}

    async def until_free(self, nodes: set[str]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.free() != nodes:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)


def add(ironic: IronicStandIn, **fields: str) -> str:
    made = ironic.pool.add(
        provision_state="available", power_state="power off", resource_class="baremetal-gold", **fields
    )
    return str(made["uuid"])


async def test_each_ironic_is_followed_and_a_uuid_that_both_have_stays_the_firsts(postgres_url: str) -> None:
    here = Regions(postgres_url)
    east, west = (here.ironics[cell] for cell in CELLS)
    try:
        mine = {add(east), add(east, uuid=SHARED)}
        theirs = [add(west, uuid=SHARED), add(west)]  # the shared one first: what comes of the other comes after it
        await here.start()
        await here.follow("east")
        await here.until_free(mine)
        await here.follow("west")
        await here.until_free(mine.union(theirs))
        maintain = partial(west.pool.set_maintenance, reason="fan", request_id="req-1")
        for node in theirs:
            await maintain(west.pool.nodes[node], True)
        await here.until_free(mine)  # the other node of that uuid is held back; the first's stays offered
        await east.pool.set_maintenance(east.pool.nodes[SHARED], True, "fan", "req-2")
        await here.until_free(mine - {SHARED})
        for node in theirs:
            await maintain(west.pool.nodes[node], False)
        await here.until_free(mine.union(theirs) - {SHARED})
    finally:
        await here.stop()
