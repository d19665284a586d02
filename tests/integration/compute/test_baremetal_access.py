"""How the bare-metal driver reaches Ironic, a node's health by Ironic's word, and boot from volume."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvicorn
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from berth.trial.ironic_stand_in import Behaviour, IronicStandIn, NodePool, Silent
from bus.clock import SystemClock, new_uuid
from bus.contracts.build import BuildRequest
from bus.contracts.deploy import ImageSource, VolumeRequest
from bus.openstack.login import KeystoneLogin
from compute_sim.config import IronicConfig
from compute_sim.driver import Build, BuildAbort, DriverHost, DriverUnavailable, Reschedule
from compute_sim.drivers.ironic import driver as driver_module
from compute_sim.drivers.ironic.api import IronicApi
from compute_sim.drivers.ironic.driver import BareMetal
from compute_sim.drivers.ironic.probation import Probation
from tests.integration.compute.harness import CELL, DEPLOYMENT, PATIENCE_S
from tests.integration.compute.test_baremetal import bare_metal, build, ironic, settings
from tests.integration.compute.test_baremetal_deploy import INSTANCE as VOLUMES_INSTANCE
from tests.integration.compute.test_baremetal_deploy import build as volumes_build
from tests.kit.certificates import Authority, Certificate
from tests.kit.keystone import KeystoneStandIn, keystone_stand_in

# --- how the bare-metal driver reaches Ironic: Keystone's tokens, HTTP basic, TLS with an operator's own authority


INSTANCE = "20000000-0000-4000-8000-000000000000"
SLOW = Behaviour(deploy_s=0.3, undeploy_s=0.005, clean_s=0.01)


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def served(
    passes: Callable[[dict[bytes, bytes]], bool], certificate: Certificate | None = None
) -> AsyncIterator[tuple[NodePool, str]]:
    """An Ironic that answers requests whose headers pass, over TLS where it has a certificate; and its address."""
    ironic = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=SLOW)
    ironic.pool.plan(2)
    inner: ASGIApp = ironic.app()

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        answer = inner if passes(dict(scope["headers"])) else Response(status_code=401)
        await answer(scope, receive, send)

    how: dict[str, Any] = {"timeout_keep_alive": 75}  # a client that stood still finds its connection open
    if certificate is not None:
        how |= {"ssl_certfile": certificate.file, "ssl_keyfile": certificate.key}
    listening = socket.create_server(("127.0.0.1", 0))
    server = Server(uvicorn.Config(guard, log_config=None, lifespan="off", loop="none", **how))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not server.started:  # noqa: ASYNC110  # uvicorn has a flag, not an event
                await asyncio.sleep(0.01)  # until it listens
        yield ironic.pool, f"{'http' if certificate is None else 'https'}://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        await ironic.pool.stop()


@contextlib.asynccontextmanager
async def driver(url: str, **more: Any) -> AsyncIterator[BareMetal]:
    made = bare_metal(IronicConfig(url=url, poll_interval_s=0.005, **more))
    await made.open()
    try:
        yield made
    finally:
        await made.close()


async def deploy_and_delete(made: BareMetal, pool: NodePool) -> None:
    node = next(iter(pool.nodes))
    await made.spawn(build(node, INSTANCE))
    assert pool.nodes[node]["instance_uuid"] == INSTANCE
    await made.destroy(node, INSTANCE, 1, DEPLOYMENT)
    assert pool.nodes[node]["instance_uuid"] is None


def has_token_of(keystone: KeystoneStandIn) -> Callable[[dict[bytes, bytes]], bool]:
    return lambda headers: headers.get(b"x-auth-token", b"").decode() in keystone.services


async def test_a_deployment_outlives_its_token() -> None:
    """Keystone's tokens last for an hour, a deployment may; and any of them may be revoked."""
    async with keystone_stand_in() as (keystone, auth_url), served(has_token_of(keystone)) as (pool, url):
        login = KeystoneLogin(auth_url=auth_url, username="berth", password="right")
        async with driver(url, keystone=login) as made:
            node = next(iter(pool.nodes))
            building = asyncio.create_task(made.spawn(build(node, INSTANCE)))
            async with asyncio.timeout(PATIENCE_S):
                while pool.nodes[node]["provision_state"] != "deploying":  # noqa: ASYNC110  (what is asked is a server)
                    await asyncio.sleep(0.005)
            keystone.services.clear()
            await building
            assert keystone.signed_in == 2
            keystone.lasts = timedelta(seconds=1)  # from now on each is out of date when it comes
            await made.destroy(node, INSTANCE, 1, DEPLOYMENT)
            assert keystone.signed_in == 2


