"""The queues of a bus: those that all its consumers share, their limits, and a project's lanes in them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiormq
import pytest
from msgspec import structs
from structlog.testing import capture_logs

from berth.up.embedded.rabbitmq import RabbitMQ
from bus.bus import Bus
from bus.clock import SystemClock
from bus.codec import Malformed
from bus.consuming import dead_letters, in_flight
from bus.consuming.dead_letters import UNKNOWN
from bus.consuming.outcome import Done, Outcome, Received, Retry
from bus.contracts.base import Message
from bus.contracts.build import BuildAccepted, BuildEvent, BuildRequest, BuildState
from bus.contracts.catalogue import door_destination
from bus.contracts.queues import (
    BY_QUEUE,
    COMMANDS,
    DEAD,
    DEAD_LETTERS,
    EVENTS,
    QUEUES,
    REQUEST_QUEUES,
    QueueKind,
    Where,
)
from bus.published_key import CODE
from bus.rabbitmq.transport import RabbitTransport
from bus.topology import (
    DELAYS_S,
    MAX_PARKED,
    NEVER_GIVEN_UP,
    delay_exchange,
    delayed_queue,
    external_plan,
    plan,
    shared_queues,
)
from bus.transport import Outgoing, PublishRefused, Transport
from tests.contract.rig import (
    EVERY_ADAPTER,
    KINDS,
    REQUESTS,
    Answering,
    Collector,
    House,
    Rig,
    boot,
    collect,
    command,
    declare,
    depth_is,
    settled,
    with_queue,
)
from tests.kit.waiting import until

# --- The topology that a bus has once for all its consumers: the queues of delayed messages, and the queue of dead
# letters.


SOON_S = DELAYS_S[0]
# More than RabbitMQ moves at a time: what cannot be moved stays in its hands.
MANY = 100


async def delay(transport: Transport, queue: str, body: bytes = b"x") -> None:
    await transport.publish(
        Outgoing(exchange=delay_exchange(SOON_S), routing_key=queue, body=body, mandatory=True, type="t.v1")
    )


async def park(transport: Transport, queue: str, name: str, **headers: str | int | float) -> None:
    dead_letter = Outgoing(
        exchange=DEAD, routing_key=queue, body=b"{}", message_id=name, headers=headers, mandatory=True
    )
    await transport.publish(dead_letter)


async def ids(transport: Transport, queue: str | None = None) -> list[str]:
    """In no order: a look may come before all that the last one held is back in line."""
    return sorted(dead_letter.id for dead_letter in await dead_letters.list_dead(transport, queue))


@EVERY_ADAPTER
def test_every_delay_of_a_row_is_one_of_the_buss(kind: str) -> None:
    assert all(set(row.retry_s) <= set(DELAYS_S) for row in QUEUES), kind


@EVERY_ADAPTER
async def test_what_was_delayed_for_a_removed_queue_delays_no_other_and_is_a_dead_letter(rig: Rig) -> None:
    """A host was taken away. RabbitMQ offered its messages again and again, and moved no other queue's meanwhile."""
    transport, queue = await with_queue(rig)
    for _ in range(MANY):
        await delay(transport, "compute.gone")
    await delay(transport, queue, b"mine")
    got = await collect(transport, queue, 1)
    await got.wait(1)
    assert got.bodies == [b"mine"]
    await until(lambda: depth_is(transport, DEAD_LETTERS, MANY))
    (dead_letter,) = await dead_letters.list_dead(transport, "compute.gone", limit=1)
    assert (dead_letter.queue, dead_letter.code, dead_letter.type) == ("compute.gone", "broker.expired", "t.v1")
    assert dead_letter.reason == "its queue was gone when its retry was due"


@EVERY_ADAPTER
async def test_letters_of_one_queue_are_listed_sent_back_and_dropped_without_the_others(rig: Rig) -> None:
    transport = await rig.transport()
    queue, other = await declare(transport), await declare(transport, name="compute.c1", bindings=())
    for number in range(3):
        await park(transport, queue, f"w{number}")
        await park(transport, other, f"c{number}")
    assert await ids(transport) == ["c0", "c1", "c2", "w0", "w1", "w2"]
    assert await ids(transport, other) == ["c0", "c1", "c2"]
    assert await dead_letters.count(transport) == dead_letters.Counts({other: 3, queue: 3}, 0)
    assert await dead_letters.replay(transport, queue, ["c1"]) == [], "not a letter of that queue"
    assert await dead_letters.replay(transport, queue, ["w1"]) == ["w1"]
    assert await dead_letters.purge(transport, other) == 3
    await until(lambda: depth_is(transport, queue, 1))
    assert await ids(transport) == ["w0", "w2"]
    assert sorted(await dead_letters.replay(transport, queue)) == ["w0", "w2"]
    assert await dead_letters.count(transport) == dead_letters.Counts({}, 0)


