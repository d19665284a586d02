"""An image on a node of a real Ironic: from the build request to `active`, failures on the way, and back to free."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from berth.bus_client.actions import ActionClient
from berth.config.site import process_name
from bus.clock import new_uuid
from bus.contracts.actions import ActionKind, ActionRequest, ActionState
from bus.contracts.build import BuildState
from bus.contracts.deploy import VolumeRequest
from compute_agent.drivers.ironic.config import IronicConfig
from compute_agent.drivers.ironic.driver import IronicDriver
from tests.kit.real_metal import RNG, WAIT_S, RealMetal, another_berth, drive, real_metal, until


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def metal() -> AsyncIterator[RealMetal]:
    async with real_metal(compute={"volumes": "static"}) as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_direct_deployment_waits_for_the_agent_and_ends_active(metal: RealMetal) -> None:
    (node,) = await metal.nodes.enroll(1, direct=True)
    await metal.offered(node)
    metal.lab.agents.silent.add(node)
    request = metal.request(name="web 1", image_source=metal.image, config_drive=drive(), host=node)
    (watch,) = await metal.client.boot([request])
    waiting = await metal.nodes.until(node, "wait call-back", timeout_s=WAIT_S)
    assert (waiting["instance_uuid"], waiting["lessee"]) == (request.instance_uuid, "acme")
    assert waiting["instance_info"]["berth"]["instance"] == request.instance_uuid
    metal.lab.agents.silent.discard(node)
    assert await metal.client.wait(WAIT_S) and watch.state == "active"
    active = await metal.nodes.get(node)
    assert active["provision_state"] == "active"
    written = next(one.params["step"] for one in metal.lab.agents.orders if one.name == "deploy.execute_deploy_step")
    image = written["args"]["image_info"]
    assert image["urls"] == [metal.image.source] and image["os_hash_value"] == metal.image.hash_value
    assert len(image["configdrive"]) > 1000, "an ISO image, compressed, as base64"
    await metal.delete(request.instance_uuid)
    free = await metal.nodes.until(node, "available", timeout_s=WAIT_S)
    assert (free["instance_uuid"], free["instance_info"], free["lessee"]) == (None, {}, None)
    await metal.all_agree()


async def test_a_node_boots_from_a_volume_without_an_agent_and_lets_go_of_it(metal: RealMetal) -> None:
    """Ironic's own `external` storage: the volume has the image, so nothing is written, and no agent calls back."""
    able = {"cpu_arch": "x86_64", "capabilities": "iscsi_boot:true"}
    (node,) = await metal.nodes.enroll(1, direct=True, storage_interface="external", properties=able)
    await metal.offered(node)
    metal.lab.agents.orders.clear()
    reached = {"target_portal": "127.0.0.1:3260", "target_iqn": "iqn.2026-11.test:v", "target_lun": 1}
    volume = VolumeRequest(volume_id="7b0c4b1e-root", properties=reached)
    request = metal.request(name="db", volumes=(volume,), host=node)
    (watch,) = await metal.boot(request)
    assert watch.state == "active", (await metal.record(request.instance_uuid)).history
    (target,) = await metal.nodes.volume_targets(node)
    assert (target["volume_id"], target["boot_index"], target["volume_type"]) == ("7b0c4b1e-root", 0, "iscsi")
    assert target["properties"] == reached and target["extra"]["berth"]["instance"] == request.instance_uuid
    active = await metal.nodes.get(node)
    assert active["provision_state"] == "active" and "image_source" not in active["instance_info"]
    assert not [order for order in metal.lab.agents.orders if order.node == node], "nothing was written"
    await metal.delete(request.instance_uuid)
    assert await metal.nodes.volume_targets(node) == []
    await metal.nodes.until(node, "available", timeout_s=WAIT_S)
    await metal.all_agree()


