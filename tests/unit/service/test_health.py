"""The health endpoint, through real sockets."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from bus.service.health import MAX_HEAD_BYTES, Health


@pytest.fixture
async def missing() -> list[str]:
    return []


@pytest.fixture
async def health(missing: list[str]) -> AsyncIterator[Health]:
    registry = CollectorRegistry()
    Counter("berth_test", "A counter", registry=registry).inc()
    server = Health(lambda: missing, registry=registry)
    await server.open()
    yield server
    await server.close()


async def ask(health: Health, request: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(health.host, health.port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


async def test_readyz_names_what_is_not_ready(health: Health, missing: list[str]) -> None:
    status, body = await ask(health, b"GET /readyz HTTP/1.1\r\n\r\n")
    assert (status, json.loads(body)) == (200, {"ready": True, "not_ready": [], "pid": os.getpid()})
    missing.append("bus api")
    status, body = await ask(health, b"GET /readyz?verbose HTTP/1.1\r\n\r\n")
    assert (status, json.loads(body)["not_ready"]) == (503, ["bus api"])


async def test_healthz_metrics_and_the_rest(health: Health) -> None:
    assert (await ask(health, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 200
    assert b"berth_test_total 1.0" in (await ask(health, b"GET /metrics HTTP/1.1\r\n\r\n"))[1]
    assert await ask(health, b"HEAD /metrics HTTP/1.1\r\n\r\n") == (200, b"")
    assert (await ask(health, b"GET /etc/passwd HTTP/1.1\r\n\r\n"))[0] == 404
    assert (await ask(health, b"POST /healthz HTTP/1.1\r\n\r\n"))[0] == 405


@pytest.mark.parametrize(
    "noise", [b"\x16\x03\x01\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * (MAX_HEAD_BYTES * 2)]
)
async def test_noise_is_answered_and_the_server_goes_on(health: Health, noise: bytes) -> None:
    assert (await ask(health, noise))[0] == 400
    assert (await ask(health, b"GET /healthz HTTP/1.1\r\n\r\n"))[0] == 200