@EVERY_ADAPTER
async def test_more_letters_than_are_read_are_counted(rig: Rig, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(dead_letters, "MAX_COUNTED", 3)
    transport, queue = await with_queue(rig)
    for number in range(5):
        await park(transport, "flood", f"f{number}")
    await park(transport, queue, "w")
    assert await dead_letters.count(transport) == dead_letters.Counts({"flood": 3}, 3)
    assert await dead_letters.purge(transport, "flood") == 5, "those that are dropped are in no other's way"
    assert await ids(transport, queue) == ["w"]


@EVERY_ADAPTER
async def test_where_a_letter_comes_from_is_not_taken_from_its_publisher(rig: Rig) -> None:
    transport, queue = await with_queue(rig)
    headers = {"berth-queue": "victim", "x-first-death-queue": "victim", "x-death": "victim", CODE: "victim"}
    await transport.publish(command(b"x", message_id="m", headers=headers))
    got = await collect(transport, queue, 1, ack=False)
    (delivery,) = await got.wait(1)
    delivery.nack(requeue=False)
    await until(lambda: depth_is(transport, DEAD_LETTERS, 1))
    (dead_letter,) = await dead_letters.list_dead(transport)
    assert (dead_letter.queue, dead_letter.code) == (queue, "broker.rejected")


@EVERY_ADAPTER
async def test_what_is_written_past_the_exchange_comes_from_nowhere(rig: Rig) -> None:
    """Every worker may write into every queue of its bus: what names its own origin goes back nowhere."""
    transport, queue = await with_queue(rig)
    await transport.publish(
        Outgoing(exchange="", routing_key=DEAD_LETTERS, body=b"{}", message_id="m", headers={"berth-queue": queue})
    )
    (dead_letter,) = await dead_letters.list_dead(transport)
    assert dead_letter.queue == UNKNOWN
    assert await dead_letters.replay(transport, queue) == []
    assert await dead_letters.purge(transport, UNKNOWN) == 1


@EVERY_ADAPTER
async def test_two_systems_in_one_virtual_host_share_nothing(rig: Rig) -> None:
    one, two = await rig.transport("one", "a."), await rig.transport("two", "b.")
    got = {}
    for transport in (one, two):
        queue = await declare(transport)
        got[transport] = Collector()
        await transport.consume(queue, got[transport], prefetch=1)
    await delay(one, queue, b"of one")
    await delay(two, queue, b"of two")
    await got[one].wait(1)
    await got[two].wait(1)
    assert (got[one].bodies, got[two].bodies) == ([b"of one"], [b"of two"])
    await park(one, queue, "m")
    assert (await ids(one, queue), await ids(two)) == (["m"], [])
    assert (await dead_letters.count(one)).by_queue == {queue: 1}
    await delay(one, "b.work")  # the other's queue is none of this one's
    await until(lambda: depth_is(one, DEAD_LETTERS, 2))
    assert await two.depth(queue) == 0


@EVERY_ADAPTER
async def test_what_is_delayed_and_what_is_parked_outlives_the_connection(rig: Rig) -> None:
    transport = await rig.transport("one")
    queue = await declare(transport)
    await transport.publish(Outgoing(exchange=delay_exchange(SOON_S), routing_key=queue, body=b"x", mandatory=True))
    await park(transport, queue, "m")
    await transport.publish(Outgoing(exchange=COMMANDS, routing_key="work.x", body=b"y", mandatory=True))
    await transport.close()
    again = await rig.transport("two")
    await until(lambda: depth_is(again, queue, 2))
    assert await ids(again, queue) == ["m"]


# --- Queues that an earlier berth declared without a delivery limit are used and named; a policy mends them.


FOREIGN = "ironic.notifications"
NOTIFIES = "foreign.notifications"
EXPIRING = BY_QUEUE["placement.reads"]
LOOKS = 30
on_rabbitmq = pytest.mark.rabbitmq
KEPT = {"x-queue-type": "quorum", "x-max-length": MAX_PARKED}
AS_BEFORE: dict[str, dict[str, str | int]] = {
    DEAD_LETTERS: {**KEPT, "x-overflow": "reject-publish"},
    FOREIGN: {**KEPT, "x-overflow": "drop-head"},
    EXPIRING.name: {
        "x-queue-type": "quorum",
        "x-max-length": EXPIRING.max_length,
        "x-overflow": "reject-publish",
        "x-message-ttl": round((EXPIRING.ttl_s or 0.0) * 1000),
    },
}


@asynccontextmanager
async def channel_on(url: str) -> AsyncIterator[aiormq.abc.AbstractChannel]:
    connection = await aiormq.connect(url)
    try:
        yield await connection.channel()
    finally:
        await connection.close()


async def declare_as_before(url: str, prefix: str) -> None:
    """The queues that an earlier berth declared without a limit."""
    async with channel_on(url) as channel:
        for name, arguments in AS_BEFORE.items():
            await channel.queue_declare(prefix + name, durable=True, arguments=arguments)  # type: ignore[arg-type]


def transport_on(url: str, prefix: str = "") -> RabbitTransport:
    return RabbitTransport(url, name="api", prefix=prefix)


def test_every_consumed_queue_states_how_often_a_message_may_be_given_back() -> None:
    """RabbitMQ 4 gives up a message of any other after 20 times. -1 gives up all at once in RabbitMQ 3.10."""
    delayed = {planned.name for planned in shared_queues() if planned.ttl_s is not None}
    assert all(name.startswith(delayed_queue(0).removesuffix("0")) for name in delayed)
    planned = (*shared_queues(), *(plan(row, row.name, row.bindings) for row in QUEUES), external_plan(FOREIGN))
    for one in planned:
        if one.durable and one.name not in delayed:
            assert one.delivery_limit is not None and one.delivery_limit > 0, one.name
    rows = {row.name: row for row in QUEUES if row.kind is QueueKind.DURABLE or row.where is Where.PROJECT}
    limits = {one.name: one.delivery_limit for one in planned if one.durable and one.name not in delayed}
    assert {name: limit for name, limit in limits.items() if limit != NEVER_GIVEN_UP} == {
        name: row.delivery_limit for name, row in rows.items()
    }


@on_rabbitmq
async def test_a_queue_of_an_earlier_berth_is_used_with_what_it_holds_and_named(amqp: tuple[str, str]) -> None:
    url, prefix = amqp
    await declare_as_before(url, prefix)
    transport = transport_on(url, prefix)
    with capture_logs() as logged:
        await transport.open()
        try:
            await transport.publish(Outgoing(exchange="", routing_key=EXPIRING.name, body=b"{}"))
            await transport.declare_shared()
            await transport.declare_queue(EXPIRING, EXPIRING.name, EXPIRING.bindings)
            async with channel_on(url) as channel:  # the exchange of another system has no prefix
                await channel.exchange_declare(NOTIFIES, exchange_type="topic", auto_delete=True)
                await transport.bind_external(FOREIGN, NOTIFIES, ["#"])
                await channel.basic_publish(b"{}", exchange=NOTIFIES, routing_key="baremetal.info")
            await until(lambda: depth_is(transport, FOREIGN, 1))
            assert await transport.depth(EXPIRING.name) == 1, "a queue of requests was deleted"
        finally:
            await transport.close()
    named = {one["queue"]: one["see"] for one in logged if one["event"] == "bus.queue_without_limit"}
    assert named == {prefix + name: "docs/operate/upgrade.md" for name in (DEAD_LETTERS, FOREIGN)}


@on_rabbitmq
async def test_a_shared_queue_that_differs_otherwise_is_left_and_named(amqp: tuple[str, str]) -> None:
    url, prefix = amqp
    async with channel_on(url) as channel:
        await channel.queue_declare(prefix + DEAD_LETTERS, durable=True, arguments={"x-queue-type": "quorum"})
    transport = transport_on(url, prefix)
    with capture_logs() as logged:
        await transport.open()
        try:
            await transport.declare_shared()
            await transport.publish(Outgoing(exchange=DEAD, routing_key="q", body=b"{}", mandatory=True))
        finally:
            await transport.close()
    differs = [(one["code"], one["queue"]) for one in logged if one["event"] == "bus.shared_queue_differs"]
    assert differs == [("bus.queue_differs", prefix + DEAD_LETTERS)]


@on_rabbitmq
async def test_a_policy_keeps_the_letters_of_a_queue_without_a_limit(own_broker: RabbitMQ) -> None:
    """The remedy of docs/operate/upgrade.md, which needs neither a worker stopped nor a letter moved."""
    url = own_broker.url()
    await declare_as_before(url, "")
    own_broker.control(
        *("set_policy", "--apply-to", "queues", "berth-kept"),
        r"^(berth\.dead-letters|ironic\.notifications)$",
        f'{{"delivery-limit": {NEVER_GIVEN_UP}}}',
    )
    bus = Bus("api", transport_on(url), process="p", clock=SystemClock(), rng=random.Random(1))
    await bus.open()
    try:
        await bus.transport.publish(Outgoing(exchange=DEAD, routing_key="q", body=b"{}", mandatory=True))
        for _ in range(LOOKS):
            await until(lambda: depth_is(bus.transport, DEAD_LETTERS, 1))
            assert (await dead_letters.count(bus.transport)).by_queue == {"q": 1}
    finally:
        await bus.close()


# --- What a consumer has of its queue.


NOISY, QUIET = "p", "quiet"
KEY = f"build.request.{NOISY}"
BATCH = 8


class Gated:
    """A handler that waits for its gate, and remembers which projects each batch was of."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.batches: list[list[str]] = []

    async def __call__(self, received: Sequence[Received]) -> Sequence[Outcome]:
        self.batches.append([one.message.project_id for one in received])  # type: ignore[attr-defined]
        await self.gate.wait()
        return [Done()] * len(received)


@pytest.fixture
async def bus(house: House) -> AsyncIterator[Bus]:
    yield await house.bus()


@KINDS
@pytest.mark.parametrize("request_", [boot(1), structs.replace(boot(1), host="h")], ids=["gateway", "operator"])
async def test_a_full_queue_of_direct_publishers_refuses_no_other_request(
    house: House, bus: Bus, request_: BuildRequest
) -> None:
    for queue in REQUEST_QUEUES:
        await bus.declare(queue)
    size = 256 * 1024

    async def is_full() -> bool:
        try:
            await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key=KEY, body=b"x" * size, mandatory=True))
        except PublishRefused:
            return True
        return False

    await until(is_full)
    handlers = [await house.answer(bus, queue) for queue in ("scheduler.operators", "scheduler.door")]
    to = None if request_.host else door_destination
    await bus.request_all([request_], BuildAccepted, timeout_s=30, causes=[""], to=to)
    assert [handler.uuids for handler in handlers].count([]) == 1


@KINDS
async def test_a_retry_of_a_full_queue_comes_back(house: House, bus: Bus) -> None:
    """The queue would refuse it, and then it holds up the delays of the whole bus."""
    for queue in REQUEST_QUEUES:
        await bus.declare(queue)
    size, began = 256 * 1024, asyncio.Event()

    async def retry(received: Sequence[Received]) -> Sequence[Outcome]:
        while True:
            try:
                await bus.transport.publish(
                    Outgoing(exchange=COMMANDS, routing_key=KEY, body=b"x" * size, mandatory=True)
                )
            except PublishRefused:
                break
        began.set()
        return [Retry("test.later")] * len(received)

    handler = await house.answer(bus, "scheduler.operators")
    consumer = await house.consume(bus, REQUESTS, retry, max_batch=1, concurrency=1, prefetch=1)
    await bus.publish(boot(1))
    await began.wait()
    await handler.wait(1)
    assert handler.uuids == [boot(1).instance_uuid] and consumer.in_flight <= 1


@KINDS
async def test_a_consumers_hands_hold_few_bytes_however_large_the_bodies_are(
    house: House, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler grew from 140 to 605 MB: 512 messages of a megabyte, and each was in bounds."""
    size, bound = 50_000, 200_000
    monkeypatch.setattr(in_flight, "MAX_BUFFERED_BYTES", bound)
    await bus.declare(REQUESTS)
    handler = Gated()
    consumer = await house.consume(bus, REQUESTS, handler, max_batch=1, concurrency=1)
    most = 0
    for number in range(30):
        message = structs.replace(boot(number), project_id=NOISY, name="n" * 200)
        await bus.publish(message)
        body = b'{"instance_uuid":"%d' % number + b"x" * size
        await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key=KEY, body=body, mandatory=True))
        await asyncio.sleep(0.01)
        most = max(most, consumer._buffered.buffered)
    assert most <= bound + 8 * size, "what is on its way when it is paused comes, too"
    await until(lambda: not_all_taken(bus))
    handler.gate.set()
    await until(lambda: len(handler.batches) == 30)
    await until(lambda: depth_is(bus, REQUESTS, 0))
    await until(lambda: consumer._buffered.buffered == 0)


