"""The server of topic `scheduler` on a real RabbitMQ, before a client that sends bodies of any kind."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
import zlib
from collections.abc import AsyncIterator
from typing import Any

import aiormq
import pytest
from aiormq.abc import AbstractChannel, DeliveredMessage
from msgspec import structs
from pamqp.commands import Basic
from structlog.testing import capture_logs

from berth.config.settings import Settings
from berth.permissions import PermissionRole, definitions, of_role
from berth.up.embedded.rabbitmq import RabbitMQ
from bus.clock import SystemClock
from bus.faults import BrokenInvariant, DatabaseUnavailable
from bus.rabbitmq import channels
from bus.rabbitmq.channels import RabbitDelivery
from bus.rabbitmq.transport import RabbitTransport
from bus.transport import BusUnavailable
from nova_scheduler.config import NotificationSettings, NovaConfig
from nova_scheduler.decide.notifications import END, START, NovaNotifier
from nova_scheduler.metrics import NOTIFICATIONS
from nova_scheduler.request.request_spec import NotDecided
from nova_scheduler.rpc import replies
from nova_scheduler.rpc import server as rpc_server
from nova_scheduler.rpc.server import RpcServer
from nova_scheduler.wire.envelope import Call, parse_call
from nova_scheduler.wire.queues import FRONTENDS, RabbitOptions, topic_queue
from tests.integration.nova_scheduler.world import EXCHANGE, Instructed, front
from tests.kit.waiting import until

pytestmark = pytest.mark.rabbitmq
# The same as `rabbitmqctl set_vm_memory_high_watermark`. %s: a share of the machine's memory.
MEMORY_LIMIT = "vm_memory_monitor:set_vm_memory_high_watermark(%s)."


@pytest.fixture
def vhost(own_broker: RabbitMQ) -> str:
    return own_broker.add_vhost("nova")


def enveloped(message: object) -> bytes:
    return json.dumps({"oslo.version": "2.0", "oslo.message": json.dumps(message)}).encode()


class Client:
    """Sends calls, and collects the replies."""

    def __init__(self, channel: AbstractChannel) -> None:
        self._channel = channel
        self.reply_queue = f"reply_{uuid.uuid4().hex}"
        self.replies: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []

    async def open(self) -> None:
        await self._channel.queue_declare(self.reply_queue, exclusive=True)
        await self._channel.basic_consume(self.reply_queue, self._take, no_ack=True)

    async def _take(self, message: DeliveredMessage) -> None:
        self.bodies.append(message.body)
        self.replies.append(json.loads(json.loads(message.body)["oslo.message"]))

    async def send(self, compress: bool = False, expiration: str | None = None, **fields: object) -> None:
        message = {
            "method": "select_destinations", "version": "4.5", "args": {}, "_msg_id": uuid.uuid4().hex,
            "_reply_q": self.reply_queue, "_unique_id": uuid.uuid4().hex, **fields,
        }  # fmt: skip
        body = enveloped(message)
        properties = Basic.Properties(
            expiration=expiration, headers={"compression": "application/x-gzip"} if compress else None
        )
        await self._channel.basic_publish(
            zlib.compress(body) if compress else body,
            exchange=EXCHANGE,
            routing_key="scheduler",
            properties=properties,
        )

    async def cast(self, unique_id: str) -> None:
        body = enveloped({"method": "delete_aggregate", "version": "4.1", "args": {}, "_unique_id": unique_id})
        await self._channel.basic_publish(body, exchange="scheduler_fanout", routing_key="")

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
        await until(lambda: server.in_flight == 0)
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
        await until(lambda: server.in_flight == 0)
        await client.send(_unique_id="next")
        await client.answers(1)
    assert len(client.replies) == 1


async def test_a_reply_to_a_client_that_is_gone_is_dropped(
    vhost: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "NOVA_REPLY", structs.replace(replies.NOVA_REPLY, lasts_s=0.5))
    dispatcher = Instructed(named)
    async with front(vhost, dispatcher) as server:
        await client.send(_reply_q="reply_gone")
        await client.send(_reply_q="reply_gone")
        await client.send()
        await client.answers(1)
        await until(lambda: server.in_flight == 0)
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
        assert server.in_flight == rpc_server.PREFETCH
        go_on.set()
        await client.answers(rpc_server.PREFETCH + 10)


STREAM = {"rabbit_quorum_queue": True, "rabbit_transient_quorum_queue": True, "rabbit_stream_fanout": True}


@pytest.mark.parametrize("options", [{}, STREAM], ids=["queue", "stream"])
async def test_casts_go_on_where_they_were_after_the_connection_was_lost(
    own_broker: RabbitMQ, vhost: str, client: Client, options: dict[str, Any]
) -> None:
    """The casts in between are not lost: the queue stays, and of a stream the offset is known."""
    dispatcher = Instructed()
    async with front(vhost, dispatcher, **options) as server:
        for unique_id in ("1", "2"):
            await client.cast(unique_id)
        await until(lambda: len(dispatcher.calls) == 2)
        transport = server._transport
        session = transport._session
        assert session is not None
        await session.close()
        await client.cast("3")
        await until(lambda: transport._session not in (None, session))
        await client.cast("4")
        # The acknowledgement of the second may be lost with the connection: then it comes again.
        await until(lambda: "4" in [call.unique_id for call in dispatcher.calls])
        assert list(dict.fromkeys(call.unique_id for call in dispatcher.calls)) == ["1", "2", "3", "4"]


class Stock:
    """A scheduler of the fallback that replies as it is told; `taken` has the calls."""

    def __init__(self, channel: AbstractChannel) -> None:
        self.channel = channel
        self.taken: list[Call] = []

    async def open(self) -> None:
        await self.channel.exchange_declare(EXCHANGE, exchange_type="topic")
        await self.channel.queue_declare("scheduler")
        await self.channel.queue_bind("scheduler", EXCHANGE, "scheduler")
        await self.channel.basic_consume("scheduler", self._take, no_ack=True)

    async def _take(self, message: DeliveredMessage) -> None:
        self.taken.append(parse_call(message.body))

    async def reply(self, call: Call, body: bytes) -> None:
        await self.channel.basic_publish(body, routing_key=call.reply_queue)


@pytest.fixture
async def fallback(own_broker: RabbitMQ) -> AsyncIterator[tuple[str, Stock]]:
    url = own_broker.add_vhost("stock")
    connection = await aiormq.connect(url)
    try:
        made = Stock(await connection.channel())
        await made.open()
        yield url, made
    finally:
        await connection.close()


async def undecided(_: Call) -> object:
    raise NotDecided("any")


async def test_a_relayed_call_is_not_delivered_again(vhost: str, client: Client, fallback: tuple[str, Stock]) -> None:
    """The stock scheduler would claim for it a second time."""
    url, stock = fallback
    dispatcher = Instructed(undecided)
    async with front(vhost, dispatcher, stock=url):
        await client.send()
        await until(lambda: stock.taken)
    other = Instructed(named)
    async with front(vhost, other):
        await client.send(_unique_id="next")
        await client.answers(1)
    assert [call.unique_id for call in other.calls] == ["next"]


async def test_what_is_acknowledged_by_the_brokers_word_does_not_come_again(vhost: str, client: Client) -> None:
    taken: list[RabbitDelivery] = []
    transport = RabbitTransport(vhost, name="nova")
    await transport.open()
    try:
        await transport.declare_external(topic_queue(RabbitOptions(), EXCHANGE, "scheduler"))
        await transport.consume_external("scheduler", taken.append, prefetch=2)
        for name in ("stays", "goes"):
            await client.send(_unique_id=name)
        await until(lambda: len(taken) == 2)
        assert await transport.consumers("scheduler") == 1
        stays, goes = taken
        await goes.acknowledged()
        session = transport._session
        assert session is not None
        await session.close()
        with pytest.raises(BusUnavailable):
            await stays.acknowledged()
        await until(lambda: len(taken) == 3)
        assert taken[2].redelivered and taken[2].body == stays.body
        await taken[2].acknowledged()
        assert await transport.depth("scheduler") == 0
    finally:
        await transport.close()


async def test_of_two_fronts_the_one_that_stops_leaves_calls_to_the_other(vhost: str, client: Client) -> None:
    go_on = asyncio.Event()

    async def held(call: Call) -> object:
        await go_on.wait()
        return call.unique_id

    async def lone_front() -> bool:
        return await server._transport.consumers(FRONTENDS) == 1

    first, second = Instructed(held), Instructed(named)
    async with front(vhost, first, name="first") as server:
        await client.send(_unique_id="in hand")
        await until(lambda: first.calls)
        async with front(vhost, second, name="second"):
            stopping = asyncio.create_task(server.drain(60.0))
            await until(lone_front)
            for number in range(10):
                await client.send(_unique_id=str(number))
            await until(lambda: len(second.calls) == 10)
            go_on.set()
            await stopping
            assert len(await client.answers(11)) == 11 and len(first.calls) == 1


@pytest.mark.parametrize("auto_delete", [False, True])
async def test_what_the_last_front_gives_back_waits_for_the_next(vhost: str, client: Client, auto_delete: bool) -> None:
    forever = asyncio.Event()

    async def held(call: Call) -> object:
        await forever.wait()
        return None

    async with front(vhost, first := Instructed(held), amqp_auto_delete=auto_delete) as server:
        await client.send(_unique_id="u")
        await until(lambda: first.calls)
        await server.drain(0.5)
    async with front(vhost, Instructed(named), amqp_auto_delete=auto_delete):
        (reply,) = await client.answers(1)
    assert reply["result"] == "u"


async def test_an_answer_of_the_fallback_comes_byte_by_byte(
    vhost: str, client: Client, fallback: tuple[str, Stock]
) -> None:
    url, stock = fallback
    async with front(vhost, Instructed(undecided), stock=url):
        await client.send(_msg_id="m", args={"pi": 3.10}, _context_request_id="req-1")
        await until(lambda: stock.taken)
        (call,) = stock.taken
        assert (call.message_id, call.request_id) == ("m", "req-1") and call.reply_queue != client.reply_queue
        odd = b' {"oslo.message": "{\\"_msg_id\\": \\"m\\", \\"ending\\":  true}",  "oslo.version":"2.1"}'
        for body in (b"", b"{}", enveloped({"_msg_id": "other", "ending": True}), odd):
            await stock.reply(call, body)
        await client.answers(1)
    assert client.bodies == [odd]


async def notified(server: RpcServer, settings: NotificationSettings, **options: Any) -> None:
    """Once a notification is in its queue."""
    transport = server._transport
    notifier = NovaNotifier(
        transport, settings, host="h", options=RabbitOptions(**options), control_exchange=EXCHANGE,
        clock=SystemClock(), rng=random.Random(1),
    )  # fmt: skip
    running = asyncio.create_task(notifier.run())
    published = NOTIFICATIONS.labels("published")._value
    before = published.get()
    notifier.notify(Call(method="select_destinations"), 0.0, placed=True)
    # A quorum queue that is only just declared is not looked into: RabbitMQ may end the connection (INTERNAL_ERROR).
    await until(lambda: published.get() == before + 2)
    told = [delivery.body for _ in range(2) if (delivery := await transport.get("versioned_notifications.info"))]
    assert [json.loads(json.loads(one)["oslo.message"])["event_type"] for one in told] == [START, END]
    running.cancel()


@pytest.mark.parametrize("options", [{}, STREAM], ids=["queue", "stream"])
async def test_a_front_needs_no_more_permissions_than_are_printed_for_it(
    own_broker: RabbitMQ, vhost: str, client: Client, fallback: tuple[str, Stock], options: dict[str, Any]
) -> None:
    """Of what it declares, writes and reads: topic, fanout, fronts, replies, and those of the fallback."""
    own_broker.add_user("berth-nova", "secret")
    url, at_stock = (own_broker.url(name, user="berth-nova", password="secret") for name in ("nova", "stock"))
    _, stock = fallback
    await stock.channel.exchange_declare("scheduler_fanout", exchange_type="fanout")
    async with front(vhost, Instructed(), **options):
        """Nova's exchange is there."""
    versioned = NotificationSettings(notification_format="versioned")
    nova = NovaConfig(transport_url=url, fallback_url=at_stock, host="front", notifications=versioned)
    grants = of_role(PermissionRole.NOVA_SCHEDULER, Settings(nova=nova), user="berth-nova")
    assert [one.vhost for one in grants] == ["nova", "stock"]
    own_broker.define(**definitions(grants))

    async def decided(call: Call) -> object:
        if call.unique_id == "forwarded":
            raise NotDecided("any")
        return None

    dispatcher = Instructed(decided)
    async with front(url, dispatcher, stock=at_stock, **options) as server:
        await notified(server, versioned, **options)
        await client.send()
        await client.cast("cast")
        await client.answers(1)
        await client.send(_unique_id="forwarded")
        await until(lambda: stock.taken)
        (call,) = stock.taken
        await stock.reply(call, enveloped({"_msg_id": call.message_id, "result": "there", "ending": True}))
        replies = await client.answers(2)
        await until(lambda: "delete_aggregate" in dispatcher.methods())
    assert replies[1]["result"] == "there"


