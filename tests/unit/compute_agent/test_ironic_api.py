"""Answers that Ironic did not give, or gave half, and requests that are given up on their way."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.clock import SystemClock
from bus.contracts.cell import ComputeResult, Destroy, InstanceSpec
from bus.contracts.deploy import NetworkRequest
from compute_agent.attempts.destroys import Destroys
from compute_agent.attempts.jobs import Jobs
from compute_agent.attempts.results import Results
from compute_agent.driver import Build, DriverOutage, DriverUnavailable
from compute_agent.drivers.ironic.api import IronicApi
from compute_agent.drivers.ironic.config import IronicConfig
from compute_agent.drivers.ironic.driver import IronicDriver
from compute_agent.drivers.ironic.neutron import NeutronNetwork
from compute_agent.records.attempt import AttemptPhase, HostAttempt
from compute_agent.records.records import Records

NODE, OTHER, THIRD = (f"8296eb22-b44b-4cba-95b1-3a66b31189a{n}" for n in (4, 5, 6))
INSTANCE = "11111111-2222-4333-8444-555555555555"
DATABASE_ID = "d0000000-0000-4000-8000-000000000001"
OF_IRONIC = {"X-OpenStack-Ironic-API-Version": "1.81"}
PROXYS = [httpx.Response(404), httpx.Response(404, text="404 page not found"), httpx.Response(404, json={})]
IRONICS = [httpx.Response(404, headers=OF_IRONIC), httpx.Response(404, json={"error_message": "no node"})]


class Slept(SystemClock):
    """Time that passes by sleeping alone: however slow the machine is, nothing takes too long."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._now += seconds
        await super().sleep(0)


async def driver(
    answer: Callable[[httpx.Request], httpx.Response], records: Records | None = None, **config: float
) -> IronicDriver:
    made = IronicDriver(
        IronicConfig(outage_timeout_s=0.01, poll_interval_s=0.001, watch_interval_s=0.001, **config),
        records=records,
        cell="c1",
        service="s",
        clock=Slept(),
        transport=httpx.MockTransport(answer),
    )
    await made.open()
    return made


async def api(answer: Callable[[httpx.Request], httpx.Response]) -> IronicApi:
    made = IronicApi(IronicConfig(), clock=SystemClock(), transport=httpx.MockTransport(answer))
    made.open()
    return made


# --- a 404 of a proxy in front of Ironic, which has no way to it just now


@pytest.mark.parametrize("answer", PROXYS)
async def test_a_404_that_is_not_ironics_proves_no_machine_gone(answer: httpx.Response) -> None:
    """The machine was reported destroyed, and ran on."""
    made = await driver(lambda _: answer)
    with pytest.raises(DriverOutage):
        await made.destroy(NODE, INSTANCE, 1, DATABASE_ID)
    spec = InstanceSpec(instance_uuid=INSTANCE, project_id="p")
    with pytest.raises(DriverOutage):
        await made._api.patch(NODE, [])
    with pytest.raises(Exception) as given_up:
        await made.spawn(Build(NODE, spec, 1, {NODE: {"CUSTOM_GOLD": 1}}, DATABASE_ID))
    assert getattr(given_up.value, "code", "") == "driver.unavailable"
    await made.close()


@pytest.mark.parametrize(
    ("listed", "holding", "removed"),
    [((OTHER,), (), True), ((OTHER,), (NODE, OTHER), True), ((), (), False), ((THIRD,), (NODE, OTHER), False)],
    ids=["removed", "removed with its machine", "nothing is shown", "another with a machine is not shown"],
)
@pytest.mark.parametrize("answer", IRONICS)
async def test_a_node_is_removed_that_ironic_has_not_and_hides_none(
    answer: httpx.Response, listed: Sequence[str], holding: Sequence[str], removed: bool
) -> None:
    """A login that had lost its role was shown no node: each delete ended, and the machines ran on."""
    nodes = {"nodes": [{"uuid": uuid, "provision_state": "active"} for uuid in listed]}
    records = Records()
    for host in holding:
        records.put((host, INSTANCE), HostAttempt(1, AttemptPhase.RUNNING, database_id=DATABASE_ID))
    made = await driver(
        lambda request: answer if request.url.path.endswith(NODE) else httpx.Response(200, json=nodes), records
    )
    with contextlib.nullcontext() if removed else pytest.raises(DriverUnavailable):
        await made.destroy(NODE, INSTANCE, 1, DATABASE_ID)
    await made.close()


# --- a node that Ironic cannot undeploy


