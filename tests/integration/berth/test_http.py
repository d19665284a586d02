"""HTTP of berth: the fencing plug-in before an API, and pages behind Keystone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from prometheus_client import CollectorRegistry, Counter
from starlette.responses import Response

from berth.bus_client import BuildClient
from berth.config.settings import FencingSettings
from berth.fencing.fencer import Fencer
from berth.fencing.plugin import FencingFailed, FencingPlugin, IronicPower, load
from berth.web.problems import Problem
from berth.web.sign_in_sessions import SESSION_COOKIE, Access, WebCaller, WebRole, check_listen
from bus.clock import SystemClock
from bus.contracts.build import HostRecord
from bus.service import http_protocol
from bus.service.http_protocol import MAX_IDLE_BYTES, MAX_PIPELINED, WRITE_TIMEOUT_S, Protocol, protocol
from bus.service.settings import SettingsError
from compute_agent.drivers.ironic.config import IronicConfig
from compute_sim.ironic_stand_in import Behaviour, IronicStandIn, Silent
from placement_worker.rest.config import KeystoneConfig
from placement_worker.rest.keystone import Keystone
from tests.kit.keystone import KeystoneStandIn, keystone_stand_in

# --- The fencing plug-in `ironic` before an API over HTTP; how plug-ins are found; what an unproved one leads to.


HOST = HostRecord(uuid="00000000-0000-4000-8000-000000000001", name="rack1-h1", cell="cell1")
MINE = {"berth_host": f"{HOST.cell}/{HOST.uuid}"}
OTHER = "00000000-0000-4000-8000-000000000002"
PLUGIN = """
class Switch:
    @classmethod
    def from_settings(cls, settings, clock):
        made = cls()
        made.option = settings.options["pdu"]
        return made

    async def switch_off(self, host):
        return f"{self.option} is off for {host.name}"

    async def close(self):
        pass
