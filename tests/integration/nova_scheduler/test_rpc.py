"""Nova's own RPC client, on a real RabbitMQ, before berth's topic `scheduler`: the server, and `berth nova serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiormq
import httpx
import pytest
from prometheus_client import REGISTRY

from berth.config.ports import free_port
from berth.up.embedded.rabbitmq import RabbitMQ
from nova_scheduler.request.request_spec import NotDecided
from nova_scheduler.wire.envelope import Call, no_valid_host
from tests.integration.nova_scheduler.world import EXCHANGE, Instructed, chosen, front, shadow
from tests.kit.nova_peer import NovaPeer, needs_nova, nova_peer
from tests.kit.raw_amqp import long, raw_publisher, table
from tests.kit.sources import ROOT
from tests.kit.waiting import until

pytestmark = [pytest.mark.rabbitmq, needs_nova]


# --- Nova's own RPC client, on a real RabbitMQ, before berth's server of topic `scheduler`.


UUIDS = ["11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"]


@pytest.fixture
def vhost(own_broker: RabbitMQ) -> str:
    return own_broker.add_vhost("nova")


@pytest.fixture
async def client(vhost: str) -> AsyncIterator[NovaPeer]:
    async with nova_peer("client", vhost) as peer:
        yield peer


async def test_a_call_of_each_kind(vhost: str, client: NovaPeer) -> None:
    dispatcher = Instructed()
    async with front(vhost, dispatcher) as server:
        found = await client.do("select", uuids=UUIDS, request_id="req-1")
        assert found.get("result") == [["h1", "h2"], ["h1", "h2"]], found
        (call,) = dispatcher.calls
        assert (call.method, call.version, call.request_id) == ("select_destinations", "4.5", "req-1")
        assert call.arguments["spec_obj"]["nova_object.name"] == "RequestSpec"
        assert (call.timeout_s, call.limit_s) == (60, 120)
        assert (await client.do("ping"))["result"] == {"service": "scheduler", "arg": "there?"}
        named = await client.do("call", method="oslo_rpc_server_ping", version="1.0", server="front")
        assert named["result"] == "pong"
        await until(lambda: server.in_flight == 0)


async def test_no_valid_host_is_raised_as_novas_own(vhost: str, client: NovaPeer) -> None:
    async def none(_: Call) -> object:
        raise no_valid_host("3 hosts are full")

    async with front(vhost, Instructed(none)):
        found = await client.do("select", uuids=UUIDS)
        assert "NoValidHost" in found["raised"]["kinds"] and found["raised"]["module"] == "nova.exception_Remote"
        assert "No valid host was found. 3 hosts are full" in found["raised"]["text"]
        assert found["keywords"] == {"reason": "3 hosts are full", "code": 500}


async def test_a_defect_is_told_as_no_valid_host_without_its_text(vhost: str, client: NovaPeer) -> None:
    async def broken(_: Call) -> object:
        raise ZeroDivisionError("secret")

    async with front(vhost, Instructed(broken)):
        found = await client.do("select", uuids=UUIDS)
        assert "NoValidHost" in found["raised"]["kinds"] and "secret" not in found["raised"]["text"]


async def test_another_version_is_refused_by_name(vhost: str, client: NovaPeer) -> None:
    dispatcher = Instructed()
    async with front(vhost, dispatcher):
        for version in ("4.0", "4.3", "4.4", "4.6", "3.0", "5.0"):
            found = await client.do("call", method="select_destinations", version=version)
            assert found["raised"]["kind"] == "UnsupportedVersion", found
            assert version in found["raised"]["text"] and "select_destinations" in found["raised"]["text"]
        found = await client.do("call", method="run_instance", version="4.0")
        assert found["raised"]["kind"] == "NoSuchMethod"
    assert dispatcher.calls == []


async def test_casts_come_to_each_server_in_their_order(vhost: str, client: NovaPeer) -> None:
    one, other = Instructed(), Instructed()
    async with front(vhost, one, name="a"), front(vhost, other, name="b"):
        await client.do("casts")
        await until(lambda: len(one.calls) == len(other.calls) == 4)
    wanted = ["update_aggregates", "delete_instance_info", "sync_instance_info", "delete_aggregate"]
    assert one.methods() == other.methods() == wanted
    assert all(call.fanout for call in one.calls)


async def test_the_end_of_the_last_server_fails_no_cast(vhost: str, client: NovaPeer) -> None:
    """With its queue the exchange went, which oslo.messaging declares once for each connection: builds of nova-compute
    ended by a 404 (MessageDeliveryFailure).
    """
    later = Instructed()
    async with front(vhost, Instructed()):
        assert (await client.do("casts"))["result"] == "sent"
    assert (await client.do("casts")).get("result") == "sent", "with no server there"
    async with front(vhost, later):
        assert (await client.do("casts"))["result"] == "sent"
        await until(lambda: len(later.calls) == 4)


async def test_heartbeats_keep_a_long_call_alive(vhost: str, client: NovaPeer) -> None:
    """The client gives up after 2 s of silence; the call takes 5."""

    async def slow(call: Call) -> object:
        await asyncio.sleep(5)
        return await chosen(call)

    async with front(vhost, Instructed(slow)):
        found = await client.do("select", uuids=UUIDS, monitor_s=2)
        assert "result" in found, found


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"berth_nova_{name}_total", labels) or 0.0


async def test_two_fronts_and_a_stock_scheduler_share_the_calls(vhost: str, client: NovaPeer) -> None:
    """Each is carried out once, by one of them."""
    one, other = Instructed(), Instructed()
    async with nova_peer("server", vhost) as stock, front(vhost, one, name="a"), front(vhost, other, name="b"):
        ids = [f"req-{number}" for number in range(30)]
        found = await asyncio.gather(*(client.do("select", uuids=UUIDS[:1], request_id=each) for each in ids))
        assert all("result" in each for each in found), found
        taken = [each["request_id"] for each in stock.taken("select_destinations")]
        ours = [call.request_id for call in (*one.calls, *other.calls)]
        assert sorted(taken + ours) == sorted(ids) and taken and one.calls and other.calls


# --- a server that is killed, a broker that is restarted, a client that is gone


async def test_a_call_of_a_killed_server_is_carried_out_by_another(vhost: str, client: NovaPeer) -> None:
    victim = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.integration.nova_scheduler.victim", vhost, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert victim.stdout is not None
    try:
        await victim.stdout.readline()
        asking = asyncio.create_task(client.do("select", uuids=UUIDS, limit_s=120))
        taken = (await victim.stdout.readline()).decode().strip()
    finally:
        victim.kill()
        await victim.wait()
    dispatcher = Instructed()
    async with front(vhost, dispatcher):
        found = await asking
        assert "result" in found, found
    assert [call.unique_id for call in dispatcher.calls] == [taken]


async def test_a_call_is_answered_once_after_the_connection_was_lost_in_the_middle(
    own_broker: RabbitMQ, vhost: str, client: NovaPeer
) -> None:
    """It is delivered again while it is in hand, and carried out once."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def held(call: Call) -> object:
        begun.set()
        await go_on.wait()
        return await chosen(call)

    dispatcher = Instructed(held)
    async with front(vhost, dispatcher) as server:
        asking = asyncio.create_task(client.do("select", uuids=UUIDS))
        await begun.wait()
        session = server._transport._session
        await asyncio.to_thread(
            own_broker.evaluate,
            '[rabbit_networking:close_connection(One, "tests") || One <- rabbit_networking:connections()].',
        )
        await until(lambda: server._transport._session not in (None, session))
        go_on.set()
        found = await asking
        assert "result" in found, found
        await until(lambda: server.in_flight == 0)
    assert len(dispatcher.calls) == 1