@pytest.mark.parametrize("rewrite_after", [100, -1])
async def test_a_restart_goes_on_undeploying_a_node_that_ironic_could_not_undeploy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewrite_after: int
) -> None:
    """Ironic drops the instance and the mark then. The next process took the machine for destroyed, and it ran on."""
    monkeypatch.setattr("compute_agent.records.records.REWRITE_AFTER", rewrite_after)
    tag = {"database_id": DATABASE_ID, "cell": "c1", "service": "s", "instance": INSTANCE, "attempt": 1}
    node = {"uuid": NODE, "provision_state": "active", "instance_uuid": INSTANCE, "instance_info": {"berth": tag}}
    ends_in = ["error"]

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            node.update(provision_state=ends_in[0], instance_uuid=None, instance_info={})
            return httpx.Response(202)
        return httpx.Response(200, json=node if request.url.path.endswith(NODE) else {"nodes": [node]})

    for life in range(3):
        records = Records(tmp_path / "records")
        records.open()
        made = await driver(answer, records, clean_timeout_s=0.01)
        if life == 2:
            assert [(one.instance_uuid, one.attempt) for one in (await made.list())[NODE]] == [(INSTANCE, 1)]
            ends_in[0] = "cleaning"
            await made.destroy(NODE, INSTANCE, 1, DATABASE_ID)
            assert not (await made.list())[NODE]
        else:
            with pytest.raises(DriverUnavailable):
                await made.destroy(NODE, INSTANCE, 1, DATABASE_ID)
        await made.close()
        records.close()
    assert node["provision_state"] == "cleaning"


@pytest.mark.parametrize("state", ["error", "deleting"])
async def test_another_service_does_not_take_a_node_that_could_not_be_undeployed_for_empty(state: str) -> None:
    """Its ring gave it the node: it listed the node without a machine, and answered that it had destroyed it."""
    node, commands = {"uuid": NODE, "provision_state": state}, list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method != "GET":
            commands.append(request.url.path)
        return httpx.Response(200, json=node if request.url.path.endswith(NODE) else {"nodes": [node]})

    made = await driver(answer, clean_timeout_s=0.01)
    assert await made.list() == {}
    with pytest.raises(DriverUnavailable):
        await made.destroy(NODE, INSTANCE, 1, DATABASE_ID)
    assert not commands
    node["provision_state"] = "available"  # by its operator
    assert await made.list() == {NODE: ()}
    await made.destroy(NODE, INSTANCE, 1, DATABASE_ID)
    await made.close()


# --- a node that cannot be read


BROKEN = {"uuid": OTHER, "maintenance": "perhaps"}


async def test_a_node_that_cannot_be_read_hides_no_other() -> None:
    """The service had no hosts then, and did not start."""
    page = b'{"nodes":[{"uuid":"%b","maintenance":"perhaps"},{"uuid":"%b"},5,{"uuid":"\xff"},{"uuid":"%b"}]}'
    uuids = (OTHER, NODE, OTHER.upper())  # no message names a host by the last one
    made = await api(lambda _: httpx.Response(200, content=page % tuple(uuid.encode() for uuid in uuids)))
    with capture_logs() as logs:
        assert [node.uuid for node in await made.nodes()] == [NODE]
    assert [one["event"] for one in logs] == ["ironic.unreadable"] * 4
    await made.close()


async def test_pages_go_on_behind_nodes_that_cannot_be_read() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.params.get("marker") == NODE:
            return httpx.Response(200, json={"nodes": [BROKEN, {"uuid": INSTANCE}]})
        return httpx.Response(200, json={"nodes": [{"uuid": NODE}, BROKEN], "next": "http://ironic/v1/nodes?marker=x"})

    made = await api(answer)
    assert [node.uuid for node in await made.nodes()] == [NODE, INSTANCE]
    await made.close()


@pytest.mark.parametrize("service", ["s", "former"])
async def test_a_complete_machine_stays_on_a_node_that_the_list_leaves_out(service: str) -> None:
    """It was undeployed by a command that was to spare it: the node that is read for that has the database's tag."""
    tag = {"database_id": DATABASE_ID, "cell": "c1", "service": service, "instance": INSTANCE, "attempt": 1}
    node = {"uuid": NODE, "provision_state": "active", "instance_uuid": INSTANCE, "instance_info": {"berth": tag}}
    listed = {**node, "maintenance": "perhaps"} if service == "s" else node  # it cannot be read
    requested: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requested.append(request.method)
        one = request.url.path.endswith(NODE)
        return httpx.Response(200, json=node if one else {"nodes": [listed, {"uuid": OTHER}]})

    made, records, sent = await driver(answer), Records(), list[ComputeResult]()
    jobs, clock = Jobs(), Slept()
    destroys = Destroys(
        service="s",
        driver=made,
        records=records,
        results=Results("s", sent.append, clock, records),
        jobs=jobs,
        clock=clock,
        rng=random.Random(1),
        max_calls=2,
    )
    command = Destroy(instance_uuid=INSTANCE, attempt=1, host_uuid=NODE, service="s", database_id=DATABASE_ID)
    destroys.handle(replace(command, keep_if_complete=True))
    async with asyncio.timeout(20):
        while jobs.tasks:
            await asyncio.wait(jobs.tasks)
    assert (requested, sent) == (["GET"], [])
    await made.close()


