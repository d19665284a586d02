"""The data that a bare-metal build gives Ironic, and its end when Ironic, a node or an earlier attempt prevents it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace

from berth.trial.ironic_stand_in import Behaviour, IronicStandIn, Silent
from berth.trial.worker_processes import NO_TLS
from bus.clock import SystemClock
from bus.contracts.cell import InstanceSpec
from bus.contracts.deploy import ConfigDrive, ImageSource, NetworkRequest
from bus.contracts.moves import MACHINE_ABSENT, RESCUE_FAILED, ChangeKind
from compute_sim.config import IronicConfig
from compute_sim.driver import (
    Build,
    BuildAbort,
    BuildFault,
    ChangeFault,
    ChangeOrder,
    DriverUnavailable,
    MachineProtected,
    NotOurs,
    Reschedule,
)
from compute_sim.drivers.ironic.driver import BareMetal
from tests.integration.compute.harness import CELL, DEPLOYMENT, PATIENCE_S

INSTANCE = "20000000-0000-4000-8000-000000000000"
PORT = "90000000-0000-4000-8000-000000000000"
DIGEST = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
IMAGE = ImageSource(source="http://images/debian.qcow2", hash_algorithm="sha256", hash_value=DIGEST, type="whole-disk")
QUICK = Behaviour(verify_s=0.001, deploy_s=0.01, undeploy_s=0.005, clean_s=0.005)


@pytest_asyncio.fixture
async def ironic() -> AsyncIterator[IronicStandIn]:
    stand_in = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=QUICK)
    await stand_in.start()
    stand_in.pool.plan(3)
    yield stand_in
    await stand_in.stop()


def config(ironic: IronicStandIn, **more: Any) -> IronicConfig:
    return IronicConfig(url=ironic.url, poll_interval_s=0.005, **more)


_opened: list[BareMetal] = []


@pytest_asyncio.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    while _opened:
        await _opened.pop().close()


async def driver_of(settings: IronicConfig, transport: httpx.AsyncBaseTransport | None = None) -> BareMetal:
    driver = BareMetal(settings, cell=CELL, service="c1-a", clock=SystemClock(), transport=transport)
    _opened.append(driver)
    await driver.open()
    return driver


def build(node: str, attempt: int = 1, **spec: Any) -> Build:
    return Build(
        node, InstanceSpec(instance_uuid=INSTANCE, project_id="acme", **spec), attempt, {node: {"X": 1}}, DEPLOYMENT
    )


async def deployed(settings: IronicConfig, wanted: Build) -> BareMetal:
    driver = await driver_of(settings)
    async with asyncio.timeout(PATIENCE_S):
        await driver.spawn(wanted)
    return driver


async def test_ironic_receives_what_to_deploy(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes))
    requested = build(
        node,
        name="web 1",
        image_source=IMAGE,
        root_gb=50,
        traits=("CUSTOM_RAID",),
        capabilities={"boot_mode": "uefi"},
        config_drive=ConfigDrive(
            user_data="#cloud-config\n", public_keys=("ssh-ed25519 AAAA me",), network_data={"links": []}
        ),
    )
    await deployed(config(ironic), requested)
    kept = ironic.pool.nodes[node]
    assert {name: value for name, value in kept["instance_info"].items() if name != "berth"} == {
        "project_id": "acme",
        "display_name": "web 1",
        "root_gb": 50,
        "traits": ["CUSTOM_RAID"],
        "capabilities": {"boot_mode": "uefi"},
        "image_source": "http://images/debian.qcow2",
        "image_os_hash_algo": "sha256",
        "image_os_hash_value": DIGEST,
        "image_type": "whole-disk",
    }
    drive = ironic.pool.config_drives[node]
    assert drive["user_data"] == "#cloud-config\n" and drive["network_data"] == {"links": []}
    assert drive["meta_data"]["public_keys"] == {"key0": "ssh-ed25519 AAAA me"}
    assert (drive["meta_data"]["hostname"], drive["meta_data"]["uuid"]) == ("web-1", INSTANCE)
    assert [method for method, _ in ironic.requested] == ["PATCH", "PUT"], "all of it is written with the instance"


async def test_a_partition_image_is_written_with_its_kernel_and_ramdisk(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes))
    image = replace(IMAGE, type="partition", kernel="http://images/vmlinuz", ramdisk="http://images/initrd")
    await deployed(config(ironic), build(node, image_source=image, root_gb=50))
    info = ironic.pool.nodes[node]["instance_info"]
    assert (info["kernel"], info["ramdisk"]) == ("http://images/vmlinuz", "http://images/initrd")
    assert (info["image_type"], info["root_gb"]) == ("partition", 50)


async def test_an_image_is_known_by_name_or_the_build_is_given_up(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes))
    settings = config(ironic, images={"debian-12": IMAGE})
    driver = await deployed(settings, build(node, image="debian-12"))
    assert ironic.pool.nodes[node]["instance_info"]["image_source"] == IMAGE.source
    with pytest.raises(BuildAbort) as caught:
        await driver.spawn(build(node, image="debian-13"))
    assert caught.value.code == "image.unknown" and "debian-12" in caught.value.reason


async def test_ironics_own_words_explain_why_a_node_was_not_deployed(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes))
    ironic.pool.invalid[node] = "Missing are: ['driver_info.deploy_kernel']"
    driver = await driver_of(config(ironic))
    with pytest.raises(Reschedule) as caught:
        await driver.spawn(build(node))
    assert caught.value.code == "node.invalid"
    assert caught.value.reason == "deploy: Missing are: ['driver_info.deploy_kernel']"
    assert ironic.pool.nodes[node]["provision_state"] == "available", "nothing was begun"
    await driver.destroy(node, INSTANCE, 1, DEPLOYMENT)
    assert ironic.pool.nodes[node]["instance_uuid"] is None and ironic.pool.nodes[node]["instance_info"] == {}
    ironic.pool.invalid.clear()
    ironic.pool.behaviour = msgspec.structs.replace(QUICK, deploy_fails=1.0)
    with pytest.raises(Reschedule) as caught:
        await driver.spawn(build(node, attempt=2))
    words, _, history = caught.value.reason.partition("; its history: ")
    assert words == "the node is in deploy failed: Timeout reached while waiting for callback"
    assert history.endswith(" deploying: Timeout reached while waiting for callback")


OF_REQUEST = [
    "Cannot validate image information for node N because one or more parameters are missing from its instance_info.",
    f"Validation of image href {IMAGE.source} failed, reason: Got HTTP code 404 instead of 200 in response to HEAD",
    "Failed to prepare to deploy: The requested image is not valid for use.",
    "The supplied image checksum is invalid or does not match.",
]
OF_NODE = "Validation of image href http://images/ipa.kernel failed, reason: Got HTTP code 404 instead of 200"


@pytest.mark.parametrize(
    ("words", "kind"), [*((words, BuildAbort) for words in OF_REQUEST), (OF_NODE, Reschedule), ("no IPMI", Reschedule)]
)
@pytest.mark.parametrize("begun", [False, True])
async def test_what_ironic_refuses_of_the_request_is_not_tried_on_node_after_node(
    ironic: IronicStandIn, words: str, kind: type[BuildFault], *, begun: bool
) -> None:
    """Each node was cleaned and charged for an image that no node accepts."""
    node = next(iter(ironic.pool.nodes))
    if begun:
        ironic.pool.behaviour = replace(QUICK, deploy_fails=1.0, failure=words)
    else:
        ironic.pool.invalid[node] = words
    driver = await driver_of(config(ironic))
    with pytest.raises(kind) as caught:
        async with asyncio.timeout(PATIENCE_S):
            await driver.spawn(build(node, image_source=IMAGE))
    assert caught.value.code == ("node.deploy_failed" if begun else "node.invalid")


async def test_a_port_that_does_not_exist_ends_the_build(ironic: IronicStandIn) -> None:
    ironic.pool.no_ports = {PORT}
    driver = await driver_of(config(ironic, network="static"))
    with pytest.raises(BuildAbort) as caught:
        await driver.spawn(build(next(iter(ironic.pool.nodes)), networks=(NetworkRequest(port=PORT),)))
    assert caught.value.code == "network.refused"


async def test_ports_are_attached_before_the_deployment_and_detached_when_it_never_began(
    ironic: IronicStandIn,
) -> None:
    first, second, _ = ironic.pool.nodes
    requested: dict[str, Any] = {"networks": (NetworkRequest(port=PORT),)}
    driver = await deployed(config(ironic, network="static"), build(first, **requested))
    assert ironic.pool.vifs[first] == [PORT]
    await driver.destroy(first, INSTANCE, 1, DEPLOYMENT)
    ironic.pool.invalid[second] = "no"
    with pytest.raises(Reschedule):
        await driver.spawn(build(second, attempt=2, **requested))
    assert ironic.pool.vifs[second] == [PORT]
    await driver.destroy(second, INSTANCE, 2, DEPLOYMENT)
    assert ironic.pool.vifs[second] == []


@pytest.mark.parametrize(
    ("network", "requested", "code"),
    [("none", NetworkRequest(port=PORT), "network.none"), ("static", NetworkRequest(network=PORT), "network.static")],
)
async def test_networks_that_no_node_here_can_have_end_the_build(
    ironic: IronicStandIn, network: str, requested: NetworkRequest, code: str
) -> None:
    driver = await driver_of(config(ironic, network=network))
    with pytest.raises(BuildAbort) as caught:
        await driver.spawn(build(next(iter(ironic.pool.nodes)), networks=(requested,)))
    assert caught.value.code == code


async def test_an_alternate_waits_until_the_failed_node_has_let_go(ironic: IronicStandIn) -> None:
    """The alternate failed with node.taken, and the good node was charged with it: three times of three."""
    failing, good, _ = ironic.pool.nodes
    ironic.pool.behaviour = msgspec.structs.replace(QUICK, deploy_fails=1.0, undeploy_s=0.2)
    driver = await driver_of(config(ironic))
    with pytest.raises(Reschedule):
        await driver.spawn(build(failing))
    ironic.pool.behaviour = msgspec.structs.replace(QUICK, undeploy_s=0.2)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(driver.destroy(failing, INSTANCE, 1, DEPLOYMENT), driver.spawn(build(good, attempt=2)))
    assert ironic.pool.nodes[good]["provision_state"] == "active"
    assert ironic.pool.nodes[failing]["instance_uuid"] is None


async def test_a_node_that_does_not_let_go_ends_the_build_and_is_named(ironic: IronicStandIn) -> None:
    failing, good, _ = ironic.pool.nodes
    driver = await deployed(config(ironic, release_timeout_s=0.05), build(failing))
    ironic.pool.nodes[failing].update(provision_state="error", last_error="the BMC does not answer")
    with pytest.raises(BuildAbort) as caught:  # final: no other node could take the instance, and none is charged
        await driver.spawn(build(good, attempt=2))
    assert caught.value.code == "node.not_released"
    assert failing in caught.value.reason and "the BMC does not answer" in caught.value.reason


async def test_an_instance_that_another_deployment_has_on_a_node_is_built_nowhere(ironic: IronicStandIn) -> None:
    theirs, free, _ = ironic.pool.nodes
    ironic.pool.nodes[theirs].update(instance_uuid=INSTANCE, provision_state="active")
    driver = await driver_of(config(ironic))
    with pytest.raises(BuildAbort) as caught:
        await driver.spawn(build(free))
    assert caught.value.code == "instance.elsewhere" and ironic.pool.nodes[free]["instance_uuid"] is None


class BetweenTwoReads(httpx.AsyncBaseTransport):
    """A way to Ironic on which a node lets go of its instance after a list has named it as the holder."""

    def __init__(self, node: dict[str, Any]) -> None:
        self._inner = httpx.AsyncHTTPTransport(verify=NO_TLS)
        self.node = node
        self.raced = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self._inner.handle_async_request(request)
        if "instance_uuid" in request.url.params and not self.raced:
            await answer.aread()
            self.raced = True
            self.node.update(instance_uuid=None, instance_info={}, provision_state="cleaning")
        return answer

    async def aclose(self) -> None:
        await self._inner.aclose()


async def test_a_node_that_lets_go_between_two_reads_ends_no_build(ironic: IronicStandIn) -> None:
    """It was taken for another deployment's: `instance.elsewhere`, final, and the build on a good node was over."""
    failing, good, _ = ironic.pool.nodes
    await deployed(config(ironic), build(failing))
    way = BetweenTwoReads(ironic.pool.nodes[failing])
    driver = await driver_of(config(ironic), way)
    async with asyncio.timeout(PATIENCE_S):
        await driver.spawn(build(good, attempt=2))
    assert way.raced and ironic.pool.nodes[good]["provision_state"] == "active"


