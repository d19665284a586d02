"""A change that moves no generation must not be missed by a copy that is reported equal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest

from bus.clock import new_uuid
from placement_worker.operations import copying
from placement_worker.operations.copying import CopySource
from placement_worker.operations.export import InvalidExport
from tests.integration.placement_rest.conftest import Placement

pytestmark = pytest.mark.postgres


@pytest.fixture
async def source(placement: Placement) -> AsyncIterator[CopySource]:
    made = CopySource(placement.base_url, "admin")
    yield made
    await made.close()


async def test_a_consumer_that_was_removed_and_made_again_is_seen(placement: Placement, source: CopySource) -> None:
    host = await placement.host(VCPU=8)
    consumer = new_uuid(placement.rng)
    assert (await placement.claim(consumer, host, VCPU=1)).status_code == 204
    before = (await source.read()).consumers[consumer]
    await placement.call("DELETE", f"/allocations/{consumer}", status=204)
    assert (await placement.claim(consumer, host, VCPU=3)).status_code == 204
    after = (await source.read(whole=False)).consumers[consumer]
    assert (before.generation, after.generation) == (1, 1)
    assert after.holding == {host: {"VCPU": 3}}


async def test_aggregates_of_the_old_days_are_seen_by_a_whole_pass(placement: Placement, source: CopySource) -> None:
    host, aggregate = await placement.host(VCPU=8), new_uuid(placement.rng)
    await source.read()
    path = f"/resource_providers/{host}/aggregates"
    answer = await placement.client.put(
        path, json=[aggregate], headers={"x-auth-token": "admin", "openstack-api-version": "placement 1.18"}
    )
    assert answer.status_code == 200
    assert (await source.read(whole=True)).providers[host].aggregates == (aggregate,)


async def test_an_unreachable_keystone_and_an_unknown_user(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "ASK", msgspec.structs.replace(copying.ASK, first_s=0.001, longest_s=0.001))
    unreachable = CopySource("http://127.0.0.1:9", "admin")
    with pytest.raises(InvalidExport, match="ConnectError"):
        await unreachable.read()
    await unreachable.close()
    unauthorized = CopySource(f"{placement.base_url}/resource_providers", "")
    with pytest.raises(InvalidExport):
        await unauthorized.read()
    await unauthorized.close()
    with pytest.raises((InvalidExport, httpx.HTTPError)):
        await CopySource("gopher://x", "").read()


HOSTILE = {
    "not UTF-8": b'{"versions":[{"max_version":"\xff"}]}',
    "nested without end": b"[" * 100_000,
    "no version": b'{"versions":[{"max_version":7}]}',
    "half an answer": b'{"versions":',
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
async def test_hostile_answers_are_no_placement(body: bytes) -> None:
    async with answering(lambda _: body) as url:
        await refused(url)


@pytest.mark.parametrize("uuid", ["\\u0000", "\\n", "x" * 70_000], ids=["NUL", "a line end", "too long for a URL"])
async def test_a_provider_whose_uuid_is_no_part_of_a_url_is_no_placement(uuid: str) -> None:
    row = f'{{"uuid":"{uuid}","name":"n","parent_provider_uuid":null,"root_provider_uuid":"r","generation":1}}'
    answers = {
        "/": '{"versions":[{"max_version":"1.39"}]}',
        "/traits": '{"traits":[]}',
        "/resource_classes": '{"resource_classes":[]}',
        "/resource_providers": f'{{"resource_providers":[{row}]}}',
    }
    async with answering(lambda path: answers.get(path, "{").encode()) as url:
        await refused(url)


async def test_an_answer_that_cannot_be_unpacked_is_no_placement() -> None:
    async with answering(lambda _: b"{}", b"content-encoding: gzip\r\n") as url:
        await refused(url)


async def refused(url: str) -> None:
    source = CopySource(url, "admin")
    with pytest.raises(InvalidExport):
        await source.read()
    await source.close()


@asynccontextmanager
async def answering(body: Callable[[str], bytes], headers: bytes = b"") -> AsyncIterator[str]:
    """A server that answers every request with 200 and whatever the path has."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        content = body(head.split()[1].decode())
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n%bcontent-length: %d\r\n\r\n" % (headers, len(content)))
        writer.write(content)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**20)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
