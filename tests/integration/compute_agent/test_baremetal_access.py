"""How the bare-metal driver reaches Ironic and Neutron, several Ironics, and a node's health by Ironic's word."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Struct
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bus.clock import SystemClock
from bus.contracts.deploy import NetworkRequest
from bus.openstack.login import KeystoneLogin
from compute_agent.driver import BuildAbort, DriverHost, DriverUnavailable, Reschedule
from compute_agent.drivers.ironic.api import IronicApi
from compute_agent.drivers.ironic.canary import CanaryGate
from compute_agent.drivers.ironic.config import NeutronConfig
from compute_sim.ironic_stand_in import NodePool
from tests.integration.compute_agent.harness import (
    CELL,
    FAILING,
    INSTANCE,
    QUICK,
    Driver,
    Metal,
    build,
    driver_of,
    fault,
    guarded,
    listening,
)
from tests.kit.certificates import Authority
from tests.kit.keystone import KeystoneStandIn, keystone_stand_in
from tests.kit.waiting import until

# --- Keystone's tokens, HTTP basic, TLS with an operator's own authority, addresses and versions


@contextlib.asynccontextmanager
async def driver(url: str, **more: Any) -> AsyncIterator[Driver]:
    made = driver_of(url=url, poll_interval_s=0.005, **more)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


async def deploy_and_delete(made: Driver, pool: NodePool) -> None:
    node = next(iter(pool.nodes))
    await made.spawn(build(node))
    assert pool.nodes[node]["instance_uuid"] == INSTANCE
    await made.destroy(node)
    assert pool.nodes[node]["instance_uuid"] is None


def has_token_of(keystone: KeystoneStandIn) -> Callable[[dict[bytes, bytes]], bool]:
    return lambda headers: headers.get(b"x-auth-token", b"").decode() in keystone.services


async def test_a_deployment_outlives_its_token() -> None:
    """Keystone's tokens last for an hour, a deployment may; and any of them may be revoked."""
    async with (
        keystone_stand_in() as (keystone, auth_url),
        guarded(has_token_of(keystone), behaviour=replace(QUICK, deploy_s=0.3)) as (pool, url),
        driver(url, keystone=KeystoneLogin(auth_url=auth_url, username="berth", password="right")) as made,
    ):
        node = next(iter(pool.nodes))
        building = asyncio.create_task(made.spawn(build(node)))
        await until(lambda: pool.nodes[node]["provision_state"] == "deploying")
        keystone.services.clear()
        await building
        assert keystone.signed_in == 2
        keystone.lasts = timedelta(seconds=1)  # from now on each is out of date when it comes
        await made.destroy(node)
        assert keystone.signed_in == 2


async def test_a_keystone_that_refuses_or_is_down_costs_no_build() -> None:
    """It is no fault of the node's: nothing was taken, and the service tries again."""
    async with keystone_stand_in() as (keystone, auth_url), guarded(has_token_of(keystone)) as (pool, url):
        for address, password in ((auth_url, "wrong"), ("http://127.0.0.1:1", "right")):
            login = KeystoneLogin(auth_url=address, username="berth", password=password)
            async with driver(url, keystone=login, outage_timeout_s=0.05) as made:
                with pytest.raises(DriverUnavailable, match="Keystone"):
                    await made.spawn(build(next(iter(pool.nodes))))
        assert all(node["instance_uuid"] is None for node in pool.nodes.values())


@pytest.mark.parametrize(
    ("name", "trusts", "passes"),
    [
        ("IP:127.0.0.1", {"ca_file": "its authority"}, True),
        ("IP:127.0.0.1", {}, False),  # this system knows nothing of the authority
        ("IP:127.0.0.1", {"verify_tls": False}, True),
        ("DNS:ironic.example.org", {"ca_file": "its authority"}, False),
    ],
)
async def test_tls_is_checked_with_an_authority_of_the_operators(
    tmp_path: Path, name: str, trusts: dict[str, Any], passes: bool
) -> None:
    authority = Authority(tmp_path)
    trusts = {option: str(authority.file) if option == "ca_file" else value for option, value in trusts.items()}
    async with guarded(lambda _: True, authority.issue("ironic", name)) as (pool, url), driver(url, **trusts) as made:
        if passes:
            await deploy_and_delete(made, pool)
        else:
            with pytest.raises(DriverUnavailable):
                await made.hosts()


