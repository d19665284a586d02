"""Positions of ironic-sync in every store, and several Ironics side by side, one for each cell."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from uuid import UUID

import pytest
from msgspec.structs import replace

import cell_conductor.app
import compute_agent.app
import ironic_sync.app
import placement_worker.app
import scheduler_worker.app
from berth.config.settings import ComputeSettings
from berth.up.local_workers import InProcessWorkers
from bus.bus import Bus
from bus.clock import SystemClock
from bus.contracts.build import BuildRequest, HostsPage, HostsQuery
from bus.contracts.placement import Inventory, ProviderReport
from bus.faults import Transient
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.database import Database
from bus.service.environment import Environment
from cell_conductor.config import ConductorConfig
from compute_agent.drivers.ironic.config import IronicConfig
from compute_sim.ironic_stand_in import IronicStandIn, MemoryAnnouncer
from ironic_sync.config import IronicSyncConfig
from ironic_sync.domain.position import Position
from ironic_sync.store.memory import MemoryPositions
from ironic_sync.store.port import PAGE, NotLeader, Positions
from ironic_sync.store.postgres import MIGRATIONS, PostgresPositions
from placement_worker.config import PlacementConfig
from placement_worker.replica.replica import Replica
from scheduler_worker.config import SchedulerConfig
from tests.kit.waiting import PATIENCE_S, until
from tests.unit.ironic_sync.world import Nodes, World

# --- One suite for both keepers of positions.


NODE = "8296eb22-b44b-4cba-95b1-3a66b31189a4"
OTHER = "05dcdb28-1788-4480-9281-af335fc32c9f"
REPORT = ProviderReport(
    uuid=NODE,
    name=NODE,
    inventories={"CUSTOM_GOLD": Inventory(total=1, reserved=1, min_unit=1, max_unit=1)},
    traits=("CUSTOM_A",),
)
POSITION = Position(
    uuid=NODE, version=7, report=REPORT, problem="node.x", state="active", updated_at="2026", read_at=1.5, due_at=2.5
)


@pytest.fixture(params=["memory", "postgres"])
async def positions(request: pytest.FixtureRequest) -> AsyncIterator[Positions]:
    if request.param == "memory":
        yield MemoryPositions()
        return
    database = Database(request.getfixturevalue("postgres_url"), "ironic_sync")
    await database.open(MIGRATIONS)
    yield PostgresPositions(database)
    await database.close()


async def test_what_is_saved_is_loaded(positions: Positions) -> None:
    async with positions.become_leader() as term:
        assert await term.load() == ({}, {})
        await term.save([POSITION, Position(uuid=OTHER, version=3)])
        await term.mark_published({NODE: 5})
    async with positions.become_leader() as term:
        loaded, published = await term.load()
        assert loaded == {NODE: POSITION, OTHER: Position(uuid=OTHER, version=3)}
        assert published.get(NODE) == 5
        assert published.get(OTHER, 0) == 0


async def test_saving_again_replaces_and_published_only_rises(positions: Positions) -> None:
    async with positions.become_leader() as term:
        await term.save([POSITION])
        await term.save([replace(POSITION, version=9, report=None)])
        await term.mark_published({NODE: 9})
        await term.mark_published({NODE: 7})
        loaded, published = await term.load()
        assert (loaded[NODE].version, loaded[NODE].report, published[NODE]) == (9, None, 9)


async def test_only_removed_and_published_nodes_are_forgotten(positions: Positions) -> None:
    async with positions.become_leader() as term:
        gone = replace(POSITION, report=None)
        await term.save([gone, replace(POSITION, uuid=OTHER)])
        assert await term.purge(1.0) == 0
        await term.mark_published({NODE: 7, OTHER: 7})
        assert await term.purge(0.0) == 0
        assert await term.purge(1.0) == 1
        assert list((await term.load())[0]) == [OTHER]


async def test_there_is_one_writer(positions: Positions) -> None:
    async with positions.become_leader() as term:
        await term.renew()
        with pytest.raises(NotLeader):
            async with positions.become_leader():
                pass
        await term.save([POSITION])
    async with positions.become_leader() as term:
        assert NODE in (await term.load())[0]


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_database_whose_clock_was_set_back_has_a_writer_at_once(postgres_url: str, hours: int) -> None:
    """As after a failover: until the clock had caught up, no node was offered or taken back."""
    database = Database(postgres_url, "ironic_sync")
    await database.open(MIGRATIONS)
    async with database.single() as connection:
        await connection.execute("UPDATE leadership SET expires_at = now() + make_interval(hours => $1)", hours)
    async with PostgresPositions(database).become_leader() as term:
        await term.renew()
        with pytest.raises(NotLeader):
            async with PostgresPositions(database).become_leader():
                pass
    await database.close()


@pytest.fixture
async def processes(postgres_url: str) -> AsyncIterator[tuple[PostgresPositions, PostgresPositions, Database]]:
    """Two processes on one database, and a look at it beside them."""
    databases = [Database(postgres_url, "ironic_sync") for _ in range(3)]
    for one in databases:
        await one.open(MIGRATIONS)
    yield PostgresPositions(databases[0]), PostgresPositions(databases[1]), databases[2]
    for one in databases:
        await one.close()


Processes = tuple[PostgresPositions, PostgresPositions, Database]
CUT = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE pid <> pg_backend_pid() AND datname = current_database()"
)
IDLE_IN_TRANSACTION = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE state LIKE 'idle in transaction%' AND pid <> pg_backend_pid() AND datname = current_database()"
)


async def test_a_writer_whose_connections_were_cut_goes_on(processes: Processes) -> None:
    first, second, beside = processes
    async with first.become_leader() as term:
        await term.save([POSITION])
        async with beside.single() as connection:
            await connection.fetch(CUT)
        with suppress(Transient):
            await term.renew()
        with suppress(Transient, NotLeader):
            async with second.become_leader():
                pass
        with pytest.raises(NotLeader):
            async with second.become_leader():
                pass
        await term.save([replace(POSITION, version=8)])
        await term.renew()
        assert (await term.load())[0][NODE].version == 8


async def test_a_writer_that_was_stopped_for_long_writes_nothing(processes: Processes) -> None:
    """It holds no lock while it is stopped, and whatever it does when it goes on is compared with the newer term."""
    first, second, beside = processes
    async with first.become_leader() as old:
        await old.save([POSITION])
        async with beside.single() as connection:
            assert await connection.fetchval(IDLE_IN_TRANSACTION) == 0
            await connection.execute("UPDATE leadership SET expires_at = now()")
        await old.save([replace(POSITION, version=8)])  # nobody else has the lease yet
        async with second.become_leader() as new:
            for write in (
                old.save([replace(POSITION, version=99)]),
                old.save([]),
                old.mark_published({NODE: 99}),
                old.purge(1e6),
                old.renew(),
                old.load(),
            ):
                with pytest.raises(NotLeader):
                    await write
            loaded, published = await new.load()
            assert (loaded[NODE].version, published[NODE]) == (8, 0)
    async with beside.single() as connection:
        assert await connection.fetchval("SELECT expires_at <= clock_timestamp() FROM leadership")


async def test_the_lease_is_renewed_while_positions_are_read(processes: Processes) -> None:
    """100,000 positions on a busy core took longer than the term of their writer."""
    first, _, beside = processes
    async with first.become_leader() as term:
        await term.save([Position(uuid=str(UUID(int=number)), version=1) for number in range(1, 2 * PAGE + 2)])
        assert len((await term.load())[0]) == 2 * PAGE + 1
    source = Nodes()
    here = World(source, positions=first, leader_poll_interval_s=0.001)  # type: ignore[arg-type]
    here.clock = SystemClock()  # type: ignore[assignment]
    loop = here.make_loop()
    ends: set[object] = set()

    async def renewed() -> bool:
        async with beside.single() as connection:
            ends.add(await connection.fetchval("SELECT expires_at FROM leadership"))
        return len(ends) >= 5

    await here.transport.open()
    async with beside.raw() as locked:
        await locked.execute("LOCK TABLE positions IN ACCESS EXCLUSIVE MODE")
        running = asyncio.create_task(loop.run())
        await until(renewed)
        assert not loop.is_leader  # it reads
    await until(lambda: loop.sync_state is not None)
    assert loop.sync_state is not None and len(loop.sync_state.positions) == 2 * PAGE + 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await here.transport.close()


# --- Several Ironics side by side, one for each cell: each is followed by an ironic-sync of its own name.


CELLS = ("east", "west")
SHARED = "8296eb22-b44b-4cba-95b1-3a66b31189a4"
CLASS = "CUSTOM_BAREMETAL_GOLD"


class Regions:
    """An Ironic for each cell, all on one bus and one database, and the replica of a running scheduler."""

    def __init__(self, database_url: str) -> None:
        self._brokers = {name: MemoryBroker(SystemClock()) for name in ("api", *CELLS)}
        self._database_url = database_url
        self.replica = Replica()
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
        scheduler = scheduler_worker.app.build(
            self.environment("scheduler"), SchedulerConfig(), CELLS, replica=self.replica
        )
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
        config = ComputeSettings(
            driver="ironic",
            ironic=IronicConfig(url=self.ironics[cell].url, poll_interval_s=0.01),
            report_interval_s=0.1,
        )
        conductor, metal = f"conductor-{cell}", f"metal-{cell}"
        built = cell_conductor.app.build(self.environment(conductor), ConductorConfig(), cell)
        await self.workers.start((conductor, built))
        await self.workers.start((metal, compute_agent.app.build(self.environment(metal), config, cell, metal)))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Bus]:
        """The bus of a client."""
        transport = MemoryTransport(self._brokers["api"], "client")
        api = Bus("api", transport, process="client", clock=SystemClock(), rng=random.Random(7))
        await api.open()
        yield api
        await api.close()

    async def boot(self, instance: str, host: str) -> None:
        """Request an instance on one node, as a client does."""
        async with self.client() as api:
            await api.publish(BuildRequest(instance_uuid=instance, flavor="bm.gold", project_id="p", host=host))

    async def until_served(self, nodes: set[str]) -> None:
        """The scheduler has heard the compute services of these, without which it places on none, whatever is free."""
        async with self.client() as api:

            async def served() -> bool:
                page = await api.request(HostsQuery(up=True), HostsPage, timeout_s=PATIENCE_S)
                return {one.uuid for one in page.hosts if one.enabled} >= nodes

            await until(served)

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
        column = self.replica.column(CLASS)
        return set() if column is None else {self.replica.uuid_of(int(row)) for row in column.root_free.nonzero()[0]}

    async def until_free(self, nodes: set[str]) -> None:
        await until(lambda: self.free() == nodes)


def add(ironic: IronicStandIn, **fields: str) -> str:
    made = ironic.pool.add(
        provision_state="available", power_state="power off", resource_class="baremetal-gold", **fields
    )
    return str(made["uuid"])


@pytest.mark.postgres
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


@pytest.mark.postgres
async def test_builds_on_two_ironics_in_one_system(postgres_url: str) -> None:
    here = Regions(postgres_url)
    nodes = {cell: [add(here.ironics[cell]) for _ in range(2)] for cell in CELLS}
    instances = {cell: f"10000000-0000-4000-8000-00000000000{number}" for number, cell in enumerate(CELLS)}
    try:
        await here.start()
        for cell in CELLS:
            await here.follow(cell)
            await here.serve(cell)
        every = {node for both in nodes.values() for node in both}
        await here.until_free(every)
        await here.until_served(every)
        for cell in CELLS:
            await here.boot(instances[cell], nodes[cell][0])
        await until(lambda: all(here.state(cell, nodes[cell][0]) == ("active", instances[cell]) for cell in CELLS))
        await here.until_free({nodes[cell][1] for cell in CELLS})
        assert [here.state(cell, nodes[cell][1]) for cell in CELLS] == [("available", None)] * 2
    finally:
        await here.stop()
