"""Boot from volume: which volume targets a build makes on its node, and what becomes of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from berth.trial.ironic_stand_in import Behaviour, IronicStandIn, Silent
from bus.clock import SystemClock, new_uuid
from bus.contracts.build import BuildRequest
from bus.contracts.deploy import ImageSource, VolumeRequest
from compute_sim.config import IronicConfig
from compute_sim.driver import Build, BuildAbort, DriverUnavailable, Reschedule
from compute_sim.drivers.ironic.driver import BareMetal
from tests.integration.compute.harness import CELL, DEPLOYMENT, PATIENCE_S
from tests.integration.compute.test_baremetal_deploy import INSTANCE, build

QUICK = Behaviour(verify_s=0.001, deploy_s=0.01, undeploy_s=0.005, clean_s=0.005)
SECRET = "chap-secret"
ROOT = VolumeRequest(volume_id="v-root", properties={"target_iqn": "iqn.2026-11:v", "auth_password": SECRET})
DATA = VolumeRequest(volume_id="v-data", boot_index=1)
OTHERS = {"berth": {"deployment": "eeeeeeee-0000-4000-8000-000000000001", "instance": INSTANCE, "attempt": 1}}


@pytest_asyncio.fixture
async def ironic() -> AsyncIterator[IronicStandIn]:
    stand_in = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=QUICK)
    await stand_in.start()
    stand_in.pool.plan(2)
    for node in stand_in.pool.nodes.values():
        node["storage_interface"] = "external"
    yield stand_in
    await stand_in.stop()


@pytest_asyncio.fixture
async def driver(ironic: IronicStandIn) -> AsyncIterator[BareMetal]:
    made = driver_of(ironic)
    await made.open()
    yield made
    await made.close()


def driver_of(ironic: IronicStandIn, **more: Any) -> BareMetal:
    settings: dict[str, Any] = {"volumes": "static", "poll_interval_s": 0.005, "max_poll_interval_s": 0.01, **more}
    return BareMetal(IronicConfig(url=ironic.url, **settings), cell=CELL, service="c1-a", clock=SystemClock())


def targets(ironic: IronicStandIn) -> dict[str, int]:
    return {one["volume_id"]: one["boot_index"] for one in ironic.pool.volume_targets.values()}


def put_target(ironic: IronicStandIn, node: str, volume: str, index: int, extra: dict[str, Any]) -> None:
    uuid = new_uuid(random.SystemRandom())
    kept = {"uuid": uuid, "node_uuid": node, "volume_id": volume, "boot_index": index, "extra": extra}
    ironic.pool.volume_targets[uuid] = kept


async def spawned(driver: BareMetal, wanted: Build) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await driver.spawn(wanted)


async def test_a_machine_boots_from_its_volume_and_lets_go_of_it(ironic: IronicStandIn, driver: BareMetal) -> None:
    node = next(iter(ironic.pool.nodes))
    await spawned(driver, build(node, volumes=(ROOT, DATA)))
    kept = ironic.pool.nodes[node]
    assert kept["provision_state"] == "active" and "image_source" not in kept["instance_info"]
    assert targets(ironic) == {"v-root": 0, "v-data": 1}
    (root,) = (one for one in ironic.pool.volume_targets.values() if one["boot_index"] == 0)
    assert (root["node_uuid"], root["volume_type"], root["properties"]) == (node, "iscsi", ROOT.properties)
    put_target(ironic, node, "operators", 7, {})
    put_target(ironic, node, "of another berth", 8, OTHERS)
    async with asyncio.timeout(PATIENCE_S):
        await driver.destroy(node, INSTANCE, 1, DEPLOYMENT)
    assert ironic.pool.nodes[node]["instance_uuid"] is None
    assert targets(ironic) == {"operators": 7, "of another berth": 8}, "what is not ours stays"


async def test_what_an_earlier_instance_left_is_not_attached_to_the_next(
    ironic: IronicStandIn, driver: BareMetal
) -> None:
    node = next(iter(ironic.pool.nodes))
    earlier = {"deployment": DEPLOYMENT, "instance": "70000000-0000-4000-8000-000000000000", "attempt": 1}
    put_target(ironic, node, "a customer's", 0, {"berth": earlier})
    await spawned(driver, build(node, volumes=(ROOT,)))
    assert targets(ironic) == {"v-root": 0}


async def test_an_interrupted_build_makes_each_target_once(ironic: IronicStandIn, driver: BareMetal) -> None:
    node = next(iter(ironic.pool.nodes))
    ironic.pool.invalid[node] = "no"
    with pytest.raises(Reschedule):
        await spawned(driver, build(node, volumes=(ROOT,)))
    assert targets(ironic) == {"v-root": 0}
    ironic.pool.invalid.clear()
    await spawned(driver, build(node, volumes=(ROOT,)))
    assert targets(ironic) == {"v-root": 0} and ironic.pool.nodes[node]["provision_state"] == "active"


async def test_a_node_that_stays_switched_on_keeps_its_target_and_is_named(ironic: IronicStandIn) -> None:
    driver = driver_of(ironic, clean_timeout_s=0.1)
    await driver.open()
    node = next(iter(ironic.pool.nodes))
    ours = {"deployment": DEPLOYMENT, "instance": INSTANCE, "attempt": 1}
    put_target(ironic, node, "v-root", 0, {"berth": ours})
    ironic.pool.nodes[node]["power_state"] = "power on"
    with pytest.raises(DriverUnavailable, match="keeps a volume target: Ironic answered 400"):
        await driver.destroy(node, INSTANCE, 1, DEPLOYMENT)
    await driver.close()


@pytest.mark.parametrize(
    ("spec", "setting", "interface", "code"),
    [
        ({"volumes": (ROOT,)}, "none", "external", "volume.none"),
        ({"volumes": (ROOT,), "image": "debian"}, "static", "external", "volume.and_image"),
        (
            {"volumes": (ROOT,), "image_source": ImageSource(source="http://x/y")},
            "static",
            "external",
            "volume.and_image",
        ),
        ({"volumes": (DATA,)}, "static", "noop", "node.no_volumes"),
    ],
)
async def test_volumes_that_no_node_here_can_have(
    ironic: IronicStandIn, spec: dict[str, Any], setting: str, interface: str, code: str
) -> None:
    node = next(iter(ironic.pool.nodes))
    ironic.pool.nodes[node]["storage_interface"] = interface
    driver = driver_of(ironic, volumes=setting)
    await driver.open()
    with pytest.raises((BuildAbort, Reschedule)) as caught:
        await spawned(driver, build(node, **spec))
    assert caught.value.code == code and not targets(ironic)
    await driver.close()


def test_a_volume_is_one_machines_and_its_secrets_are_not_printed() -> None:
    with pytest.raises(ValueError, match="a volume is one machine's"):
        BuildRequest(instance_uuid=INSTANCE, flavor="m", project_id="p", volumes=(ROOT,), count=2)
    with pytest.raises(ValueError, match="16384"):
        VolumeRequest(volume_id="v", properties={"x": "y" * 17_000})
    assert SECRET not in repr(BuildRequest(instance_uuid=INSTANCE, flavor="m", project_id="p", volumes=(ROOT,)))
