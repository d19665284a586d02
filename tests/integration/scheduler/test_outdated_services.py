"""A compute service whose announcements are older than what a scheduler knows of its name."""

from __future__ import annotations

import pytest

from bus.contracts.cell import ComputeHosts, ServiceOutdated
from scheduler_worker.config import SchedulerConfig
from tests.integration.scheduler.world import World

pytestmark = pytest.mark.postgres

WARM = SchedulerConfig(hosts_warmup_s=0.001)


async def test_a_service_that_announces_under_an_epoch_below_the_known_one_receives_that_one(world: World) -> None:
    await world.scheduler(config=WARM)
    (host,) = await world.add_hosts("c1", 1)  # announced under epoch 1
    report = world.hosts["c1"][host]

    async def announce(epoch: int, sequence: int) -> None:
        message = ComputeHosts(
            service="compute-c1", cell="c1", epoch=epoch, sequence=sequence, hosts=(report,), complete=True
        )
        await world.buses["c1"].publish(message)

    await announce(9, 1)  # another process that has the name for a moment, with a clock that is ahead
    await announce(9, 1)  # a copy: nothing is outdated by it
    await announce(1, 99)
    await world.until(lambda: world.outdated)
    assert world.outdated == [ServiceOutdated(service="compute-c1", cell="c1", epoch=9)]