class BetweenReadAndTake(httpx.AsyncBaseTransport):
    """A way to Ironic on which an operator takes the node in hand just before a PATCH takes it."""

    def __init__(self, node: dict[str, Any]) -> None:
        self._inner = httpx.AsyncHTTPTransport(verify=NO_TLS)
        self.node = node

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PATCH" and self.node["instance_uuid"] is None:
            self.node.update(provision_state="manageable")
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()


async def test_a_node_that_leaves_available_under_the_take_is_given_back(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes.values()))
    driver = await driver_of(config(ironic, clean_timeout_s=0.02), BetweenReadAndTake(node))
    with pytest.raises(Reschedule) as caught:
        await driver.spawn(build(node["uuid"]))
    assert caught.value.code == "node.deploy_failed" and node["provision_state"] == "manageable"
    with pytest.raises(DriverUnavailable, match="still carries the instance and is in manageable"):
        await driver.destroy(node["uuid"], INSTANCE, 1, DEPLOYMENT)
    node.update(provision_state="available")  # its operator provides it again
    patient = await driver_of(config(ironic))
    await patient.destroy(node["uuid"], INSTANCE, 1, DEPLOYMENT)
    assert node["instance_uuid"] is None and "berth" not in node["instance_info"]


class Flaky(httpx.AsyncBaseTransport):
    """A way to Ironic that answers some requests with 503, or loses an answer."""

    def __init__(self, *, busy: int = 0, lost: int = 0) -> None:
        self._inner = httpx.AsyncHTTPTransport(verify=NO_TLS)
        self.busy, self.lost, self.changes = busy, lost, 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.changes += request.method != "GET"
        if self.changes and self.busy:
            self.busy -= 1
            return httpx.Response(503, json={"error_message": {"faultstring": "no free conductor workers"}})
        answer = await self._inner.handle_async_request(request)
        if request.method == "PATCH" and self.lost:
            self.lost -= 1
            await answer.aread()
            raise httpx.ReadTimeout("lost")
        return answer

    async def aclose(self) -> None:
        await self._inner.aclose()


