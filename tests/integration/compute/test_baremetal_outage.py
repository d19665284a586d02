"""Builds of bare metal while Ironic or Keystone is away, several Ironics, and ports made in Neutron."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvicorn
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from berth.trial.embedded.process import free_port
from berth.trial.ironic_stand_in import Behaviour, IronicStandIn, NodePool, Silent
from berth.trial.worker_processes import NO_TLS
from bus.clock import SystemClock
from bus.contracts.cell import ComputeOutcome, Running
from bus.contracts.deploy import NetworkRequest
from bus.openstack.login import KeystoneLogin
from compute_sim.config import ComputeConfig, IronicConfig, NeutronConfig
from compute_sim.driver import Build, BuildAbort, DriverUnavailable, Reschedule
from compute_sim.drivers.ironic.deployment import LOCK_TRIES
from compute_sim.drivers.ironic.driver import BareMetal
from compute_sim.fleet import Fleet
from tests.integration.compute.harness import CELL, DEPLOYMENT, PATIENCE_S, Cell
from tests.integration.compute.test_baremetal_access import Server, has_token_of, served
from tests.integration.compute.test_baremetal_deploy import INSTANCE, build
from tests.kit.keystone import KeystoneStandIn, keystone_stand_in

# --- builds of bare metal while Ironic's API, its conductor or Keystone is away: real HTTP servers that go and return


QUICK = Behaviour(verify_s=0.001, deploy_s=0.01, undeploy_s=0.005, clean_s=0.005)


class Counting(httpx.AsyncBaseTransport):
    """A way to Ironic that counts the requests that found no server, and answers as planned.

    plan: called with each request; an answer of its own is taken instead of Ironic's.
    """

    def __init__(self, plan: Callable[[httpx.Request], httpx.Response | None] = lambda _: None) -> None:
        self._inner = httpx.AsyncHTTPTransport(verify=NO_TLS)
        self._plan = plan
        self.unanswered = 0
        self.changed = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        planned = self._plan(request)
        if planned is not None:
            return planned
        try:
            return await self._inner.handle_async_request(request)
        except httpx.TransportError:
            self.unanswered += 1
            self.changed.set()
            raise

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def until_unanswered(self, more: int) -> None:
        wanted = self.unanswered + more
        async with asyncio.timeout(PATIENCE_S):
            while self.unanswered < wanted:
                self.changed.clear()
                await self.changed.wait()


class Skipping(SystemClock):
    """Each sleep takes so much longer than it should, by its own reckoning, and no time by anyone else's."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._skipped = 0.0
        self.slept: list[float] = []

    def skip(self, seconds: float) -> None:
        self._skipped += seconds

    def monotonic(self) -> float:
        return super().monotonic() + self._skipped

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._skipped += seconds * self._factor
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def ironic() -> AsyncIterator[IronicStandIn]:
    stand_in = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=QUICK, port=free_port())
    await stand_in.start()
    stand_in.pool.plan(3)
    yield stand_in
    await stand_in.stop()


def config(ironic: IronicStandIn, **more: Any) -> IronicConfig:
    return IronicConfig(url=ironic.url, poll_interval_s=0.005, max_poll_interval_s=0.05, **more)


async def spawned(settings: IronicConfig, node: str, way: Counting, clock: SystemClock | None = None) -> str:
    driver = BareMetal(settings, cell=CELL, service="c1-a", clock=clock or SystemClock(), transport=way)
    await driver.open()
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await driver.spawn(build(node))
    finally:
        await driver.close()


