"""The resources that the suites of the contracts open and close."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from bus.clock import SystemClock
from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from bus.persistence.database import Database
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from cell_conductor.store.port import InstanceStore
from cell_conductor.store.postgres import PostgresInstances
from placement_worker.operations import audit
from placement_worker.service import PlacementService
from placement_worker.store.postgres_rows import PostgresPlacementRows
from tests.contract.books import HOSTS, KINDS, POOL, Placements, books, roomy_host
from tests.contract.rig import House, Rig, rig_for


@pytest.fixture
async def rig(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with rig_for(kind, lambda: request.getfixturevalue("amqp")) as found:
        yield found


@pytest.fixture
async def house(rig: Rig) -> AsyncIterator[House]:
    made = House(rig)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture(params=KINDS)
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Placements]:
    """Another store on the same book, as another process has it; the audit finds nothing, whatever was done to it."""
    async with books(request) as made:
        yield made
        for store in made.made:
            if isinstance(store.rows, PostgresPlacementRows):
                async with store.rows.database.raw() as connection:
                    assert await audit.findings(connection) == []


@pytest.fixture
async def store(make: Placements) -> PlacementService:
    """A book of HOSTS with plenty of room; a suite that needs another has its own."""
    made = make()
    await made.open()
    await made.apply_reports([roomy_host(uuid) for uuid in HOSTS])
    return made


@pytest.fixture
async def pooled(make: Placements) -> PlacementService:
    """A book of four hosts with eight VCPUs each, and a pool of disks."""
    made = make()
    await made.open()
    for uuid in (*HOSTS[:4], POOL):
        inventory = {"DISK_GB": Inventory(total=20)} if uuid == POOL else {"VCPU": Inventory(total=8)}
        root = ProviderReport(uuid=uuid, name=f"host-{uuid[0]}", inventories=inventory)
        await made.apply_reports([InventoryUpdate(reporter="s", version=1, root_uuid=uuid, providers=(root,))])
    return made


@pytest.fixture(params=KINDS)
async def instances(request: pytest.FixtureRequest) -> AsyncIterator[InstanceStore]:
    """A cell's store, open and without rows: its instances, leases, fences and what is unexplained."""
    made: InstanceStore
    if request.param == "memory":
        made = MemoryInstances(MemoryInstanceTable(SystemClock()).session())
    else:
        made = PostgresInstances(Database(request.getfixturevalue("postgres_url"), "cell_c1"))
    await made.open()
    yield made
    await made.close()
