"""Floods: heads and trailers without end, and more bodies at once than fit."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from placement_worker.rest import metrics
from tests.integration.placement_rest.conftest import PATIENCE_S, serving, until

pytestmark = pytest.mark.postgres

TOO_MUCH = 2**25  # more than any system's own buffers take


# Each is sent again and again, until the connection ends.
ENDLESS = {
    "a header": (b"GET / HTTP/1.1\r\nHost: x\r\nX: ", b"a" * 65_536),
    "headers": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"X: a\r\n" * 8192),
    "a path": (b"GET /", b"a" * 65_536),
    "trailers": (
        b"POST /reshaper HTTP/1.1\r\nHost: x\r\nX-Auth-Token: admin\r\nX-Roles: service\r\n"
        b"Content-Type: application/json\r\n"
        b"OpenStack-API-Version: placement 1.39\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
        b"X: a\r\n" * 8192,
    ),
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_a_head_without_end_is_refused_before_it_is_large(postgres_url: str, what: str) -> None:
    begin, more = ENDLESS[what]
    async with serving(postgres_url) as placement:
        before = metrics.LET_GO.labels("size")._value.get()
        host, _, port = placement.base_url.removeprefix("http://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(begin)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < TOO_MUCH:
                writer.write(more)
                await writer.drain()
                sent += len(more)
        assert sent < TOO_MUCH
        assert metrics.LET_GO.labels("size")._value.get() == before + 1
        writer.close()
        await placement.call("GET", "/", status=200)


def begun(size: int, of: int) -> bytes:
    """A POST whose body has come so far."""
    head = (
        "POST /allocations HTTP/1.1\r\nHost: x\r\nX-Auth-Token: admin\r\nContent-Type: application/json\r\n"
        f"OpenStack-API-Version: placement 1.39\r\nContent-Length: {of}\r\n\r\n"
    )
    return head.encode() + b" " * size


def gathering() -> float:
    return float(metrics.GATHERING._value.get())


async def test_bodies_that_do_not_get_whole_are_bounded_together(postgres_url: str) -> None:
    async with serving(postgres_url, max_bodies_bytes=2**20) as placement:
        host, _, port = placement.base_url.removeprefix("http://").rpartition(":")
        _, slow = await asyncio.open_connection(host, int(port))
        slow.write(begun(900_000, 1_000_000))
        await slow.drain()
        await until(lambda: gathering() >= 900_000)
        reader, other = await asyncio.open_connection(host, int(port))
        other.write(begun(500_000, 500_000))
        assert b" 503 " in await reader.readline()
        other.close()
        slow.close()
        await until(lambda: gathering() == 0)
        reader, other = await asyncio.open_connection(host, int(port))
        other.write(begun(500_000, 500_000))
        assert b" 400 " in await reader.readline()
        other.close()


async def test_a_body_that_comes_drop_by_drop_is_not_waited_for_for_ever(postgres_url: str) -> None:
    async with serving(postgres_url, body_timeout_s=0.1) as placement:
        host, _, port = placement.base_url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(begun(1, 1000))
        answer = asyncio.create_task(reader.readline())
        async with asyncio.timeout(PATIENCE_S):
            while not answer.done():
                writer.write(b" ")
                await asyncio.sleep(0.01)  # the drops
        assert b" 408 " in await answer
        writer.close()


async def test_no_answer_has_more_candidates_than_the_site_allows(postgres_url: str) -> None:
    async with serving(postgres_url, default_limit=2) as placement:
        for _ in range(4):
            await placement.host(VCPU=8)
        for query, count in (("", 2), ("&limit=1", 1), ("&limit=3", 2)):
            answer = await placement.call("GET", f"/allocation_candidates?resources=VCPU:1{query}", status=200)
            assert len(answer.json()["allocation_requests"]) == count, query
