"""The behaviour of a transport, tested on every adapter alike: memory, memory behind a socket, RabbitMQ."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from bus.contracts.queues import COMMANDS, EVENTS, REPLY, QueueKind
from bus.transport import Delivery, NotSent, Outgoing, QueueLocked, QueueMissing, Unroutable
from tests.contract.rig import (
    EVERY_ADAPTER,
    EVERY_ADAPTER_THAT_RECONNECTS,
    Collector,
    Rig,
    collect,
    command,
    declare,
    depth_is,
    with_queue,
)
from tests.kit.waiting import PATIENCE_S, until

# --- The behaviour of a transport, tested on every adapter alike: memory, memory behind a socket, RabbitMQ.


@EVERY_ADAPTER
async def test_a_confirmed_message_arrives_with_all_that_travels_beside_it(rig: Rig) -> None:
    transport, queue = await with_queue(rig)
    got = await collect(transport, queue, 10)
    headers = {"berth-cause": "c", "n": 7, "far": 2**40, "f": 1700000000.25}
    await transport.publish(
        command(b"{}", message_id="m1", type="t.v1", correlation_id="c1", reply_to="answers", headers=headers)
    )
    (delivery,) = await got.wait(1)
    assert (delivery.body, delivery.exchange, delivery.routing_key) == (b"{}", COMMANDS, "work.do")
    assert (delivery.content_type, delivery.message_id, delivery.type) == ("application/json", "m1", "t.v1")
    assert (delivery.correlation_id, delivery.reply_to) == ("c1", "answers")
    assert {name: delivery.headers[name] for name in headers} == headers
    assert (delivery.redelivered, delivery.delivery_count) == (False, 0)


@EVERY_ADAPTER
async def test_a_large_body_arrives_whole(rig: Rig) -> None:
    transport, queue = await with_queue(rig)
    got = await collect(transport, queue, 10)
    body = bytes(range(256)) * 4000
    await transport.publish(command(body))
    await transport.publish(command(b""))
    await got.wait(2)
    assert got.bodies == [body, b""]


@EVERY_ADAPTER
@pytest.mark.parametrize("message_id", ["m1", ""])
async def test_a_mandatory_message_without_a_queue_is_unroutable(rig: Rig, message_id: str) -> None:
    transport = await rig.transport()
    with pytest.raises(Unroutable):
        await transport.publish(command(b"1", message_id=message_id))
    with pytest.raises(Unroutable):
        await transport.publish(Outgoing(exchange="", routing_key="nobody", body=b"1", mandatory=True))


@EVERY_ADAPTER
async def test_an_event_without_a_listener_is_no_error(rig: Rig) -> None:
    transport = await rig.transport()
    losses: list[None] = []
    transport.on_reconnect(lambda: losses.append(None))
    await transport.publish(Outgoing(exchange=EVENTS, routing_key="not.bound", body=b"1"))
    with pytest.raises(Unroutable):  # what must have a queue still fails, on the same connection
        await transport.publish(command(b"1"))
    assert transport.connected and not losses


@EVERY_ADAPTER
@pytest.mark.parametrize(
    ("pattern", "key", "taken"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("a.#", "a", True),
        ("a.#", "a.b.c", True),
        ("#.c", "a.b.c", True),
        ("a.#.c", "a.c", True),
        ("*.#", "", False),
        ("#", "", True),
        ("#", "a.b", True),
    ],
)
async def test_topic_patterns(rig: Rig, pattern: str, key: str, taken: bool) -> None:
    transport = await rig.transport()
    await declare(transport, QueueKind.PRIVATE, bindings=((COMMANDS, pattern),))
    if taken:
        await transport.publish(command(b"x", key))
    else:
        with pytest.raises(Unroutable):
            await transport.publish(command(b"x", key))


@EVERY_ADAPTER
async def test_two_bindings_that_match_deliver_once(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, bindings=((COMMANDS, "a.#"), (COMMANDS, "*.b")))
    await transport.publish(command(b"x", "a.b"))
    assert await transport.depth(queue) == 1


@EVERY_ADAPTER
async def test_a_private_queue_goes_with_its_connection(rig: Rig) -> None:
    owner, other = await rig.transport("owner"), await rig.transport("other")
    queue = await declare(owner, QueueKind.PRIVATE)
    await owner.close()
    with pytest.raises(QueueMissing):
        await other.depth(queue)
    with pytest.raises(Unroutable):
        await other.publish(command(b"x"))


@EVERY_ADAPTER
async def test_a_private_queue_belongs_to_one_connection_at_a_time(rig: Rig) -> None:
    first, second = await rig.transport("first"), await rig.transport("second")
    queue = await declare(first, QueueKind.PRIVATE)
    await declare(first, QueueKind.PRIVATE)  # its own, once more
    got = await collect(first, queue, 10)
    for _ in range(2):
        with pytest.raises(QueueLocked):
            await declare(second, QueueKind.PRIVATE)
    await second.publish(command(b"1"))
    await got.wait(1)
    await first.close()

    async def declared() -> bool:
        with contextlib.suppress(QueueLocked):
            return await declare(second, QueueKind.PRIVATE) == queue
        return False

    await until(declared)
    again = await collect(second, queue, 10)
    await second.publish(command(b"2"))
    await again.wait(1)
    assert (got.bodies, again.bodies) == ([b"1"], [b"2"])


@EVERY_ADAPTER
async def test_a_queue_that_was_purged_has_room_again(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, max_bytes=1000)
    for _ in range(4):
        await transport.publish(command(b"x" * 900))
        assert await transport.purge(queue) == 1


@EVERY_ADAPTER
async def test_get_depth_and_purge(rig: Rig) -> None:
    transport, queue = await with_queue(rig)
    assert await transport.get(queue) is None
    for body in (b"1", b"2", b"3"):
        await transport.publish(command(body))
    assert await transport.depth(queue) == 3
    delivery = await transport.get(queue)
    assert delivery is not None and delivery.body == b"1"
    delivery.ack()
    assert await transport.purge(queue) == 2
    assert await transport.depth(queue) == 0
    with pytest.raises(QueueMissing):
        await transport.depth("no.such.queue")


@EVERY_ADAPTER
async def test_a_cancelled_get_keeps_no_message(rig: Rig) -> None:
    transport, queue = await with_queue(rig)
    await transport.publish(command(b"1"))
    getting = asyncio.create_task(transport.get(queue))
    await asyncio.sleep(0)
    getting.cancel()
    await asyncio.gather(getting, return_exceptions=True)
    if not getting.cancelled() and (taken := getting.result()) is not None:
        taken.nack(requeue=True)
    await until(lambda: depth_is(transport, queue, 1))


@EVERY_ADAPTER
async def test_time_to_live_ends_a_message(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, QueueKind.EXPIRING, ttl_s=0.03)
    await transport.publish(command(b"1"))
    await until(lambda: depth_is(transport, queue, 0))


@EVERY_ADAPTER
async def test_expiration_ends_a_message(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, QueueKind.EXPIRING)
    await transport.publish(command(b"1", expiration_s=0.03))
    await transport.publish(command(b"2"))
    await until(lambda: depth_is(transport, queue, 1))
    left = await transport.get(queue)
    assert left is not None and left.body == b"2"


@EVERY_ADAPTER
async def test_a_mistake_does_not_take_the_connection_down(rig: Rig) -> None:
    transport, queue = await with_queue(rig)
    got = await collect(transport, queue, 10)
    with pytest.raises(QueueMissing):
        await transport.consume("no.such.queue", got, prefetch=1)
    with pytest.raises(QueueMissing):
        await transport.get("no.such.queue")
    with pytest.raises(QueueMissing):
        await transport.publish(Outgoing(exchange="no.such.exchange", routing_key="x", body=b"x"))
    await transport.publish(command(b"1"))
    await got.wait(1)
    assert transport.connected


@EVERY_ADAPTER
async def test_a_foreign_exchange_is_bound_and_never_declared(rig: Rig) -> None:
    transport = await rig.transport()
    exchange = f"ironic.{id(rig)}"
    with pytest.raises(QueueMissing):
        await transport.bind_external("ours", exchange, ["info.#"])
    await rig.foreign_exchange(exchange)  # type: ignore[attr-defined]
    await transport.bind_external("ours", exchange, ["info.#"])
    await transport.bind_external("ours", exchange, ["info.#"])
    assert await transport.depth("ours") == 0


@EVERY_ADAPTER
async def test_prefixes_keep_systems_apart_and_foreign_reply_queues_reachable(rig: Rig) -> None:
    one, two = await rig.transport("one", "a."), await rig.transport("two", "b.")
    queue = await declare(one)
    await declare(two)
    await one.publish(command(b"1", reply_to="=somebodys.own"))
    await one.publish(command(b"2", reply_to="berth.reply.me"))
    assert await two.depth(queue) == 0
    first, second = await one.get(queue), await one.get(queue)
    assert first is not None and second is not None
    assert (first.reply_to, second.reply_to) == ("=somebodys.own", "berth.reply.me")
    with pytest.raises(Unroutable):
        await one.publish(Outgoing(exchange="", routing_key="=" + queue, body=b"x", mandatory=True))


# --- A callback that raises costs nobody else anything, on every adapter.


class Defect(Exception):
    pass


@pytest.fixture(autouse=True)
async def _reported() -> None:
    """What callbacks raise is reported here, where it would fail the test."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)