async def test_an_application_credential_deploys() -> None:
    async with keystone_stand_in() as (keystone, auth_url), served(has_token_of(keystone)) as (pool, url):
        login = KeystoneLogin(auth_url=auth_url, application_credential_id="id", application_credential_secret="right")
        async with driver(url, keystone=login) as made:
            await deploy_and_delete(made, pool)
        assert keystone.methods == ["application_credential"]


async def test_a_keystone_that_refuses_or_is_down_costs_no_build() -> None:
    """It is no fault of the node's: nothing was taken, and the service tries again."""
    async with keystone_stand_in() as (keystone, auth_url), served(has_token_of(keystone)) as (pool, url):
        for login in (
            KeystoneLogin(auth_url=auth_url, username="berth", password="wrong"),
            KeystoneLogin(auth_url="http://127.0.0.1:1", username="berth", password="right"),
        ):
            async with driver(url, keystone=login, outage_timeout_s=0.05) as made:
                with pytest.raises(DriverUnavailable, match="Keystone"):
                    await made.spawn(build(next(iter(pool.nodes)), INSTANCE))
        assert all(node["instance_uuid"] is None for node in pool.nodes.values())


async def test_basic_sign_in() -> None:
    expected = b"Basic " + base64.b64encode(b"berth:secret")
    async with served(lambda headers: headers.get(b"authorization") == expected) as (pool, url):
        async with driver(url, username="berth", password="secret") as made:
            await deploy_and_delete(made, pool)
        async with driver(url, username="berth", password="other") as made:
            with pytest.raises(DriverUnavailable, match="401"):
                await made.hosts()


async def test_tls_with_an_authority_of_the_operators(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate = authority.issue("ironic", "IP:127.0.0.1")
    async with served(lambda _: True, certificate) as (pool, url):
        async with driver(url, ca_file=str(authority.file)) as made:
            await deploy_and_delete(made, pool)
        async with driver(url) as made:  # of which this system knows nothing
            with pytest.raises(DriverUnavailable):
                await made.hosts()
        async with driver(url, verify_tls=False) as made:
            assert len(await made.hosts()) == 2


async def test_tls_for_another_name_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate = authority.issue("ironic", "DNS:ironic.example.org")
    async with served(lambda _: True, certificate) as (_, url), driver(url, ca_file=str(authority.file)) as made:
        with pytest.raises(DriverUnavailable):
            await made.hosts()


# --- a node's health, by Ironic's word: what is critical takes no build, what was repaired proves itself first


assert ironic  # a fixture

CANARY = "canary"


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


# --- boot from volume: which volume targets a build makes on its node, and what becomes of them


QUICK = Behaviour(verify_s=0.001, deploy_s=0.01, undeploy_s=0.005, clean_s=0.005)
SECRET = "chap-secret"
ROOT = VolumeRequest(volume_id="v-root", properties={"target_iqn": "iqn.2026-11:v", "auth_password": SECRET})
DATA = VolumeRequest(volume_id="v-data", boot_index=1)
OTHERS = {"berth": {"deployment": "eeeeeeee-0000-4000-8000-000000000001", "instance": VOLUMES_INSTANCE, "attempt": 1}}


@pytest_asyncio.fixture
async def volumes_ironic() -> AsyncIterator[IronicStandIn]:
    stand_in = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=QUICK)
    await stand_in.start()
    stand_in.pool.plan(2)
    for node in stand_in.pool.nodes.values():
        node["storage_interface"] = "external"
    yield stand_in
    await stand_in.stop()


@pytest_asyncio.fixture
async def volumes_driver(volumes_ironic: IronicStandIn) -> AsyncIterator[BareMetal]:
    made = driver_of(volumes_ironic)
    await made.open()
    yield made
    await made.close()


def driver_of(volumes_ironic: IronicStandIn, **more: Any) -> BareMetal:
    settings: dict[str, Any] = {"volumes": "static", "poll_interval_s": 0.005, "max_poll_interval_s": 0.01, **more}
    return BareMetal(IronicConfig(url=volumes_ironic.url, **settings), cell=CELL, service="c1-a", clock=SystemClock())


def targets(volumes_ironic: IronicStandIn) -> dict[str, int]:
    return {one["volume_id"]: one["boot_index"] for one in volumes_ironic.pool.volume_targets.values()}


def put_target(volumes_ironic: IronicStandIn, node: str, volume: str, index: int, extra: dict[str, Any]) -> None:
    uuid = new_uuid(random.SystemRandom())
    kept = {"uuid": uuid, "node_uuid": node, "volume_id": volume, "boot_index": index, "extra": extra}
    volumes_ironic.pool.volume_targets[uuid] = kept