async def test_calls_after_a_restart_of_the_broker_are_answered(own_broker: RabbitMQ, client: NovaPeer) -> None:
    vhost = own_broker.url("nova")
    async with front(vhost, Instructed()) as server:
        assert "result" in await client.do("select", uuids=UUIDS)
        await asyncio.to_thread(own_broker.kill)
        await asyncio.to_thread(own_broker.start)
        await until(lambda: not server.unavailable_reason)
        assert "result" in await client.do("select", uuids=UUIDS)


async def test_a_server_that_stops_answers_what_it_has_in_hand(vhost: str, client: NovaPeer) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def held(call: Call) -> object:
        begun.set()
        await go_on.wait()
        return await chosen(call)

    async with front(vhost, Instructed(held)) as server:
        asking = asyncio.create_task(client.do("select", uuids=UUIDS))
        await begun.wait()
        draining = asyncio.create_task(server.drain(60.0))
        await until(lambda: not any(one._tag for one in server._intakes))
        later = asyncio.create_task(client.do("select", uuids=UUIDS))
        go_on.set()
        await draining
        assert "result" in await asking
        other = Instructed()
        async with front(vhost, other, name="other"):
            assert "result" in await later
        assert len(other.calls) == 1


async def test_hostile_bodies_end_nothing(vhost: str, client: NovaPeer) -> None:
    bodies = (b"", b"\xff", b"[" * 100_000, b"{}", b"null", b'{"oslo.version": "2.0", "oslo.message": "[]"}')
    before = counted("calls", method="other", outcome="unreadable")
    dispatcher = Instructed()
    async with front(vhost, dispatcher), raw_publisher(vhost) as hostile:
        for number, body in enumerate(bodies):
            key = (b"scheduler", b"scheduler.front")[number % 2]
            await hostile.publish(
                EXCHANGE, key, body, content_type=b"\xff", headers=table({b"compression": b"S" + long(b"\xff")})
            )
            await hostile.publish("scheduler_fanout", b"", body)
        assert "result" in await client.do("select", uuids=UUIDS)
        await until(lambda: counted("calls", method="other", outcome="unreadable") == before + 2 * len(bodies))
    assert len(dispatcher.calls) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"amqp_durable_queues": True, "rabbit_transient_queues_ttl": 60},
        {"amqp_auto_delete": True},
        {"rabbit_quorum_queue": True, "rabbit_transient_quorum_queue": True, "rabbit_quorum_delivery_limit": 7},
        {
            "rabbit_quorum_queue": True,
            "rabbit_transient_quorum_queue": True,
            "rabbit_stream_fanout": True,
            "rabbit_qos_prefetch_count": 10,
        },
    ],
    ids=["durable", "auto_delete", "quorum", "stream"],
)
async def test_queues_are_declared_as_novas_services_declare_them(vhost: str, options: dict[str, object]) -> None:
    """A stock scheduler declares the same queues beside, which the broker refuses where they differ."""
    ours = {name: value for name, value in options.items() if name != "rabbit_qos_prefetch_count"}
    dispatcher = Instructed()
    async with front(vhost, dispatcher, **ours), nova_peer("server", vhost, **options) as stock:
        async with nova_peer("client", vhost, **options) as client:
            await client.do("casts")
            await until(lambda: len(dispatcher.calls) == 4 and stock.taken("update_aggregates"))
            found = [await client.do("select", uuids=UUIDS) for _ in range(4)]
            assert all("result" in one for one in found), found
        assert len(stock.taken("select_destinations")) + dispatcher.methods().count("select_destinations") == 4


