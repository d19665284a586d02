"""Behaviour that only a real RabbitMQ can show: it is killed, it refuses, and its channels change under way."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import random
import struct
import threading
import uuid
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import aiormq
import msgspec
import pytest
from aiormq.abc import AbstractChannel
from msgspec import structs
from pamqp import encode
from structlog.testing import capture_logs

from berth.up.embedded.rabbitmq import RabbitMQ
from bus import metrics
from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import BuildAccepted, BuildEvent, BuildRequest, BuildState
from bus.contracts.queues import BY_QUEUE, COMMANDS, EVENTS, QUEUES, REPLY, QueueKind
from bus.rabbitmq import channels, session
from bus.rabbitmq.address import parse_bus_url
from bus.rabbitmq.patches import has_ended
from bus.rabbitmq.session import Session
from bus.rabbitmq.transport import RabbitSubscription, RabbitTransport
from bus.service.health import Health
from bus.service.service import WorkerRuntime
from bus.topology import QueueNames, plan, shared_queues
from bus.transport import (
    BusError,
    BusForbidden,
    BusUnavailable,
    Delivery,
    Outgoing,
    PublishRefused,
    QueueDiffers,
    QueueMissing,
)
from tests.contract.rig import Collector, Rig, collect, command, declare, row, with_queue
from tests.kit.waiting import until

# --- Behaviour that only a real RabbitMQ can show: it is killed, and it refuses.


pytestmark = [pytest.mark.rabbitmq]
PATIENCE_S = 60.0
# The same as `rabbitmqctl close_all_connections`, once there is one: the broker lists a connection a moment after it
# has opened it, and each rabbitmqctl takes seconds, on a slow machine many.
CLOSE_ALL = """
Close = fun Again([]) -> timer:sleep(20), Again(rabbit_networking:connections());
            Again(Found) -> [rabbit_networking:close_connection(One, "maintenance") || One <- Found]
        end,
Close([]).
"""
# The same as `rabbitmqctl set_vm_memory_high_watermark`. %s: a share of the machine's memory.
MEMORY_LIMIT = "vm_memory_monitor:set_vm_memory_high_watermark(%s)."
# %s: the name that a client has given its connection.
CLOSE_CONNECTION = """
[rabbit_networking:close_connection(Pid, "tests") || Pid <- rabbit_networking:connections(),
    [{client_properties, Given}] <- [rabbit_reader:info(Pid, [client_properties])],
    {<<"connection_name">>, _, <<"%s">>} <- Given].
"""
# The same as `rabbitmqctl delete_queue scheduler.requests`.
DELETE_REQUESTS = """
case rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"scheduler.requests">>)) of
    {ok, Queue} -> rabbit_amqqueue:delete(Queue, false, false, <<"tests">>);
    {error, not_found} -> being_declared