async def spawned(volumes_driver: BareMetal, wanted: Build) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await volumes_driver.spawn(wanted)


async def test_a_machine_boots_from_its_volume_and_lets_go_of_it(
    volumes_ironic: IronicStandIn, volumes_driver: BareMetal
) -> None:
    node = next(iter(volumes_ironic.pool.nodes))
    await spawned(volumes_driver, volumes_build(node, volumes=(ROOT, DATA)))
    kept = volumes_ironic.pool.nodes[node]
    assert kept["provision_state"] == "active" and "image_source" not in kept["instance_info"]
    assert targets(volumes_ironic) == {"v-root": 0, "v-data": 1}
    (root,) = (one for one in volumes_ironic.pool.volume_targets.values() if one["boot_index"] == 0)
    assert (root["node_uuid"], root["volume_type"], root["properties"]) == (node, "iscsi", ROOT.properties)
    put_target(volumes_ironic, node, "operators", 7, {})
    put_target(volumes_ironic, node, "of another berth", 8, OTHERS)
    async with asyncio.timeout(PATIENCE_S):
        await volumes_driver.destroy(node, VOLUMES_INSTANCE, 1, DEPLOYMENT)
    assert volumes_ironic.pool.nodes[node]["instance_uuid"] is None
    assert targets(volumes_ironic) == {"operators": 7, "of another berth": 8}, "what is not ours stays"


async def test_what_an_earlier_instance_left_is_not_attached_to_the_next(
    volumes_ironic: IronicStandIn, volumes_driver: BareMetal
) -> None:
    node = next(iter(volumes_ironic.pool.nodes))
    earlier = {"deployment": DEPLOYMENT, "instance": "70000000-0000-4000-8000-000000000000", "attempt": 1}
    put_target(volumes_ironic, node, "a customer's", 0, {"berth": earlier})
    await spawned(volumes_driver, volumes_build(node, volumes=(ROOT,)))
    assert targets(volumes_ironic) == {"v-root": 0}


async def test_an_interrupted_build_makes_each_target_once(
    volumes_ironic: IronicStandIn, volumes_driver: BareMetal
) -> None:
    node = next(iter(volumes_ironic.pool.nodes))
    volumes_ironic.pool.invalid[node] = "no"
    with pytest.raises(Reschedule):
        await spawned(volumes_driver, volumes_build(node, volumes=(ROOT,)))
    assert targets(volumes_ironic) == {"v-root": 0}
    volumes_ironic.pool.invalid.clear()
    await spawned(volumes_driver, volumes_build(node, volumes=(ROOT,)))
    assert targets(volumes_ironic) == {"v-root": 0} and volumes_ironic.pool.nodes[node]["provision_state"] == "active"


async def test_a_node_that_stays_switched_on_keeps_its_target_and_is_named(volumes_ironic: IronicStandIn) -> None:
    driver = driver_of(volumes_ironic, clean_timeout_s=0.1)
    await driver.open()
    node = next(iter(volumes_ironic.pool.nodes))
    ours = {"deployment": DEPLOYMENT, "instance": VOLUMES_INSTANCE, "attempt": 1}
    put_target(volumes_ironic, node, "v-root", 0, {"berth": ours})
    volumes_ironic.pool.nodes[node]["power_state"] = "power on"
    with pytest.raises(DriverUnavailable, match="keeps a volume target: Ironic answered 400"):
        await driver.destroy(node, VOLUMES_INSTANCE, 1, DEPLOYMENT)
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
    volumes_ironic: IronicStandIn, spec: dict[str, Any], setting: str, interface: str, code: str
) -> None:
    node = next(iter(volumes_ironic.pool.nodes))
    volumes_ironic.pool.nodes[node]["storage_interface"] = interface
    driver = driver_of(volumes_ironic, volumes=setting)
    await driver.open()
    with pytest.raises((BuildAbort, Reschedule)) as caught:
        await spawned(driver, volumes_build(node, **spec))
    assert caught.value.code == code and not targets(volumes_ironic)
    await driver.close()


def test_a_volume_is_one_machines_and_its_secrets_are_not_printed() -> None:
    with pytest.raises(ValueError, match="a volume is one machine's"):
        BuildRequest(instance_uuid=VOLUMES_INSTANCE, flavor="m", project_id="p", volumes=(ROOT,), count=2)
    with pytest.raises(ValueError, match="16384"):
        VolumeRequest(volume_id="v", properties={"x": "y" * 17_000})
    assert SECRET not in repr(BuildRequest(instance_uuid=VOLUMES_INSTANCE, flavor="m", project_id="p", volumes=(ROOT,)))