async def test_queues_that_exist_otherwise_are_used_as_they_are(vhost: str, client: NovaPeer) -> None:
    async with await aiormq.connect(vhost) as connection:
        channel = await connection.channel()
        await channel.exchange_declare(EXCHANGE, exchange_type="topic", durable=False)
        await channel.queue_declare("scheduler", durable=False)
    async with front(vhost, Instructed(), amqp_durable_queues=True):
        assert "result" in await client.do("select", uuids=UUIDS)


# --- the fallback


async def test_what_is_not_decided_is_relayed_and_its_answer_as_it_came(
    own_broker: RabbitMQ, vhost: str, client: NovaPeer
) -> None:
    async def undecided(_: Call) -> object:
        raise NotDecided("numa_topology")

    fallback = own_broker.add_vhost("stock")
    before = counted("forwarded", reason="numa_topology", outcome="answered")
    async with (
        nova_peer("server", fallback) as stock,
        front(vhost, Instructed(undecided), stock=fallback) as server,
    ):
        found = await client.do("select", uuids=UUIDS, request_id="req-7")
        assert found.get("result") == [["stock"], ["stock"]], found
        (taken,) = stock.taken("select_destinations")
        assert (taken["request_id"], taken["uuids"]) == ("req-7", UUIDS)
        none = await client.do("select", uuids=UUIDS, request_id="req-none")
        assert "NoValidHost" in none["raised"]["kinds"] and "stock has none" in none["raised"]["text"]
        slow = await client.do("select", uuids=UUIDS, request_id="req-slow", monitor_s=2)
        assert "result" in slow, slow
        await client.do("casts")
        await until(lambda: stock.taken("update_aggregates"))
        assert server.in_flight == 0
    assert counted("forwarded", reason="numa_topology", outcome="answered") == before + 3


