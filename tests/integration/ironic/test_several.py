"""Several Ironics side by side, one for each cell: each is followed by an ironic-sync of its own name."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest

import cell_conductor.app
import compute_sim.app
import ironic_sync.app
import placement_worker.app
import scheduler_worker.app
from berth.in_process import InProcessWorkers
from berth.trial.ironic_stand_in import IronicStandIn, MemoryAnnouncer
from bus.bus import Bus
from bus.clock import SystemClock
from bus.contracts.build import BuildRequest
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from cell_conductor.config import ConductorConfig
from compute_sim.config import ComputeConfig, IronicConfig
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

    async def serve(self, cell: str) -> None:
        """Start a conductor of one cell, and a compute service on its Ironic."""
        config = ComputeConfig(
            driver="ironic",
            ironic=IronicConfig(url=self.ironics[cell].url, poll_interval_s=0.01),
            report_interval_s=0.1,
        )
        conductor, metal = f"conductor-{cell}", f"metal-{cell}"
        built = cell_conductor.app.build(self.environment(conductor), ConductorConfig(), cell)
        await self.workers.start((conductor, built))
        await self.workers.start((metal, compute_sim.app.build(self.environment(metal), config, cell, metal)))

    async def boot(self, instance: str, host: str) -> None:
        """Request an instance on one node, as a client does."""
        transport = MemoryTransport(self._brokers["api"], "client")
        api = Bus("api", transport, process="client", clock=SystemClock(), rng=random.Random(7))
        await api.open()
        await api.publish(BuildRequest(instance_uuid=instance, flavor="bm.gold", project_id="p", host=host))
        await api.close()

    async def stop(self) -> None:
        await self.workers.stop()
        for ironic in self.ironics.values():
            await ironic.stop()

    def state(self, cell: str, node: str) -> tuple[str, str | None]:
        """A node's provision state and instance, by its cell's Ironic."""
        found = self.ironics[cell].pool.nodes[node]
        return found["provision_state"], found["instance_uuid"]

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


async def test_builds_on_two_ironics_in_one_system(postgres_url: str) -> None:
    here = Regions(postgres_url)
    nodes = {cell: [add(here.ironics[cell]) for _ in range(2)] for cell in CELLS}
    instances = {cell: f"10000000-0000-4000-8000-00000000000{number}" for number, cell in enumerate(CELLS)}
    try:
        await here.start()
        for cell in CELLS:
            await here.follow(cell)
            await here.serve(cell)
        await here.until_free({node for both in nodes.values() for node in both})
        for cell in CELLS:
            await here.boot(instances[cell], nodes[cell][0])
        async with asyncio.timeout(PATIENCE_S):
            while not all(here.state(cell, nodes[cell][0]) == ("active", instances[cell]) for cell in CELLS):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        await here.until_free({nodes[cell][1] for cell in CELLS})
        assert [here.state(cell, nodes[cell][1]) for cell in CELLS] == [("available", None)] * 2
    finally:
        await here.stop()