async def test_a_bug_in_the_look_for_nodes_costs_that_look() -> None:
    """It ended the service, and each later start of it."""
    looks, found = [1], asyncio.Event()

    def answer(_: httpx.Request) -> httpx.Response:
        if looks:
            raise KeyError(looks.pop())
        return httpx.Response(200, json={"nodes": [{"uuid": NODE, "provision_state": "available"}]})

    made = await driver(answer)
    made.on_change(lambda _: found.set())
    watching = asyncio.create_task(made.watch())
    found_or_ended = asyncio.create_task(found.wait())
    await asyncio.wait({watching, found_or_ended}, return_when=asyncio.FIRST_COMPLETED)
    assert not watching.done()
    for task in (watching, found_or_ended):
        task.cancel()
    await asyncio.gather(watching, found_or_ended, return_exceptions=True)
    await made.close()


# --- answers without an end


class Dripping(httpx.AsyncByteStream):
    """A beginning, then nothing more and no end."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()


class Swelling(httpx.AsyncByteStream):
    """Much more than any answer has."""

    def __init__(self) -> None:
        self.sent_mib = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(64):
            self.sent_mib += 1
            yield b" " * 2**20


async def test_an_answer_that_does_not_end_is_given_up() -> None:
    """httpx bounds each wait for a byte alone: the request, and the build behind it, never ended."""
    config = IronicConfig(request_timeout_s=0.01, network="neutron")
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Dripping()))
    made = IronicApi(config, clock=SystemClock(), transport=transport)
    made.open()
    network = NeutronNetwork(config, clock=SystemClock(), transport=transport)
    for call in (made.node(NODE), made.patch(NODE, []), network.release(NODE, INSTANCE)):
        with pytest.raises(DriverOutage):
            await call
    await made.close()
    await network.close()


async def test_an_answer_beyond_its_bound_is_not_read_to_its_end() -> None:
    streams: list[Swelling] = []

    def answer(_: httpx.Request) -> httpx.Response:
        streams.append(Swelling())
        return httpx.Response(200, stream=streams[-1])

    made = await api(answer)
    network = NeutronNetwork(
        IronicConfig(network="neutron"), clock=SystemClock(), transport=httpx.MockTransport(answer)
    )
    for call in (made.node(NODE), network.release(NODE, INSTANCE)):
        with pytest.raises(DriverUnavailable):
            await call
    assert all(stream.sent_mib < 64 for stream in streams)
    await made.close()
    await network.close()


# --- a request for a port that is given up on its way


async def test_a_port_that_is_being_made_when_its_build_is_given_up_is_removed() -> None:
    """Neutron made it after its removal, and nobody removed it any more."""
    ports: dict[str, dict[str, str]] = {}
    requested, made = asyncio.Event(), asyncio.Event()

    class Neutron(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.method == "POST":
                port = {
                    "id": "made",
                    "network_id": OTHER,
                    "project_id": "p",
                    "device_id": INSTANCE,
                    "name": f"berth-{INSTANCE}-{NODE}-0",
                }
                requested.set()
                carrying_out = asyncio.ensure_future(self.make(port))  # a server goes on, whoever waits for its answer
                await asyncio.shield(carrying_out)
                return httpx.Response(201, json={"port": port})
            if request.method == "DELETE":
                del ports[request.url.path.rpartition("/")[2]]
                return httpx.Response(204)
            if "/networks/" in request.url.path:
                return httpx.Response(200, json={"network": {"id": OTHER, "project_id": "p"}})
            return httpx.Response(200, json={"ports": list(ports.values())})

        async def make(self, port: dict[str, str]) -> None:
            await made.wait()
            ports[port["id"]] = port

    network = NeutronNetwork(IronicConfig(network="neutron"), clock=SystemClock(), transport=Neutron())
    spec = InstanceSpec(instance_uuid=INSTANCE, project_id="p", networks=(NetworkRequest(network=OTHER),))

    async def build_given_up() -> None:
        building = asyncio.create_task(network.prepare(NODE, spec))
        await requested.wait()
        building.cancel()
        await asyncio.gather(building, return_exceptions=True)
        await network.release(NODE, INSTANCE)

    giving_up = asyncio.create_task(build_given_up())
    await requested.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    made.set()
    await giving_up
    for _ in range(20):
        await asyncio.sleep(0)
    assert not ports
    await network.close()