"""


@asynccontextmanager
async def ironic(behaviour: Behaviour | None = None, **node: Any) -> AsyncIterator[tuple[dict[str, Any], IronicPower]]:
    """A node that is on, and the plug-in."""
    stand_in = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=behaviour)
    made = stand_in.pool.add(
        **{"name": "u7", "properties": MINE, "power_state": "power on", "provision_state": "active", **node}
    )
    config = IronicConfig(url=await stand_in.start(), poll_interval_s=0.01)
    settings = FencingSettings(plugin="ironic", ironic=config, nodes={"cell1": {OTHER: made["name"]}})
    power = IronicPower.from_settings(settings, SystemClock())
    try:
        yield made, power
    finally:
        await power.close()
        await stand_in.stop()


@pytest.mark.parametrize("power_s", [0.0, 0.3])
async def test_it_returns_when_the_node_is_reported_off(power_s: float) -> None:
    async with ironic(Behaviour(power_s=power_s)) as (node, power):
        assert node["uuid"] in await power.switch_off(HOST)
        assert node["power_state"] == "power off"
        assert await power.switch_off(HOST)  # it may be called again


async def test_what_ironic_knew_before_is_no_proof() -> None:
    """It was seen off before a person switched it on by hand; Ironic reads the power state again in a minute."""
    async with ironic(Behaviour(power_s=0.3), power_state="power off") as (node, power):
        switching = asyncio.create_task(power.switch_off(HOST))
        async with asyncio.timeout(30.0):
            while node["reservation"] is None:  # noqa: ASYNC110  (the stand-in has no event for it)
                await asyncio.sleep(0.01)
            node["power_state"] = "power off"
            await switching
        assert node["reservation"] is None


async def test_a_node_that_stays_on_is_a_failure_with_ironics_words() -> None:
    async with ironic(Behaviour(power_fails=True)) as (_, power):
        with pytest.raises(FencingFailed, match="Failed to set node power state"):
            await power.switch_off(HOST)


async def test_a_bmc_that_does_not_answer_proves_nothing_by_what_ironic_knew() -> None:
    """Ironic keeps the power state that it had before, and says that it could not ask: the host was fenced, and ran."""
    async with ironic(Behaviour(power_fails=True), power_state="power off") as (_, power):
        with pytest.raises(FencingFailed):
            await power.switch_off(HOST)
    async with ironic(power_state="power off", last_error="of before") as (_, power):
        assert await power.switch_off(HOST)


async def test_a_locked_node_is_tried_again() -> None:
    async with ironic(reservation="other") as (node, power):
        switching = asyncio.create_task(power.switch_off(HOST))
        await asyncio.sleep(0.05)
        assert not switching.done()
        node["reservation"] = None
        await switching
        assert node["power_state"] == "power off"


async def test_the_settings_may_name_the_node() -> None:
    async with ironic(properties={}) as (node, power):
        with pytest.raises(FencingFailed):
            await power.switch_off(HOST)
        assert node["power_state"] == "power on"
        await power.switch_off(HostRecord(uuid=OTHER, name="other", cell="cell1"))
        assert node["power_state"] == "power off"


async def test_a_bare_metal_host_is_not_switched_off() -> None:
    async with ironic(uuid=HOST.uuid) as (node, power):
        with pytest.raises(FencingFailed, match="bare-metal"):
            await power.switch_off(HOST)
        assert node["power_state"] == "power on"


async def test_an_unavailable_ironic_is_a_failure() -> None:
    async with ironic() as (_, power):
        pass
    with pytest.raises(FencingFailed):
        await power.switch_off(HOST)


async def test_nothing_is_decided_of_a_host_that_is_not_proved_to_be_off() -> None:
    """The client has no connection: a decision would fail in another way."""
    client = cast("BuildClient", None)
    async with ironic(reservation="for ever") as (_, power):
        fencer = Fencer(client, power, FencingSettings(timeout_s=0.1), clock=SystemClock())
        with pytest.raises(FencingFailed, match="within"):
            await fencer.fence(HOST, "dead", by="ann")
        running = HostRecord(uuid=HOST.uuid, name=HOST.name, up=True)
        with pytest.raises(FencingFailed) as fault:
            await fencer.fence(running, "dead", by="ann")
        assert fault.value.code == "host.service_up"

    class Broken:
        async def switch_off(self, host: HostRecord) -> str:
            raise ZeroDivisionError

        async def close(self) -> None: ...

    plugin: FencingPlugin = Broken()
    with pytest.raises(FencingFailed, match="ZeroDivisionError"):
        await Fencer(client, plugin, FencingSettings(), clock=SystemClock()).fence(HOST, "dead", by="ann")


async def test_a_plug_in_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rack_switch.py").write_text(PLUGIN)
    about = tmp_path / "rack_switch-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rack-switch\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[berth.fencing]\npdu = rack_switch:Switch\nbroken = rack_switch:None_\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "rack_switch", None)
    monkeypatch.delitem(sys.modules, "rack_switch")
    plugin = load(FencingSettings(plugin="pdu", options={"pdu": "outlet 7"}), clock=SystemClock())
    assert await plugin.switch_off(HOST) == "outlet 7 is off for rack1-h1"
    for name, words in (("other", "ironic, pdu"), ("broken", "AttributeError"), ("", "no plug-in")):
        with pytest.raises(SettingsError, match=words):
            load(FencingSettings(plugin=name), clock=SystemClock())


# --- HTTP as berth serves it: by httptools, and behind Keystone.


# --- keystone's tokens at `berth serve web`: what their roles allow, when they end, and a Keystone that is away
HOUR = timedelta(hours=1)
PROJECT = {"id": "0c8f0c9e3f0d4d9f8b589c2f6f0f2a11", "name": "demo"}


class Later(SystemClock):
    """A clock that is moved past the time for which a token is trusted."""

    offset = 0.0

    def time(self) -> float:
        return super().time() + self.offset


class Rig:
    """A Keystone, and what `berth serve web` makes of its tokens."""

    def __init__(self, keystone: KeystoneStandIn, url: str) -> None:
        self.keystone = keystone
        self.clock = Later()
        self.auth = Keystone(KeystoneConfig(auth_url=url, password="right", cache_s=60.0), self.clock)
        self.access = Access(None, self.clock, self.auth)

    async def caller(self, token: str) -> WebCaller:
        return await self.access.caller({"authorization": f"Bearer {token}"}, {})

    async def refused(self, token: str) -> tuple[int, str]:
        with pytest.raises(Problem) as caught:
            await self.caller(token)
        return caught.value.status, caught.value.code


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with keystone_stand_in() as (keystone, url):
        made = Rig(keystone, url)
        yield made
        await made.auth.close()


@pytest.mark.parametrize(
    ("token", "caller"),
    [
        ({"roles": [{"name": "admin"}], "project": PROJECT}, WebCaller("u1", WebRole.OPERATOR)),
        ({"roles": [{"name": "reader"}], "system": {"all": True}}, WebCaller("u1", WebRole.READER)),
        ({"roles": [{"name": "member"}], "project": PROJECT}, WebCaller("u1", WebRole.PROJECT, PROJECT["id"])),
    ],
    ids=["admin", "reader of the system", "member of a project"],
)
async def test_roles_of_keystone_are_roles_here(rig: Rig, token: dict[str, Any], caller: WebCaller) -> None:
    rig.keystone.add("good", HOUR, **token)
    assert await rig.caller("good") == caller
    assert await rig.access.caller({"x-auth-token": "good"}, {}) == caller
    assert not rig.access.open


@pytest.mark.parametrize(
    "token",
    [
        {"roles": [{"name": "reader"}], "project": PROJECT},
        {"roles": [{"name": "member"}], "domain": {"id": "default"}},
        {"roles": [], "project": PROJECT},
    ],
    ids=["reader of a project", "member of a domain", "no role"],
)
async def test_a_token_whose_roles_allow_nothing_is_forbidden(rig: Rig, token: dict[str, Any]) -> None:
    rig.keystone.add("weak", HOUR, **token)
    assert await rig.refused("weak") == (403, "role.insufficient")


@pytest.mark.parametrize("token", ["unknown", "x" * 9000, "a b", "\u00e9"])
async def test_what_keystone_does_not_know_is_no_caller(rig: Rig, token: str) -> None:
    assert await rig.refused(token) == (401, "auth.required")


async def test_a_keystone_that_does_not_answer_lets_no_caller_in(rig: Rig) -> None:
    rig.keystone.add("good", HOUR, roles=[{"name": "admin"}])
    rig.keystone.answer = Response(status_code=500)
    assert await rig.refused("good") == (503, "keystone.unavailable")
    rig.keystone.answer = None
    assert (await rig.caller("good")).role is WebRole.OPERATOR
    rig.clock.offset += 61.0
    rig.keystone.sign_in_answer = Response(status_code=401)
    rig.keystone.services.clear()
    assert await rig.refused("good") == (503, "keystone.http_401")


async def test_a_session_ends_with_the_token_that_it_was_begun_with(rig: Rig) -> None:
    rig.keystone.add("good", HOUR, roles=[{"name": "admin"}])
    session = {SESSION_COOKIE: rig.access.log_in("good")}
    assert (await rig.access.caller({}, session)).role is WebRole.OPERATOR
    del rig.keystone.tokens["good"]  # revoked
    rig.clock.offset += 61.0
    with pytest.raises(Problem) as caught:
        await rig.access.caller({}, session)
    assert caught.value.status == 401


async def test_with_keystone_it_may_listen_to_other_machines(rig: Rig) -> None:
    check_listen("0.0.0.0", rig.access)
    with pytest.raises(SettingsError, match="loopback"):
        check_listen("0.0.0.0", Access(None, rig.clock))


# --- the bounds of a connection over HTTP, for any application behind it
PATIENCE_S = 60.0
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Served:
    """An application that answers when it may, and its server."""

    def __init__(self) -> None:
        self.requests = 0
        self.may_answer = asyncio.Event()
        self.registry = CollectorRegistry()
        self.kind: type[Protocol] = protocol(
            WRITE_TIMEOUT_S, Counter("disconnected", "By step.", ["at"], registry=self.registry)
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests += 1
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def disconnected(self, at: str) -> float:
        return self.registry.get_sample_value("disconnected_total", {"at": at}) or 0.0


@asynccontextmanager
async def connected(served: Served, **options: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config = uvicorn.Config(served, http=served.kind, ws="none", lifespan="off", log_config=None, port=0, **options)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    listening = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config=config, server_state=server.server_state, app_state={}),
        "127.0.0.1",
        0,
    )
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        try:
            yield reader, writer
        finally:
            writer.transport.abort()
            listening.close()
            served.may_answer.set()
            await asyncio.gather(*server.server_state.tasks, return_exceptions=True)


async def test_requests_that_are_sent_ahead_are_bounded() -> None:
    """20 MB of them, answers unread, took 1.3 GB of a process that did not get them back."""
    served = Served()
    async with connected(served) as (reader, writer):
        writer.write(REQUEST * (MAX_PIPELINED + 2))
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        served.may_answer.set()
        assert served.disconnected("pipeline") == 1
    assert served.requests == 1, "none of those that waited is carried out"


async def test_some_requests_may_be_sent_ahead() -> None:
    served = Served()
    served.may_answer.set()
    async with connected(served) as (reader, writer):
        writer.write(REQUEST * (MAX_PIPELINED + 1))
        for _ in range(MAX_PIPELINED + 1):
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
    assert served.requests == MAX_PIPELINED + 1


@pytest.mark.parametrize("piece", [b"x: y\r\n", b"y"], ids=["many headers", "one header"])
async def test_a_head_without_an_end_is_refused(piece: bytes) -> None:
    served = Served()
    async with connected(served) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nx: " + piece * (2 * MAX_IDLE_BYTES // len(piece)))
        with contextlib.suppress(ConnectionError):  # it is closed before all that was sent was read
            await reader.read()
    assert (served.requests, served.disconnected("size")) == (0, 1)


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nx: "], ids=["nothing", "half a head"])
async def test_a_connection_without_a_whole_request_is_closed(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    """A thousand of these were as many as a server takes, for as long as they stayed."""
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.05)
    served = Served()
    async with connected(served) as (reader, writer):
        writer.write(begun)
        assert await reader.read() == b""
    assert served.disconnected("head") == 1


async def test_a_connection_that_is_idle_after_an_answer_is_closed() -> None:
    served = Served()
    served.may_answer.set()
    async with connected(served, timeout_keep_alive=0) as (reader, writer):
        writer.write(REQUEST)
        assert (await reader.read()).endswith(b"ok")
    assert served.requests == 1
