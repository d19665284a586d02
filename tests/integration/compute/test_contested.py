"""A compute service's handling of hosts that the book has as another service's, on both transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from bus.clock import SystemClock
from bus.contracts.cell import ComputeOutcome, HostReport, HostsContested, HostsReleased
from bus.contracts.placement import InventoryTaken, InventoryUpdate
from compute_sim.config import ComputeConfig
from compute_sim.contested import ContestedHosts
from compute_sim.host_changes import HostChanges
from tests.integration.compute.harness import CELL, Cell, cell_on, planned
from tests.kit.virtual_time import on_virtual_time

HOST = "10000000-0000-4000-8000-000000000001"
CONFIG = ComputeConfig(hosts=2, heartbeat_interval_s=0.05, report_interval_s=3600.0)


@pytest.fixture(params=["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
async def cell(request: pytest.FixtureRequest) -> AsyncIterator[Cell]:
    made = Cell() if request.param == "memory" else cell_on(*request.getfixturevalue("amqp"))
    await made.open()
    yield made
    await made.close()


def newest(cell: Cell, host: str) -> HostReport:
    return [one for report in cell.announced() for one in report.hosts if one.uuid == host][-1]


def reports_of(cell: Cell, host: str) -> list[InventoryUpdate]:
    return [update for update in cell.inventory() if update.root_uuid == host]


async def test_it_builds_nothing_on_a_host_of_another_service_until_it_takes_it_over(cell: Cell) -> None:
    fleet = planned(CONFIG)
    contested, own = (host.plan.uuid for host in fleet.hosts)
    await cell.compute(CONFIG, fleet)
    await cell.until(lambda: cell.announced() and reports_of(cell, contested))
    with capture_logs() as logs:
        for source in ("compute-c1-b", "compute-c1-a"):
            taken = InventoryTaken(source=source, root_uuid=contested, owner="compute-other")
            await cell.bus.publish(taken)
        await cell.until(lambda: newest(cell, contested).owner == "other")
    errors = [line for line in logs if line.get("code") == "host.other_service"]
    assert [(line["log_level"], line["host"], line["owner"]) for line in errors] == [("error", contested, "other")]
    assert newest(cell, own).owner is None
    assert REGISTRY.get_sample_value("berth_compute_hosts_refused", {"service": "c1-a"}) == 1
    refused, built = cell.instance(), cell.instance()
    await cell.spawn(contested, refused)
    await cell.spawn(own, built)
    result = await cell.outcome(refused, 1)
    assert (result.outcome, result.code) == (ComputeOutcome.FAILED, "host.other_service")
    assert (await cell.outcome(built, 1)).outcome is ComputeOutcome.ACTIVE
    before = len(reports_of(cell, contested))
    await cell.bus.publish(HostsReleased(service="c1-a", cell=CELL, owner="another", hosts=(contested,)))
    await cell.bus.publish(HostsReleased(service="c1-a", cell=CELL, owner="other", hosts=(contested, own)))
    await cell.until(lambda: len(reports_of(cell, contested)) > before)
    await cell.until(lambda: newest(cell, contested).owner is None)
    assert [update.takes_over for update in reports_of(cell, contested)[before:]] == ["compute-other"]
    assert REGISTRY.get_sample_value("berth_compute_hosts_refused", {"service": "c1-a"}) == 0
    taken_over = cell.instance()
    await cell.spawn(contested, taken_over)
    assert (await cell.outcome(taken_over, 1)).outcome is ComputeOutcome.ACTIVE
    fleet.disable(contested)
    await cell.until(lambda: len(reports_of(cell, contested)) > before + 1)
    assert reports_of(cell, contested)[-1].takes_over is None, "once for each release"


async def test_a_late_refusal_does_not_undo_a_release() -> None:
    """Seed 16 of same-hosts: each refusal of a report from before a release ended that release, for ever."""
    changes = HostChanges(SystemClock())
    hosts = ContestedHosts(service="s2", changes=changes, clock=SystemClock())
    taken = InventoryTaken(source="compute-s2", root_uuid=HOST, owner="compute-s1")
    hosts.on_taken(taken)
    hosts.on_released(HostsReleased(service="s2", cell=CELL, owner="s1", hosts=(HOST,)))
    hosts.on_taken(taken)
    assert (hosts.owner_of(HOST), hosts.take_over(HOST)) == (None, "compute-s1")
    hosts.on_taken(taken)
    assert (hosts.owner_of(HOST), hosts.take_over(HOST)) == ("s1", None), "its report was refused: to be asked again"


@on_virtual_time
async def test_a_host_whose_name_is_taken_is_reported_again_until_the_name_is_free() -> None:
    """It stayed out of the book when the name was free, until an operator replayed dead letters."""
    changes = HostChanges(SystemClock())
    changes.inventory.take()  # that of the start
    hosts = ContestedHosts(service="s2", changes=changes, clock=SystemClock())
    telling = asyncio.create_task(hosts.announce())
    for _ in range(2):
        hosts.on_taken(InventoryTaken(source="compute-s2", root_uuid=HOST, code="provider.name_taken", reason="h"))
        await changes.inventory.wait(60.0)
        assert changes.inventory.take() == [HOST]
    assert hosts.owner_of(HOST) is None
    await changes.inventory.wait(60.0)
    assert changes.inventory.take() is None, "not refused any more: with all others, in their interval"
    telling.cancel()


async def test_the_owner_logs_who_was_refused_and_announces_its_host_once_more(cell: Cell) -> None:
    fleet = planned(CONFIG)
    (host, _) = (one.plan.uuid for one in fleet.hosts)
    await cell.compute(CONFIG, fleet)
    await cell.until(lambda: cell.announced() and reports_of(cell, host))
    count = len(cell.announced())
    with capture_logs() as logs:
        for _ in range(2):
            await cell.bus.publish(HostsContested(service="c1-a", cell=CELL, other="c1-b", hosts=(host,)))
        await cell.until(lambda: len(cell.announced()) > count)
    assert newest(cell, host).owner is None
    errors = [(line["code"], line["other"]) for line in logs if line["event"] == "host.contested"]
    assert errors == [("host.other_service", "c1-b")], "not with each message"
