"""What the server of the topic does with deliveries when queues refuse, and when it pauses: on a broker in memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

import pytest
from msgspec import structs

from bus.clock import SystemClock
from bus.rabbitmq.channels import CONFIRM_TIMEOUT_S, RabbitDelivery
from bus.rabbitmq.transport import RabbitTransport
from bus.retrying import NOVA_REPLY
from bus.topology import ExternalQueue
from bus.transport import BusError, BusForbidden, BusUnavailable, NotSent, Outgoing, PublishRefused, Unroutable
from nova_scheduler.request.request_spec import NotDecided
from nova_scheduler.rpc.intake import LIMIT
from nova_scheduler.rpc.server import PREFETCH, RpcServer
from nova_scheduler.stock.forwarder import StockForwarder
from nova_scheduler.wire.envelope import Call
from nova_scheduler.wire.queues import FRONTENDS, TOPIC, RabbitOptions
from tests.kit.virtual_time import on_virtual_time

EXCHANGE = "nova"
LONG_S = 1800.0  # `long_rpc_timeout` of Nova, how long a call waits
SILENT_S = 60  # `rpc_response_timeout`, after which its client gives up without a sign


class Delivered:
    """One delivery. ends: what was done with it: ack, requeue, drop."""

    content_type = message_id = type = correlation_id = reply_to = None
    delivery_count = 0

    def __init__(self, queue: str, message: Outgoing, broker: Transport, *, redelivered: bool) -> None:
        self.broker, self.redelivered = broker, redelivered
        self.body, self.exchange, self.routing_key = message.body, "", queue
        self.headers: Mapping[str, object] = message.headers
        self.expiration_s = message.expiration_s
        self.ends: list[str] = []
        self.is_acked = False  # its acknowledgement is on the way

    def ack(self) -> None:
        self.ends = self.ends or ["ack"]

    async def acknowledged(self) -> None:
        self.is_acked = True
        if self.broker.blocked:  # it reads the acknowledgement once the alarm is over
            await asyncio.sleep(CONFIRM_TIMEOUT_S)
            raise BusUnavailable("no answer")
        await self.broker.confirms.wait()
        if (lost := self.broker.loses) is not None:
            self._come_again()
            raise lost
        self.ack()
        self.broker.done.append(f"ack {self.routing_key}")

    def nack(self, *, requeue: bool) -> None:
        if not self.is_acked:  # else it is not open any more
            self.ends.append("requeue" if requeue else "drop")
            if requeue:
                self._come_again()

    def _come_again(self) -> None:
        if self.broker.requeues:
            self.broker.loses = None  # it is back
            again = Outgoing(exchange="", routing_key=self.routing_key, body=self.body, expiration_s=self.expiration_s)
            self.broker.deliver(self.routing_key, again, redelivered=True)


class Consumption:
    """Of one queue. paused: whether it is; pauses: how often it was."""

    def __init__(self, take: Callable[[RabbitDelivery], None]) -> None:
        self.take = take
        self.paused, self.pauses = False, 0

    def pause(self) -> None:
        self.paused, self.pauses = True, self.pauses + 1

    def resume(self) -> None:
        self.paused = False

    async def cancel(self) -> None:
        self.paused = True


class Transport:
    """A broker of one virtual host: what is published to a queue that is consumed is delivered at once.

    refuses: raised by each publication to the frontends. loses: by each acknowledgement that is waited for. confirms:
    set: it confirms these. others: frontends of other processes. rest: what lies in the queue of the frontends. done:
    publications and these acknowledgements.
    """

    def __init__(self) -> None:
        self.connected = True
        self.blocked = ""
        self.consumed: dict[str, Consumption] = {}
        self.published: list[Outgoing] = []
        self.refuses: BusError | None = None
        self.loses: BusError | None = None
        self.confirms = asyncio.Event()
        self.confirms.set()
        self.requeues = False  # at once, as a broker that is near
        self.others = 0
        self.rest: list[Delivered] = []
        self.delivered: list[Delivered] = []
        self.done: list[str] = []

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def declare_external(self, planned: ExternalQueue) -> None: ...

    @property
    def fanout(self) -> str:
        return next(queue for queue in self.consumed if queue.startswith(f"{TOPIC}_fanout"))

    async def declare_reply_queue(self, name: str, *, bound: bool) -> None: ...

    async def consumers(self, queue: str) -> int:
        return self.others

    async def get(self, queue: str) -> Delivered | None:
        return self.rest.pop(0) if self.rest else None

    async def consume(self, queue: str, take: Callable[[RabbitDelivery], None], **_: object) -> Consumption:
        made = self.consumed[queue] = Consumption(take)
        return made

    consume_external = consume

    async def publish(self, message: Outgoing) -> None:
        if self.blocked:
            await asyncio.sleep(CONFIRM_TIMEOUT_S)
            raise BusUnavailable("no confirm")
        self.published.append(message)
        self.done.append(f"publish {message.routing_key}")
        if message.routing_key == FRONTENDS and self.refuses is not None:
            raise self.refuses
        if not message.exchange and message.routing_key in self.consumed:
            self.deliver(message.routing_key, message)

    def deliver(self, queue: str, message: Outgoing, *, redelivered: bool = False) -> Delivered:
        delivered = Delivered(queue, message, self, redelivered=redelivered)
        self.delivered.append(delivered)
        if self.consumed[queue].paused:
            self.rest.append(delivered)
            return delivered
        self.consumed[queue].take(cast(RabbitDelivery, delivered))
        return delivered

    def call(self, number: int, queue: str = TOPIC, *, redelivered: bool = False, **fields: object) -> Delivered:
        """A call comes to a queue."""
        message = {
            "method": "select_destinations", "version": "4.5", "args": {}, "_msg_id": f"m{number}",
            "_reply_q": "reply_nova", "_unique_id": f"u{number}", "_timeout": SILENT_S, **fields,
        }  # fmt: skip
        body = json.dumps({"oslo.version": "2.0", "oslo.message": json.dumps(message)}).encode()
        outgoing = Outgoing(exchange="", routing_key=queue, body=body, expiration_s=LONG_S)
        return self.deliver(queue, outgoing, redelivered=redelivered)

    def answer(self) -> None:
        """A stock nova-scheduler answers the call that it took last."""
        call = json.loads(json.loads(self.sent_to(TOPIC)[-1].body)["oslo.message"])
        reply = {"_msg_id": call["_msg_id"], "result": [], "failure": None, "ending": True}
        body = json.dumps({"oslo.version": "2.0", "oslo.message": json.dumps(reply)}).encode()
        self.deliver(call["_reply_q"], Outgoing(exchange="", routing_key=call["_reply_q"], body=body))

    def sent_to(self, key: str) -> list[Outgoing]:
        return [one for one in self.published if one.routing_key == key]

    def given_back(self) -> list[str]:
        """The unique ids of the calls that went back to the frontends."""
        bodies = [one.body for one in self.delivered if one.ends == ["requeue"] and one.routing_key == FRONTENDS]
        return [json.loads(json.loads(one)["oslo.message"])["_unique_id"] for one in bodies]

    def replies(self, *, ending: bool = True) -> list[dict[str, Any]]:
        """What clients were told: answers, or heartbeats."""
        told = [json.loads(json.loads(one.body)["oslo.message"]) for one in self.sent_to("reply_nova")]
        return [one for one in told if one["ending"] is ending]

    def failures(self) -> list[str]:
        """What the exceptions say that clients were told."""
        return [json.loads(one["failure"])["message"] for one in self.replies() if one["failure"]]


class Undecided:
    """A dispatcher that leaves calls to the fallback, or holds them."""

    def __init__(self) -> None:
        self.holds = False
        self.calls: list[Call] = []
        self._decided = asyncio.Event()

    def decide(self) -> None:
        """Leave those that are held."""
        self._decided.set()

    async def call(self, call: Call) -> object:
        self.calls.append(call)
        if self.holds:
            await self._decided.wait()
        raise NotDecided("any")


class World:
    def __init__(self, *, in_flight: int = 100, **options: Any) -> None:
        self.nova, self.stock, self.dispatcher = Transport(), Transport(), Undecided()
        relay = StockForwarder(
            cast(RabbitTransport, self.stock),
            control_exchange=EXCHANGE,
            unique="r",
            clock=SystemClock(),
            in_flight=in_flight,
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
            fallback=relay,
        )

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[World]:
        await self.server.open()
        await self.server.start()
        running = asyncio.create_task(self.server.run())
        try:
            yield self
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await self.server.close()


@on_virtual_time
async def test_calls_that_come_while_the_broker_takes_nothing_are_carried_out_when_it_does() -> None:
    """It reads no acknowledgement before: given up meanwhile, each would take effect later, and its call be lost."""
    async with World().started() as world:
        world.dispatcher.holds = True
        world.nova.blocked = "memory"
        for number in range(5):
            world.nova.call(number)
        await asyncio.sleep(600)
        assert world.server.in_flight == 0 and {one.is_acked for one in world.nova.delivered} == {False}
        world.nova.blocked = ""
        await asyncio.sleep(5)
        assert len(world.dispatcher.calls) == 5


@on_virtual_time
async def test_a_call_leaves_for_the_fallback_when_the_broker_takes_its_acknowledgement() -> None:
    async with World().started() as world:
        world.dispatcher.holds = True
        world.nova.call(1)
        await asyncio.sleep(1)
        world.nova.blocked = "memory"
        world.dispatcher.decide()
        await asyncio.sleep(SILENT_S - 2)
        assert world.stock.sent_to(TOPIC) == [] and world.server.in_flight == 1
        world.nova.blocked = ""
        await asyncio.sleep(5)
        assert len(world.stock.sent_to(TOPIC)) == 1


@on_virtual_time
async def test_a_call_whose_client_gives_up_in_an_alarm_does_not_leave() -> None:
    """It comes again, and Nova is asked whether its server waits."""
    async with World().started() as world:
        world.dispatcher.holds = True
        world.nova.call(1)
        await asyncio.sleep(1)
        world.nova.blocked = "memory"
        world.dispatcher.decide()
        await asyncio.sleep(SILENT_S + 1)
        assert world.nova.given_back() == ["u1"] and world.server.in_flight == 0
        assert world.stock.sent_to(TOPIC) == []


@on_virtual_time
async def test_a_call_that_does_not_come_again_is_answered_when_an_alarm_is_over() -> None:
    async with World().started() as world:
        world.nova.refuses = NotSent("not connected")
        world.dispatcher.holds = True
        world.nova.call(1)
        await asyncio.sleep(1)
        world.nova.blocked = "memory"
        world.dispatcher.decide()
        await asyncio.sleep(SILENT_S + 1)
        world.nova.blocked = ""
        await asyncio.sleep(60)
        assert len(world.nova.failures()) == 1 and world.server.in_flight == 0
        assert world.stock.sent_to(TOPIC) == []


@on_virtual_time
async def test_answers_in_a_long_alarm_are_given_up_together() -> None:
    async with World(in_flight=0).started() as world:
        world.dispatcher.holds = True
        for number in range(PREFETCH):
            world.nova.call(number)
        await asyncio.sleep(1)
        world.nova.blocked = "disk"
        world.dispatcher.decide()
        await asyncio.sleep((NOVA_REPLY.lasts_s or 0.0) + 2 * CONFIRM_TIMEOUT_S)
        assert world.server.in_flight == 0


@on_virtual_time
async def test_no_cast_waits_for_a_fallback_that_takes_nothing() -> None:
    async with World().started() as world:
        world.stock.blocked = "memory"
        for number in range(9):
            world.nova.call(number, world.nova.fanout, method="update_instance_info", _msg_id=None)
        await asyncio.sleep(1)
        assert len(world.dispatcher.calls) == 9


@pytest.mark.parametrize("reason", ["memory", ""])
@on_virtual_time
async def test_a_call_waits_for_the_broker_of_the_fallback(reason: str) -> None:
    """It is away after a restart that the frontend's own is back from."""
    async with World().started() as world:
        world.stock.blocked, world.stock.connected = reason, bool(reason)
        world.nova.call(1)
        await asyncio.sleep(SILENT_S - 5)
        assert world.server.in_flight == 1 and not world.nova.failures()
        world.stock.blocked, world.stock.connected = "", True
        await asyncio.sleep(1)
        assert len(world.stock.sent_to(TOPIC)) == 1