@pytest.mark.parametrize("way", [{"busy": 7}, {"lost": 1}])
async def test_an_ironic_that_is_down_for_a_moment_costs_no_attempt(ironic: IronicStandIn, way: dict[str, int]) -> None:
    node = next(iter(ironic.pool.nodes))
    driver = await driver_of(config(ironic), Flaky(**way))
    async with asyncio.timeout(PATIENCE_S):
        await driver.spawn(build(node))
    assert ironic.pool.nodes[node]["provision_state"] == "active"


class Crowded(httpx.AsyncBaseTransport):
    """A way to an Ironic that turns so many requests of one method down, and counts those under way."""

    def __init__(self, method: str, times: int, status: int = 503, **headers: str) -> None:
        self._inner = httpx.AsyncHTTPTransport(verify=NO_TLS)
        self._method, self._status, self._headers = method, status, headers
        self.left, self.under_way, self.most = times, 0, 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if request.method == self._method and self.left:
                self.left -= 1
                return httpx.Response(self._status, headers=self._headers)
            return await self._inner.handle_async_request(request)
        finally:
            self.under_way -= 1

    async def aclose(self) -> None:
        await self._inner.aclose()


class NotingClock(SystemClock):
    """Notes how long is slept, and does not sleep."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


@pytest.mark.parametrize(("method", "status"), [("GET", 503), ("PATCH", 409), ("PUT", 503), ("PUT", 409)])
async def test_a_busy_ironic_is_polled_less_and_less_often(ironic: IronicStandIn, method: str, status: int) -> None:
    """It was asked every half a second by each of five hundred builds, and a build's first refusal ended it."""
    node, clock = next(iter(ironic.pool.nodes)), NotingClock()
    settings = IronicConfig(url=ironic.url, poll_interval_s=0.5, max_poll_interval_s=10.0)
    way = Crowded(method, 8, status)
    driver = BareMetal(settings, cell=CELL, service="c1-a", clock=clock, transport=way)
    _opened.append(driver)
    await driver.open()
    async with asyncio.timeout(PATIENCE_S):
        await driver.spawn(build(node))
    assert ironic.pool.nodes[node]["provision_state"] == "active" and not way.left
    first = clock.slept.index(next(one for one in clock.slept if one != 0.5))
    refused = clock.slept[first : first + 8]
    for number, pause in enumerate(refused, start=1):
        longest = min(10.0, 0.5 * 2**number)
        assert longest / 2 <= pause <= longest, clock.slept
    assert set(clock.slept[first + 8 :]) == {0.5}, "as soon as it answers, it is asked as before"