async def test_a_relayed_call_that_no_scheduler_takes_has_no_valid_host(
    own_broker: RabbitMQ, vhost: str, client: NovaPeer
) -> None:
    async def undecided(_: Call) -> object:
        raise NotDecided("pci_requests")

    async with front(vhost, Instructed(undecided), stock=own_broker.add_vhost("stock")):
        found = await client.do("select", uuids=UUIDS)
        assert "NoValidHost" in found["raised"]["kinds"], found
    before = counted("forwarded", reason="pci_requests", outcome="no_fallback")
    async with front(vhost, Instructed(undecided)):
        found = await client.do("select", uuids=UUIDS)
        assert "NoValidHost" in found["raised"]["kinds"] and "pci_requests" in found["raised"]["text"]
    assert counted("forwarded", reason="pci_requests", outcome="no_fallback") == before + 1


async def test_in_the_shadow_stock_decides_and_the_difference_is_counted(
    own_broker: RabbitMQ, vhost: str, client: NovaPeer
) -> None:
    """A decision that does not come holds nothing up."""

    async def beside(call: Call) -> object:
        if call.request_id == "req-slow":
            await asyncio.Event().wait()
        return await chosen(call)

    fallback = own_broker.add_vhost("stock")
    async with nova_peer("server", fallback) as stock, shadow(vhost, fallback, Instructed(beside)) as relay:
        found = await client.do("select", uuids=UUIDS, request_id="req-7")
        assert found.get("result") == [["stock"], ["stock"]], found
        await until(lambda: relay.counts() == {"other host": 1})
        none = await client.do("select", uuids=UUIDS, request_id="req-none")
        assert "NoValidHost" in none["raised"]["kinds"] and "stock has none" in none["raised"]["text"]
        await until(lambda: relay.counts() == {"other host": 1, "would fit": 1})
        slow = await client.do("select", uuids=UUIDS, request_id="req-slow", monitor_s=2)
        assert "result" in slow, slow
        assert len(stock.taken("select_destinations")) == 3


# --- `berth nova serve` as an operator runs it: the REST API and the topic in one process, called by Nova's client.