async def test_a_node_whose_deployment_fails_lets_go_before_the_alternate_is_deployed(metal: RealMetal) -> None:
    nodes = await metal.nodes.enroll(2, direct=True, resource_class="baremetal-silver")
    await metal.offered(*nodes)
    metal.lab.agents.first_fails = dict.fromkeys(nodes, "the disk is broken")
    request = metal.request(flavor="bm.silver", image_source=metal.image, config_drive=drive())
    (watch,) = await metal.client.boot([request])
    assert await metal.client.wait(WAIT_S)
    record = await metal.record(request.instance_uuid)
    (broken,) = set(nodes) & set(metal.lab.agents.failing)
    (good,) = set(nodes) - {broken}
    assert (watch.state, record.host) == ("active", good), record.history
    assert [attempt.code for attempt in record.history] == ["node.deploy_failed", ""]
    assert "the disk is broken" in record.history[0].reason, "Ironic's own words"
    assert "; its history: " in record.history[0].reason
    await metal.nodes.until(broken, "available", timeout_s=WAIT_S)
    await metal.delete(request.instance_uuid)
    await metal.nodes.until(good, "available", timeout_s=WAIT_S)
    await metal.all_agree()


async def test_an_image_that_ironic_does_not_accept_is_reported_in_its_words(metal: RealMetal) -> None:
    (node,) = await metal.nodes.enroll(1, direct=True)
    await metal.offered(node)
    request = metal.request(host=node)
    (watch,) = await metal.boot(request)
    record = await metal.record(request.instance_uuid)
    assert watch.state == "failed" and record.state is BuildState.FAILED
    assert "node.invalid" in record.history[0].code and "instance_info.image_source" in record.history[0].reason

    async def is_free() -> bool:
        free = await metal.nodes.get(node)
        return (free["provision_state"], free["instance_uuid"], free["instance_info"]) == ("available", None, {})

    await until(is_free)


async def test_a_foreign_node_is_left_as_it_is_and_a_rescued_one_stays_ours(metal: RealMetal) -> None:
    foreign, ours = await metal.nodes.enroll(2)
    await metal.offered(foreign, ours)
    theirs = "90000000-0000-4000-8000-000000000000"
    await metal.nodes.patch(
        foreign,
        {"op": "add", "path": "/instance_uuid", "value": theirs},
        {"op": "add", "path": "/instance_info/display_name", "value": "another's"},
    )
    await metal.nodes.provision(foreign, "active")
    await metal.nodes.until(foreign, "active")
    before = await metal.nodes.get(foreign)
    request = metal.request(host=ours)
    assert (await metal.boot(request))[0].state == "active"
    await metal.nodes.provision(ours, "rescue", rescue_password="secret")
    await metal.nodes.until(ours, "rescue")
    await metal.all_agree()
    assert (await metal.record(request.instance_uuid)).state is BuildState.ACTIVE
    await metal.nodes.provision(ours, "unrescue")
    await metal.nodes.until(ours, "active")
    await metal.delete(request.instance_uuid)
    await metal.nodes.until(ours, "available", timeout_s=WAIT_S)
    assert await metal.nodes.get(foreign) == before


async def test_a_second_berth_of_the_same_names_leaves_our_machine(metal: RealMetal) -> None:
    """Its cell, services and Ironic are called the same, and its database is empty, as after a wrong restore."""
    ours, free = await metal.nodes.enroll(2)
    await metal.offered(ours, free)
    request = metal.request(host=ours)
    assert (await metal.boot(request))[0].state == "active"
    before = await metal.nodes.get(ours)
    async with another_berth(metal.lab, metal.nodes) as other:
        await other.offered(free)
        theirs = other.request(host=free)  # several scans of all nodes go by
        assert (await other.boot(theirs))[0].state == "active"
        (refused,) = await other.boot(other.request(host=ours))
        assert refused.state == "failed"
        await other.delete(theirs.instance_uuid)
        await metal.nodes.until(free, "available", timeout_s=WAIT_S)
    after = await metal.nodes.get(ours)
    assert {**after, "updated_at": before["updated_at"]} == before
    assert (await metal.record(request.instance_uuid)).state is BuildState.ACTIVE
    await metal.delete(request.instance_uuid)
    await metal.nodes.until(ours, "available", timeout_s=WAIT_S)