async def test_a_build_waits_for_an_ironic_that_restarts_and_its_result_names_the_outage(
    cell: Cell, ironic: IronicStandIn
) -> None:
    """Its attempt failed at once, and its alternates', which are nodes of the same Ironic, with it."""
    settings = ComputeConfig(driver="ironic", hosts=0, ironic=config(ironic))
    way = Counting()
    driver = BareMetal(settings.ironic, cell=CELL, service="c1-a", clock=SystemClock(), transport=way)
    life = await cell.compute(settings, Fleet.planned(settings, CELL, "c1-a"), driver=driver)
    node, instance = next(iter(ironic.pool.nodes)), cell.instance()
    await ironic.stop()
    await cell.spawn(node, instance)
    await way.until_unanswered(5)
    assert not cell.results(instance)
    (waits,) = driver.waiting()
    assert (waits.instance_uuid, waits.attempt) == (instance, 1) and "ConnectError" in waits.reason
    await ironic.start()
    result = await cell.outcome(instance, 1)
    assert driver.waiting() == []
    assert result.outcome is ComputeOutcome.ACTIVE, result
    assert result.reason.startswith("waited ") and "ConnectError" in result.reason, result
    assert len(cell.results(instance)) == 1
    await life.stop()


class Late(BareMetal):
    """A driver that returns from its builds only when it is let."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.let = asyncio.Event()

    async def spawn(self, wanted: Build) -> str:
        await super().spawn(wanted)
        await self.let.wait()
        return "waited for the test"


async def test_a_report_does_not_end_a_build_before_its_driver_has(cell: Cell, ironic: IronicStandIn) -> None:
    """A report that named the machine as complete overtook the result, and the driver's remark was lost."""
    settings = ComputeConfig(driver="ironic", hosts=0, ironic=config(ironic))
    driver = Late(settings.ironic, cell=CELL, service="c1-a", clock=SystemClock())
    life = await cell.compute(settings, Fleet.planned(settings, CELL, "c1-a"), driver=driver)
    node, instance = next(iter(ironic.pool.nodes)), cell.instance()
    await cell.spawn(node, instance)

    async def reported() -> bool:
        """As the next page that shows the machine on a deployed node has it."""
        first = len(cell.announced())
        await cell.ask()

        def shown() -> list[Running]:
            hosts = [host for page in cell.announced()[first:] for host in page.hosts if host.uuid == node]
            return [machine for host in hosts for machine in host.running or ()]

        machine: Running = (await cell.until(shown))[0]
        return machine.built

    async with asyncio.timeout(PATIENCE_S):
        while ironic.pool.nodes[node]["provision_state"] != "active":  # noqa: ASYNC110  (what is asked is a server)
            await asyncio.sleep(0.005)
    assert await reported() is False
    driver.let.set()
    assert (await cell.outcome(instance, 1)).reason == "waited for the test"
    assert await reported() is True
    await life.stop()


async def test_an_ironic_that_stays_down_ends_the_attempt_after_a_time_with_its_fault(ironic: IronicStandIn) -> None:
    node, way = next(iter(ironic.pool.nodes)), Counting()
    await ironic.stop()
    with pytest.raises(DriverUnavailable, match=r"ConnectError; waited .* s for Ironic"):
        await spawned(config(ironic, outage_timeout_s=1_000.0), node, way, Skipping(1_000.0))
    assert way.unanswered > 2
    await ironic.start()


async def test_a_build_without_an_outage_has_no_remark(ironic: IronicStandIn) -> None:
    assert await spawned(config(ironic), next(iter(ironic.pool.nodes)), Counting()) == ""


@pytest.mark.parametrize("method", ["GET", "PATCH", "PUT"])
async def test_a_conductor_of_ironic_that_restarts_is_waited_for(ironic: IronicStandIn, method: str) -> None:
    """The API goes on meanwhile: its nodes name no conductor, and it answers 400 to every change."""
    node = next(iter(ironic.pool.nodes))
    looks = 0

    def plan(request: httpx.Request) -> httpx.Response | None:
        nonlocal looks
        kept = ironic.pool.nodes[node]
        if request.method == method and not looks:
            kept["conductor"] = None
        if kept.get("conductor", "c1") is None:
            looks += 1
            if looks > 6:
                kept["conductor"] = "c1"
            elif request.method != "GET":
                return httpx.Response(400, json={"error_message": {"faultstring": "No valid host was found."}})
        return None

    remark = await spawned(config(ironic), node, Counting(plan))
    assert ironic.pool.nodes[node]["provision_state"] == "active" and "no conductor" in remark


