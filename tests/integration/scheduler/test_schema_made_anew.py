"""A schema that is made anew under a worker that stays connected: each role ends, and reports why."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from bus.bus import API
from bus.clock import SystemClock
from bus.faults import DatabaseReplaced, first_fault
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence import identity
from bus.persistence.database import Database
from bus.service.environment import Environment
from tests.integration.scheduler.test_second_deployment import ROLES
from tests.integration.scheduler.world import CELLS, PATIENCE_S

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(300)]

SCHEMAS = {
    "scheduler": ("scheduler", "scheduler_worker.store.migrations"),
    "placement": ("placement", "placement_worker.store.migrations"),
    "conductor": (f"cell_{CELLS[0]}", "cell_conductor.store.migrations"),
    "ironic-sync": ("ironic_sync", "ironic_sync.store.migrations"),
}


async def made_anew(url: str, schema: str, migrations: str) -> None:
    """As an operator does it, but at one moment, so that no statement finds the schema missing."""
    other = Database(url, f"{schema}_new")
    await other.open(migrations)
    await other.close()
    connection = await asyncpg.connect(url)
    async with connection.transaction():
        await connection.execute(f'ALTER SCHEMA "{schema}" RENAME TO "{schema}_old"')
        await connection.execute(f'ALTER SCHEMA "{schema}_new" RENAME TO "{schema}"')
    await connection.close()


@pytest.mark.parametrize("role", ROLES)
async def test_a_worker_does_not_go_on_in_a_schema_that_was_made_anew(
    role: str, empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wrote there, with what it knew of the old one, until it was started again."""
    monkeypatch.setattr(identity, "WATCH_S", 0.05)
    brokers = {name: MemoryBroker(SystemClock()) for name in (API, *CELLS)}

    def connect(bus: str) -> MemoryTransport:
        return MemoryTransport(brokers[bus], bus)

    service = ROLES[role](Environment(role, transports=connect, database_url=empty_database, cells=CELLS))
    running = asyncio.create_task(service.run(asyncio.Event()))
    async with asyncio.timeout(PATIENCE_S):
        while not running.done() and service.phase not in ("preparing", "ready"):  # noqa: ASYNC110  (a text, no event)
            await asyncio.sleep(0.005)
        await made_anew(empty_database, *SCHEMAS[role])
        with pytest.raises(BaseException) as ended:
            await running
    fault = first_fault(ended.value)
    assert isinstance(fault, DatabaseReplaced) and fault.code == "database.replaced"