async def test_a_protected_node_is_kept_until_its_operator_unsets_it(metal: RealMetal) -> None:
    (node,) = await metal.nodes.enroll(1)
    await metal.offered(node)
    request = metal.request(host=node)
    assert (await metal.boot(request))[0].state == "active"
    reason = "the ledger is on it"
    await metal.nodes.patch(
        node,
        {"op": "replace", "path": "/protected", "value": True},
        {"op": "replace", "path": "/protected_reason", "value": reason},
    )
    await metal.client.delete([await metal.record(request.instance_uuid)], retry_for_s=WAIT_S)

    async def is_deleting() -> bool:
        record = await metal.record(request.instance_uuid)
        lines = [line.detail for line in record.timeline if line.what == "deleting"]
        return record.state is BuildState.DELETING and record.code == "destroy.protected" and reason in lines[-1]

    await until(is_deleting)
    assert (await metal.nodes.get(node))["provision_state"] == "active"
    await metal.nodes.patch(node, {"op": "replace", "path": "/protected", "value": False})
    assert await metal.client.wait(WAIT_S)
    await metal.nodes.until(node, "available", timeout_s=WAIT_S)


async def test_a_node_of_a_project_serves_no_other_and_shards_select(metal: RealMetal) -> None:
    owned, sharded = await metal.nodes.enroll(2)
    await metal.nodes.patch(owned, {"op": "add", "path": "/owner", "value": "hotel"})
    await metal.nodes.patch(sharded, {"op": "add", "path": "/shard", "value": "s1"})
    for on in (True, False):  # a service that announces the maintenance has read the owner
        await metal.nodes.maintenance(owned, on=on)
        await until(partial(metal.takes_builds, owned, not on))
    await metal.offered(owned, sharded)

    (strange,) = await metal.boot(metal.request(host=owned, project_id="acme"))
    assert strange.state == "failed"
    record = await metal.record(strange.instance_uuid)
    assert "host.of_another_project" in str(record), record
    request = metal.request(host=owned, project_id="hotel")
    assert (await metal.boot(request))[0].state == "active"
    await metal.delete(request.instance_uuid)
    driver = IronicDriver(
        IronicConfig(url=metal.lab.ironic.url, shards=("s1",), microversion="1.82"),
        cell="cell1",
        service="sharded",
        clock=metal.site.clock,
    )
    await driver.open()
    assert [host.uuid for host in await driver.hosts()] == [sharded]
    await driver.close()


async def test_a_machine_is_stopped_started_rescued_and_rebuilt_by_its_client(metal: RealMetal) -> None:
    (node,) = await metal.nodes.enroll(1, direct=True)
    await metal.offered(node)
    request = metal.request(image_source=metal.image, config_drive=drive(), host=node)
    assert (await metal.boot(request))[0].state == "active"
    moves = ActionClient(metal.client.bus, clock=metal.site.clock, process=process_name("moves"))
    await moves.open()

    async def ask(kind: ActionKind, **fields: Any) -> None:
        requested = ActionRequest(
            request_id=new_uuid(RNG), instance_uuid=request.instance_uuid, project_id="acme", kind=kind, **fields
        )
        await moves.ask(requested, timeout_s=WAIT_S)
        assert await moves.wait(WAIT_S)
        ended = moves.ended[requested.request_id]
        assert ended.state is ActionState.DONE, ended

    try:
        await ask(ActionKind.STOP)
        assert (await metal.nodes.get(node))["power_state"] == "power off"
        await metal.all_agree()
        await ask(ActionKind.START)
        assert (await metal.nodes.get(node))["power_state"] == "power on"
        for kind, state in ((ActionKind.RESCUE, "rescue"), (ActionKind.UNRESCUE, "active")):
            await ask(kind, **({"rescue_password": "sesame"} if kind is ActionKind.RESCUE else {}))
            assert (await metal.nodes.get(node))["provision_state"] == state
            await metal.all_agree()
        metal.lab.agents.orders.clear()
        await ask(ActionKind.REBUILD, image="again")
    finally:
        await moves.close()
    rebuilt = await metal.nodes.get(node)
    assert rebuilt["provision_state"] == "active" and rebuilt["instance_info"]["berth"]["change_number"] > 0
    assert rebuilt["instance_info"]["image_source"].endswith("?again")
    steps = [one.params["step"] for one in metal.lab.agents.orders if one.name == "deploy.execute_deploy_step"]
    assert steps[0]["args"]["image_info"]["urls"] == [rebuilt["instance_info"]["image_source"]], "written anew"
    await metal.delete(request.instance_uuid)
    await metal.nodes.until(node, "available", timeout_s=WAIT_S)
    await metal.all_agree()
