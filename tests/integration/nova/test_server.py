"""The server of topic `scheduler` on a real RabbitMQ, before a client that sends bodies of any kind."""

from __future__ import annotations

import asyncio
import json
import uuid
import zlib
from collections.abc import AsyncIterator
from typing import Any

import aiormq
import pytest
from aiormq.abc import AbstractChannel, DeliveredMessage
from msgspec import structs
from pamqp.commands import Basic

from berth.trial.embedded.rabbitmq import RabbitMQ
from bus.faults import BrokenInvariant, DatabaseUnavailable
from scheduler_worker.nova import rpc_server
from scheduler_worker.nova.envelope import Call
from tests.integration.nova.world import EXCHANGE, Instructed, front
from tests.kit.waiting import until

pytestmark = pytest.mark.rabbitmq


@pytest.fixture
def vhost(own_broker: RabbitMQ) -> str:
    return own_broker.add_vhost("nova")


class Client:
    """Sends calls, and collects the replies."""

    def __init__(self, channel: AbstractChannel) -> None:
        self._channel = channel
        self.reply_queue = f"reply_{uuid.uuid4().hex}"
        self.replies: list[dict[str, Any]] = []

    async def open(self) -> None:
        await self._channel.queue_declare(self.reply_queue, exclusive=True)
        await self._channel.basic_consume(self.reply_queue, self._take, no_ack=True)

    async def _take(self, message: DeliveredMessage) -> None:
        self.replies.append(json.loads(json.loads(message.body)["oslo.message"]))

    async def send(self, compress: bool = False, expiration: str | None = None, **fields: object) -> None:
        message = {
            "method": "select_destinations", "version": "4.5", "args": {}, "_msg_id": uuid.uuid4().hex,
            "_reply_q": self.reply_queue, "_unique_id": uuid.uuid4().hex, **fields,
        }  # fmt: skip
        body = json.dumps({"oslo.version": "2.0", "oslo.message": json.dumps(message)}).encode()
        properties = Basic.Properties(
            expiration=expiration, headers={"compression": "application/x-gzip"} if compress else None
        )
        await self._channel.basic_publish(
            zlib.compress(body) if compress else body,
            exchange=EXCHANGE,
            routing_key="scheduler",
            properties=properties,
        )

    async def answers(self, count: int) -> list[dict[str, Any]]:
        """The final replies, once there are so many."""
        await until(lambda: len([one for one in self.replies if one["ending"]]) >= count)
        return [one for one in self.replies if one["ending"]]


@pytest.fixture
async def client(vhost: str) -> AsyncIterator[Client]:
    connection = await aiormq.connect(vhost)
    try:
        made = Client(await connection.channel())
        await made.open()
        yield made
    finally:
        await connection.close()


async def named(call: Call) -> object:
    return call.unique_id


async def test_a_compressed_call_is_answered(vhost: str, client: Client) -> None:
    async with front(vhost, Instructed(named)):
        await client.send(compress=True, _unique_id="u", _msg_id="m")
        (reply,) = await client.answers(1)
    assert (reply["_msg_id"], reply["result"], reply["failure"]) == ("m", "u", None)


async def test_a_call_waits_for_a_server_that_is_away_and_its_client_has_heartbeats(vhost: str, client: Client) -> None:
    away = True

    async def depends(call: Call) -> object:
        if away:
            raise DatabaseUnavailable("away")
        return "there"

    async with front(vhost, Instructed(depends)) as server:
        await client.send(_timeout=2)
        await until(lambda: client.replies)  # a heartbeat
        away = False
        (reply,) = await client.answers(1)
        await until(lambda: server.in_hand == 0)
    assert reply["result"] == "there" and client.replies[0]["ending"] is False


async def test_a_client_without_a_timeout_has_no_heartbeat(vhost: str, client: Client) -> None:
    """oslo.messaging's client fails on one that it has not asked for."""
    go_on = asyncio.Event()

    async def held(call: Call) -> object:
        if call.unique_id != "asked":
            await go_on.wait()
        return None

    async with front(vhost, Instructed(held)):
        await client.send(_timeout=None)
        await client.send(_timeout=0)
        await client.send(_timeout=1)  # half of it is too short
        await client.send(_unique_id="asked")
        await client.answers(1)
        go_on.set()
        replies = await client.answers(4)
    assert len(replies) == len(client.replies) == 4


async def test_a_call_that_was_answered_is_not_carried_out_again(vhost: str, client: Client) -> None:
    dispatcher = Instructed(named)
    async with front(vhost, dispatcher):
        await client.send(_unique_id="once")
        await client.answers(1)
        await client.send(_unique_id="once")
        await client.send(_unique_id="twice")
        await client.answers(2)
    assert [call.unique_id for call in dispatcher.calls] == ["once", "twice"]


async def test_a_call_ends_when_its_client_gives_up(vhost: str, client: Client) -> None:
    ended = asyncio.Event()

    async def endless(call: Call) -> object:
        if call.unique_id == "next":
            return None
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with front(vhost, Instructed(endless)) as server:
        await client.send(expiration="1500")
        await ended.wait()
        await until(lambda: server.in_hand == 0)
        await client.send(_unique_id="next")
        await client.answers(1)
    assert len(client.replies) == 1


async def test_a_reply_to_a_client_that_is_gone_is_dropped(
    vhost: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_server, "NOVA_REPLY", structs.replace(rpc_server.NOVA_REPLY, lasts_s=0.5))
    dispatcher = Instructed(named)
    async with front(vhost, dispatcher) as server:
        await client.send(_reply_q="reply_gone")
        await client.send(_reply_q="reply_gone")
        await client.send()
        await client.answers(1)
        await until(lambda: server.in_hand == 0)
    assert len(dispatcher.calls) == 3


async def test_a_broken_invariant_ends_the_server(vhost: str, client: Client) -> None:
    async def breaks(_: Call) -> object:
        raise BrokenInvariant("planted")

    async with front(vhost, Instructed(breaks)) as server:
        running = asyncio.create_task(server.run())
        await client.send()
        with pytest.raises(BrokenInvariant):
            await running


async def test_no_more_calls_are_carried_out_at_a_time_than_there_are_slots(vhost: str, client: Client) -> None:
    go_on = asyncio.Event()

    async def held(_: Call) -> object:
        await go_on.wait()

    dispatcher = Instructed(held)
    async with front(vhost, dispatcher) as server:
        for _ in range(rpc_server.PREFETCH + 10):
            await client.send()
        await until(lambda: len(dispatcher.calls) == rpc_server.PREFETCH)
        assert server.in_hand == rpc_server.PREFETCH
        go_on.set()
        await client.answers(rpc_server.PREFETCH + 10)