@on_virtual_time
async def test_calls_that_wait_for_the_broker_of_the_fallback_hold_no_slot_of_the_topic() -> None:
    """One project's requests that berth does not decide would stop everybody's."""
    async with World().started() as world:
        world.stock.connected = False
        for number in range(2 * PREFETCH):
            world.nova.call(number)
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)
        assert len(world.dispatcher.calls) == 2 * PREFETCH and not world.nova.consumed[TOPIC].paused
        world.stock.connected = True
        await asyncio.sleep(1)
        assert len(world.stock.sent_to(TOPIC)) == 2 * PREFETCH


@on_virtual_time
async def test_a_call_that_no_broker_takes_for_the_fallback_fails() -> None:
    async with World().started() as world:
        world.stock.connected = False
        world.nova.call(1)
        await asyncio.sleep(SILENT_S + 1)
        assert world.server.in_flight == 0 and len(world.nova.failures()) == 1


@on_virtual_time
async def test_a_silent_fallback_holds_no_slot_of_the_topic() -> None:
    async with World().started() as world:
        for number in range(2 * PREFETCH):
            world.nova.call(number)
            await asyncio.sleep(0.1)
        assert world.server.in_flight == len(world.stock.sent_to(TOPIC)) == 2 * PREFETCH
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


@on_virtual_time
async def test_the_topic_is_acknowledged_before_a_call_is_put_to_the_fronts() -> None:
    """Else a stock nova-scheduler may get the topic's copy, and claims as well."""
    async with World().started() as world:
        world.dispatcher.holds = True
        world.nova.call(1)
        await asyncio.sleep(1)
        assert world.nova.done == [f"ack {TOPIC}", f"publish {FRONTENDS}"]
        world.nova.loses = BusUnavailable("lost")
        lost = world.nova.call(2)
        await asyncio.sleep(1)
        assert lost.ends == [] and len(world.nova.sent_to(FRONTENDS)) == 1


