"""A service starts over hosts that were set back while it was stopped: what it had destroyed runs again."""

from __future__ import annotations

import pytest

from bus.contracts.cell import ComputeOutcome
from tests.unit.compute.test_agent import HOSTS, INSTANCES, Scripted, Service, destroy, spawn

KEY = (HOSTS[0], INSTANCES[0])


@pytest.mark.parametrize("phase", ["destroyed", "replaced and destroyed"])
async def test_what_was_destroyed_and_runs_again_is_destroyed_at_the_start(phase: str) -> None:
    driver = Scripted()
    service = Service(driver)
    await service.agent.resume()
    service.agent.take([spawn(0)])
    await service.rest()
    last = 1 if phase == "destroyed" else 2
    if last == 2:
        service.agent.take([spawn(0, attempt=2)])
        await service.rest()
    service.agent.take([destroy(0, attempt=last)])
    await service.rest()
    assert not driver.machines
    driver.machines[KEY] = 1  # the host's disk is what it was
    again = Service(driver, service.records)
    await again.agent.resume()
    await again.rest()
    assert not driver.machines
    assert [(result.attempt, result.outcome) for result in again.said] == [(last, ComputeOutcome.DESTROYED)]


async def test_a_newer_machine_than_what_was_destroyed_stays() -> None:
    driver = Scripted()
    service = Service(driver)
    await service.agent.resume()
    service.agent.take([spawn(0), destroy(0), spawn(0, attempt=2)])
    await service.rest()
    assert driver.machines == {KEY: 2}
    again = Service(driver, service.records)
    await again.agent.resume()
    await again.rest()
    assert driver.machines == {KEY: 2}
