"""The bounds of a connection over HTTP, for any application behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from prometheus_client import CollectorRegistry, Counter

from bus.service import http_protocol
from bus.service.http_protocol import MAX_IDLE_BYTES, MAX_PIPELINED, WRITE_TIMEOUT_S, Protocol, protocol

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
