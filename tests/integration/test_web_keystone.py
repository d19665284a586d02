"""HTTP as berth serves it: by httptools, and behind Keystone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
import uvicorn
from prometheus_client import CollectorRegistry, Counter
from starlette.responses import Response

from berth.web.access import SESSION_COOKIE, Access, WebCaller, WebRole, check_listen
from berth.web.problems import Problem
from bus.clock import SystemClock
from bus.service import http_protocol
from bus.service.http_protocol import MAX_IDLE_BYTES, MAX_PIPELINED, WRITE_TIMEOUT_S, Protocol, protocol
from bus.service.settings import SettingsError
from placement_worker.rest.config import KeystoneConfig
from placement_worker.rest.keystone import Keystone
from tests.kit.keystone import KeystoneStandIn, keystone_stand_in

# --- keystone's tokens at `berth web`: what their roles allow, when they end, and what a Keystone that is away means


HOUR = timedelta(hours=1)
PROJECT = {"id": "0c8f0c9e3f0d4d9f8b589c2f6f0f2a11", "name": "demo"}


class Later(SystemClock):
    """A clock that is moved past the time for which a token is trusted."""

    offset = 0.0

    def time(self) -> float:
        return super().time() + self.offset


class Rig:
    """A Keystone, and what `berth web` makes of its tokens."""

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
    assert await rig.refused("good") == (503, "rest.keystone_unavailable")
    rig.keystone.answer = None
    assert (await rig.caller("good")).role is WebRole.OPERATOR
    rig.clock.offset += 61.0
    rig.keystone.sign_in_answer = Response(status_code=401)
    rig.keystone.services.clear()
    assert await rig.refused("good") == (503, "rest.keystone_forbidden")


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