async def test_what_ironic_refuses_while_its_conductor_is_there_is_the_nodes_fault(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes))
    ironic.pool.nodes[node]["conductor"] = "c1"
    way = Counting(lambda request: httpx.Response(400) if request.method == "PATCH" else None)
    with pytest.raises(Reschedule) as caught:
        await spawned(config(ironic), node, way)
    assert caught.value.code == "node.refused"


async def test_a_keystone_that_is_down_is_waited_for_like_ironic(ironic: IronicStandIn) -> None:
    login = KeystoneLogin(auth_url="http://127.0.0.1:1", username="berth", password="right")
    with pytest.raises(DriverUnavailable, match=r"Keystone at .*; waited"):
        await spawned(config(ironic, keystone=login, outage_timeout_s=0.1), next(iter(ironic.pool.nodes)), Counting())


@pytest.mark.parametrize(("conflicts", "ends"), [(LOCK_TRIES - 1, False), (LOCK_TRIES + 1, True)])
async def test_a_node_counts_as_locked_after_so_many_refusals_however_long_each_takes(
    ironic: IronicStandIn, conflicts: int, ends: bool
) -> None:
    """Two of 500 builds at once had failed: under load two short locks, 30 s apart, counted as one that lasted."""
    node, left = next(iter(ironic.pool.nodes)), conflicts

    def plan(request: httpx.Request) -> httpx.Response | None:
        nonlocal left
        if request.method != "PATCH" or not left:
            return None
        left -= 1
        return httpx.Response(409)

    try:
        await spawned(config(ironic, deploy_timeout_s=80_000), node, Counting(plan), Skipping(10_000))
    except Reschedule as fault:
        assert ends and fault.code == "node.locked", fault
    else:
        assert not ends


async def test_a_look_that_ironic_did_not_answer_is_repeated_soon_however_long_it_took(ironic: IronicStandIn) -> None:
    """It paused for twenty times as long as the look had taken: after a hang of 10 s, for 200 s."""
    clock, hung = Skipping(1.0), 3

    def plan(_: httpx.Request) -> httpx.Response | None:
        nonlocal hung
        if not hung:
            return None
        hung -= 1
        clock.skip(10.0)
        raise httpx.ReadTimeout("hung")

    settings = config(ironic, watch_interval_s=2.0)
    driver = BareMetal(settings, cell=CELL, service="c1-a", clock=clock, transport=Counting(plan))
    found: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
    driver.on_change(lambda _: None if found.done() else found.set_result(list(clock.slept)))
    await driver.open()
    watching = asyncio.create_task(driver.watch())
    async with asyncio.timeout(PATIENCE_S):
        slept = await found
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await driver.close()
    assert slept == [1.0, 1.0, 1.0]


# --- ports made in Neutron for bare metal, and several Ironics side by side, each with its Keystone and its Neutron


NET, UNKNOWN_NET = "a0000000-0000-4000-8000-000000000001", "a0000000-0000-4000-8000-00000000000f"
PORT = "90000000-0000-4000-8000-000000000000"
NAMED = {"id": PORT, "name": "eth0", "device_id": "", "network_id": NET}
THEIRS = {"id": "theirs", "name": "web", "device_id": INSTANCE, "network_id": NET}


