"""A Destroy of an attempt that is out of time spares what is complete: only its host knows whether it is."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from bus.contracts.cell import ComputeOutcome
from compute_sim.driver import DriverUnavailable
from tests.unit.compute.test_agent import HOSTS, INSTANCES, Scripted, Service, destroy, spawn

KEY = (HOSTS[0], INSTANCES[0])
ENDED = replace(destroy(0), unless_built=True)


@pytest.mark.parametrize("recorded", [True, False], ids=["on record", "not on record"])
async def test_a_complete_machine_stays_and_is_reported_active_again(recorded: bool) -> None:
    driver = Scripted()
    service = Service(driver)
    await service.agent.resume()
    if recorded:
        service.agent.take([spawn(0)])
        await service.rest()
    driver.machines[KEY] = 1
    service.results.clear()
    service.agent.take([ENDED])
    await service.rest()
    assert [(one.attempt, one.outcome) for one in service.results] == [(1, ComputeOutcome.ACTIVE)]
    assert driver.machines == {KEY: 1} and not driver.destroys
    assert service.records.is_live(*KEY)


async def test_one_that_is_being_built_is_ended() -> None:
    driver = Scripted()
    driver.gate = asyncio.Event()
    service = Service(driver)
    await service.agent.resume()
    service.agent.take([spawn(0), ENDED])
    await service.rest()
    assert [(one.attempt, one.outcome) for one in service.results] == [(1, ComputeOutcome.DESTROYED)]
    service.agent.take([spawn(0)])
    await service.rest()
    assert service.results[-1].code == "spawn.fenced" and not driver.machines


@pytest.mark.parametrize("there", [None, 2], ids=["nothing", "a newer attempt"])
async def test_one_that_its_host_does_not_know_is_fenced(there: int | None) -> None:
    driver = Scripted()
    service = Service(driver)
    await service.agent.resume()
    if there is not None:
        driver.machines[KEY] = there
    service.agent.take([ENDED])
    await service.rest()
    assert [(one.attempt, one.outcome) for one in service.results] == [(1, ComputeOutcome.DESTROYED)]
    assert driver.machines == ({} if there is None else {KEY: there})


async def test_what_is_commanded_while_its_host_is_looked_at_counts() -> None:
    driver = Scripted()
    service = Service(driver)
    await service.agent.resume()
    service.agent.take([ENDED, spawn(0)])
    await service.rest()
    # Unknown when it was to end, and begun since: it is complete or ended, and its host has reported which.
    assert (driver.machines == {KEY: 1}) is (service.results[-1].outcome is ComputeOutcome.ACTIVE)


async def test_a_host_that_cannot_be_scanned_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Scripted()
    service = Service(driver)
    await service.agent.resume()

    async def unavailable(hosts: object = None) -> None:
        raise DriverUnavailable("unavailable")

    monkeypatch.setattr(driver, "list", unavailable)
    driver.machines[KEY] = 1
    service.agent.take([ENDED])
    await service.rest()
    assert not service.results and driver.machines == {KEY: 1}
