"""A service starts over hosts that were set back while it was stopped: what it had destroyed runs again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from bus.contracts.cell import ComputeOutcome
from compute_sim.driver import Machine
from tests.unit.compute.test_agent import HOSTS, INSTANCES, Scripted, Service, destroy, spawn

KEY = (HOSTS[0], INSTANCES[0])


class LeavesMachines(Scripted):
    """Hosts whose manager reports that their machines are gone, while the marks stay: nothing is done about them."""

    left = False

    async def list(self, hosts: Sequence[str] | None = None) -> Mapping[str, Sequence[Machine]]:
        """As marked."""
        found = await super().list(hosts)
        return {host: [replace(one, left=self.left) for one in machines] for host, machines in found.items()}

    async def destroy(self, host_uuid: str, instance_uuid: str, attempt: int, deployment: str | None) -> None:
        """It changes nothing."""
        self.destroys += 1


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
    assert [(result.attempt, result.outcome) for result in again.results] == [(last, ComputeOutcome.DESTROYED)]


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


async def test_a_machine_that_is_left_as_it_is_counts_as_leaving_once_its_attempt_is_fenced() -> None:
    """Seed 1094: an operator cleared `instance_uuid` alone; each report had both conductors order its destruction."""
    driver = LeavesMachines()
    service = Service(driver)
    await service.agent.resume()
    service.agent.take([spawn(0)])
    await service.rest()
    driver.left = True

    async def leaving() -> list[bool]:
        return [one.destroying for one in (await service.survey.running())[HOSTS[0]]]

    assert await leaving() == [False], "no client has asked for its end"
    service.agent.take([destroy(0)])
    await service.rest()
    assert driver.machines == {KEY: 1} and await leaving() == [True]
    assert [result.outcome for result in service.results][-1] is ComputeOutcome.DESTROYED
    driver.machines[KEY] = 2
    assert await leaving() == [False], "a newer one than its fence"
    driver.machines[KEY] = 1
    destroys_before = driver.destroys
    again = Service(driver, service.records)
    await again.agent.resume()
    await again.rest()
    assert driver.destroys == destroys_before, "nor is it destroyed with each start"


async def test_what_appears_after_its_destruction_is_destroyed_when_that_is_ordered_again() -> None:
    """Ironic carried out the request that takes a node seconds after its answer was given up."""
    driver = Scripted()
    service = Service(driver)
    await service.agent.resume()
    service.agent.take([spawn(0)])
    await service.rest()
    service.agent.take([destroy(0)])
    await service.rest()
    driver.machines[KEY] = 1
    service.agent.take([destroy(0)])
    await service.rest()
    assert not driver.machines
    assert [result.outcome for result in service.results[1:]] == [ComputeOutcome.DESTROYED] * 2