async def test_a_microversion_that_ironic_does_not_support_is_answered_with_what_to_do(metal: Metal) -> None:
    limits = {"X-OpenStack-Ironic-API-Minimum-Version": "1.1", "X-OpenStack-Ironic-API-Maximum-Version": "1.58"}
    made = await metal.driver(way=httpx.MockTransport(lambda _: httpx.Response(406, headers=limits)))
    with pytest.raises(DriverUnavailable, match=r"1\.1 to 1\.58: set compute\.ironic\.microversion"):
        await made.hosts()


# --- ports made in Neutron, and several Ironics side by side, each with its Keystone and its Neutron


NET, UNKNOWN_NET = "a0000000-0000-4000-8000-000000000001", "a0000000-0000-4000-8000-00000000000f"
PORT = "90000000-0000-4000-8000-000000000000"
NAMED = {"id": PORT, "name": "eth0", "device_id": "", "network_id": NET, "project_id": "acme"}
THEIRS = {"id": "theirs", "name": "web", "device_id": INSTANCE, "network_id": NET, "project_id": "acme"}


class Neutron:
    """As much of Neutron as is used here; it answers 401 to any token that is not its Keystone's."""

    def __init__(self, keystone: KeystoneStandIn) -> None:
        self.ports: dict[str, dict[str, Any]] = {"theirs": dict(THEIRS), PORT: dict(NAMED)}
        self.shared_with = "acme"  # the network, which is another project's
        self.made = 0
        self.removals: list[str] = []
        self.status = 0  # what every request is answered with; 0: as it should be
        self._keystone = keystone
        self.app = Starlette(
            routes=[
                Route("/v2.0/networks/{network}", self._network),
                Route("/v2.0/rbac-policies", self._policies),
                Route("/v2.0/ports", self._ports, methods=["GET", "POST"]),
                Route("/v2.0/ports/{port}", self._port, methods=["GET", "DELETE"]),
            ]
        )

    def _refusal(self, request: Request) -> Response | None:
        if request.headers.get("x-auth-token") not in self._keystone.services:
            return Response(status_code=401)
        return Response(status_code=self.status) if self.status else None

    async def _network(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        found = request.path_params["network"]
        if found == NET:
            return JSONResponse({"network": {"id": NET, "project_id": "infra", "shared": False}})
        words = f"Network {found} could not be found."
        return JSONResponse({"NeutronError": {"type": "NetworkNotFound", "message": words}}, 404)

    async def _policies(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        asked = dict(request.query_params)
        assert asked == {"object_type": "network", "object_id": NET, "action": "access_as_shared"}
        return JSONResponse({"rbac_policies": [{"object_id": NET, "target_tenant": self.shared_with}]})

    async def _ports(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        if request.method == "GET":
            device = request.query_params["device_id"]
            return JSONResponse({"ports": [port for port in self.ports.values() if port["device_id"] == device]})
        wanted = (await request.json())["port"]
        self.made += 1
        port = {**wanted, "id": f"made-{self.made}"}
        self.ports[port["id"]] = port
        return JSONResponse({"port": port}, 201)

    async def _port(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        if request.method == "GET":
            port = self.ports.get(request.path_params["port"])
            return JSONResponse({"port": port}, 404 if port is None else 200)
        self.removals.append(request.path_params["port"])
        gone = self.ports.pop(request.path_params["port"], None)
        return Response(status_code=404 if gone is None else 204)


class Region(Struct):
    """One Keystone, Ironic and Neutron, and a driver on them."""

    keystone: KeystoneStandIn
    neutron: Neutron
    pool: NodePool
    driver: Driver

    async def spawn(self, node: str, *networks: NetworkRequest) -> None:
        await self.driver.spawn(build(node, networks=networks or (NetworkRequest(network=NET),)))


@contextlib.asynccontextmanager
async def region(name: str) -> AsyncIterator[Region]:
    """Its tokens begin with its name, and so does its password."""
    async with contextlib.AsyncExitStack() as servers:
        keystone, auth_url = await servers.enter_async_context(keystone_stand_in())
        keystone.issues, keystone.password = name, f"{name}-password"
        pool, url = await servers.enter_async_context(guarded(has_token_of(keystone)))
        neutron = Neutron(keystone)
        address = await servers.enter_async_context(listening(neutron.app))
        login = KeystoneLogin(auth_url=auth_url, username="berth", password=keystone.password)
        of_neutron = NeutronConfig(url=f"http://{address}/v2.0", keystone=login)
        more: dict[str, Any] = {"keystone": login, "network": "neutron", "neutron": of_neutron}
        made = await servers.enter_async_context(
            driver(url, max_poll_interval_s=0.02, outage_timeout_s=0.2, cell=f"{CELL}-{name}", service=name, **more)
        )
        yield Region(keystone, neutron, pool, made)


@pytest.fixture
async def east() -> AsyncIterator[Region]:
    async with region("east") as here:
        yield here


async def test_a_port_is_made_attached_and_removed_and_others_are_left(east: Region) -> None:
    node = next(iter(east.pool.nodes))
    await east.spawn(node, NetworkRequest(network=NET), NetworkRequest(port=PORT))
    assert east.pool.vifs[node] == ["made-1", PORT]
    made = east.neutron.ports["made-1"]
    assert (made["device_id"], made["project_id"], made["binding:vnic_type"]) == (INSTANCE, "acme", "baremetal")
    await east.driver.destroy(node)
    assert east.neutron.ports == {"theirs": THEIRS, PORT: NAMED} and east.neutron.removals == ["made-1"]


async def test_a_port_that_neutron_does_not_have_ends_the_build(east: Region) -> None:
    """Ironic answers as if it had failed itself, and every node was tried."""
    unknown = NetworkRequest(port="90000000-0000-4000-8000-00000000000f")
    assert await fault(east.spawn(next(iter(east.pool.nodes)), unknown)) == (BuildAbort, "network.refused")


async def test_a_network_that_is_not_shared_with_the_project_ends_the_build(east: Region) -> None:
    east.neutron.shared_with = "others"
    assert await fault(east.spawn(next(iter(east.pool.nodes)))) == (BuildAbort, "network.other_project")
    assert (east.neutron.made, east.pool.vifs) == (0, {})


async def test_an_attempt_has_its_port_once_and_removes_its_own_and_not_the_next_attempts(east: Region) -> None:
    """The failed attempt is cleared away while the next one, on another node, has its ports already."""
    first, second = list(east.pool.nodes)[:2]
    east.pool.invalid[first] = "no"
    for _ in range(2):
        assert await fault(east.spawn(first)) == (Reschedule, "node.invalid")
    assert east.neutron.made == 1
    east.pool.nodes[first].update(instance_uuid=None, instance_info={})
    await east.spawn(second)
    await east.driver.destroy(first)
    assert east.neutron.removals == ["made-1"] and "made-2" in east.neutron.ports


async def test_neutrons_words_are_the_reason_and_its_outage_is_waited_for(east: Region) -> None:
    node = next(iter(east.pool.nodes))
    with pytest.raises(BuildAbort, match=f"Network {UNKNOWN_NET} could not be found") as caught:
        await east.spawn(node, NetworkRequest(network=UNKNOWN_NET))
    assert caught.value.code == "network.refused"
    await east.driver.destroy(node)
    east.neutron.status = 503
    building = asyncio.create_task(east.spawn(node))
    await until(lambda: east.pool.nodes[node]["instance_uuid"])
    with pytest.raises(DriverUnavailable, match="503"):
        await east.driver.destroy("b0000000-0000-4000-8000-000000000001")
    east.neutron.status = 0
    await building
    assert east.pool.nodes[node]["provision_state"] == "active"


async def test_several_ironics_each_have_their_own_tokens_and_ports(east: Region) -> None:
    """Settings are a cell's own: no token of one region is sent to another, and each port is made in its own."""
    async with region("west") as west:
        for here in (east, west):
            node = next(iter(here.pool.nodes))
            await here.spawn(node)
            assert here.pool.nodes[node]["provision_state"] == "active" and here.neutron.made == 1
            assert all(token.startswith(here.keystone.issues) for token in here.keystone.services)
        west.keystone.services.clear()  # revoked: one signs in again, and the other is left alone
        signed_in = east.keystone.signed_in
        for here in (east, west):
            await here.driver.destroy(next(iter(here.pool.nodes)))
            assert here.neutron.ports == {"theirs": THEIRS, PORT: NAMED}
        assert east.keystone.signed_in == signed_in


# --- a node's health, by Ironic's word: what is critical takes no build, what was repaired proves itself first


pytestmark = pytest.mark.usefixtures("looks_soon")
CANARY = "canary"


class Watched:
    """A driver that watches the nodes, and what it offers."""

    def __init__(self, metal: Metal, driver: Driver) -> None:
        self.metal, self.driver = metal, driver
        self.changed: list[str] = []

    async def host(self) -> DriverHost:
        return next(host for host in await self.driver.hosts() if host.uuid == self.metal.first)

    async def until(self, there: Callable[[DriverHost], object]) -> None:
        async def found() -> object:
            return there(await self.host())

        await until(found)

    async def look_twice(self) -> None:
        """Until the second of two looks has found something: the first one is over."""
        for other in [*self.metal.nodes.values()][1:3]:
            other["health"] = "Critical"
            await self.until(lambda _, other=other: unproven(other))

    def build(self, project: str) -> Any:
        return self.driver.spawn(build(self.metal.first, project=project))


@pytest.fixture
async def watched(metal: Metal, request: pytest.FixtureRequest) -> AsyncIterator[Watched]:
    """With a canary project, unless a test is given another one."""
    made = await metal.driver(microversion="1.109", canary_project=getattr(request, "param", CANARY))
    here = Watched(metal, made)
    made.on_change(here.changed.extend)
    await made.hosts()  # as the first announcement does
    async with metal.watching(made):
        yield here


def unproven(node: dict[str, Any]) -> str:
    return str(node["extra"].get("berth_unproven", {}).get("reason", ""))


@pytest.mark.parametrize("watched", [""], indirect=True)
async def test_a_critical_node_takes_no_build_until_it_is_well(metal: Metal, watched: Watched) -> None:
    assert (await watched.host()).enabled
    metal.node["health"] = "Critical"
    await watched.until(lambda host: not host.enabled)
    assert (await watched.host()).disabled_reason == "health is Critical"
    await until(lambda: metal.first in watched.changed)
    assert await fault(watched.build("acme")) == (Reschedule, "node.unhealthy")
    metal.node["health"] = "OK"
    await watched.until(lambda host: host.enabled)
    assert unproven(metal.node) == ""  # there is no canary project


async def test_a_warning_is_an_attribute(metal: Metal, watched: Watched) -> None:
    metal.node["health"] = "Warning"
    await watched.until(lambda host: host.attributes.get("health") == "warning")
    assert (await watched.host()).enabled
    metal.node["health"] = "OK"
    await watched.until(lambda host: "health" not in host.attributes)


@pytest.mark.parametrize(
    ("failure", "reason"),
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
    metal: Metal, watched: Watched, failure: dict[str, Any], reason: str
) -> None:
    metal.node.update(failure)
    await watched.until(lambda _: unproven(metal.node))
    assert unproven(metal.node) == reason
    metal.node.update(health="OK", fault=None, maintenance=False, provision_state="available")
    await watched.until(lambda host: host.enabled and host.attributes["project_id"] == CANARY)
    with pytest.raises(Reschedule) as caught:
        await watched.build("customer")
    assert (caught.value.code, reason in caught.value.reason) == ("node.unproven", True)
    await watched.build(CANARY)
    assert unproven(metal.node) == ""
    await watched.until(lambda host: "project_id" not in host.attributes)
    await watched.driver.destroy(metal.first)


async def test_a_canary_that_fails_proves_nothing(metal: Metal, watched: Watched) -> None:
    metal.node["extra"] = {"berth_unproven": {"since": 1.0, "reason": "disk 2"}, "rack": "7"}
    metal.pool.behaviour = FAILING
    assert await fault(watched.build(CANARY)) == (Reschedule, "node.deploy_failed")
    await watched.driver.destroy(metal.first)
    await watched.until(lambda host: host.attributes.get("project_id") == CANARY)
    assert unproven(metal.node) == "disk 2"
    metal.pool.behaviour = QUICK
    await metal.in_state("available")
    await watched.build(CANARY)
    assert metal.node["extra"] == {"rack": "7"}


async def test_a_failed_deployment_quarantines_no_node(metal: Metal, watched: Watched) -> None:
    """A customer's image can cause it: so any customer could have every node put aside."""
    metal.pool.behaviour = FAILING
    assert (await fault(watched.build("customer")))[0] is Reschedule
    await watched.look_twice()
    assert unproven(metal.node) == ""


async def test_a_node_with_an_instance_of_anothers_is_not_written_on(metal: Metal, watched: Watched) -> None:
    metal.node.update(instance_uuid="30000000-0000-4000-8000-000000000000", provision_state="service failed")
    await watched.look_twice()
    assert metal.node["extra"] == {}


async def test_a_customers_build_that_ends_late_proves_nothing(metal: Metal) -> None:
    """It began before the node failed."""
    metal.node["extra"] = {"berth_unproven": {"since": 1.0, "reason": "disk 2"}}
    api = IronicApi(metal.config(canary_project=CANARY), clock=SystemClock())
    api.open()
    probation = CanaryGate(api, project=CANARY, clock=SystemClock())
    for project, left in (("customer", "disk 2"), (CANARY, "")):
        await probation.proved(metal.first, project)
        assert unproven(metal.node) == left
    await api.close()
