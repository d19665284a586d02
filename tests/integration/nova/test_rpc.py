"""Nova's own RPC client, on a real RabbitMQ, before berth's server of topic `scheduler`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from berth.trial.embedded.rabbitmq import RabbitMQ
from scheduler_worker.nova.envelope import Call, no_valid_host
from tests.integration.nova.world import Instructed, chosen, front
from tests.kit.nova_peer import NovaPeer, needs_nova, nova_peer
from tests.kit.waiting import until

pytestmark = [pytest.mark.rabbitmq, needs_nova]
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
        await until(lambda: server.in_hand == 0)


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


async def test_heartbeats_keep_a_long_call_alive(vhost: str, client: NovaPeer) -> None:
    """The client gives up after 2 s of silence; the call takes 5."""

    async def slow(call: Call) -> object:
        await asyncio.sleep(5)
        return await chosen(call)

    async with front(vhost, Instructed(slow)):
        found = await client.do("select", uuids=UUIDS, monitor_s=2)
        assert "result" in found, found
