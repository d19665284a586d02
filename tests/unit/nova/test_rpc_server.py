"""What the server of the topic does with deliveries when queues refuse, and when it pauses: on a broker in memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

import pytest

from bus.clock import SystemClock
from bus.port import BusError, Delivery, Outgoing, PublishRefused, Unroutable
from bus.rabbitmq.transport import RabbitTransport
from bus.topology import ForeignQueue
from scheduler_worker.nova.envelope import Call
from scheduler_worker.nova.queues import FRONTS, TOPIC, RabbitOptions
from scheduler_worker.nova.relay import StockRelay
from scheduler_worker.nova.request_spec import NotDecided
from scheduler_worker.nova.rpc_server import PREFETCH, RpcServer
from tests.kit.virtual_time import on_virtual_time

EXCHANGE = "nova"
LONG_S = 1800.0  # `long_rpc_timeout` of Nova, how long a call waits
SILENT_S = 60  # `rpc_response_timeout`, after which its client gives up without a sign


class Delivered:
    """One delivery. ends: what was done with it: ack, requeue, drop."""

    is_lost = False
    content_type = message_id = type = correlation_id = reply_to = None
    redelivered, delivery_count = False, 0

    def __init__(self, queue: str, message: Outgoing) -> None:
        self.body, self.exchange, self.routing_key = message.body, "", queue
        self.headers: Mapping[str, object] = message.headers
        self.expiration_s = message.expiration_s
        self.ends: list[str] = []

    def ack(self) -> None:
        self.ends.append("ack")

    def nack(self, *, requeue: bool) -> None:
        self.ends.append("requeue" if requeue else "drop")


class Consumption:
    """Of one queue. paused: whether it is; pauses: how often it was."""

    def __init__(self, take: Callable[[Delivery], None]) -> None:
        self.take = take
        self.paused, self.pauses = False, 0

    def pause(self) -> None:
        self.paused, self.pauses = True, self.pauses + 1

    def resume(self) -> None:
        self.paused = False

    async def cancel(self) -> None:
        """Nothing comes after a test."""


class Transport:
    """A broker of one virtual host: what is published to a queue that is consumed is delivered at once.

    refuses: raised by each publication to the fronts.
    """

    blocked, connected = "", True

    def __init__(self) -> None:
        self.consumed: dict[str, Consumption] = {}
        self.published: list[Outgoing] = []
        self.refuses: BusError | None = None

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def declare_foreign(self, planned: ForeignQueue) -> None: ...

    async def declare_reply_queue(self, name: str) -> None: ...

    async def delete_foreign(self, queue: str) -> None: ...

    async def get(self, queue: str) -> None: ...

    async def consume(self, queue: str, take: Callable[[Delivery], None], **_: object) -> Consumption:
        made = self.consumed[queue] = Consumption(take)
        return made

    consume_foreign = consume

    async def publish(self, message: Outgoing) -> None:
        self.published.append(message)
        if message.routing_key == FRONTS and self.refuses is not None:
            raise self.refuses
        if not message.exchange and message.routing_key in self.consumed:
            self.deliver(message.routing_key, message)

    def deliver(self, queue: str, message: Outgoing) -> Delivered:
        delivered = Delivered(queue, message)
        self.consumed[queue].take(cast(Delivery, delivered))
        return delivered

    def call(self, number: int, **fields: object) -> Delivered:
        """A call comes to the topic."""
        message = {
            "method": "select_destinations", "version": "4.5", "args": {}, "_msg_id": f"m{number}",
            "_reply_q": "reply_nova", "_unique_id": f"u{number}", "_timeout": SILENT_S, **fields,
        }  # fmt: skip
        body = json.dumps({"oslo.version": "2.0", "oslo.message": json.dumps(message)}).encode()
        return self.deliver(TOPIC, Outgoing(exchange="", routing_key=TOPIC, body=body, expiration_s=LONG_S))

    def sent_to(self, key: str) -> list[Outgoing]:
        return [one for one in self.published if one.routing_key == key]

    def failures(self) -> list[str]:
        """What the exceptions say that clients were told."""
        replies = [json.loads(json.loads(one.body)["oslo.message"]) for one in self.sent_to("reply_nova")]
        return [json.loads(one["failure"])["message"] for one in replies if one["ending"] and one["failure"]]


class Undecided:
    """A dispatcher that leaves calls to the fallback, or holds them."""

    def __init__(self) -> None:
        self.holds = False
        self.calls: list[Call] = []

    async def call(self, call: Call) -> object:
        self.calls.append(call)
        if self.holds:
            await asyncio.Event().wait()
        raise NotDecided("any")


class World:
    def __init__(self, *, in_flight: int = 100, **options: Any) -> None:
        self.nova, self.stock, self.dispatcher = Transport(), Transport(), Undecided()
        relay = StockRelay(
            cast(RabbitTransport, self.stock), control_exchange=EXCHANGE, unique="r", in_flight=in_flight
        )
        self.server = RpcServer(
            cast(RabbitTransport, self.nova),
            self.dispatcher,
            host="h",
            unique="u",
            options=RabbitOptions(**options),
            control_exchange=EXCHANGE,
            clock=SystemClock(),
            rng=random.Random(1),
            relay=relay,
        )

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[World]:
        await self.server.open()
        await self.server.start()
        try:
            yield self
        finally:
            await self.server.close()


@on_virtual_time
async def test_a_silent_fallback_holds_no_slot_of_the_topic() -> None:
    async with World().started() as world:
        for number in range(2 * PREFETCH):
            world.nova.call(number)
            await asyncio.sleep(0.1)
        assert world.server.in_hand == len(world.stock.sent_to(TOPIC)) == 2 * PREFETCH
        assert not world.nova.consumed[TOPIC].paused
        world.dispatcher.holds = True
        for number in range(2 * PREFETCH, 3 * PREFETCH):
            world.nova.call(number)
            await asyncio.sleep(0.1)
        assert world.nova.consumed[TOPIC].paused, "calls that berth decides are as many as before"


@on_virtual_time
async def test_beyond_the_calls_that_wait_for_the_fallback_one_fails_at_once() -> None:
    async with World(in_flight=3).started() as world:
        for number in range(5):
            world.nova.call(number)
        await asyncio.sleep(0.1)
        assert len(world.stock.sent_to(TOPIC)) == 3
        assert len(world.nova.failures()) == 2


@pytest.mark.parametrize(("silent_s", "expected_s"), [(SILENT_S, 60.0), (0, LONG_S), (7200, LONG_S)])
@on_virtual_time
async def test_the_fallback_takes_no_call_that_nobody_waits_for(silent_s: int, expected_s: float) -> None:
    async with World().started() as world:
        world.nova.call(1, _timeout=silent_s)
        await asyncio.sleep(1)
        assert [one.expiration_s for one in world.stock.sent_to(TOPIC)] == [expected_s]


@pytest.mark.parametrize("refuses", [PublishRefused("full"), Unroutable("gone")])
@on_virtual_time
async def test_a_call_that_the_fronts_cannot_take_is_tried_again_and_then_given_back(refuses: BusError) -> None:
    """Given back at once it would come again as fast as the broker can, and use its delivery limit up."""
    async with World().started() as world:
        world.nova.refuses = refuses
        late, soon = world.nova.call(1), world.nova.call(2)
        await asyncio.sleep(5)
        assert late.ends == [] and 4 <= len(world.nova.sent_to(FRONTS)) <= 40
        world.nova.refuses = None
        await asyncio.sleep(5)
        assert late.ends == soon.ends == ["ack"] and len(world.dispatcher.calls) == 2
        world.nova.refuses = refuses
        never = world.nova.call(3)
        await asyncio.sleep(120)
        assert never.ends == ["requeue"]


@pytest.mark.parametrize(("auto_delete", "pauses"), [(False, 1), (True, 0)])
@on_virtual_time
async def test_a_queue_that_goes_with_its_last_consumer_is_not_paused(auto_delete: bool, pauses: int) -> None:
    """RabbitMQ would delete it, with the calls that it holds."""
    async with World(amqp_auto_delete=auto_delete).started() as world:
        world.dispatcher.holds = True
        for number in range(PREFETCH + 3):
            world.nova.call(number)
            await asyncio.sleep(0.1)
        assert world.nova.consumed[TOPIC].pauses == pauses