CELL = "ce110000-0000-4000-8000-000000000001"
NODES = [f"{n}0000000-0000-4000-8000-000000000000" for n in (1, 2)]
VMS = [f"c00000{n:02d}-0000-4000-8000-000000000000" for n in range(9)]
HEADERS = {"x-auth-token": "admin", "openstack-api-version": "placement 1.39"}
SERVICES = [
    {"id": f"s{n}", "host": f"h{n}", "binary": "nova-compute", "status": "enabled", "state": "up"} for n in (1, 2)
]
HYPERVISORS = [
    {"id": uuid, "hypervisor_hostname": f"h{n}.local", "service": {"host": f"h{n}"}, "state": "up", "status": "enabled"}
    for n, uuid in enumerate(NODES, 1)
]
LISTS: dict[str, Any] = {
    "/v2.1/": {"version": {"id": "v2.1", "version": "2.104"}},
    "/v2.1/os-services": {"services": SERVICES},
    "/v2.1/os-aggregates": {"aggregates": []},
    "/v2.1/os-hypervisors/detail": {"hypervisors": HYPERVISORS},
    "/v2.1/os-hypervisors": {"hypervisors": [{"id": uuid, "servers": []} for uuid in NODES]},
}


class ComputeApi(BaseHTTPRequestHandler):
    """The lists of two hosts. Of a list in pages the second is empty."""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        found = LISTS.get(path)
        if found is not None and "marker=" in query:
            found = {key: [] for key in found}
        body = json.dumps(found).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def compute_api() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ComputeApi)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v2.1"
    server.shutdown()
    server.server_close()
    thread.join()


@contextlib.asynccontextmanager
async def served(vhost: str, compute_api: str, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """`berth nova serve`, and a client of its Placement."""
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "STATE_DIR": str(folder),
        "NOVA__TRANSPORT_URL": vhost.replace("amqp://", "rabbit://"),
        "NOVA__API__URL": compute_api,
        "NOVA__API__CELLS": json.dumps({CELL: ["*"]}),
    }
    env = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    env |= {f"BERTH_{name}": value for name, value in settings.items()}
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "berth", "nova", "serve", "--memory", "--api", address),
            env=env, cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            async with httpx.AsyncClient(base_url=f"http://{address}", headers=HEADERS) as client:
                yield client
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            assert await process.wait() == 0, (folder / "log").read_text()[-4000:]


async def answers(client: httpx.AsyncClient, path: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await client.get(path)).status_code == httpx.codes.OK
    return False


async def report(client: httpx.AsyncClient) -> None:
    """As a nova-compute does."""
    for n, uuid in enumerate(NODES, 1):
        made = await client.post("/resource_providers", json={"uuid": uuid, "name": f"h{n}.local"})
        assert made.status_code == httpx.codes.OK, made.text
        inventories = {name: {"total": 100} for name in ("VCPU", "MEMORY_MB", "DISK_GB")}
        body = {"resource_provider_generation": made.json()["generation"], "inventories": inventories}
        assert (await client.put(f"/resource_providers/{uuid}/inventories", json=body)).status_code == httpx.codes.OK


async def test_one_process_is_placement_and_scheduler(own_broker: RabbitMQ, compute_api: str, tmp_path: Path) -> None:
    vhost = own_broker.add_vhost("nova")
    async with served(vhost, compute_api, tmp_path) as placement, nova_peer("client", vhost) as client:
        await until(lambda: answers(placement, "/"))
        await report(placement)
        found = await client.do("select", uuids=VMS[:2], request_id="req-1")
        assert "result" in found, (found, (tmp_path / "log").read_text()[-4000:])
        assert {host for row in found["result"] for host in row} == {"h1", "h2"}
        for vm, row in zip(VMS, found["result"], strict=False):
            held = (await placement.get(f"/allocations/{vm}")).json()
            (provider,) = held["allocations"]
            assert (held["project_id"], held["consumer_type"]) == ("p", "INSTANCE")
            assert NODES.index(provider) == int(row[0][1:]) - 1
            # Nova's services write it as their own.
            assert (await placement.delete(f"/allocations/{vm}")).status_code == httpx.codes.NO_CONTENT
        too_many = await client.do("select", uuids=[f"{vm[:-3]}{n:03d}" for n in range(70) for vm in VMS[3:6]])
        assert "NoValidHost" in too_many["raised"]["kinds"], too_many
        assert "in use" in too_many["raised"]["text"] or "VCPU" in too_many["raised"]["text"]
        casts = await client.do("casts")
        assert casts["result"] == "sent"
