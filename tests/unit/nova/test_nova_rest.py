"""Nova's answers over HTTP: paged, bounded, negotiated, and hostile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY

from bus.clock import SystemClock
from bus.faults import Fault
from bus.openstack.login import KeystoneLogin
from scheduler_worker.nova import nova_rest
from scheduler_worker.nova.api_config import NovaApiConfig
from scheduler_worker.nova.facts import NovaAggregate, NovaService
from scheduler_worker.nova.nova_rest import NovaRefused, NovaRest, NovaUnavailable, flattened
from tests.unit.nova.facts_kit import uuid_of

Answer = Callable[[httpx.Request], httpx.Response]


def rest(answer: Answer, newest: str = "2.104", **config: Any) -> NovaRest:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/compute/v2.1/":
            return httpx.Response(200, json={"version": {"version": newest, "min_version": "2.1"}})
        return answer(request)

    config = {"url": "http://nova/compute/v2.1", "token": "t", **config}
    return NovaRest(NovaApiConfig(**config), clock=SystemClock(), setting="nova", transport=httpx.MockTransport(handle))


def hypervisor(number: int, **more: object) -> dict[str, object]:
    service = {"id": uuid_of(900 + number), "host": f"host{number}", "disabled_reason": None}
    known = {"id": uuid_of(number), "hypervisor_hostname": f"node{number}", "state": "up", "status": "enabled"}
    return {**known, "service": service, "hypervisor_type": "QEMU", "cpu_info": {"arch": "x86_64"}, **more}


async def test_services() -> None:
    rows = [
        {"binary": "nova-conductor", "host": "c", "state": "up", "status": "enabled"},
        {"binary": "nova-compute", "host": "a b", "state": "up", "status": "disabled", "disabled_reason": "fan"},
        {"binary": "nova-compute", "host": "forced", "state": "down", "status": "enabled", "forced_down": True},
        {"binary": "nova-compute", "host": "away", "status": "UNKNOWN"},
        {"binary": "nova-compute", "host": ""},
        7,
    ]
    before = unreadable("services")
    nova = rest(lambda request: httpx.Response(200, json={"services": rows}))
    assert await nova.services() == [
        NovaService(host="a b", is_up=True, is_disabled=True, reason="fan"),
        NovaService(host="forced", is_up=False),
        NovaService(host="away", is_up=False, reason="its cell is out of reach"),
    ]
    assert unreadable("services") == before + 2


def unreadable(name: str) -> float:
    return REGISTRY.get_sample_value("berth_nova_unreadable_rows_total", {"list": name}) or 0.0


async def test_a_version_that_nova_has_no_more_is_negotiated_anew() -> None:
    """It was rolled back, or another process of it is older."""
    newest = "2.104"

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/compute/v2.1/":
            return httpx.Response(200, json={"version": {"version": newest, "min_version": "2.1"}})
        is_known = request.headers["OpenStack-API-Version"] == f"compute {newest}"
        return httpx.Response(200, json={"aggregates": []}) if is_known else httpx.Response(406)

    config = NovaApiConfig(url="http://nova/compute/v2.1", token="t")
    nova = NovaRest(config, clock=SystemClock(), setting="nova", transport=httpx.MockTransport(handle))
    assert await nova.aggregates() == []
    newest = "2.96"
    with pytest.raises(NovaRefused) as refused:
        await nova.aggregates()
    assert refused.value.code == "nova.http_406"
    assert await nova.aggregates() == []


@pytest.mark.parametrize(
    ("newest", "asked"), [("2.104", "2.104"), ("2.110", "2.104"), ("2.96", "2.96"), ("2.88", "2.88")]
)
async def test_the_newest_version_that_both_know(newest: str, asked: str) -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["OpenStack-API-Version"])
        assert request.headers["X-Auth-Token"] == "t"
        return httpx.Response(200, json={"aggregates": [], "hypervisors": []})

    nova = rest(answer, newest)
    assert await nova.aggregates() == [] and await nova.nodes() == []
    assert seen == [f"compute {asked}", "compute 2.87"]


@pytest.mark.parametrize(
    ("newest", "code"), [("2.87", "nova.microversion"), ("2.1", "nova.microversion"), ("", "nova.not_nova")]
)
async def test_what_is_too_old_or_no_nova(newest: str, code: str) -> None:
    with pytest.raises(NovaRefused) as refused:
        await rest(lambda request: httpx.Response(200, json={}), newest).services()
    assert refused.value.code == code


async def test_pages_until_one_is_empty() -> None:
    """Nova leaves out the nodes of deleted services, and then gives no link to the next page."""
    markers: list[str | None] = []
    pages = {None: [1, 2], uuid_of(2): [3], uuid_of(3): [4, 5], uuid_of(5): []}

    def answer(request: httpx.Request) -> httpx.Response:
        marker = request.url.params.get("marker")
        markers.append(marker)
        assert request.url.params["limit"] == "2"
        return httpx.Response(200, json={"hypervisors": [hypervisor(one) for one in pages[marker]]})

    found = await rest(answer, page_size=2).nodes()
    assert [node.uuid for node, _ in found] == [uuid_of(number) for number in (1, 2, 3, 4, 5)]
    assert markers == [None, uuid_of(2), uuid_of(3), uuid_of(5)]
    assert found[0][0].cpu_info == {"arch": "x86_64"} and found[0][1] == NovaService(host="host1", is_up=True)


async def test_a_list_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    page = {"hypervisors": [hypervisor(1)]}
    with pytest.raises(NovaRefused) as refused:
        await rest(lambda request: httpx.Response(200, json=page)).nodes()
    assert refused.value.code == "nova.endless_list"
    monkeypatch.setattr(nova_rest, "MAX_ROWS", 4)
    numbers = iter(range(1, 100))
    with pytest.raises(NovaRefused) as refused:
        await rest(lambda request: httpx.Response(200, json={"hypervisors": [hypervisor(next(numbers))]})).nodes()
    assert refused.value.code == "nova.endless_list"


async def test_one_node() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        known = request.url.path.endswith(uuid_of(1))
        return httpx.Response(200, json={"hypervisor": hypervisor(1)}) if known else httpx.Response(404, json={})

    nova = rest(answer)
    found = await nova.node(uuid_of(1))
    assert found is not None and found[0].nodename == "node1"
    assert await nova.node(uuid_of(2)) is None
    other = rest(lambda request: httpx.Response(200, json={"hypervisor": hypervisor(3)}))
    assert await other.node(uuid_of(1)) is None, "an answer about another node"


async def test_aggregates() -> None:
    rows = [
        {"id": 1, "uuid": uuid_of(7), "name": "ssd", "hosts": ["h 1"], "metadata": {"availability_zone": "z"}},
        {"id": 2, "uuid": uuid_of(8), "name": "bare", "hosts": None, "metadata": None},
        {"id": 3, "uuid": "nothing"},
    ]
    nova = rest(lambda request: httpx.Response(200, json={"aggregates": rows}))
    assert await nova.aggregates() == [
        NovaAggregate(uuid=uuid_of(7), name="ssd", metadata={"availability_zone": "z"}, hosts=("h 1",)),
        NovaAggregate(uuid=uuid_of(8), name="bare"),
    ]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([], None),
        ([{"id": uuid_of(1), "OS-EXT-STS:task_state": None}], ""),
        ([{"id": uuid_of(1), "OS-EXT-STS:task_state": "scheduling"}], "scheduling"),
        ([{"id": uuid_of(1), "status": "UNKNOWN"}], NovaUnavailable),
        ([{"id": uuid_of(2), "OS-EXT-STS:task_state": None}], NovaRefused),
        ([{"id": uuid_of(1), "OS-EXT-STS:task_state": 7}], NovaRefused),
        (None, NovaRefused),
    ],
)
async def test_the_task_of_a_server(answer: list[Any] | None, expected: str | type[Exception] | None) -> None:
    nova = rest(lambda request: httpx.Response(200 if answer is not None else 403, json={"servers": answer}))
    if isinstance(expected, type):
        with pytest.raises(expected):
            await nova.task_of(uuid_of(1))
    else:
        assert await nova.task_of(uuid_of(1)) == expected


@pytest.mark.parametrize(
    ("answer", "fault", "code"),
    [
        (httpx.Response(503), NovaUnavailable, "nova.unavailable"),
        (httpx.Response(429), NovaUnavailable, "nova.unavailable"),
        (httpx.Response(401, json={}), NovaRefused, "nova.http_401"),
        (httpx.Response(403, json={"forbidden": {"message": "no"}}), NovaRefused, "nova.http_403"),
        (httpx.Response(200, text="<html>"), NovaUnavailable, "nova.not_json"),
        (httpx.Response(200, content=b"[" * 100_000), NovaUnavailable, "nova.not_json"),
        (httpx.Response(200, json=[]), NovaRefused, "nova.not_json"),
        (httpx.Response(200, json={"services": {}}), NovaRefused, "nova.not_a_list"),
        (httpx.Response(200, content=b" " * 300), NovaRefused, "nova.too_large"),
    ],
)
async def test_answers_that_are_none(
    answer: httpx.Response, fault: type[Fault], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nova_rest, "MAX_PAGE_BYTES", 200 if code == "nova.too_large" else 2**20)
    with pytest.raises(fault) as raised:
        await rest(lambda request: answer).services()
    assert getattr(raised.value, "code") == code  # noqa: B009  (of either fault)


async def test_nova_out_of_reach() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(NovaUnavailable):
        await rest(answer).services()


@pytest.mark.parametrize("fault", [httpx.ReadTimeout(""), httpx.PoolTimeout("")])
async def test_a_request_without_an_answer_says_how_long_it_was_waited_for(fault: Exception) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise fault

    with pytest.raises(NovaUnavailable) as unavailable:
        await rest(answer, request_timeout_s=7.5).services()
    assert "no answer within 7.5 s" in str(unavailable.value)


async def test_a_silent_keystone_is_told_as_such() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        while await reader.read(1000):
            """No answer."""
        writer.close()

    served: list[asyncio.Task[None] | None] = []
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        login = KeystoneLogin(auth_url=url, username="u", password="p")
        config = NovaApiConfig(url=url, keystone=login, request_timeout_s=0.2)
        nova = NovaRest(config, clock=SystemClock(), setting="nova")
        with pytest.raises(NovaUnavailable) as unavailable:
            await nova.services()
        await nova.close()
        await asyncio.gather(*(one for one in served if one is not None))
    assert unavailable.value.code == "keystone.unavailable" and "no answer within" in str(unavailable.value)


async def test_an_answer_that_does_not_end_is_not_waited_for() -> None:
    async def endless() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    with pytest.raises(NovaUnavailable) as unavailable:
        await rest(lambda request: httpx.Response(200, content=endless()), request_timeout_s=0.01).services()
    assert "no answer within 0.01 s" in str(unavailable.value)


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        (None, {}),
        ("Nehalem", {}),
        (
            {"arch": "x86_64", "topology": {"cores": 8}, "features": ["aes", "avx"], "none": None},
            {"arch": "x86_64", "topology:cores": "8", "features": "['aes', 'avx']"},
        ),
        ({"a": {"b": {"c": {"d": {"e": 1}}}}}, {}),
    ],
)
def test_a_processor_as_nova_compares_it(tree: object, found: dict[str, str]) -> None:
    assert flattened(tree) == found


def test_a_processor_is_bounded() -> None:
    found = flattened({str(number): {"x" * 9: "y" * 100_000} for number in range(1000)})
    assert len(found) == nova_rest.MAX_VALUES and len(json.dumps(found)) < nova_rest.MAX_VALUES * 10_000