@pytest.mark.parametrize("refuses", [PublishRefused("full"), Unroutable("gone"), NotSent("not connected")])
@on_virtual_time
async def test_a_call_that_the_fronts_cannot_take_is_carried_out_here(refuses: BusError) -> None:
    async with World().started() as world:
        world.nova.refuses = refuses
        world.dispatcher.holds = True
        for number in range(PREFETCH + 3):
            world.nova.call(number)
            await asyncio.sleep(0.1)
        assert world.nova.consumed[TOPIC].paused, "they have slots"
        assert len(world.dispatcher.calls) == PREFETCH == len(world.nova.sent_to(FRONTENDS))


@pytest.mark.parametrize("cause", [BusUnavailable("no confirm"), BusForbidden("amq.default"), BusError("closed")])
@on_virtual_time
async def test_a_call_that_may_be_among_the_fronts_is_not_carried_out_twice(cause: BusError) -> None:
    """What closes the channel is the cause for all that was published on it: it may be of a reply."""
    async with World().started() as world:
        world.nova.refuses = cause
        call = world.nova.call(1)
        await asyncio.sleep(1)
        assert call.ends == ["ack"] and not world.dispatcher.calls


@pytest.mark.parametrize(("silent_s", "expected_s"), [(SILENT_S, 60.0), (0, LONG_S), (7200, LONG_S)])
@on_virtual_time
async def test_no_front_takes_a_call_whose_client_has_given_up(silent_s: int, expected_s: float) -> None:
    """In the queue nobody tells it that its call is under way."""
    async with World().started() as world:
        world.nova.call(1, _timeout=silent_s)
        await asyncio.sleep(1)
        (sent,) = world.nova.sent_to(FRONTENDS)
        (call,) = world.dispatcher.calls
        assert (sent.expiration_s, call.limit_s) == (expected_s, LONG_S), "it waits longer for a call that is under way"