async def test_an_ironic_that_names_a_time_is_not_polled_before(ironic: IronicStandIn) -> None:
    node, clock = next(iter(ironic.pool.nodes)), NotingClock()
    way = Crowded("PUT", 1, **{"Retry-After": "7"})
    driver = BareMetal(IronicConfig(url=ironic.url), cell=CELL, service="c1-a", clock=clock, transport=way)
    _opened.append(driver)
    await driver.open()
    async with asyncio.timeout(PATIENCE_S):
        await driver.spawn(build(node))
    assert max(clock.slept) == 7.0


async def test_a_build_that_ironic_has_no_time_for_ends_before_it_has_taken_a_node(ironic: IronicStandIn) -> None:
    driver = await driver_of(config(ironic, lock_timeout_s=0.05), Crowded("GET", 1_000_000))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(DriverUnavailable, match="503"):
            await driver.spawn(build(next(iter(ironic.pool.nodes))))
    assert not ironic.requested


async def test_requests_under_way_are_bounded(ironic: IronicStandIn) -> None:
    way = Crowded("", 0)
    driver = await driver_of(config(ironic, requests_in_flight=4), way)
    await asyncio.gather(*(driver.hosts() for _ in range(30)))
    assert way.most == 4


async def test_a_protected_node_is_kept_and_the_reason_reported(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes))
    driver = await deployed(config(ironic), build(node))
    ironic.pool.nodes[node].update(protected=True, protected_reason="the ledger is on it")
    ironic.requested.clear()
    with pytest.raises(MachineProtected, match=r"protected in Ironic \(the ledger is on it\)"):
        await driver.destroy(node, INSTANCE, 1, DEPLOYMENT)
    assert not ironic.requested and ironic.pool.nodes[node]["provision_state"] == "active"


