"""A node's health, by Ironic's word: what is critical takes no build, what was repaired proves itself first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from berth.trial.ironic_stand_in import Behaviour, IronicStandIn
from bus.clock import SystemClock
from compute_sim.driver import Build, DriverHost, Reschedule
from compute_sim.drivers.ironic import driver as driver_module
from compute_sim.drivers.ironic.api import IronicApi
from compute_sim.drivers.ironic.driver import BareMetal
from compute_sim.drivers.ironic.probation import Probation
from tests.integration.compute.harness import DEPLOYMENT
from tests.integration.compute.test_baremetal import bare_metal, build, ironic, settings

assert ironic  # a fixture

CANARY = "canary"
INSTANCE = "20000000-0000-4000-8000-000000000000"


class Watched:
    """A driver that watches, and what it offers."""

    def __init__(self, driver: BareMetal) -> None:
        self.driver = driver
        self.changed: list[str] = []

    def on_change(self, hosts: Sequence[str]) -> None:
        self.changed += hosts

    async def host(self, uuid: str) -> DriverHost:
        return next(host for host in await self.driver.hosts() if host.uuid == uuid)

    async def look_twice(self, *others: dict[str, Any]) -> None:
        """Until the second of two looks has found something: the first one is over."""
        for other in others:
            other["health"] = "Critical"
            await self.until(other["uuid"], lambda _, other=other: bool(unproven(other)))  # type: ignore[misc]

    async def until(self, uuid: str, there: Callable[[DriverHost], bool]) -> None:
        async with asyncio.timeout(60):
            while not there(await self.host(uuid)):  # noqa: ASYNC110  (what is asked is another process)
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def watched(stand_in: IronicStandIn, **more: Any) -> AsyncIterator[Watched]:
    driver = bare_metal(settings(stand_in, microversion="1.109", **more).ironic)
    made = Watched(driver)
    driver.on_change(made.on_change)
    await driver.open()
    await driver.hosts()  # as the first announcement does
    watching = asyncio.create_task(driver.watch())
    try:
        yield made
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await driver.close()


@pytest.fixture(autouse=True)
def looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a look during which the process stood still for 3 s, the next one came 60 s later."""
    monkeypatch.setattr(driver_module, "LOOK_SHARE", 0)


@pytest_asyncio.fixture
async def node(ironic: IronicStandIn) -> AsyncIterator[dict[str, Any]]:
    yield next(iter(ironic.pool.nodes.values()))


def of(project: str, build_: Build) -> Build:
    return Build(build_.host_uuid, replace(build_.spec, project_id=project), 1, build_.allocations, DEPLOYMENT)


def unproven(node: Mapping[str, Any]) -> str:
    return str(node["extra"].get("berth_unproven", {}).get("why", ""))


async def test_a_critical_node_takes_no_build_until_it_is_well(ironic: IronicStandIn, node: dict[str, Any]) -> None:
    async with watched(ironic) as here:
        assert (await here.host(node["uuid"])).enabled
        node["health"] = "Critical"
        await here.until(node["uuid"], lambda host: not host.enabled)
        assert (await here.host(node["uuid"])).disabled_reason == "health is Critical"
        assert node["uuid"] in here.changed
        with pytest.raises(Reschedule) as caught:
            await here.driver.spawn(build(node["uuid"], INSTANCE))
        assert caught.value.code == "node.unhealthy"
        node["health"] = "OK"
        await here.until(node["uuid"], lambda host: host.enabled)
        assert unproven(node) == ""  # there is no canary project


