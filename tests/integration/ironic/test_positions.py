"""Positions of ironic-sync in every store, and several Ironics side by side, one for each cell."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import nullcontext
from functools import partial

import pytest
from msgspec.structs import replace

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
from bus.contracts.placement import Inventory, ProviderReport
from bus.faults import Transient
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.database import Database
from bus.service.environment import Environment
from cell_conductor.config import ConductorConfig
from compute_sim.config import ComputeConfig, IronicConfig
from ironic_sync.config import IronicSyncConfig
from ironic_sync.domain.position import Position
from ironic_sync.store.memory import MemoryPositions
from ironic_sync.store.port import NotLeader, Positions
from ironic_sync.store.postgres import MIGRATIONS, PostgresPositions
from placement_worker.config import PlacementConfig
from placement_worker.replica.book import Book
from scheduler_worker.config import SchedulerConfig
from tests.kit.waiting import until

# --- One suite for both keepers of positions.


PATIENCE_S = 60.0
LEADER_LIMIT_S = 40.0  # below the 60 s of any other transaction
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
        await term.check()
        with pytest.raises(NotLeader):
            async with positions.become_leader():
                pass
        await term.save([POSITION])
    async with positions.become_leader() as term:
        assert NODE in (await term.load())[0]


async def test_a_writer_whose_connection_was_cut_is_fenced(postgres_url: str) -> None:
    """The lock is gone with the connection; the next writer takes over at once; the first one cannot write."""
    first, second = Database(postgres_url, "ironic_sync"), Database(postgres_url, "ironic_sync")
    await first.open(MIGRATIONS)
    await second.open(MIGRATIONS)
    try:
        with pytest.raises(Transient):
            async with PostgresPositions(first).become_leader() as old:
                await old.save([POSITION])
                async with second.raw() as connection:
                    await connection.fetch(
                        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
                        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                    )
                async with _lead_soon(PostgresPositions(second)) as new:
                    with pytest.raises(NotLeader):
                        await old.save([replace(POSITION, version=8)])
                    with pytest.raises(NotLeader):
                        await old.mark_published({NODE: 8})
                    assert (await new.load())[0][NODE].version == 7
                await old.check()
    finally:
        await first.close()
        await second.close()


class _lead_soon:  # noqa: N801  (reads as a context manager)
    """Become the writer as soon as the server has noticed that the one before is gone."""

    def __init__(self, positions: PostgresPositions) -> None:
        self._positions = positions

    async def __aenter__(self):  # type: ignore[no-untyped-def]
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self._lead = self._positions.become_leader()
                try:
                    return await self._lead.__aenter__()
                except NotLeader:
                    await asyncio.sleep(0.01)

    async def __aexit__(self, *error: object) -> None:
        await self._lead.__aexit__(*error)  # type: ignore[arg-type]


@pytest.mark.parametrize("inside", [False, True], ids=["between transactions", "in one"])
async def test_a_writer_that_is_stopped_is_replaced_in_seconds(postgres_url: str, *, inside: bool) -> None:
    """Its connections kept the lock, or the epoch's row, for the server's 60 s: another was not the writer after 45."""
    stopped, standing_by = (Database(postgres_url, "ironic_sync") for _ in range(2))
    await stopped.open(MIGRATIONS)
    await standing_by.open(MIGRATIONS)
    replaced = False
    with pytest.raises(Transient):  # the server has ended its connection
        async with PostgresPositions(stopped).become_leader() as old:  # does nothing from now on, as under SIGSTOP
            async with old._fenced() if inside else nullcontext():
                async with asyncio.timeout(LEADER_LIMIT_S):
                    while not replaced:
                        try:
                            async with PostgresPositions(standing_by).become_leader() as new:
                                await new.save([POSITION])
                                replaced = True
                        except NotLeader:
                            await asyncio.sleep(0.1)
                if inside:
                    await old.check()
            with pytest.raises(NotLeader):
                await old.save([replace(POSITION, version=99)])
            await old.check()
    assert replaced  # a timeout would have passed for a lost connection
    await stopped.close()
    await standing_by.close()


# --- Several Ironics side by side, one for each cell: each is followed by an ironic-sync of its own name.


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
        await here.until_free({node for both in nodes.values() for node in both})
        for cell in CELLS:
            await here.boot(instances[cell], nodes[cell][0])
        await until(lambda: all(here.state(cell, nodes[cell][0]) == ("active", instances[cell]) for cell in CELLS))
        await here.until_free({nodes[cell][1] for cell in CELLS})
        assert [here.state(cell, nodes[cell][1]) for cell in CELLS] == [("available", None)] * 2
    finally:
        await here.stop()
