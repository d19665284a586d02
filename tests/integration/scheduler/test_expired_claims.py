"""The claim of an expired request whose record was lost is built on or left to its cell, with a deadline or without."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from bus.contracts.cell import CellBuild
from bus.contracts.cell_queries import CellBuildQuery
from scheduler_worker.engine import SchedulingEngine
from tests.integration.scheduler.test_given_up import BEGUN_S
from tests.integration.scheduler.test_twins import Gate, forgotten
from tests.integration.scheduler.world import World

pytestmark = pytest.mark.postgres
SOON_S = 8.0


@pytest.mark.parametrize("has_deadline", [False, True])
@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_what_an_expired_request_had_claimed_is_built_or_left_to_its_cell(
    world: World, monkeypatch: pytest.MonkeyPatch, *, has_deadline: bool, is_forgotten: bool
) -> None:
    await world.scheduler()
    await world.add_hosts("c1", 1)
    request = world.request()
    with monkeypatch.context() as patched:
        writing = Gate(patched, SchedulingEngine, "_write")
        await world.expires(request, patience_s=BEGUN_S if has_deadline else None, after_s=BEGUN_S)
        await writing.wait()  # claimed, and not written
        assert await world.used()
        await world.kill("s1")
        if is_forgotten:
            await forgotten(world, request.instance_uuid)
        await world.eventually(lambda: world.brokers["api"].queue("scheduler.given_up").ready)
    await world.scheduler("s2")
    await world.until_expired_are_handled()
    world.events.clear()

    async def cared_for() -> bool:
        return not await world.used() or any(
            one.spec.instance_uuid == request.instance_uuid
            for _, one in [*world.builds, *world.queries]
            if isinstance(one, CellBuild | CellBuildQuery)
        )

    try:
        async with asyncio.timeout(SOON_S):
            while not await cared_for():
                pass
    except TimeoutError:
        connection = await asyncpg.connect(world.url)
        held = await connection.fetchval("SELECT count(*) FROM placement.consumers")
        known = await connection.fetchval("SELECT count(*) FROM scheduler.build_requests")
        await connection.close()
        pytest.fail(
            f"used after {SOON_S} s: {await world.used()}; {held} consumers; {known} builds on record"
            f" (another request's); events: {world.states(request.instance_uuid)}"
        )