end.
"""
# What a node's restart does to a queue whose only member, or whose leader until another is elected, is there.
LEADER = """
{ok, Queue} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"gateway.events.p">>)),
ra:%s_server(quorum_queues, amqqueue:get_pid(Queue)).
"""


def bus_on(url: str, name: str = "api", process: str = "p") -> Bus:
    transport = RabbitTransport(url, name=name)
    return Bus(name, transport, process=process, clock=SystemClock(), rng=random.Random(process))


def boot(number: int) -> BuildRequest:
    return BuildRequest(instance_uuid=str(uuid.UUID(int=number)), flavor="m1.small", project_id="p")


def test_no_queue_is_transient_and_not_exclusive() -> None:
    """RabbitMQ 4.3 deprecates those, and can be configured to refuse them (transient_nonexcl_queues)."""
    for planned in (*shared_queues(), *(plan(one, one.name, one.bindings) for one in QUEUES)):
        assert planned.durable is not planned.exclusive, planned.name


async def test_a_queue_of_requests_of_an_older_berth_is_replaced(amqp: tuple[str, str]) -> None:
    url, prefix = amqp
    row = BY_QUEUE["placement.requests"]
    connection = await aiormq.connect(url)
    try:
        channel = await connection.channel()
        await channel.queue_declare(prefix + row.name, durable=True, arguments={"x-queue-type": "classic"})
    finally:
        await connection.close()
    transport = RabbitTransport(url, name="api", prefix=prefix)
    await transport.open()
    try:
        await transport.declare_shared()
        await transport.declare_queue(row, row.name, row.bindings)
        for name, kind in (("scheduler.requests", QueueKind.DURABLE), ("mine", QueueKind.PRIVATE)):
            declared = structs.replace(BY_QUEUE["scheduler.requests"], name=name, kind=kind)
            await transport.declare_queue(declared, name, ())
            with pytest.raises(QueueDiffers):  # what holds something worth keeping is never deleted
                await transport.declare_queue(structs.replace(declared, max_length=7), name, ())
        assert await transport.depth(row.name) == 0
    finally:
        await transport.close()


async def test_a_broker_short_of_memory_shows_on_readyz_and_what_waits_for_it_leaves_when_it_has_enough_again(
    own_broker: RabbitMQ,
) -> None:
    """Nothing could be published for minutes, and every /readyz answered 200."""
    bus = bus_on(own_broker.url())
    service = WorkerRuntime("p", clock=SystemClock())
    service.add_resource(bus.open, bus.close)
    service.add_bus_check("bus api", lambda: bus.unavailable_reason)
    health = Health(service.not_ready)
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    await service.ready.wait()
    await bus.declare("scheduler.requests")
    with capture_logs() as logged:
        await asyncio.to_thread(own_broker.evaluate, MEMORY_LIMIT % "0.000001")
        waiting: list[asyncio.Task[None]] = []

        async def blocked() -> bool:
            if not waiting:
                published = asyncio.create_task(bus.publish(boot(len(waiting))))
                done, _ = await asyncio.wait([published], timeout=0.5)
                if not done:
                    waiting.append(published)
            return health.answer("GET", "/readyz")[0] == 503

        await until(blocked)
        assert service.not_ready() == ["bus api: the broker takes no messages: low on memory"]
        assert metrics.BLOCKED.labels("api")._value.get() == 1
        await asyncio.to_thread(own_broker.evaluate, MEMORY_LIMIT % "0.6")
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*waiting)

        async def ready() -> bool:
            return health.answer("GET", "/readyz")[0] == 200

        await until(ready)
    assert metrics.BLOCKED.labels("api")._value.get() == 0
    assert [one["event"] for one in logged if "blocked" in one["event"]] == ["bus.blocked", "bus.unblocked"]
    stop.set()
    await running


async def test_what_is_late_in_an_alarm_is_not_sent_again(
    own_broker: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was late every 30 s, and each time whoever had sent it sent it again: all copies waited in the connection."""
    for module in (channels, session):
        monkeypatch.setattr(module, "CONFIRM_TIMEOUT_S", 0.5)
    transport = RabbitTransport(own_broker.url(), name="api")
    await transport.open()
    try:
        await transport.declare_shared()
        await transport.declare_reply_queue("q")
        await asyncio.to_thread(own_broker.evaluate, MEMORY_LIMIT % "0.000001")
        before: list[BaseException | None] = []

        async def blocked() -> bool:  # the broker says so after a publish
            if not transport.blocked:
                before.extend(await asyncio.gather(transport.publish(to("q")), return_exceptions=True))
            return bool(transport.blocked)

        await until(blocked)
        for _ in range(3):
            with pytest.raises(BusUnavailable):
                await transport.publish(to("q"))
        waiting = asyncio.create_task(asyncio.to_thread(own_broker.evaluate, MEMORY_LIMIT % "0.6"))
        await until(lambda: not transport.blocked)
        await waiting
        await transport.publish(to("q"))
        assert await transport.depth("q") == len(before) + 1
    finally:
        await transport.close()