async def test_a_warning_is_an_attribute(ironic: IronicStandIn, node: dict[str, Any]) -> None:
    async with watched(ironic) as here:
        node["health"] = "Warning"
        await here.until(node["uuid"], lambda host: host.attributes.get("health") == "warning")
        assert (await here.host(node["uuid"])).enabled
        node["health"] = "OK"
        await here.until(node["uuid"], lambda host: "health" not in host.attributes)


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        ({"health": "Critical"}, "health is Critical"),
        ({"fault": "power failure", "maintenance": True}, "fault: power failure"),
        ({"provision_state": "clean failed", "last_error": "disk 2"}, "the node was in clean failed: disk 2"),
        ({"provision_state": "inspect failed", "last_error": "no BMC"}, "the node was in inspect failed: no BMC"),
        ({"provision_state": "adopt failed", "last_error": "no disk"}, "the node was in adopt failed: no disk"),
        ({"provision_state": "service failed", "last_error": "bios"}, "the node was in service failed: bios"),
    ],
)
async def test_a_repaired_node_takes_a_canary_before_customers(
    ironic: IronicStandIn, node: dict[str, Any], failure: dict[str, Any], why: str
) -> None:
    async with watched(ironic, canary_project=CANARY) as here:
        node.update(failure)
        await here.until(node["uuid"], lambda _: bool(unproven(node)))
        assert unproven(node) == why
        node.update(health="OK", fault=None, maintenance=False, provision_state="available")
        await here.until(node["uuid"], lambda host: host.enabled and host.attributes["project_id"] == CANARY)
        with pytest.raises(Reschedule) as caught:
            await here.driver.spawn(of("customer", build(node["uuid"], INSTANCE)))
        assert (caught.value.code, why in caught.value.reason) == ("node.unproven", True)
        await here.driver.spawn(of(CANARY, build(node["uuid"], INSTANCE)))
        assert unproven(node) == ""
        await here.until(node["uuid"], lambda host: "project_id" not in host.attributes)
        await here.driver.destroy(node["uuid"], INSTANCE, 1, DEPLOYMENT)


async def test_a_canary_that_fails_proves_nothing(ironic: IronicStandIn, node: dict[str, Any]) -> None:
    node["extra"] = {"berth_unproven": {"since": 1.0, "why": "disk 2"}, "rack": "7"}
    ironic.pool.behaviour = Behaviour(deploy_s=0.001, undeploy_s=0.001, clean_s=0.001, deploy_fails=1.0)
    async with watched(ironic, canary_project=CANARY) as here:
        with pytest.raises(Reschedule):
            await here.driver.spawn(of(CANARY, build(node["uuid"], INSTANCE)))
        await here.driver.destroy(node["uuid"], INSTANCE, 1, DEPLOYMENT)
        await here.until(node["uuid"], lambda host: host.attributes.get("project_id") == CANARY)
        assert unproven(node) == "disk 2"
        ironic.pool.behaviour = Behaviour(deploy_s=0.001, undeploy_s=0.001, clean_s=0.001)
        await here.until(node["uuid"], lambda _: node["provision_state"] == "available")
        await here.driver.spawn(of(CANARY, build(node["uuid"], INSTANCE, 1)))
        assert node["extra"] == {"rack": "7"}


async def test_a_failed_deployment_quarantines_no_node(ironic: IronicStandIn, node: dict[str, Any]) -> None:
    """A customer's image can cause it: so any customer could have every node put aside."""
    ironic.pool.behaviour = Behaviour(deploy_s=0.001, undeploy_s=0.001, clean_s=0.001, deploy_fails=1.0)
    async with watched(ironic, canary_project=CANARY) as here:
        with pytest.raises(Reschedule):
            await here.driver.spawn(of("customer", build(node["uuid"], INSTANCE)))
        await here.look_twice(*list(ironic.pool.nodes.values())[1:3])
        assert unproven(node) == ""


async def test_a_node_with_an_instance_of_anothers_is_not_written_on(
    ironic: IronicStandIn, node: dict[str, Any]
) -> None:
    foreign = {"instance_uuid": "30000000-0000-4000-8000-000000000000", "provision_state": "service failed"}
    node.update(foreign)
    async with watched(ironic, canary_project=CANARY) as here:
        await here.look_twice(*list(ironic.pool.nodes.values())[1:3])
        assert node["extra"] == {}


async def test_a_customers_build_that_ends_late_proves_nothing(ironic: IronicStandIn, node: dict[str, Any]) -> None:
    """It began before the node failed."""
    node["extra"] = {"berth_unproven": {"since": 1.0, "why": "disk 2"}}
    api = IronicApi(settings(ironic, canary_project=CANARY).ironic, clock=SystemClock())
    api.open()
    probation = Probation(api, project=CANARY, clock=SystemClock())
    await probation.proved(node["uuid"], "customer")
    assert unproven(node) == "disk 2"
    await probation.proved(node["uuid"], CANARY)
    assert unproven(node) == ""
    await api.close()