async def test_a_retired_node_takes_no_build(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes))
    ironic.pool.nodes[node]["retired"] = True
    driver = await driver_of(config(ironic))
    with pytest.raises(BuildFault) as caught:
        await driver.spawn(build(node))
    assert caught.value.code == "node.retired" and not ironic.requested


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_address_is_taken_with_the_version_or_without(ironic: IronicStandIn, suffix: str) -> None:
    driver = await driver_of(config(ironic).__class__(url=ironic.url + suffix))
    assert len(await driver.hosts()) == len(ironic.pool.nodes)


async def test_a_microversion_that_ironic_does_not_support_is_answered_with_what_to_do() -> None:
    limits = {"X-OpenStack-Ironic-API-Minimum-Version": "1.1", "X-OpenStack-Ironic-API-Maximum-Version": "1.58"}
    answers = httpx.MockTransport(lambda _: httpx.Response(406, headers=limits))
    driver = await driver_of(IronicConfig(), answers)
    with pytest.raises(DriverUnavailable) as caught:
        await driver.hosts()
    assert (
        str(caught.value) == "Ironic supports microversions 1.1 to 1.58: set compute.ironic.microversion to one of them"
    )


def order(node: str, kind: ChangeKind, number: int = 1, attempt: int = 1, **spec: Any) -> ChangeOrder:
    return ChangeOrder(
        kind=kind,
        host_uuid=node,
        spec=InstanceSpec(instance_uuid=INSTANCE, project_id="acme", **spec),
        attempt=attempt,
        order=number,
        allocations={},
        deployment=DEPLOYMENT,
    )


async def test_what_ironic_remembers_of_a_failed_deployment_is_in_its_reason(ironic: IronicStandIn) -> None:
    """A node's last error is that of its last step; why the deployment failed may be in its history alone."""
    node = next(iter(ironic.pool.nodes))
    old = {"created_at": "2020-01-01T00:00:00", "severity": "ERROR", "event_type": "cleaning", "event": "of another"}
    ironic.pool.history[node] = [old, {**old, "created_at": None, "event": "at no time"}]
    ironic.pool.behaviour = msgspec.structs.replace(QUICK, deploy_fails=1.0)
    driver = await driver_of(config(ironic))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Reschedule, match=r"its history: \S+ deploying: Timeout reached") as caught:
            await driver.spawn(build(node))
    assert "of another" not in caught.value.reason and "at no time" not in caught.value.reason