async def test_a_fallback_that_is_silent_is_not_waited_for(
    vhost: str, client: Client, fallback: tuple[str, Stock]
) -> None:
    url, stock = fallback
    async with front(vhost, Instructed(undecided), stock=url):
        await client.send(_timeout=1)
        (reply,) = await client.answers(1)
    assert stock.taken and json.loads(reply["failure"])["class"] == "NoValidHost"


async def test_calls_of_an_alarm_are_answered_after_it(
    own_broker: RabbitMQ, vhost: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "CONFIRM_TIMEOUT_S", 0.2)
    names = {str(number) for number in range(5)}
    async with front(vhost, Instructed(named)):
        """The topic's queue is there."""
    for name in names:
        await client.send(_unique_id=name)
    await asyncio.to_thread(own_broker.evaluate, MEMORY_LIMIT % "0.000001")
    with capture_logs() as logged:
        async with front(vhost, dispatcher := Instructed(named)):
            await until(lambda: "nova.call_uncertain" in [one["event"] for one in logged])
            await asyncio.to_thread(own_broker.evaluate, MEMORY_LIMIT % "0.6")
            # A call whose confirm did not come in time may be answered twice.
            await until(lambda: {one["result"] for one in client.replies if one["ending"]} == names)
    assert {call.unique_id for call in dispatcher.calls} == names


async def test_the_client_of_a_call_beyond_the_bound_is_told(vhost: str, client: Client) -> None:
    """It would hold a thread of nova-conductor for as long as it waits."""
    dispatcher = Instructed(named)
    async with front(vhost, dispatcher):
        await client.send(_reply_q=client.reply_queue, args={"x": "x" * 2**24}, _msg_id="m")
        await client.send(args={"x": "x" * (2**24 - 2**14)}, _unique_id="next")
        replies = await client.answers(2)
    failure, answer = sorted(replies, key=lambda one: not one["failure"])
    assert answer["result"] == "next"
    told = json.loads(failure["failure"])
    assert failure["_msg_id"] == "m" and told["class"] == "NoValidHost" and "nova.call_too_large" in told["message"]
    assert [call.unique_id for call in dispatcher.calls] == ["next"]
