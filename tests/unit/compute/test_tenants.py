"""Bare metal: a project's request reaches other projects' networks, ports, images and nodes."""

from __future__ import annotations

import json

import httpx
import msgspec
import pytest

from bus.clock import SystemClock
from bus.contracts.build import BuildRequest
from bus.contracts.catalogue import operators_rights
from bus.contracts.cell import InstanceSpec
from bus.contracts.deploy import ImageSource, NetworkRequest
from compute_sim.config import IronicConfig
from compute_sim.driver import Build, BuildAbort, BuildFault
from compute_sim.drivers.ironic.api import IronicApi
from compute_sim.drivers.ironic.driver import BareMetal
from compute_sim.drivers.ironic.neutron import NeutronNetwork

NODE = "8296eb22-b44b-4cba-95b1-3a66b31189a4"
FOREIGN_NETWORK = "8296eb22-b44b-4cba-95b1-3a66b31189a5"
FOREIGN_PORT = "8296eb22-b44b-4cba-95b1-3a66b31189a6"
INSTANCE = "11111111-2222-4333-8444-555555555555"
DEPLOYMENT = "d0000000-0000-4000-8000-000000000001"


def neutron(posted: list[dict]) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            port = json.loads(request.content)["port"]
            posted.append(port)
            return httpx.Response(201, json={"port": {"id": "made", **port}})
        if request.url.path.endswith(FOREIGN_PORT):
            return httpx.Response(200, json={"port": {"id": FOREIGN_PORT, "project_id": "victim"}})
        if "/networks/" in request.url.path:
            network = {"id": FOREIGN_NETWORK, "project_id": "victim", "shared": False, "router:external": False}
            return httpx.Response(200, json={"network": network})
        return httpx.Response(200, json={"ports": []})

    return httpx.MockTransport(answer)


@pytest.mark.xfail(strict=True, reason="Found A1")
def test_a_request_that_names_networks_or_an_image_by_address_is_an_operators() -> None:
    """Either the request is refused here, or the driver checks whose they are: one of these tests has to hold."""
    request = BuildRequest(
        instance_uuid=INSTANCE,
        project_id="attacker",
        flavor="bm",
        networks=(NetworkRequest(network=FOREIGN_NETWORK),),
        image_source=ImageSource(source="http://169.254.169.254/latest/", checksum="http://10.0.0.1:8500/v1/kv/"),
    )
    request = msgspec.json.decode(msgspec.json.encode(request), type=BuildRequest)  # the contract takes it
    assert operators_rights(request)


@pytest.mark.xfail(strict=True, reason="Found A1")
async def test_no_port_is_made_on_another_projects_network() -> None:
    posted: list[dict] = []
    network = NeutronNetwork(IronicConfig(network="neutron"), clock=SystemClock(), transport=neutron(posted))
    spec = InstanceSpec(
        instance_uuid=INSTANCE, project_id="attacker", networks=(NetworkRequest(network=FOREIGN_NETWORK),)
    )
    try:
        with pytest.raises(BuildAbort):
            await network.prepare(NODE, spec)
    finally:
        await network.close()
    assert posted == []


@pytest.mark.xfail(strict=True, reason="Found A1")
async def test_no_port_of_another_project_is_attached() -> None:
    network = NeutronNetwork(IronicConfig(network="neutron"), clock=SystemClock(), transport=neutron([]))
    spec = InstanceSpec(instance_uuid=INSTANCE, project_id="attacker", networks=(NetworkRequest(port=FOREIGN_PORT),))
    try:
        with pytest.raises(BuildAbort):
            await network.prepare(NODE, spec)
    finally:
        await network.close()


@pytest.mark.xfail(strict=True, reason="Found A1")
async def test_a_node_that_was_leased_to_another_project_since_is_not_taken() -> None:
    """The driver reads the node again because the book may be behind, and looks at all but its lessee and owner."""
    patches: list[bytes] = []
    node = {"uuid": NODE, "provision_state": "available", "lessee": "victim", "power_state": "power off"}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "PATCH":
            patches.append(request.content)
            for one in json.loads(request.content):
                if one["path"] == "/instance_uuid":
                    node["instance_uuid"] = one["value"]
                if one["path"] == "/instance_info/berth":
                    node["instance_info"] = {"berth": one["value"]}
            return httpx.Response(200, json=node)
        if request.url.path.endswith("/validate"):
            return httpx.Response(200, json={})
        if request.method == "PUT":
            node["provision_state"] = "active"
            return httpx.Response(202)
        return httpx.Response(200, json=node)

    config = IronicConfig(poll_interval_s=0.001, watch_interval_s=0.001)
    driver = BareMetal(config, cell="c1", service="s", clock=SystemClock(), transport=httpx.MockTransport(answer))
    await driver.open()
    spec = InstanceSpec(instance_uuid=INSTANCE, project_id="attacker")
    try:
        with pytest.raises(BuildFault):
            await driver.spawn(Build(NODE, spec, 1, {NODE: {"CUSTOM_BM": 1}}, DEPLOYMENT))
    finally:
        await driver.close()
    assert patches == []


@pytest.mark.xfail(strict=True, reason="Found B19")
async def test_all_nodes_are_read_where_ironic_gives_small_pages() -> None:
    """[api] max_limit of ironic.conf bounds a page: after 100 of them the rest is left out without a word."""

    count, most = 250, 2
    uuids = [f"8296eb22-b44b-4cba-95b1-{n:012d}" for n in range(count)]

    def answer(request: httpx.Request) -> httpx.Response:
        marker = request.url.params.get("marker")
        at = 0 if marker is None else uuids.index(marker) + 1
        page = uuids[at : at + most]
        more = {"next": "http://ironic/v1/nodes?marker=x"} if at + most < count else {}
        return httpx.Response(200, json={"nodes": [{"uuid": one} for one in page], **more})

    api = IronicApi(IronicConfig(), clock=SystemClock(), transport=httpx.MockTransport(answer))
    api.open()
    found = await api.nodes()
    await api.close()
    assert len(found) == count
