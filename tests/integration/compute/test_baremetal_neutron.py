"""Ports made in Neutron for bare metal, and several Ironics side by side, each with its Keystone and its Neutron.

All over real HTTP; each service accepts the tokens of its own Keystone and no others.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from berth.trial.ironic_stand_in import NodePool
from bus.clock import SystemClock
from bus.contracts.deploy import NetworkRequest
from bus.openstack.login import KeystoneLogin
from compute_sim.config import IronicConfig, NeutronConfig
from compute_sim.driver import Build, BuildAbort, DriverUnavailable
from compute_sim.drivers.ironic.driver import BareMetal
from tests.integration.compute.harness import CELL, DEPLOYMENT, PATIENCE_S
from tests.integration.compute.test_baremetal_access import Server, has_token_of, served
from tests.integration.compute.test_baremetal_deploy import INSTANCE, build
from tests.kit.keystone import KeystoneStandIn, keystone_stand_in

NET, UNKNOWN_NET = "a0000000-0000-4000-8000-000000000001", "a0000000-0000-4000-8000-00000000000f"
PORT = "90000000-0000-4000-8000-000000000000"
THEIRS = {"id": "theirs", "name": "web", "device_id": INSTANCE, "network_id": NET}


class Neutron:
    """As much of Neutron as is used here; it answers 401 to any token that is not its Keystone's."""

    def __init__(self, keystone: KeystoneStandIn) -> None:
        self.ports: dict[str, dict[str, Any]] = {"theirs": dict(THEIRS)}
        self.made = 0
        self.removals: list[str] = []
        self.status = 0  # what every request is answered with; 0: as it should be
        self._keystone = keystone
        self.app = Starlette(
            routes=[
                Route("/v2.0/ports", self._ports, methods=["GET", "POST"]),
                Route("/v2.0/ports/{port}", self._remove, methods=["DELETE"]),
            ]
        )

    def _refusal(self, request: Request) -> Response | None:
        if request.headers.get("x-auth-token") not in self._keystone.services:
            return Response(status_code=401)
        return Response(status_code=self.status) if self.status else None

    async def _ports(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        if request.method == "GET":
            device = request.query_params["device_id"]
            return JSONResponse({"ports": [port for port in self.ports.values() if port["device_id"] == device]})
        wanted = (await request.json())["port"]
        if wanted["network_id"] != NET:
            words = f"Network {wanted['network_id']} could not be found."
            return JSONResponse({"NeutronError": {"type": "NetworkNotFound", "message": words}}, 404)
        self.made += 1
        port = {**wanted, "id": f"made-{self.made}"}
        self.ports[port["id"]] = port
        return JSONResponse({"port": port}, 201)

    async def _remove(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        self.removals.append(request.path_params["port"])
        gone = self.ports.pop(request.path_params["port"], None)
        return Response(status_code=404 if gone is None else 204)


class Region(Struct):
    """One Keystone, Ironic and Neutron, and a driver of theirs."""

    keystone: KeystoneStandIn
    neutron: Neutron
    pool: NodePool
    driver: BareMetal


@contextlib.asynccontextmanager
async def region(name: str) -> AsyncIterator[Region]:
    """Its tokens begin with its name, and so does its password."""
    async with contextlib.AsyncExitStack() as servers:
        keystone, auth_url = await servers.enter_async_context(keystone_stand_in())
        keystone.issues, keystone.password = name, f"{name}-password"
        pool, url = await servers.enter_async_context(served(has_token_of(keystone)))
        neutron = Neutron(keystone)
        listening = socket.create_server(("127.0.0.1", 0))
        settings = uvicorn.Config(neutron.app, log_config=None, lifespan="off", loop="none", timeout_keep_alive=75)
        server = Server(settings)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        login = KeystoneLogin(auth_url=auth_url, username="berth", password=keystone.password)
        config = IronicConfig(
            url=url,
            poll_interval_s=0.005,
            max_poll_interval_s=0.02,
            outage_timeout_s=0.2,
            keystone=login,
            network="neutron",
            neutron=NeutronConfig(url=f"http://127.0.0.1:{listening.getsockname()[1]}/v2.0", keystone=login),
        )
        driver = BareMetal(config, cell=f"{CELL}-{name}", service=name, clock=SystemClock())
        await driver.open()
        try:
            yield Region(keystone, neutron, pool, driver)
        finally:
            await driver.close()
            server.should_exit = True
            await serving


def wanted(node: str, *networks: NetworkRequest) -> Build:
    return build(node, networks=networks)


async def spawned(here: Region, requested: Build) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await here.driver.spawn(requested)


async def test_a_port_is_made_attached_and_removed_and_others_are_left() -> None:
    async with region("east") as here:
        node = next(iter(here.pool.nodes))
        await spawned(here, wanted(node, NetworkRequest(network=NET), NetworkRequest(port=PORT)))
        assert here.pool.vifs[node] == ["made-1", PORT]
        made = here.neutron.ports["made-1"]
        assert (made["device_id"], made["project_id"], made["binding:vnic_type"]) == (INSTANCE, "acme", "baremetal")
        await here.driver.destroy(node, INSTANCE, 1, DEPLOYMENT)
        assert here.neutron.ports == {"theirs": THEIRS} and here.neutron.removals == ["made-1"]


async def test_a_build_that_is_repeated_makes_no_second_port() -> None:
    async with region("east") as here:
        node = next(iter(here.pool.nodes))
        here.pool.invalid[node] = "no"
        for _ in range(2):
            with contextlib.suppress(Exception):
                await spawned(here, wanted(node, NetworkRequest(network=NET)))
        assert here.neutron.made == 1


async def test_an_attempt_removes_its_own_ports_and_not_the_next_attempts() -> None:
    """The failed attempt is cleared away while the next one, on another node, has its ports already."""
    async with region("east") as here:
        first, second = list(here.pool.nodes)[:2]
        here.pool.invalid[first] = "no"
        with contextlib.suppress(Exception):
            await spawned(here, wanted(first, NetworkRequest(network=NET)))
        here.pool.nodes[first].update(instance_uuid=None, instance_info={})
        await spawned(here, wanted(second, NetworkRequest(network=NET)))
        await here.driver.destroy(first, INSTANCE, 1, DEPLOYMENT)
        assert here.neutron.removals == ["made-1"] and "made-2" in here.neutron.ports


async def test_neutrons_words_are_the_reason_and_its_outage_is_waited_for() -> None:
    async with region("east") as here:
        node = next(iter(here.pool.nodes))
        with pytest.raises(BuildAbort, match=f"Network {UNKNOWN_NET} could not be found") as caught:
            await spawned(here, wanted(node, NetworkRequest(network=UNKNOWN_NET)))
        assert caught.value.code == "network.refused"
        await here.driver.destroy(node, INSTANCE, 1, DEPLOYMENT)
        here.neutron.status = 503
        building = asyncio.create_task(spawned(here, wanted(node, NetworkRequest(network=NET))))
        async with asyncio.timeout(PATIENCE_S):
            while here.pool.nodes[node]["instance_uuid"] is None:  # noqa: ASYNC110  (what is queried is a server)
                await asyncio.sleep(0.005)
        with pytest.raises(DriverUnavailable, match="503"):
            await here.driver.destroy("b0000000-0000-4000-8000-000000000001", INSTANCE, 1, DEPLOYMENT)
        here.neutron.status = 0
        await building
        assert here.pool.nodes[node]["provision_state"] == "active"


async def test_several_ironics_each_have_their_own_tokens_and_ports() -> None:
    """Settings are a cell's own: no token of one region is sent to another, and each port is made in its own."""
    async with region("east") as east, region("west") as west:
        for here in (east, west):
            node = next(iter(here.pool.nodes))
            await spawned(here, wanted(node, NetworkRequest(network=NET)))
            assert here.pool.nodes[node]["provision_state"] == "active" and here.neutron.made == 1
            assert all(token.startswith(here.keystone.issues) for token in here.keystone.services)
        west.keystone.services.clear()  # revoked: one signs in again, and the other is left alone
        signed_in = east.keystone.signed_in
        for here in (east, west):
            await here.driver.destroy(next(iter(here.pool.nodes)), INSTANCE, 1, DEPLOYMENT)
            assert here.neutron.ports == {"theirs": THEIRS}
        assert east.keystone.signed_in == signed_in
