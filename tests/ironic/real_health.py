"""Health and sensors of nodes, by a real Ironic's word: its periodic looks, its notifications."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bus.contracts.build import BuildState, HostsPage, HostsQuery
from bus.contracts.host_metrics import HostMetricsPage, HostMetricsQuery
from tests.kit.bmc import CONFIG, DRIVER, Bmc
from tests.kit.real_metal import WAIT_S, RealMetal, real_metal, until

pytestmark = pytest.mark.timeout(900)

CANARY = "canary"
ONE_RESYNC_S = 120.0  # a minute and its tenth, and a busy machine


@pytest_asyncio.fixture
async def bmc(tmp_path: Path) -> Bmc:
    return Bmc(tmp_path)


@pytest_asyncio.fixture
async def metal(bmc: Bmc) -> AsyncIterator[RealMetal]:
    compute = {"microversion": "1.109", "canary_project": CANARY}
    async with real_metal(compute=compute, plugins=bmc.directory, more=CONFIG) as made:
        yield made


def sensors(celsius: float, watts: float, health: str = "OK") -> dict[str, Any]:
    return {
        "Temperature": {"cpu@1": {"identity": "cpu", "reading_celsius": celsius, "health": health}},
        "Power": {"psu@1": {"last_power_output_watts": watts, "health": "OK"}},
    }


async def known(metal: RealMetal, node: str) -> dict[str, float]:
    page = await metal.client.bus.request(HostMetricsQuery(host=node), HostMetricsPage, timeout_s=WAIT_S)
    return {one.name: one.value for record in page.hosts for one in record.metrics if one.fresh}


async def chosen(metal: RealMetal, *nodes: str) -> str:
    """Where a build goes while all these nodes are offered."""
    await metal.offered(*nodes)
    (watch,) = await metal.boot(metal.request())
    record = await metal.record(watch.instance_uuid)
    await metal.delete(watch.instance_uuid)
    assert record.state == BuildState.ACTIVE, record
    return str(record.host)


async def test_sensor_readings_are_known_and_a_warning_sinks_a_node(metal: RealMetal, bmc: Bmc) -> None:
    first, second = await metal.nodes.enroll(2, driver=DRIVER, management_interface=DRIVER)
    bmc.set_readings(first, sensors=sensors(71.5, 240, "Warning"))
    bmc.set_readings(second, sensors=sensors(30, 120))
    await metal.offered(first, second)

    async def is_known() -> bool:
        return await known(metal, first) == {
            "temperature.celsius": 71.5,
            "power.watts": 240.0,
            "sensors.warning": 1.0,
            "sensors.critical": 0.0,
        } and bool(await known(metal, second))

    await until(is_known)
    assert [await chosen(metal, first, second) for _ in range(3)] == [second] * 3
    bmc.set_readings(first, sensors=sensors(31, 120))
    bmc.set_readings(second, sensors=sensors(30, 120), health="Warning")

    async def has_turned() -> bool:
        page = await metal.client.bus.request(HostsQuery(up=True), HostsPage, timeout_s=WAIT_S)
        assert {host.uuid for host in page.hosts} == {first, second}
        return (await known(metal, first))["sensors.warning"] == 0 and await chosen(metal, first, second) == first

    await until(has_turned)
    await metal.all_agree()


async def test_a_critical_node_is_disabled_and_proves_itself(metal: RealMetal, bmc: Bmc) -> None:
    (node,) = await metal.nodes.enroll(1, driver=DRIVER, management_interface=DRIVER)
    await metal.offered(node)
    bmc.set_readings(node, health="Critical")
    await until(lambda: metal.takes_builds(node, False))

    async def is_marked() -> bool:
        return "berth_unproven" in (await metal.nodes.get(node))["extra"]

    await until(is_marked)
    bmc.set_readings(node, health="OK")
    await until(lambda: metal.takes_builds(node, True))
    (customer,) = await metal.boot(metal.request())
    assert customer.state == BuildState.FAILED
    (canary,) = await metal.boot(metal.request(project_id=CANARY))
    assert canary.state == BuildState.ACTIVE
    assert not await is_marked()
    await metal.delete(canary.instance_uuid)

    async def serves() -> bool:  # with the next look of the service, watch_interval_s later at most
        (watch,) = await metal.boot(metal.request())
        if watch.state != BuildState.ACTIVE:
            return False
        await metal.delete(watch.instance_uuid)
        return True

    await until(serves)
    await metal.all_agree()


async def test_a_node_whose_power_failed_is_offered_again(metal: RealMetal, bmc: Bmc) -> None:
    """Ironic drops the power state that it had noted, so it is unknown unless the machine itself is asked again."""
    (node,) = await metal.nodes.enroll(1, driver=DRIVER, management_interface=DRIVER)
    await metal.offered(node)
    bmc.set_readings(node, broken=True)

    async def is_withdrawn() -> bool:
        found = await metal.nodes.get(node)
        return found["fault"] == "power failure" and not await metal.is_free(node)

    await until(is_withdrawn)
    bmc.set_readings(node)

    async def is_repaired() -> bool:
        return not (await metal.nodes.get(node))["maintenance"]

    await until(is_repaired)
    async with asyncio.timeout(ONE_RESYNC_S):
        await metal.offered(node)
    await metal.all_agree()


async def test_a_machine_whose_power_fails_while_it_is_deleted_is_deleted_later(metal: RealMetal, bmc: Bmc) -> None:
    """Ironic drops its instance, and the delete had ended while the machine ran on."""
    (node,) = await metal.nodes.enroll(1, direct=True, driver=DRIVER)
    await metal.offered(node)
    (watch,) = await metal.boot(metal.request(image_source=metal.image, host=node))
    assert watch.state == BuildState.ACTIVE
    bmc.set_readings(node, broken=True)
    deleting = asyncio.create_task(metal.delete(watch.instance_uuid))

    async def is_tried_again() -> bool:
        answer = await metal.nodes.client.get(f"/v1/nodes/{node}/history", params={"detail": "True"})
        return sum("Failed to tear down" in one["event"] for one in answer.json()["history"]) > 1

    await until(is_tried_again)
    assert not deleting.done()
    bmc.set_readings(node)
    await deleting
    await metal.offered(node)
    await metal.all_agree()
