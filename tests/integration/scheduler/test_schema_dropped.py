"""A schema that is dropped under a running worker: no message is given up for it, and the worker logs why it ends."""

from __future__ import annotations

import asyncpg
import pytest

from bus.bus import API
from bus.contracts.build import BuildState
from bus.faults import DatabaseUnprepared
from bus.owner import BusOwnedByAnother
from tests.integration.scheduler.world import World

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(300)]


async def test_a_dropped_schema_ends_the_scheduler_and_no_request(world: World) -> None:
    """Each request was taken for the cause of a crash, and ended as a dead letter."""
    await world.scheduler()
    await world.add_hosts("c1", 2)
    connection = await asyncpg.connect(world.url)
    await connection.execute("DROP SCHEMA scheduler CASCADE")
    await connection.close()
    requests = [world.request() for _ in range(5)]
    await world.ask(*requests)
    _, _, task = world.services["s1"]
    with pytest.raises(DatabaseUnprepared, match="does not exist"):
        await task
    await world.kill("s1")
    assert not [event for event in world.events if event.terminal]
    with pytest.raises(BusOwnedByAnother):  # the schema is made anew, and is another one
        await world.scheduler("s2")
    await world.kill("s2")
    await world.buses[API].transport.unmark("scheduler")
    for cell in ("c1", "c2"):
        await world.buses[cell].transport.unmark("scheduler")
    await world.scheduler("s3")  # an operator's word: go on with what there is
    for request in requests:
        await world.ended(request.instance_uuid, BuildState.SCHEDULED)