class Neutron:
    """As much of Neutron as is used here; it answers 401 to any token that is not its Keystone's."""

    def __init__(self, keystone: KeystoneStandIn) -> None:
        self.ports: dict[str, dict[str, Any]] = {"theirs": dict(THEIRS), PORT: dict(NAMED)}
        self.made = 0
        self.removals: list[str] = []
        self.status = 0  # what every request is answered with; 0: as it should be
        self._keystone = keystone
        self.app = Starlette(
            routes=[
                Route("/v2.0/ports", self._ports, methods=["GET", "POST"]),
                Route("/v2.0/ports/{port}", self._port, methods=["GET", "DELETE"]),
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


async def neutron_spawned(here: Region, requested: Build) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await here.driver.spawn(requested)


async def test_a_port_is_made_attached_and_removed_and_others_are_left() -> None:
    async with region("east") as here:
        node = next(iter(here.pool.nodes))
        await neutron_spawned(here, wanted(node, NetworkRequest(network=NET), NetworkRequest(port=PORT)))
        assert here.pool.vifs[node] == ["made-1", PORT]
        made = here.neutron.ports["made-1"]
        assert (made["device_id"], made["project_id"], made["binding:vnic_type"]) == (INSTANCE, "acme", "baremetal")
        await here.driver.destroy(node, INSTANCE, 1, DEPLOYMENT)
        assert here.neutron.ports == {"theirs": THEIRS, PORT: NAMED} and here.neutron.removals == ["made-1"]


async def test_a_port_that_neutron_does_not_have_ends_the_build() -> None:
    """Ironic answers as if it had failed itself, and every node was tried."""
    async with region("east") as here:
        unknown = NetworkRequest(port="90000000-0000-4000-8000-00000000000f")
        with pytest.raises(BuildAbort) as caught:
            await neutron_spawned(here, wanted(next(iter(here.pool.nodes)), unknown))
        assert caught.value.code == "network.refused"


async def test_a_build_that_is_repeated_makes_no_second_port() -> None:
    async with region("east") as here:
        node = next(iter(here.pool.nodes))
        here.pool.invalid[node] = "no"
        for _ in range(2):
            with contextlib.suppress(Exception):
                await neutron_spawned(here, wanted(node, NetworkRequest(network=NET)))
        assert here.neutron.made == 1


async def test_an_attempt_removes_its_own_ports_and_not_the_next_attempts() -> None:
    """The failed attempt is cleared away while the next one, on another node, has its ports already."""
    async with region("east") as here:
        first, second = list(here.pool.nodes)[:2]
        here.pool.invalid[first] = "no"
        with contextlib.suppress(Exception):
            await neutron_spawned(here, wanted(first, NetworkRequest(network=NET)))
        here.pool.nodes[first].update(instance_uuid=None, instance_info={})
        await neutron_spawned(here, wanted(second, NetworkRequest(network=NET)))
        await here.driver.destroy(first, INSTANCE, 1, DEPLOYMENT)
        assert here.neutron.removals == ["made-1"] and "made-2" in here.neutron.ports


async def test_neutrons_words_are_the_reason_and_its_outage_is_waited_for() -> None:
    async with region("east") as here:
        node = next(iter(here.pool.nodes))
        with pytest.raises(BuildAbort, match=f"Network {UNKNOWN_NET} could not be found") as caught:
            await neutron_spawned(here, wanted(node, NetworkRequest(network=UNKNOWN_NET)))
        assert caught.value.code == "network.refused"
        await here.driver.destroy(node, INSTANCE, 1, DEPLOYMENT)
        here.neutron.status = 503
        building = asyncio.create_task(neutron_spawned(here, wanted(node, NetworkRequest(network=NET))))
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
            await neutron_spawned(here, wanted(node, NetworkRequest(network=NET)))
            assert here.pool.nodes[node]["provision_state"] == "active" and here.neutron.made == 1
            assert all(token.startswith(here.keystone.issues) for token in here.keystone.services)
        west.keystone.services.clear()  # revoked: one signs in again, and the other is left alone
        signed_in = east.keystone.signed_in
        for here in (east, west):
            await here.driver.destroy(next(iter(here.pool.nodes)), INSTANCE, 1, DEPLOYMENT)
            assert here.neutron.ports == {"theirs": THEIRS, PORT: NAMED}
        assert east.keystone.signed_in == signed_in
