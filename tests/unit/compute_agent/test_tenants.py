"""Bare metal: a project's request reaches other projects' networks, ports, images and nodes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence

import httpx
import msgspec
import pytest

from bus.clock import SystemClock
from bus.contracts.build import BuildRequest
from bus.contracts.catalogue import operators_rights
from bus.contracts.cell import InstanceSpec
from bus.contracts.deploy import ImageSource, NetworkRequest
from compute_agent.driver import Build, BuildAbort, BuildFault
from compute_agent.drivers.ironic.api import IronicApi
from compute_agent.drivers.ironic.config import IronicConfig
from compute_agent.drivers.ironic.driver import IronicDriver
from compute_agent.drivers.ironic.network import StaticNetwork
from compute_agent.drivers.ironic.neutron import NeutronNetwork

NODE = "8296eb22-b44b-4cba-95b1-3a66b31189a4"
FOREIGN_NETWORK = "8296eb22-b44b-4cba-95b1-3a66b31189a5"
FOREIGN_PORT = "8296eb22-b44b-4cba-95b1-3a66b31189a6"
INSTANCE = "11111111-2222-4333-8444-555555555555"
DATABASE_ID = "d0000000-0000-4000-8000-000000000001"


def neutron(
    posted: list[dict],
    *,
    owner: str = "victim",
    shared_with: str = "somebody",
    ports: Sequence[dict] = (),
    device: str = "",
) -> httpx.MockTransport:
    """The port and the network are the owner's; berth's own project may use the network (`shared`)."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            port = json.loads(request.content)["port"]
            posted.append(port)
            return httpx.Response(201, json={"port": {"id": "made", **port}})
        if request.url.path.endswith(FOREIGN_PORT):
            return httpx.Response(200, json={"port": {"id": FOREIGN_PORT, "project_id": owner, "device_id": device}})
        if "/networks/" in request.url.path:
            network = {"id": FOREIGN_NETWORK, "project_id": owner, "shared": True, "router:external": True}
            return httpx.Response(200, json={"network": network})
        if request.url.path.endswith("/rbac-policies"):
            return httpx.Response(200, json={"rbac_policies": [{"target_tenant": shared_with}]})
        return httpx.Response(200, json={"ports": list(ports)})

    return httpx.MockTransport(answer)


@contextlib.asynccontextmanager
async def network(transport: httpx.MockTransport) -> AsyncIterator[NeutronNetwork]:
    made = NeutronNetwork(IronicConfig(network="neutron"), clock=SystemClock(), transport=transport)
    try:
        yield made
    finally:
        await made.close()


def wants(*, port: str | None = None) -> InstanceSpec:
    named = NetworkRequest(network=FOREIGN_NETWORK) if port is None else NetworkRequest(port=port)
    return InstanceSpec(instance_uuid=INSTANCE, project_id="attacker", networks=(named,))


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


async def test_no_port_is_made_on_another_projects_network() -> None:
    posted: list[dict] = []
    async with network(neutron(posted)) as here:
        with pytest.raises(BuildAbort) as refused:
            await here.prepare(NODE, wants())
    assert (refused.value.code, posted) == ("network.other_project", [])


@pytest.mark.parametrize("project", [{"owner": "attacker"}, {"shared_with": "attacker"}, {"shared_with": "*"}])
async def test_a_port_is_made_on_a_network_that_the_project_may_use(project: dict[str, str]) -> None:
    posted: list[dict] = []
    async with network(neutron(posted, **project)) as here:
        assert (await here.prepare(NODE, wants())).vifs == ("made",)
    assert [port["project_id"] for port in posted] == ["attacker"]


@pytest.mark.parametrize("shared_with", ["somebody", "attacker"])
async def test_no_port_of_another_project_is_attached(shared_with: str) -> None:
    """Neutron shares networks, and no ports."""
    async with network(neutron([], shared_with=shared_with)) as here:
        with pytest.raises(BuildAbort) as refused:
            await here.prepare(NODE, wants(port=FOREIGN_PORT))
    assert refused.value.code == "network.other_project"


@pytest.mark.parametrize("device", ["", INSTANCE])
async def test_a_port_of_the_project_is_attached(device: str) -> None:
    async with network(neutron([], owner="attacker", device=device)) as here:
        assert (await here.prepare(NODE, wants(port=FOREIGN_PORT))).vifs == (FOREIGN_PORT,)


async def test_a_port_that_another_machine_has_is_not_taken_away_from_it() -> None:
    """Ironic rebinds whatever it is given; Nova refuses such a port, too."""
    async with network(neutron([], owner="attacker", device=DATABASE_ID)) as here:
        with pytest.raises(BuildAbort) as refused:
            await here.prepare(NODE, wants(port=FOREIGN_PORT))
    assert refused.value.code == "network.refused"


@pytest.mark.parametrize(
    "other", [{"project_id": "other"}, {"network_id": "8296eb22-b44b-4cba-95b1-3a66b31189aa"}, {"name": "eth0"}]
)
async def test_a_port_of_our_name_is_taken_with_its_network_and_project_alone(other: dict[str, str]) -> None:
    """Whoever makes a port chooses its name and its device."""
    ours = {"name": f"berth-{INSTANCE}-{NODE}-0", "device_id": INSTANCE, "project_id": "attacker"}
    ours |= {"network_id": FOREIGN_NETWORK}
    theirs = {"id": "theirs", **ours, **other}
    for ports, vif in ([{"id": "ours", **ours}, theirs], "ours"), ([theirs], "made"):
        async with network(neutron([], owner="attacker", ports=ports)) as here:
            assert (await here.prepare(NODE, wants())).vifs == (vif,)


async def test_a_static_port_is_attached_to_the_machines_of_its_project_alone() -> None:
    for owner, listed in ("victim", FOREIGN_PORT), ("attacker", FOREIGN_NETWORK):
        with pytest.raises(BuildAbort) as refused:
            await StaticNetwork({listed: owner}).prepare(NODE, wants(port=FOREIGN_PORT))
        assert refused.value.code == "network.other_project"
    assert (await StaticNetwork({FOREIGN_PORT: "attacker"}).prepare(NODE, wants(port=FOREIGN_PORT))).vifs


@pytest.mark.parametrize(
    ("field", "restricts", "code"),
    [
        ("lessee", True, "node.other_project"),
        ("lessee", False, "node.other_project"),
        ("owner", True, "node.other_project"),
        ("owner", False, None),
    ],
)
async def test_a_node_that_another_project_has_got_since_is_not_taken(
    field: str, restricts: bool, code: str | None
) -> None:
    """The driver reads the node again because placement may be behind."""
    patches: list[bytes] = []
    node = {"uuid": NODE, "provision_state": "available", field: "victim", "power_state": "power off"}

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

    config = IronicConfig(poll_interval_s=0.001, watch_interval_s=0.001, restrict_to_owner=restricts)
    driver = IronicDriver(config, cell="c1", service="s", clock=SystemClock(), transport=httpx.MockTransport(answer))
    await driver.open()
    spec = InstanceSpec(instance_uuid=INSTANCE, project_id="attacker")
    try:
        await driver.spawn(Build(NODE, spec, 1, {NODE: {"CUSTOM_BM": 1}}, DATABASE_ID))
    except BuildFault as fault:
        assert (fault.code, patches) == (code, [])
    else:
        assert code is None
    finally:
        await driver.close()


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
