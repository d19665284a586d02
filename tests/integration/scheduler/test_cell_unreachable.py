"""A cell whose broker is unavailable: the other cells are served all the same, and it is, when it comes."""

from __future__ import annotations

import pytest

from bus.contracts.build import BuildState
from tests.integration.scheduler.world import World

pytestmark = pytest.mark.postgres


async def test_a_scheduler_that_starts_while_a_cell_is_unreachable_serves_the_others(world: World) -> None:
    (there,) = await world.add_hosts("c1", 1, VCPU=1, MEMORY_MB=4096, DISK_GB=100)
    (unreachable,) = await world.add_hosts("c2", 1, VCPU=1, MEMORY_MB=4096, DISK_GB=100)
    world.brokers["c2"].stop()
    service = await world.scheduler()
    assert service.not_ready() == ["bus c2: not connected"]
    first, second = world.request(), world.request()
    await world.ask(first)
    event = await world.ended(first.instance_uuid, BuildState.SCHEDULED)
    assert event.cell == "c1"
    world.brokers["c2"].start()
    await world.eventually(lambda: not service.not_ready())
    await world.ask(second)
    assert (await world.ended(second.instance_uuid, BuildState.SCHEDULED)).cell == "c2"
    await world.announced("c2", second, BuildState.ACTIVE, 10, terminal=True)
    await world.ended(second.instance_uuid, BuildState.ACTIVE)
    assert set(await world.used()) == {there, unreachable}