@KINDS
async def test_a_consumer_whose_deliveries_were_lost_holds_none_of_them(house: House, bus: Bus) -> None:
    await bus.declare(REQUESTS)
    handler = Gated()
    consumer = await house.consume(bus, REQUESTS, handler, max_batch=1, concurrency=1)
    for number in range(3):
        await bus.publish(structs.replace(boot(number), project_id=NOISY))
    await until(lambda: len(handler.batches) == 1 and consumer._waiting() == 2)
    back = asyncio.Event()
    bus.transport.on_reconnect(back.set)
    await house.rig.cut()
    await back.wait()
    handler.gate.set()
    await settled(bus)
    await until(lambda: consumer._buffered.buffered == 0)
    assert len(handler.batches) >= 3


async def not_all_taken(bus: Bus) -> bool:
    return not await depth_is(bus, REQUESTS, 0)


@KINDS
async def test_unreadable_messages_of_one_round_are_settled_together(
    house: House, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waited for three confirms before the next one was looked at, and sound requests waited behind them."""
    count, published = 20, bus.transport.publish
    under_way = most = 0

    async def counting(message: Outgoing) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            await asyncio.sleep(0.01)
            await published(message)
        finally:
            under_way -= 1

    def refused(bad: Malformed) -> Sequence[Message]:
        return [] if bad.body == b"{" else [event(boot(int(bad.body[1:])).instance_uuid)]

    await bus.declare(REQUESTS)
    for number in range(count):
        for body in (b"{", b"{%d" % number):
            await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key=KEY, body=body, mandatory=True))
    monkeypatch.setattr(bus.transport, "publish", counting)
    await house.consume(bus, REQUESTS, Answering(), on_malformed=refused, concurrency=1)
    await settled(bus, dead=count)
    assert most >= count // 2


@KINDS
async def test_a_full_queue_of_another_program_holds_up_no_request(house: House) -> None:
    """Two malformed requests, about which an event was published, stopped every scheduler for ever."""
    bus = await house.bus()
    full = structs.replace(BY_QUEUE["client.record.{process}"], max_length=1)
    await bus.transport.declare_queue(full, "client.record.full", ((EVENTS, "build.event.#"),))
    for _ in range(100):  # a quorum queue's bound is not exact
        await bus.publish_each([(event(boot().instance_uuid), "")] * 20)
    got = Answering()
    await house.consume(
        bus, REQUESTS, got, on_malformed=lambda _bad: [event(boot().instance_uuid)], concurrency=1, max_batch=1
    )
    for _ in range(2):
        await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key=KEY, body=b"{", mandatory=True))
    await bus.publish(boot())
    await got.wait(1)
    await settled(bus, dead=2)


def event(instance: str) -> BuildEvent:
    return BuildEvent(
        instance_uuid=instance, project_id=NOISY, state=BuildState.REFUSED, sequence=0, terminal=True, code="no"
    )


@EVERY_ADAPTER
async def test_a_paused_subscription_gets_nothing_until_it_is_resumed(rig: Rig) -> None:
    transport, queue = await with_queue(rig)
    got = Collector()
    subscription = await transport.consume(queue, got, prefetch=10)
    await transport.publish(command(b"1"))
    await got.wait(1)
    subscription.pause()
    subscription.pause()

    async def is_kept() -> bool:
        await transport.publish(command(b"2"))
        await asyncio.sleep(0.01)
        return await transport.depth(queue) > 0

    await until(is_kept)
    before = len(got.got)
    await transport.publish(command(b"last"))
    assert len(got.got) == before
    subscription.resume()
    await until(lambda: got.bodies[-1] == b"last")
    assert await transport.depth(queue) == 0


@EVERY_ADAPTER
async def test_a_subscription_that_is_cancelled_while_it_is_resumed_gives_nothing_back(rig: Rig) -> None:
    """It would go on at the broker, and each message given back would be one delivery nearer to its limit."""
    transport, queue = await with_queue(rig)
    subscription = await transport.consume(queue, Collector(), prefetch=10)
    for _ in range(10):
        subscription.pause()
        await asyncio.sleep(0.001)
        subscription.resume()
    await subscription.cancel()
    await transport.publish(command(b"1"))
    got = await collect(transport, queue, 1)
    (delivery,) = await got.wait(1)
    assert not delivery.redelivered


@pytest.mark.parametrize("kind", ["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
async def test_a_lost_connection_neither_ends_a_pause_nor_makes_it_last(rig: Rig) -> None:
    transport, queue = await with_queue(rig)
    got = Collector(ack=False)
    back = asyncio.Event()
    transport.on_reconnect(back.set)
    subscription = await transport.consume(queue, got, prefetch=10)
    subscription.pause()
    await rig.cut()
    await back.wait()
    await transport.publish(command(b"1"))
    assert await transport.depth(queue) == 1
    subscription.resume()
    await got.wait(1)
    back.clear()
    subscription.pause()
    await rig.cut()
    subscription.resume()
    await back.wait()
    await got.wait(2)
    assert got.bodies == [b"1", b"1"]