@pytest.mark.parametrize(
    "answer", [httpx.Response(404), httpx.Response(500), httpx.Response(200, text='{"history": 5}')]
)
async def test_without_a_history_a_failed_deployment_ends_as_well(
    ironic: IronicStandIn, answer: httpx.Response
) -> None:
    class Forgetful(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return answer if request.url.path.endswith("/history") else await super().handle_async_request(request)

    ironic.pool.behaviour = msgspec.structs.replace(QUICK, deploy_fails=1.0)
    driver = await driver_of(config(ironic), Forgetful(verify=NO_TLS))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Reschedule) as caught:
            await driver.spawn(build(next(iter(ironic.pool.nodes))))
    assert caught.value.code == "node.deploy_failed" and "history" not in caught.value.reason


async def test_a_machine_is_switched_off_and_on_again(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes))
    driver = await deployed(config(ironic), build(node))
    for kind, power, runs in ((ChangeKind.STOP, "power off", False), (ChangeKind.START, "power on", True)):
        ironic.requested.clear()
        for _ in range(2):  # the second time it is so already
            async with asyncio.timeout(PATIENCE_S):
                assert (await driver.change(order(node, kind))).runs is runs
        assert ironic.pool.nodes[node]["power_state"] == power and len(ironic.requested) == 1
        (machine,) = (await driver.list([node]))[node]
        assert (machine.runs, machine.built) == (runs, True)


async def test_a_power_action_that_ironic_ends_with_a_fault_gives_its_reason(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes))

    class Broken(Flaky):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("/states/power"):
                ironic.pool.nodes[node]["last_error"] = "the BMC does not answer"
                return httpx.Response(202)
            return await super().handle_async_request(request)

    await deployed(config(ironic), build(node))
    driver = await driver_of(config(ironic), Broken())
    with pytest.raises(ChangeFault, match="the BMC does not answer") as caught:
        async with asyncio.timeout(PATIENCE_S):
            await driver.change(order(node, ChangeKind.STOP))
    assert (caught.value.code, caught.value.runs) == ("node.power_failed", True)


async def test_the_error_of_an_earlier_action_does_not_end_a_power_action(ironic: IronicStandIn) -> None:
    """Ironic clears the node's last error when it takes the action up, which is after it has accepted it."""
    node = next(iter(ironic.pool.nodes))
    driver = await deployed(config(ironic), build(node))
    ironic.pool.nodes[node]["last_error"] = "the BMC did not answer yesterday"
    ironic.pool.behaviour = replace(ironic.pool.behaviour, power_s=0.5)
    async with asyncio.timeout(PATIENCE_S):
        assert not (await driver.change(order(node, ChangeKind.STOP))).runs
    assert ironic.pool.nodes[node]["power_state"] == "power off"


async def test_a_power_action_that_fails_as_an_earlier_one_did_has_failed(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes))
    driver = await deployed(config(ironic), build(node))
    ironic.pool.nodes[node]["last_error"] = "Failed to set node power state to power off."
    ironic.pool.behaviour = replace(ironic.pool.behaviour, power_fails=True)
    with pytest.raises(ChangeFault) as caught:
        async with asyncio.timeout(PATIENCE_S):
            await driver.change(order(node, ChangeKind.STOP))
    assert caught.value.code == "node.power_failed"


