"""What bounds the REST API: long searches, floods of requests, forked clients, and the event loop beside long work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY

from bus.clock import new_uuid
from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from bus.service.http_protocol import MAX_PIPELINED
from placement_worker import metrics
from placement_worker.rest import api, bodies, candidates
from tests.integration.placement_rest.conftest import PATIENCE_S, Placement, serving
from tests.kit.cases import case
from tests.kit.waiting import until

pytestmark = pytest.mark.postgres

# --- one client's long search, and one that does not read its answer, cost no other client anything

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
    await placement.store.apply_reports(
        [InventoryUpdate(reporter="t", version=1, root_uuid=root, providers=tuple(reports))]
    )
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
            # The searched replica changes under it: it goes on with what was there.
            gone = InventoryUpdate(reporter="t", version=2, root_uuid=root)
            await placement.store.apply_reports([gone])
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


BEYOND = {
    "groups": "&".join(f"resources{number}=SRIOV_NET_VF:1" for number in range(1, 102)) + "&group_policy=none",
    "slots": "&".join(f"resources{number}=SRIOV_NET_VF:1,VCPU:1" for number in range(1, 101))
    + "&group_policy=none&resources="
    + ",".join(f"CUSTOM_{number}:1" for number in range(40)),
    "required": "resources=VCPU:1&required=in:HW_CPU_X86_AVX,HW_CPU_X86_AVX2"
    + "".join(f"&required=in:HW_CPU_X86_AVX,CUSTOM_{number}" for number in range(70)),
    "member_of": "resources=VCPU:1"
    + "".join(f"&member_of=00000000-0000-4000-8000-{number:012d}" for number in range(70)),
    "parameters": "resources=VCPU:1" + "&x=1" * 1001,
    "digits": "resources=VCPU:" + "9" * 5000,
    "bytes": "resources=" + "VCPU:1," * 9000,
}


async def test_queries_beyond_a_bound_are_400_with_a_reason(placement: Placement) -> None:
    for bound, query in BEYOND.items():
        with case(bound):
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


# --- floods: heads and trailers without end, and more bodies at once than fit

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


async def test_a_head_without_end_is_refused_before_it_is_large(postgres_url: str) -> None:
    async with serving(postgres_url) as placement:
        host, _, port = placement.base_url.removeprefix("http://").rpartition(":")
        for what, (begin, more) in ENDLESS.items():
            with case(what):
                before = metrics.LET_GO.labels("size")._value.get()
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
    return REGISTRY.get_sample_value("berth_placement_rest_buffered_bytes") or 0.0


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


# --- a client that forks after it has read the version document: nova-scheduler with two workers after a restart

# Its two workers share what their parent has left open; an answer that is another's, or none, is a failure.
CLIENT = """
import os, sys
import httpx
url, token, *providers = sys.argv[1:]
client = httpx.Client(base_url=url, headers={"x-auth-token": token}, trust_env=False, timeout=10.0)
assert client.get("/").status_code == 200
workers = []
for provider in providers:
    pid = os.fork()
    if pid == 0:
        found = [client.get(f"/resource_providers/{provider}").json().get("uuid") for _ in range(50)]
        os._exit(0 if set(found) == {provider} else 1)
    workers.append(pid)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers))
"""


async def test_workers_that_are_forked_after_discovery_share_no_connection(placement: Placement) -> None:
    providers = [await placement.host(VCPU=4) for _ in range(2)]
    async with asyncio.timeout(PATIENCE_S):
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, placement.base_url, "admin", *providers
        )
        assert await client.wait() == 0


# --- long work on a client's body or request leaves the event loop: others are answered meanwhile

ADMIN = {"x-auth-token": "admin", "openstack-api-version": "placement 1.39", "content-type": "application/json"}


class BlockedTurn:
    """Stands before a function: who comes through on the event loop's thread is a fault, others wait until it opens."""

    def __init__(self, behind: Callable[..., Any]) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self._behind = behind
        self._loop = threading.current_thread()

    def __call__(self, *arguments: Any) -> Any:
        assert threading.current_thread() is not self._loop, "on the event loop"
        self.reached.set()
        assert self.open.wait(PATIENCE_S)
        return self._behind(*arguments)


async def answered_beside(placement: Placement, gate: BlockedTurn, long: asyncio.Task[Any]) -> None:
    """A host can be made and searched for while the long request stands at the gate."""
    try:
        await until(lambda: gate.reached.is_set() or long.done())
        assert not long.done(), long.result().text
        host = await placement.host(VCPU=4)
        answer = await placement.call("GET", "/allocation_candidates?resources=VCPU:4", status=200)
        assert host in answer.json()["provider_summaries"]
        assert not long.done()
    finally:
        gate.open.set()


async def test_what_is_wrong_with_a_long_body_is_found_off_the_event_loop(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(postgres_url) as placement:
        host = await placement.host(MEMORY_MB=4)
        wrong = json.dumps([*({} for _ in range(api.EXPLAINED_AT_ONCE))])
        gate = BlockedTurn(bodies._check_depth)
        before = metrics.OFFLOADED.labels("text")._value.get()
        put = placement.client.put(f"/resource_providers/{host}/aggregates", content=wrong, headers=ADMIN)
        long = asyncio.create_task(put)
        with monkeypatch.context() as patch:
            patch.setattr(bodies, "_check_depth", gate)
            await answered_beside(placement, gate, long)
            answer = await long
        assert answer.status_code == 400
        assert "is not of type" in answer.text
        assert metrics.OFFLOADED.labels("text")._value.get() == before + 1


async def test_a_body_of_more_than_a_megabyte_is_413(postgres_url: str) -> None:
    async with serving(postgres_url) as placement:
        path = f"/resource_providers/{new_uuid(placement.rng)}/aggregates"
        for size, status in ((2**20, 404), (2**20 + 1, 413)):
            content = b'["' + b"x" * (size - 4) + b'"]'
            answer = await placement.client.put(path, content=content, headers=ADMIN)
            assert answer.status_code == status
        assert "At most 1048576 bytes of body are taken (max_body_bytes)." in answer.text


async def test_words_about_a_long_body_are_short(postgres_url: str) -> None:
    async with serving(postgres_url) as placement:
        content = json.dumps({"name": "x" * 500_000})
        answer = await placement.client.post("/resource_providers", content=content, headers=ADMIN)
        assert answer.status_code == 400
        assert len(answer.json()["errors"][0]["detail"]) <= 8192