async def test_what_is_handled_in_an_alarm_leaves_its_queue(
    own_broker: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acknowledgements went the way of what is published, which the broker does not read then: its queues never shrank,
    and the alarm stayed for ever.
    """
    monkeypatch.setattr(channels, "CONFIRM_TIMEOUT_S", 5.0)
    transport = RabbitTransport(own_broker.url(), name="api")
    await transport.open()
    await transport.declare_shared()
    got: list[Delivery] = []
    try:
        await transport.declare_reply_queue("q")
        await transport.consume("q", got.append, prefetch=10)
        for _ in range(2):
            await transport.publish(to("q"))
        await until(lambda: len(got) == 2)
        await asyncio.to_thread(own_broker.evaluate, MEMORY_LIMIT % "0.000001")

        async def blocked() -> bool:  # the broker says so after a publish
            if not transport.blocked:
                await asyncio.wait([asyncio.create_task(transport.publish(to("q")))], timeout=0.5)
            return bool(transport.blocked)

        await until(blocked)
        for delivery in got:
            await delivery.acknowledged()
        assert transport.blocked and transport.connected
    finally:
        await asyncio.to_thread(own_broker.evaluate, MEMORY_LIMIT % "0.6")
        await transport.close()


async def test_a_worker_that_starts_in_an_alarm_does_not_wait_to_learn_its_permissions(own_broker: RabbitMQ) -> None:
    """Each bus waited half a minute for an answer that the broker gives after the alarm, which who consumes ends."""
    await asyncio.to_thread(own_broker.evaluate, MEMORY_LIMIT % "0.000001")
    transport = RabbitTransport(own_broker.url(), name="api")
    try:
        await transport.open()
        await transport.declare_shared()
        await transport.declare_reply_queue("q")
        with capture_logs() as logged:
            for _ in range(2):
                await transport.check_publishes([(REPLY, "q")])
        assert [one["reason"] != "" for one in logged if one["event"] == "bus.permissions_unchecked"] == [True, True]
    finally:
        await asyncio.to_thread(own_broker.evaluate, MEMORY_LIMIT % "0.6")
        await until(lambda: not transport.blocked)
    await transport.check_publishes([(REPLY, "q")])
    assert await transport.depth("q") == 0
    await transport.close()


async def test_either_connection_that_is_lost_ends_the_session(own_broker: RabbitMQ) -> None:
    """Who publishes and who consumes is told of one loss, and of one return."""
    transport = RabbitTransport(own_broker.url(), name="api")
    await transport.open()
    await transport.declare_shared()
    returns: list[None] = []
    transport.on_reconnect(lambda: returns.append(None))
    try:
        for number, name in enumerate(("berth api", "berth api publishes"), start=1):
            await asyncio.to_thread(own_broker.evaluate, CLOSE_CONNECTION % name)
            await until(lambda number=number: len(returns) == number)  # type: ignore[misc]
            await transport.declare_reply_queue("q")
            await transport.publish(to("q"))
            assert await transport.depth("q") == 1
            await transport.purge("q")
    finally:
        await transport.close()


async def test_a_killed_broker_loses_nothing_that_it_confirmed(own_broker: RabbitMQ) -> None:
    publisher, consumer_bus = bus_on(own_broker.url(), process="a"), bus_on(own_broker.url(), process="b")
    await publisher.open()
    await consumer_bus.open()
    handled: set[str] = set()

    async def handler(received: Sequence[Received]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        for one in received:
            assert isinstance(one.message, BuildRequest)
            handled.add(one.message.instance_uuid)
            outcomes.append(Done(BuildAccepted(instance_uuid=one.message.instance_uuid)))
        return outcomes

    consumer = Consumer(consumer_bus, "scheduler.requests", handler)
    await consumer.start()
    running = asyncio.create_task(consumer.run())
    confirmed: list[str] = []
    failures: list[str] = []
    stop = asyncio.Event()

    async def publish() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                await publisher.publish(boot(number))
                confirmed.append(boot(number).instance_uuid)
            except BusUnavailable as error:
                failures.append(error.code)
                await asyncio.sleep(0.01)

    publishing = asyncio.create_task(publish())
    await until(lambda: len(confirmed) > 50)
    # RabbitMQ 3.10 registers a new quorum queue in a table that it writes out half a second later. A broker killed
    # before that has a queue without a leader (declare and publish hang); here we ask about messages, not about that.
    await asyncio.to_thread(own_broker.evaluate, "[dets:sync(Table) || Table <- dets:all()].")
    await asyncio.to_thread(own_broker.kill)
    await until(lambda: failures and not publisher.transport.connected)
    await asyncio.to_thread(own_broker.start)
    before = len(confirmed)
    await until(lambda: len(confirmed) >= before + 50)
    stop.set()
    await publishing
    async with asyncio.timeout(PATIENCE_S):
        while not set(confirmed) <= handled:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        # The reply queue is back too, although it died with the broker.
        answer = await publisher.request(boot(10**6), BuildAccepted, timeout_s=PATIENCE_S)
    assert answer.instance_uuid == boot(10**6).instance_uuid
    assert not running.done()
    await consumer.drain(5)
    await running
    await publisher.close()
    await consumer_bus.close()


async def test_connections_closed_by_an_operator_come_back(own_broker: RabbitMQ) -> None:
    bus = bus_on(own_broker.url())
    await bus.open()
    back = asyncio.Event()
    bus.transport.on_reconnect(back.set)
    await bus.declare("scheduler.feed.{process}")
    await asyncio.to_thread(own_broker.evaluate, CLOSE_ALL)
    async with asyncio.timeout(PATIENCE_S):
        await back.wait()
    assert await bus.transport.depth("scheduler.feed.p") == 0
    await bus.close()


async def test_what_the_broker_forbids_is_raised_at_once(own_broker: RabbitMQ) -> None:
    await asyncio.to_thread(own_broker.add_vhost, "cell1")
    await asyncio.to_thread(own_broker.add_user, "cell", "secret")
    await asyncio.to_thread(own_broker.set_permissions, "cell", "cell1", r"berth.*|c\..*", "berth", r".*")
    with pytest.raises(BusForbidden):
        await bus_on(own_broker.url(user="cell", password="wrong")).open()
    with pytest.raises(BusForbidden):
        await bus_on(own_broker.url(user="cell", password="secret")).open()  # the API bus
    with pytest.raises(BusForbidden):
        await bus_on(own_broker.url("nowhere", user="cell", password="secret")).open()
    bus = bus_on(own_broker.url("cell1", user="cell", password="secret"), "cell1")
    await bus.open()
    with pytest.raises(BusForbidden):
        await bus.declare("scheduler.feed.{process}")
    transport = bus.transport
    await transport.publish(Outgoing(exchange=COMMANDS, routing_key="x", body=b""))
    await asyncio.to_thread(own_broker.set_permissions, "cell", "cell1", "berth.*", "^berth$", "nothing")
    bystander = transport.publish(Outgoing(exchange=COMMANDS, routing_key="x", body=b""))
    forbidden = transport.publish(Outgoing(exchange=EVENTS, routing_key="x", body=b""))
    results = await asyncio.gather(bystander, forbidden, return_exceptions=True)
    assert results[0] is None or isinstance(results[0], BusUnavailable)
    assert isinstance(results[1], BusForbidden)
    with pytest.raises((BusForbidden, QueueMissing)):
        await transport.get("anything")
    assert transport.connected
    await bus.close()


def _open_channels(session: Session) -> int:
    found = session._connection.channels.values()  # type: ignore[attr-defined]
    return sum(1 for one in found if one is not None and not has_ended(one))


async def test_a_deleted_queue_is_declared_and_consumed_again(own_broker: RabbitMQ) -> None:
    bus = bus_on(own_broker.url())
    await bus.open()
    got: list[Received] = []

    async def handler(received: Sequence[Received]) -> Sequence[Outcome]:
        got.extend(received)
        return [Done()] * len(received)

    consumer = Consumer(bus, "scheduler.requests", handler)
    await consumer.start()
    await asyncio.to_thread(own_broker.evaluate, DELETE_REQUESTS)
    async with asyncio.timeout(PATIENCE_S):
        while not got:
            try:
                await bus.publish(boot(1))
            except Exception as error:  # unroutable until it is back
                assert getattr(error, "code", "").startswith("bus."), error
            await asyncio.sleep(0.02)
    session = bus.transport._session  # type: ignore[attr-defined]
    before = _open_channels(session)
    for _ in range(3):
        deleted = len(got)
        await asyncio.to_thread(own_broker.evaluate, DELETE_REQUESTS)
        async with asyncio.timeout(PATIENCE_S):
            while len(got) == deleted:
                with contextlib.suppress(BusError):
                    await bus.publish(boot(1))
                await asyncio.sleep(0.02)
    assert bus.transport._session is session  # type: ignore[attr-defined]
    await until(lambda: _open_channels(session) <= before)
    await consumer.drain(5)
    await bus.close()


async def test_a_consumption_that_could_not_begin_leaves_no_channel_open(
    own_broker: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = bus_on(own_broker.url())
    await bus.open()
    queue = await bus.declare("scheduler.requests")
    session = bus.transport._session  # type: ignore[attr-defined]
    before, qos, failures = _open_channels(session), aiormq.Channel.basic_qos, [TimeoutError(), TimeoutError()]

    async def silent_twice(self: aiormq.Channel, **given: Any) -> Any:
        if failures:
            raise failures.pop()
        return await qos(self, **given)

    monkeypatch.setattr(aiormq.Channel, "basic_qos", silent_twice)
    await bus.transport.consume(queue, lambda _: None, prefetch=1)
    assert not failures and _open_channels(session) == before + 1
    await bus.close()


@pytest.mark.parametrize("bad", ["timestamp", "correlation_id", "message_id", "headers"])
async def test_properties_that_cannot_be_read_cost_no_connection(
    amqp: tuple[str, str], monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    """Twenty lost connections would drive its healthy neighbours into the dead letters, too."""
    url, prefix = amqp
    bus = Bus(
        "api",
        RabbitTransport(url, name="api", prefix=prefix),
        process="p",
        clock=SystemClock(),
        rng=random.Random(1),
    )
    await bus.open()
    await bus.declare("scheduler.requests")
    await _publish_badly(url, prefix + COMMANDS, boot(1), bad, monkeypatch)
    await bus.publish(boot(2))
    got: list[Received] = []
    lost: list[str] = []
    bus.transport.on_reconnect(lambda: lost.append("connection"))

    async def handler(received: Sequence[Received]) -> Sequence[Outcome]:
        got.extend(received)
        return [Done()] * len(received)

    consumer = Consumer(bus, "scheduler.requests", handler)
    await consumer.start()
    await until(lambda: len(got) >= 2 or lost)
    assert [(one.message, one.redelivered) for one in got] == [(boot(1), False), (boot(2), False)]
    assert not lost
    await consumer.drain(1.0)
    await bus.close()


async def _publish_badly(
    url: str, exchange: str, message: BuildRequest, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a client in another language can: the broker looks at none of it."""
    values: dict[str, Any] = {"timestamp": datetime.now(UTC), "headers": {"when": datetime.now(UTC)}}
    properties = {bad: values.get(bad, "BAD")}
    short = encode.METHODS["shortstr"]
    far = struct.pack(">Q", 2**63 - 1)
    monkeypatch.setitem(encode.METHODS, "shortstr", lambda text: b"\x02\xff\xfe" if text == "BAD" else short(text))
    monkeypatch.setitem(encode.METHODS, "timestamp", lambda _: far)
    monkeypatch.setattr(encode, "timestamp", lambda _: far)
    connection = await aiormq.connect(url)
    channel = await connection.channel()
    await channel.basic_publish(
        msgspec.json.encode(message),
        exchange=exchange,
        routing_key="build.request.p",
        properties=aiormq.spec.Basic.Properties(content_type="application/json", **properties),
    )
    await connection.close()
    monkeypatch.undo()


def test_an_attempt_to_connect_that_failed_leaves_nothing_to_be_closed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """aio-pika closes what it finds open when it is collected: a warning out of nowhere where that is in a thread."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # a record kept would hold the connection
    loop = asyncio.new_event_loop()
    kept: list[BaseException] = []  # with all that the attempt held

    def forget() -> None:
        kept.clear()
        gc.collect()

    try:
        try:
            loop.run_until_complete(Session.connect(parse_bus_url("amqp://127.0.0.1:1/"), QueueNames("n"), "nobody"))
        except BusUnavailable as error:
            kept.append(error)
        assert kept
        with warnings.catch_warnings(record=True) as logged:
            warnings.simplefilter("always")
            forgetting = threading.Thread(target=forget)
            forgetting.start()
            forgetting.join()
        assert logged == []
    finally:
        loop.close()


# --- Channels of a real RabbitMQ that change while something is under way on them.


# The members of a quorum queue answer nothing, as when their disk hangs. %s: the queue, the vhost's name is "/".
HANG = """
{ok, Queue} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"%s">>)),
sys:%s(amqqueue:get_pid(Queue)).
"""


@pytest.mark.parametrize("kind", ["rabbitmq"])
async def test_a_subscription_that_is_cancelled_while_it_is_taken_up_again_consumes_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gave back at once whatever came, each time one delivery nearer to the limit."""
    transport, queue = await with_queue(rig)
    subscription = await transport.consume(queue, Collector(), prefetch=10)
    back, taking_up, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    transport.on_reconnect(back.set)
    consume = RabbitSubscription._consume

    async def late(self: RabbitSubscription, channel: AbstractChannel) -> str:
        taking_up.set()
        await go_on.wait()
        return await consume(self, channel)

    monkeypatch.setattr(RabbitSubscription, "_consume", late)
    await rig.cut()
    await taking_up.wait()
    cancelling = asyncio.create_task(subscription.cancel())
    await asyncio.sleep(0)
    go_on.set()
    await cancelling
    await back.wait()
    await transport.publish(command(b"1"))
    got = await collect(transport, queue, 1)
    (delivery,) = await got.wait(1)
    assert not delivery.redelivered


