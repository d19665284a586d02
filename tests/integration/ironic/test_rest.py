"""Ironic's REST API: against the stand-in over real HTTP, and against answers no Ironic should give."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from berth.trial.ironic_stand_in import IronicStandIn, Silent
from bus.clock import SystemClock
from ironic_sync.app import rest_source
from ironic_sync.config import IronicSyncConfig
from ironic_sync.domain.node import Allocation, Node, Unreadable
from ironic_sync.source.port import SourceRefused, SourceUnavailable
from ironic_sync.source.rest import RestSource
from tests.integration.compute.test_baremetal_access import served
from tests.kit.certificates import Authority

UUID = "8296eb22-b44b-4cba-95b1-3a66b31189a4"


@pytest.fixture
async def ironic() -> AsyncIterator[IronicStandIn]:
    ironic = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1))
    await ironic.start()
    yield ironic
    await ironic.stop()


def source(url: str, **settings: Any) -> RestSource:
    return rest_source(IronicSyncConfig(url=url, **settings), SystemClock())


async def test_nodes_are_read(ironic: IronicStandIn) -> None:
    ironic.pool.plan(7)
    first = next(iter(ironic.pool.nodes.values()))
    first["allocation_uuid"] = UUID
    reading = source(ironic.url, page_size=3)
    pages = [page async for page in reading.list_nodes()]
    assert [len(page) for page in pages] == [3, 3, 1]
    assert [node.uuid for page in pages for node in page] == list(ironic.pool.nodes)
    node = await reading.get_node(first["uuid"])
    assert isinstance(node, Node)
    assert (node.provision_state, node.resource_class, node.traits) == ("available", "baremetal-gold", ("CUSTOM_GOLD",))
    assert node.updated_at == first["updated_at"]
    assert await reading.get_node(UUID) is None
    assert await reading.get_allocation(UUID) == Allocation(uuid=UUID, state="active", node_uuid=first["uuid"])
    assert await reading.get_allocation(first["uuid"]) is None
    await reading.close()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_address_is_taken_with_the_version_or_without(ironic: IronicStandIn, suffix: str) -> None:
    ironic.pool.plan(1)
    reading = source(ironic.url + suffix)
    assert [len(page) async for page in reading.list_nodes()] == [1]
    await reading.close()


async def test_a_microversion_that_ironic_does_not_support_is_answered_with_what_to_do() -> None:
    limits = {"X-OpenStack-Ironic-API-Minimum-Version": "1.1", "X-OpenStack-Ironic-API-Maximum-Version": "1.38"}
    reading = answering(lambda _: httpx.Response(406, headers=limits))
    with pytest.raises(SourceRefused) as caught:
        await reading.ping()
    advice = "Ironic supports microversions 1.1 to 1.38: set ironic_sync.microversion to one of them"
    assert (caught.value.code, caught.value.reason) == ("ironic.microversion", advice)
    await reading.close()


async def test_basic_sign_in() -> None:
    expected = b"Basic " + base64.b64encode(b"berth:secret")
    async with served(lambda headers: headers.get(b"authorization") == expected) as (pool, url):
        assert await count(source(url, username="berth", password="secret")) == len(pool.nodes)
        with pytest.raises(SourceRefused) as refused:
            await count(source(url, username="berth", password="other"))
    assert refused.value.code == "ironic.http_401"


async def test_tls_with_an_authority_of_the_operators(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with served(lambda _: True, authority.issue("ironic", "IP:127.0.0.1")) as (pool, url):
        assert await count(source(url, ca_file=str(authority.file))) == len(pool.nodes)
        assert await count(source(url, verify_tls=False)) == len(pool.nodes)
        with pytest.raises(SourceUnavailable):  # this system does not know the authority
            await count(source(url))
    async with served(lambda _: True, authority.issue("ironic", "DNS:ironic.example.org")) as (_, url):
        with pytest.raises(SourceUnavailable):
            await count(source(url, ca_file=str(authority.file)))


async def count(reading: RestSource) -> int:
    try:
        return sum([len(page) async for page in reading.list_nodes()])
    finally:
        await reading.close()


async def test_an_unreachable_address() -> None:
    reading = source("http://127.0.0.1:1")
    with pytest.raises(SourceUnavailable):
        await reading.get_node(UUID)
    await reading.close()


def answering(answer: Callable[[httpx.Request], httpx.Response]) -> RestSource:
    return RestSource(
        "http://ironic",
        microversion="1.52",
        timeout_s=60.0,
        list_timeout_s=60.0,
        page_size=2,
        connections=2,
        transport=httpx.MockTransport(answer),
    )


@pytest.mark.parametrize(
    ("status", "content", "fault"),
    [
        (500, b"", SourceUnavailable),
        (503, b"", SourceUnavailable),
        (429, b"", SourceUnavailable),
        (401, b"", SourceRefused),
        (406, b"", SourceRefused),
        (404, b"<html>no such path</html>", SourceRefused),
        (404, b"{}", SourceRefused),
        (302, b"", SourceRefused),
        (200, b"not json", SourceUnavailable),
        (200, b"x" * (5 * 1024 * 1024), SourceRefused),
    ],
)
async def test_odd_answers_are_faults_and_never_a_removal(status: int, content: bytes, fault: type[Exception]) -> None:
    reading = answering(lambda _: httpx.Response(status, content=content))
    with pytest.raises(fault):
        await reading.get_node(UUID)
    await reading.close()


@pytest.mark.parametrize("content", [{"uuid": "05dcdb28-1788-4480-9281-af335fc32c9f"}, [], {"uuid": UUID, "traits": 1}])
async def test_an_answer_that_is_not_this_node(content: object) -> None:
    reading = answering(lambda _: httpx.Response(200, json=content))
    assert isinstance(await reading.get_node(UUID), Unreadable)
    await reading.close()


async def test_a_hanging_ironic_is_given_up() -> None:
    def hang(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("hangs")

    reading = answering(hang)
    with pytest.raises(SourceUnavailable):
        await reading.get_node(UUID)
    await reading.close()


async def test_a_list_that_never_ends_and_one_that_is_none() -> None:
    endless = answering(lambda _: httpx.Response(200, json={"nodes": [], "next": f"http://elsewhere/?marker={UUID}"}))
    with pytest.raises(SourceRefused):
        [page async for page in endless.list_nodes()]
    none = answering(lambda _: httpx.Response(200, json=[1]))
    with pytest.raises(SourceRefused):
        [page async for page in none.list_nodes()]
    await endless.close()
    await none.close()


async def test_a_next_link_cannot_lead_elsewhere() -> None:
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        link = {} if len(requests) > 1 else {"next": f"http://evil/v1/nodes?marker={UUID}&limit=2"}
        return httpx.Response(200, json={"nodes": [{"uuid": "bad"}], **link})

    reading = answering(answer)
    pages = [page async for page in reading.list_nodes()]
    assert [request.url.host for request in requests] == ["ironic", "ironic"]
    assert requests[1].url.params["marker"] == UUID
    assert requests[0].headers["X-OpenStack-Ironic-API-Version"] == "1.52"
    assert all(isinstance(node, Unreadable) for page in pages for node in page)
    assert json.loads("{}") == {}
    await reading.close()
