"""A service that was away destroys what it is ordered to destroy before it offers the hosts, each for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from bus.contracts.cell import ComputeOutcome, HostReport, QueueMarker
from compute_sim import offering
from compute_sim.driver import DriverUnavailable
from compute_sim.drivers.hypervisor import Hypervisors
from compute_sim.fleet import Fleet
from tests.integration.compute.harness import Cell, Life, settled
from tests.integration.compute.test_service import config, hosts_of, planned

SETTINGS = config(2)


class Gated(Hypervisors):
    """Destroys nothing before the gate opens. unavailable: a destruction fails so often before that."""

    def __init__(self, fleet: Fleet, cell: Cell, *, unavailable: bool = False) -> None:
        super().__init__(fleet, SETTINGS.faults, seed=1, clock=cell.clock, nested=False)
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self._unavailable = unavailable

    async def destroy(self, host_uuid: str, instance_uuid: str, attempt: int, deployment: str | None) -> None:
        self.begun.set()
        if self._unavailable and not self.gate.is_set():
            raise DriverUnavailable("no answer")
        await self.gate.wait()
        await super().destroy(host_uuid, instance_uuid, attempt, deployment)


def newest(cell: Cell, uuid: str) -> HostReport | None:
    reports = [host for report in cell.announced() for host in report.hosts if host.uuid == uuid]
    return reports[-1] if reports else None


def is_offered(cell: Cell, uuid: str) -> bool:
    report = newest(cell, uuid)
    has_inventory = any(one.root_uuid == uuid for one in cell.inventory())
    return report is not None and report.enabled and has_inventory


async def returned(cell: Cell, fleet: Fleet, *, unavailable: bool = False) -> tuple[Gated, Life, str]:
    """A service with a machine on its first host dies, the machine is to be destroyed, and the service comes back."""
    first = hosts_of(fleet)[0]
    life, instance = await cell.compute(SETTINGS, fleet), cell.instance()
    await cell.spawn(first, instance)
    await cell.ended(instance, 1, ComputeOutcome.ACTIVE)
    await life.kill()
    await cell.destroy(first, instance)
    cell.received.clear()
    driver = Gated(fleet, cell, unavailable=unavailable)
    return driver, await cell.compute(SETTINGS, fleet, driver=driver), instance


@pytest.mark.parametrize("unavailable", [False, True])
async def test_a_returning_service_offers_a_host_when_it_has_destroyed_what_is_lost_there(
    cell: Cell, unavailable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its driver did not answer for so long that the destruction was given up and is taken up later."""
    monkeypatch.setattr("compute_sim.agent.DESTROY_AGAIN_S", 0.05)
    monkeypatch.setattr(__name__ + ".SETTINGS", replace(SETTINGS, destroy_attempts=1))
    fleet = planned(SETTINGS)
    first, second = hosts_of(fleet)
    driver, life, instance = await returned(cell, fleet, unavailable=unavailable)
    await cell.until(lambda: is_offered(cell, second))
    await driver.begun.wait()
    report = newest(cell, first)
    assert report is not None and (report.enabled, report.disabled_reason) == (False, offering.DESTROYING)
    assert [one.instance_uuid for one in report.running or ()] == [instance]
    assert first not in {one.root_uuid for one in cell.inventory()}
    driver.gate.set()
    await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
    await cell.until(lambda: is_offered(cell, first))
    assert fleet.guest(first, instance) is None
    await life.stop()


async def test_nothing_is_announced_or_begun_before_all_that_waited_in_the_queue_has_been_taken(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content of the queue is known only when the service's own marker, behind all of it, has come."""
    markers: list[QueueMarker] = []
    on_marker = offering.Offering.on_marker
    monkeypatch.setattr(offering.Offering, "on_marker", lambda _self, marker, _owed: markers.append(marker))
    fleet = planned(SETTINGS)
    life, instance = await cell.compute(SETTINGS, fleet), cell.instance()
    doomed = cell.instance()
    await cell.spawn(hosts_of(fleet)[0], instance)
    await cell.spawn(hosts_of(fleet)[0], doomed)
    await settled(lambda: fleet.records.accepted == 2)
    await cell.until(lambda: len(cell.heartbeats()) > 2)
    assert markers and cell.announced() == [] and cell.inventory() == []
    assert list(fleet.guests()) == [] and cell.results() == []  # the order that ends a build may be behind it
    await cell.destroy(hosts_of(fleet)[0], doomed)
    await cell.ended(doomed, 1, ComputeOutcome.DESTROYED)
    (made,) = [one.__self__ for one in callbacks(life) if isinstance(one.__self__, offering.Offering)]
    on_marker(made, replace(markers[0], epoch=markers[0].epoch - 1), ())  # of a former life
    assert not made.begun.is_set()
    on_marker(made, markers[0], ())
    await cell.until(lambda: all(is_offered(cell, uuid) for uuid in hosts_of(fleet)))
    await cell.ended(instance, 1, ComputeOutcome.ACTIVE)
    assert {one.outcome for one in cell.results(doomed)} == {ComputeOutcome.DESTROYED}
    await life.stop()


def callbacks(life: Life) -> Sequence[object]:
    """The side tasks of a service."""
    return [body for _, body in life.service._task_makers if hasattr(body, "__self__")]
