"""One client's long search, and one that does not read its answer, cost no other client anything."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time

import pytest

from bus.clock import new_uuid
from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from bus.service.http_protocol import MAX_PIPELINED
from placement_worker.rest import candidates, metrics
from tests.integration.placement_rest.conftest import PATIENCE_S, Placement, serving, until

pytestmark = pytest.mark.postgres

GROUPS = "&".join(f"resources{number}=SRIOV_NET_VF:1" for number in range(1, 81))
LONG = f"/allocation_candidates?{GROUPS}&group_policy=isolate&limit=1000"


class Gate:
    """A clock for the thread of long searches that stands still until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()

    def __call__(self) -> float:
        self.reached.set()
        assert self.open.wait(PATIENCE_S)
        return time.monotonic()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(candidates, "monotonic", gate)
    return gate


def is_cut_off(sock: socket.socket) -> bool:
    """Whether the client is gone; a server that waits for its answer to be read still is."""
    try:
        sock.send(b" ")
    except ConnectionError:
        return True
    except BlockingIOError:
        return False
    return False


async def devices(placement: Placement, count: int) -> str:
    """A host with so many like devices."""
    root = new_uuid(placement.rng)
    inventory = {"SRIOV_NET_VF": Inventory(total=8)}
    reports = [ProviderReport(uuid=root, name=f"host-{root}")]
    for number in range(count):
        uuid = new_uuid(placement.rng)
        reports.append(ProviderReport(uuid=uuid, name=f"{number}-{uuid}", parent_uuid=root, inventories=inventory))
    await placement.store.report([InventoryUpdate(source="t", version=1, root_uuid=root, providers=tuple(reports))])
    return root


async def test_others_are_answered_while_a_long_search_runs_and_it_sees_one_state(
    postgres_url: str, gate: Gate
) -> None:
    async with serving(postgres_url) as placement:
        root = await devices(placement, 300)
        long = asyncio.create_task(placement.call("GET", LONG))
        try:
            await until(gate.reached.is_set)  # the search is under way, and goes no further
            other = await placement.host(VCPU=4)
            answer = await placement.call("GET", "/allocation_candidates?resources=VCPU:1", status=200)
            assert list(answer.json()["provider_summaries"]) == [other]
            # The searched book changes under it: it goes on with what was there.
            gone = InventoryUpdate(source="t", version=2, root_uuid=root)
            await placement.store.report([gone])
            answer = await placement.call("GET", "/allocation_candidates?resources=SRIOV_NET_VF:1", status=200)
            assert answer.json()["allocation_requests"] == []
            assert not long.done()
        finally:
            gate.open.set()
        answer = await long
        assert answer.status_code == 200
        found = answer.json()
        assert found["allocation_requests"]
        assert len(found["provider_summaries"]) == 301
        assert all(len(each["allocations"]) == 80 for each in found["allocation_requests"])
        fresh = await placement.call("GET", LONG, status=200)
        assert fresh.json()["allocation_requests"] == []


async def test_a_search_that_finds_nothing_in_time_fails_instead_of_answering_none(postgres_url: str) -> None:
    async with serving(postgres_url, search_timeout_s=1e-9) as placement:
        await devices(placement, 300)
        answer = await placement.call("GET", LONG, status=400)
        assert "bounds of time" in answer.json()["errors"][0]["detail"]
        await placement.call("GET", "/allocation_candidates?resources=SRIOV_NET_VF:1", status=200)


async def test_too_many_long_searches_are_answered_503(postgres_url: str, gate: Gate) -> None:
    async with serving(postgres_url, search_timeout_s=0.2) as placement:
        await devices(placement, 300)
        searches = [asyncio.create_task(placement.call("GET", LONG)) for _ in range(19)]
        try:
            await until(lambda: sum(search.done() for search in searches) == 2)  # so all of them have come
            done = [search.result() for search in searches if search.done()]
            assert {answer.status_code for answer in done} == {503}
            assert done[0].headers["retry-after"] == "1"
        finally:
            gate.open.set()
        statuses = [(await search).status_code for search in searches]
        assert statuses.count(503) == 2
        assert {200, 400, 503}.issuperset(statuses)  # 400: a busy machine found nothing in so short a time


@pytest.mark.parametrize(
    "query",
    [
        "&".join(f"resources{number}=SRIOV_NET_VF:1" for number in range(1, 102)) + "&group_policy=none",
        "&".join(f"resources{number}=SRIOV_NET_VF:1,VCPU:1" for number in range(1, 101))
        + "&group_policy=none&resources="
        + ",".join(f"CUSTOM_{number}:1" for number in range(40)),
        "resources=VCPU:1"
        + "&required=in:HW_CPU_X86_AVX,HW_CPU_X86_AVX2" * 1
        + "".join(f"&required=in:HW_CPU_X86_AVX,CUSTOM_{number}" for number in range(70)),
        "resources=VCPU:1" + "".join(f"&member_of=00000000-0000-4000-8000-{number:012d}" for number in range(70)),
        "resources=VCPU:1" + "&x=1" * 1001,
        "resources=VCPU:" + "9" * 5000,
        "resources=" + "VCPU:1," * 9000,
    ],
    ids=["groups", "slots", "required", "member_of", "parameters", "digits", "bytes"],
)
async def test_queries_beyond_a_bound_are_400_with_a_reason(placement: Placement, query: str) -> None:
    kind = "traits" if "required" in query else "resource_classes"
    for name in re.findall(r"CUSTOM_\d+", query):
        await placement.call("PUT", f"/{kind}/{name}")
    answer = await placement.call("GET", f"/allocation_candidates?{query}", status=400)
    assert answer.json()["errors"][0]["detail"]


async def test_a_client_that_does_not_read_is_disconnected_and_delays_no_other(postgres_url: str) -> None:
    async with serving(postgres_url, write_timeout_s=0.2) as placement:
        await devices(placement, 300)
        big = "/allocation_candidates?resources=SRIOV_NET_VF:1"
        before = metrics.LET_GO.labels("read")._value.get()
        host, _, port = placement.base_url.removeprefix("http://").rpartition(":")
        loop = asyncio.get_running_loop()
        headers = "Host: x\r\nX-Auth-Token: admin\r\nOpenStack-API-Version: placement 1.39"
        request = f"GET {big} HTTP/1.1\r\n{headers}\r\n\r\n".encode()
        with contextlib.ExitStack() as sockets:
            lazy = [sockets.enter_context(socket.socket()) for _ in range(4)]
            for each in lazy:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                each.setblocking(False)
                await loop.sock_connect(each, (host, int(port)))
                # together more than the system's own buffers take
                await loop.sock_sendall(each, request * MAX_PIPELINED)
            await placement.call("GET", big, status=200)
            await until(lambda: metrics.LET_GO.labels("read")._value.get() == before + 4)
            await until(lambda: all(is_cut_off(each) for each in lazy))
        await placement.call("GET", big, status=200)


async def test_a_client_that_reads_slowly_gets_all_of_it(postgres_url: str) -> None:
    async with serving(postgres_url, write_timeout_s=2.0) as placement:
        await devices(placement, 300)
        reader, writer = await asyncio.open_connection(
            *placement.base_url.removeprefix("http://").split(":"), limit=1024
        )
        line = "GET /allocation_candidates?resources=SRIOV_NET_VF:1 HTTP/1.1\r\nHost: x\r\nX-Auth-Token: admin\r\n"
        writer.write(f"{line}OpenStack-API-Version: placement 1.39\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        assert len(await reader.readexactly(size)) == size
        writer.close()