def failing_at(body: bytes, collector: Collector) -> Callable[[Delivery], None]:
    def on_delivery(delivery: Delivery) -> None:
        if delivery.body == body:
            raise Defect
        collector(delivery)

    return on_delivery


@EVERY_ADAPTER
async def test_a_delivery_whose_callback_raises_is_rejected(rig: Rig) -> None:
    """It had a place of the prefetch for as long as the connection lasted."""
    transport = await rig.transport()
    queue, got = await declare(transport), Collector()
    for body in (b"1", b"2"):
        await transport.publish(command(body))
    await transport.consume(queue, failing_at(b"1", got), prefetch=1)
    await got.wait(1)
    assert got.bodies == [b"2"] and await transport.depth(queue) == 0


@EVERY_ADAPTER_THAT_RECONNECTS
async def test_the_connection_comes_back_after_a_callback_has_raised(rig: Rig) -> None:
    """No connection was made after the second loss, and the second callback was never called."""
    transport = await rig.transport()
    called: list[str] = []

    def bad() -> None:
        called.append("bad")
        raise Defect

    transport.on_reconnect(bad)
    transport.on_reconnect(lambda: called.append("good"))
    for times in (1, 2):
        await rig.cut()
        await until(lambda times=times: called == ["bad", "good"] * times and transport.connected)