@pytest.mark.parametrize("kind", ["rabbitmq"])
async def test_a_subscription_that_begins_while_others_are_taken_up_again_is_one_consumption(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There were two, of which `cancel` ended one: the other gave back at once whatever came, up to the limit."""
    transport = await rig.transport()
    assert isinstance(transport, RabbitTransport)
    first, second = await declare(transport), await declare(transport, name="scheduler.requests.2")
    await transport.consume(first, Collector(), prefetch=10)
    back, taking_up, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    transport.on_reconnect(back.set)
    consume = RabbitSubscription._consume

    async def late(self: RabbitSubscription, channel: AbstractChannel) -> str:
        if self.queue.endswith(first):
            taking_up.set()
            await go_on.wait()
        return await consume(self, channel)

    monkeypatch.setattr(RabbitSubscription, "_consume", late)
    await rig.cut()
    await taking_up.wait()
    await transport.consume(second, Collector(), prefetch=10)
    go_on.set()
    await back.wait()
    assert await transport.consumers(second) == 1


@pytest.mark.parametrize("kind", ["rabbitmq"])
async def test_a_queue_that_is_deleted_when_its_consumption_has_just_begun_is_consumed_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker's word that the consumption has ended came before anyone listened, and the queue had no consumer."""
    transport = await rig.transport()
    assert isinstance(transport, RabbitTransport)
    queue = await declare(transport)
    consume, begun = RabbitSubscription._consume, 0

    async def slow(self: RabbitSubscription, channel: AbstractChannel) -> str:
        nonlocal begun
        tag, begun = await consume(self, channel), begun + 1
        if begun == 1:
            await transport._current().delete_queue(self.queue)
            await until(lambda: tag not in channel.consumers)  # type: ignore[attr-defined]
        return tag

    monkeypatch.setattr(RabbitSubscription, "_consume", slow)
    await transport.consume(queue, Collector(), prefetch=10)
    await until(lambda: begun == 2)
    assert await transport.consumers(queue) == 1


@pytest.mark.parametrize("kind", ["rabbitmq"])
@pytest.mark.parametrize("frames", ["publishes", "acknowledgements"])
async def test_what_is_sent_beside_the_end_of_a_channel_costs_no_connection(rig: Rig, frames: str) -> None:
    """The broker ends the connection for a frame on a channel whose end has been acknowledged: all that was delivered
    on it was delivered again."""
    transport, queue = await with_queue(rig)
    back: list[bool] = []
    transport.on_reconnect(lambda: back.append(True))
    subscription = await transport.consume(queue, collector := Collector(), prefetch=1)
    assert isinstance(subscription, RabbitSubscription)
    channel = subscription._channel
    assert channel is not None
    acks, unknown = channels.Acks(channel, prefetch=1), itertools.count(1_000)
    publishes: list[asyncio.Task[None]] = []
    if frames == "publishes":
        nowhere = Outgoing(exchange="nowhere", routing_key="x", body=b"")
        publishes.append(asyncio.create_task(transport.publish(nowhere)))
    while not (publishes[0].done() if publishes else channel.is_closed):
        if publishes:
            publishes.append(asyncio.create_task(transport.publish(command(b"x"))))
        else:
            acks.register(tag := next(unknown))
            acks.ack(tag, now=True)
        await asyncio.sleep(0)
    await asyncio.gather(*publishes, return_exceptions=True)
    await until(lambda: subscription._channel is not None and not subscription._channel.is_closed)
    await transport.publish(command(b"last"))
    await until(lambda: b"last" in collector.bodies)
    assert not back


async def test_a_refusal_beside_a_publish_that_hangs_stops_nothing(
    own_broker: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channel that was refused something is replaced; each publish waited up to 35 s for the one that hung."""
    monkeypatch.setattr(channels, "REPLACE_REFUSED_S", 0.0)
    transport = RabbitTransport(own_broker.url(), name="api")
    await transport.open()
    try:
        await transport.declare_shared()
        for name, most in (("hangs", 1000), ("full", 1), ("takes", 1000)):
            await transport.declare_queue(row(name=name, max_length=most), name, ())
        await transport.publish(to("hangs"))  # the first on a channel is a call, for which all of the channel waits
        await asyncio.to_thread(own_broker.evaluate, HANG % ("hangs", "suspend"))
        hung = asyncio.create_task(transport.publish(to("hangs")))
        with pytest.raises(PublishRefused):
            for _ in range(100):  # a quorum queue notices a little later
                await transport.publish(to("full"))
        for _ in range(3):
            await transport.publish(to("takes"))
        assert not hung.done(), "what waited behind it waited for as long"
        assert transport.connected and await transport.depth("takes") == 3
        await asyncio.to_thread(own_broker.evaluate, HANG % ("hangs", "resume"))
        async with asyncio.timeout(PATIENCE_S):
            await hung
    finally:
        await transport.close()


def to(queue: str) -> Outgoing:
    return Outgoing(exchange="", routing_key=queue, body=b"x", mandatory=True)


async def test_an_event_that_a_queue_without_a_leader_refuses_comes_when_it_has_one(own_broker: RabbitMQ) -> None:
    bus = bus_on(own_broker.url())
    await bus.open()
    try:
        queue = await bus.declare("gateway.events.{project}", project="p")
        event = BuildEvent(instance_uuid=boot(1).instance_uuid, project_id="p", state=BuildState.ACTIVE, sequence=1)
        await asyncio.to_thread(own_broker.evaluate, LEADER % "stop")
        with pytest.raises(PublishRefused):
            await bus.publish(event)
        await asyncio.to_thread(own_broker.evaluate, LEADER % "restart")

        async def has_it() -> bool:
            with contextlib.suppress(PublishRefused):  # until its channel is replaced
                await bus.publish(event)
            return await bus.transport.depth(queue) > 0

        await until(has_it)
    finally:
        await bus.close()
