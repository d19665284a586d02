"""A scheduler answers from its memory while its database does not answer."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from bus.bus import API
from bus.contracts.build import BuildPage, BuildQuery, HostsPage, HostsQuery
from bus.contracts.operations import ServicesPage, ServicesQuery
from bus.contracts.workers import WorkersPage, WorkersQuery
from tests.integration.scheduler.world import PATIENCE_S, World

pytestmark = pytest.mark.postgres

SEARCHES = 8  # more than a scheduler makes at a time


async def test_hosts_services_and_workers_are_answered_while_searches_wait_for_the_database(world: World) -> None:
    """An operator looks at the page because the database is slow: hosts and workers must not come as unknown, too."""
    await world.scheduler()
    await world.add_hosts("c1", 1)
    ask = world.buses[API].request
    connection = await asyncpg.connect(world.url)
    try:
        await connection.execute("BEGIN; LOCK TABLE scheduler.build_requests")
        searches = [
            asyncio.create_task(ask(BuildQuery(project_id=f"p{number}"), BuildPage, timeout_s=PATIENCE_S))
            for number in range(SEARCHES)
        ]
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        while await connection.fetchval(waiting) == 0:  # noqa: ASYNC110  (a lock sends no event)
            await asyncio.sleep(0.01)
        services = await ask(ServicesQuery(), ServicesPage, timeout_s=PATIENCE_S)
        hosts = await ask(HostsQuery(), HostsPage, timeout_s=PATIENCE_S)
        await ask(WorkersQuery(), WorkersPage, timeout_s=PATIENCE_S)
        assert not any(search.done() for search in searches)
        await connection.execute("ROLLBACK")
        await asyncio.gather(*searches)
    finally:
        await connection.close()
    assert "c1" in {one.cell for one in services.services}
    assert "c1-0" in {one.name for one in hosts.hosts}