# --- A connection that is lost, and a broker that is unavailable, asked of every adapter that reconnects.


@EVERY_ADAPTER_THAT_RECONNECTS
async def test_a_lost_connection_comes_back_with_everything(rig: Rig) -> None:
    transport = await rig.transport()
    durable, private = await declare(transport), await declare(transport, QueueKind.PRIVATE, name="mine")
    await transport.declare_reply_queue("berth.reply.x")
    back = asyncio.Event()
    transport.on_reconnect(back.set)
    held, got, replies = Collector(ack=False), Collector(), Collector()
    await transport.consume(durable, held, prefetch=10)
    await transport.consume(private, got, prefetch=10)
    await transport.consume("berth.reply.x", replies, prefetch=10)
    await transport.publish(command(b"1"))
    await held.wait(1)
    await rig.cut()
    async with asyncio.timeout(PATIENCE_S):
        await back.wait()
    held.got[0].ack()  # of the old connection: does nothing
    assert transport.connected
    await held.wait(2)
    assert held.got[1].redelivered
    held.got[1].ack()
    await transport.publish(command(b"2"))
    await transport.publish(Outgoing(exchange=REPLY, routing_key="berth.reply.x", body=b"r", mandatory=True))
    await held.wait(3)
    await got.wait(2)
    await replies.wait(1)


@EVERY_ADAPTER_THAT_RECONNECTS
async def test_a_connection_that_comes_back_waits_for_its_private_queue_while_another_has_it(rig: Rig) -> None:
    """As after a fail-over: its former connection may still have it, or a process that was quicker."""
    transport = await rig.transport()
    queue = await declare(transport, QueueKind.PRIVATE, name="mine")
    got, back, locked = Collector(), asyncio.Event(), asyncio.Event()
    await transport.consume(queue, got, prefetch=10)
    transport.on_reconnect(back.set)
    transport.on_locked(locked.set)
    await rig.part(transport)
    await until(lambda: not transport.connected)
    quicker = rig.outside("quicker")
    await quicker.open()
    try:
        await quicker.declare_shared()

        async def has_it() -> bool:  # RabbitMQ may need a moment to notice that the other one has gone
            with contextlib.suppress(QueueLocked):
                return await declare(quicker, QueueKind.PRIVATE, name="mine") == queue
            return False

        await until(has_it)
        await rig.rejoin(transport)
        async with asyncio.timeout(PATIENCE_S):
            await locked.wait()
        assert not transport.connected and not back.is_set()
    finally:
        await quicker.close()
    async with asyncio.timeout(PATIENCE_S):
        await back.wait()
    await transport.publish(command(b"1"))
    await got.wait(1)


@EVERY_ADAPTER_THAT_RECONNECTS
async def test_while_the_broker_is_unavailable_publishing_fails(rig: Rig) -> None:
    transport, queue = await with_queue(rig)
    await transport.publish(command(b"kept"))
    await rig.shut()
    await until(lambda: not transport.connected)
    with pytest.raises(NotSent):
        await transport.publish(command(b"lost"))
    back = asyncio.Event()
    transport.on_reconnect(back.set)
    await rig.reopen()
    async with asyncio.timeout(PATIENCE_S):
        await back.wait()
    assert await transport.depth(queue) == 1


@EVERY_ADAPTER_THAT_RECONNECTS
async def test_open_waits_for_an_unavailable_broker(rig: Rig) -> None:
    await rig.shut()
    opening = asyncio.create_task(rig.transport())
    await asyncio.sleep(0)
    assert not opening.done()
    await rig.reopen()
    async with asyncio.timeout(PATIENCE_S):
        assert (await opening).connected