async def test_a_rebuild_writes_the_new_image_with_a_new_config_drive_once(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes))
    old = ImageSource(source="http://images/old.qcow2", checksum="http://images/SUMS", kernel="http://images/k")
    settings = config(ironic, images={"debian-12": IMAGE})
    driver = await deployed(settings, build(node, image_source=old, name="web"))
    ironic.requested.clear()
    again = ConfigDrive(user_data="again")
    wanted: dict[str, Any] = {"name": "web", "image": "debian-12", "config_drive": again}
    async with asyncio.timeout(PATIENCE_S):
        assert (await driver.change(order(node, ChangeKind.REBUILD, 3, **wanted))).runs
    info = ironic.pool.nodes[node]["instance_info"]
    assert (info["image_source"], info["image_os_hash_value"]) == (IMAGE.source, DIGEST)
    assert "kernel" not in info and "image_checksum" not in info, "nothing of the old image"
    assert ironic.pool.config_drives[node]["user_data"] == "again"
    assert list(ironic.requested) == [("PATCH", node), ("PUT", node)]
    mark = info["berth"]
    assert (mark["attempt"], mark["order"], mark["instance"]) == (1, 3, INSTANCE)
    assert ironic.pool.nodes[node]["provision_state"] == "active"
    with pytest.raises(ChangeFault) as unknown:
        await driver.change(order(node, ChangeKind.REBUILD, 4, image="debian-13"))
    assert unknown.value.code == "image.unknown"
    ironic.pool.behaviour = msgspec.structs.replace(QUICK, deploy_fails=1.0)
    with pytest.raises(ChangeFault) as failed:
        await driver.change(order(node, ChangeKind.REBUILD, 5, image="debian-12"))
    assert (failed.value.code, failed.value.runs) == ("node.rebuild_failed", False)
    await driver.destroy(node, INSTANCE, 1, DEPLOYMENT)
    assert ironic.pool.nodes[node]["instance_uuid"] is None


async def test_a_rebuild_writes_the_image_of_the_source_that_it_names(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes))
    driver = await deployed(config(ironic, images={"debian-12": IMAGE}), build(node))
    named = ImageSource(source="http://images/named.qcow2", checksum="http://images/SUMS")
    async with asyncio.timeout(PATIENCE_S):
        assert (await driver.change(order(node, ChangeKind.REBUILD, 3, image="debian-12", image_source=named))).runs
    info = ironic.pool.nodes[node]["instance_info"]
    assert (info["image_source"], info["image_checksum"]) == (named.source, named.checksum)


def rescue(node: str, number: int = 1) -> ChangeOrder:
    return msgspec.structs.replace(order(node, ChangeKind.RESCUE, number), rescue_password="sesame")


async def test_a_machine_is_rescued_and_unrescued_each_once(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes))
    driver = await deployed(config(ironic), build(node))
    for change, state in ((rescue(node), "rescue"), (order(node, ChangeKind.UNRESCUE, 2), "active")):
        ironic.requested.clear()
        for _ in range(2):  # the second time it is so already
            async with asyncio.timeout(PATIENCE_S):
                assert (await driver.change(change)).runs
        assert ironic.pool.nodes[node]["provision_state"] == state and len(ironic.requested) == 1
        (machine,) = (await driver.list([node]))[node]
        assert (machine.attempt, machine.built, machine.runs) == (1, True, True)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ChangeFault, match="rescue_password") as caught:
            await driver.change(order(node, ChangeKind.RESCUE, 3))
        assert (caught.value.code, caught.value.runs) == ("node.refused", True)
        await driver.change(rescue(node, 4))
        await driver.destroy(node, INSTANCE, 1, DEPLOYMENT)
    assert ironic.pool.nodes[node]["instance_uuid"] is None


async def test_from_a_rescue_that_failed_unrescuing_is_the_way_back(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes))
    driver = await deployed(config(ironic), build(node))
    ironic.pool.behaviour = msgspec.structs.replace(QUICK, rescue_fails=True)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ChangeFault, match="the ramdisk does not boot") as caught:
            await driver.change(rescue(node))
        assert caught.value.code == RESCUE_FAILED
        assert (await driver.change(order(node, ChangeKind.UNRESCUE, 2))).runs
    assert ironic.pool.nodes[node]["provision_state"] == "active"


@pytest.mark.parametrize("kind", [ChangeKind.STOP, ChangeKind.REBUILD, ChangeKind.RESCUE])
async def test_a_node_that_is_not_ours_is_not_changed(ironic: IronicStandIn, kind: ChangeKind) -> None:
    node, free, _ = ironic.pool.nodes
    driver = await deployed(config(ironic), build(node))
    ironic.requested.clear()
    with pytest.raises(ChangeFault) as other:
        await driver.change(order(node, kind, attempt=2))
    with pytest.raises(ChangeFault) as absent:
        await driver.change(order(free, kind))
    assert (other.value.code, absent.value.code) == ("machine.other", MACHINE_ABSENT)
    del ironic.pool.nodes[node]["instance_info"]["berth"]
    with pytest.raises(NotOurs):
        await driver.change(order(node, kind))
    with pytest.raises(ChangeFault, match="no snapshot"):
        await driver.change(order(node, ChangeKind.SNAPSHOT))
    assert not ironic.requested