@pytest.mark.parametrize("limit", ["60", -1, 0, True, float("nan"), float("inf"), 2**63, None])
@on_virtual_time
async def test_a_limit_that_is_none_is_not_read(limit: Any) -> None:
    async with World().started() as world:
        message = Outgoing(exchange="", routing_key=FRONTENDS, body=world.nova.call(1).body, headers={LIMIT: limit})
        world.nova.deliver(FRONTENDS, structs.replace(message, body=message.body.replace(b"u1", b"u2")))
        await asyncio.sleep(1)
        assert {call.limit_s for call in world.dispatcher.calls} <= {LONG_S, None, 1}


@on_virtual_time
async def test_a_call_leaves_for_the_fallback_once_it_cannot_be_delivered_again() -> None:
    """Forwarded a second time, the stock nova-scheduler would claim for it a second time."""
    async with World().started() as world:
        world.dispatcher.holds = True
        world.nova.call(1)
        await asyncio.sleep(1)
        world.nova.loses = BusUnavailable("lost")
        world.dispatcher.decide()
        await asyncio.sleep(1)
        assert world.stock.sent_to(TOPIC) == [] == world.nova.failures() and world.server.in_flight == 0
        world.nova.loses = None
        world.nova.call(1, FRONTENDS, redelivered=True)
        await asyncio.sleep(1)
        assert len(world.stock.sent_to(TOPIC)) == 1


@on_virtual_time
async def test_the_fallback_is_waited_for_when_it_may_have_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nova-scheduler may claim: told meanwhile that there is no host, the conductor would take the move back."""
    async with World().started() as world:

        async def unconfirmed(message: Outgoing) -> None:
            world.stock.published.append(message)
            raise BusUnavailable("no confirm")

        monkeypatch.setattr(world.stock, "publish", unconfirmed)
        world.nova.call(1)
        await asyncio.sleep(SILENT_S - 1)
        assert world.nova.failures() == [] and len(world.stock.sent_to(TOPIC)) == 1
        world.stock.answer()
        await asyncio.sleep(1)
        assert world.nova.failures() == [] and len(world.nova.replies()) == 1
        world.nova.call(2)
        await asyncio.sleep(SILENT_S + 1)
        assert len(world.nova.failures()) == 1, "not for ever"


@on_virtual_time
async def test_a_call_that_has_not_left_is_sent_to_the_fallback_when_its_connection_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with World().started() as world:
        publish, losses = world.stock.publish, [NotSent("not connected")]

        async def lost_once(message: Outgoing) -> None:
            if losses:
                raise losses.pop()
            await publish(message)

        monkeypatch.setattr(world.stock, "publish", lost_once)
        world.nova.call(1)
        await asyncio.sleep(2)
        assert not losses and len(world.stock.sent_to(TOPIC)) == 1
        world.stock.answer()
        await asyncio.sleep(1)
        assert world.nova.failures() == [] and len(world.nova.replies()) == 1


@pytest.mark.parametrize(("silent_s", "after_s"), [(SILENT_S, [1, 31, 61]), (1, [])])
@on_virtual_time
async def test_a_client_is_told_soon_that_its_call_is_under_way(silent_s: int, after_s: list[int]) -> None:
    """It may have waited in a queue for nearly as long as it waits for a sign of life."""
    async with World().started() as world:
        world.dispatcher.holds = True
        world.nova.call(1, _timeout=silent_s)
        told: list[int] = []
        for second in range(70):
            await asyncio.sleep(0.5)
            told += [second] * (len(world.nova.replies(ending=False)) - len(told))
            await asyncio.sleep(0.5)
        assert told == after_s


@on_virtual_time
async def test_a_call_that_is_given_back_and_comes_again_at_once_is_carried_out() -> None:
    async with World().started() as world:
        world.dispatcher.holds = True
        world.nova.call(1)
        await asyncio.sleep(1)
        world.nova.loses, world.nova.requeues = BusUnavailable("lost"), True
        world.dispatcher.decide()
        await asyncio.sleep(1)
        assert len(world.stock.sent_to(TOPIC)) == 1 == world.server.in_flight


# --- a frontend that stops


@on_virtual_time
async def test_a_front_that_stops_takes_no_more_and_ends_what_it_has() -> None:
    async with World().started() as world:
        world.nova.others = 1
        world.dispatcher.holds = True
        world.nova.call(1)
        await asyncio.sleep(1)
        stopping = asyncio.create_task(world.server.drain(10))
        await asyncio.sleep(1)
        later = [world.nova.call(2), world.nova.call(3, FRONTENDS)]
        world.dispatcher.decide()
        await asyncio.sleep(1)
        world.stock.answer()
        await stopping
        assert [call.unique_id for call in world.dispatcher.calls] == ["u1"] and world.server.in_flight == 0
        assert [one.ends for one in later] == [[], []] and len(world.nova.replies()) == 1


@on_virtual_time
async def test_the_last_front_ends_what_has_come_over() -> None:
    async with World().started() as world:
        world.nova.consumed[FRONTENDS].paused = True
        for number in range(3):
            world.nova.call(number, FRONTENDS)
        stopping = asyncio.create_task(world.server.drain(10))
        await asyncio.sleep(1)
        for _ in range(3):
            world.stock.answer()
            await asyncio.sleep(1)
        await stopping
        assert len(world.nova.replies()) == 3 and not world.nova.rest


@on_virtual_time
async def test_a_front_whose_time_is_over_tells_the_clients_of_the_fallback_and_gives_the_rest_back() -> None:
    async with World().started() as world:
        forwarded = world.nova.call(1)
        await asyncio.sleep(1)
        world.dispatcher.holds = True
        under_way = world.nova.call(2)
        await asyncio.sleep(1)
        began_s = asyncio.get_running_loop().time()
        await world.server.drain(10)
        assert asyncio.get_running_loop().time() - began_s <= 10
        (told,) = world.nova.failures()
        assert forwarded.ends == under_way.ends == ["ack"], "to the topic"
        assert world.nova.given_back() == ["u2"]
        assert told.startswith("No valid host was found.") and world.server.in_flight == 0
        assert len(world.stock.sent_to(TOPIC)) == 1


@on_virtual_time
async def test_a_call_that_a_front_parts_with_as_its_time_is_over_is_answered() -> None:
    """It does not come again: cut, it would be lost."""
    async with World().started() as world:
        world.dispatcher.holds = True
        world.nova.call(1)
        await asyncio.sleep(1)
        world.nova.confirms.clear()
        world.dispatcher.decide()
        stopping = asyncio.create_task(world.server.drain(10))
        await asyncio.sleep(9.5)
        world.nova.confirms.set()
        await stopping
        assert len(world.nova.failures()) == 1 and not world.nova.given_back() + world.stock.sent_to(TOPIC)


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
