"""The behaviour of a transport, tested on every adapter alike: memory, memory behind a socket, RabbitMQ."""

from __future__ import annotations

import contextlib

import pytest

from bus.contracts.catalogue import COMMANDS, EVENTS, QueueKind
from bus.port import Outgoing, QueueLocked, QueueMissing, Unroutable
from tests.contract.queues import EVERY_ADAPTER, command, declare, depth_is
from tests.contract.rig import Collector, Rig, until

pytestmark = EVERY_ADAPTER


async def test_a_confirmed_message_arrives_with_all_that_travels_beside_it(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    got = Collector()
    await transport.consume(queue, got, prefetch=10)
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


async def test_a_large_body_arrives_whole(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    got = Collector()
    await transport.consume(queue, got, prefetch=10)
    body = bytes(range(256)) * 4000
    await transport.publish(command(body))
    await transport.publish(command(b""))
    await got.wait(2)
    assert got.bodies == [body, b""]


@pytest.mark.parametrize("message_id", ["m1", ""])
async def test_a_mandatory_message_without_a_queue_is_unroutable(rig: Rig, message_id: str) -> None:
    transport = await rig.transport()
    with pytest.raises(Unroutable):
        await transport.publish(command(b"1", message_id=message_id))
    with pytest.raises(Unroutable):
        await transport.publish(Outgoing(exchange="", routing_key="nobody", body=b"1", mandatory=True))


async def test_an_event_without_a_listener_is_no_error(rig: Rig) -> None:
    transport = await rig.transport()
    losses: list[None] = []
    transport.on_reconnect(lambda: losses.append(None))
    await transport.publish(Outgoing(exchange=EVENTS, routing_key="not.bound", body=b"1"))
    with pytest.raises(Unroutable):  # what must have a queue still fails, on the same connection
        await transport.publish(command(b"1"))
    assert transport.connected and not losses


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


async def test_two_bindings_that_match_deliver_once(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, bindings=((COMMANDS, "a.#"), (COMMANDS, "*.b")))
    await transport.publish(command(b"x", "a.b"))
    assert await transport.depth(queue) == 1


async def test_a_private_queue_goes_with_its_connection(rig: Rig) -> None:
    owner, other = await rig.transport("owner"), await rig.transport("other")
    queue = await declare(owner, QueueKind.PRIVATE)
    await owner.close()
    with pytest.raises(QueueMissing):
        await other.depth(queue)
    with pytest.raises(Unroutable):
        await other.publish(command(b"x"))


async def test_a_private_queue_belongs_to_one_connection_at_a_time(rig: Rig) -> None:
    first, second = await rig.transport("first"), await rig.transport("second")
    queue = await declare(first, QueueKind.PRIVATE)
    await declare(first, QueueKind.PRIVATE)  # its own, once more
    got = Collector()
    await first.consume(queue, got, prefetch=10)
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
    again = Collector()
    await second.consume(queue, again, prefetch=10)
    await second.publish(command(b"2"))
    await again.wait(1)
    assert (got.bodies, again.bodies) == ([b"1"], [b"2"])


async def test_get_depth_and_purge(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
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


async def test_time_to_live_ends_a_message(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, QueueKind.EXPIRING, ttl_s=0.03)
    await transport.publish(command(b"1"))
    await until(lambda: depth_is(transport, queue, 0))


async def test_expiration_ends_a_message(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, QueueKind.EXPIRING)
    await transport.publish(command(b"1", expiration_s=0.03))
    await transport.publish(command(b"2"))
    await until(lambda: depth_is(transport, queue, 1))
    left = await transport.get(queue)
    assert left is not None and left.body == b"2"


async def test_a_mistake_does_not_take_the_connection_down(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    got = Collector()
    await transport.consume(queue, got, prefetch=10)
    with pytest.raises(QueueMissing):
        await transport.consume("no.such.queue", got, prefetch=1)
    with pytest.raises(QueueMissing):
        await transport.get("no.such.queue")
    with pytest.raises(QueueMissing):
        await transport.publish(Outgoing(exchange="no.such.exchange", routing_key="x", body=b"x"))
    await transport.publish(command(b"1"))
    await got.wait(1)
    assert transport.connected


async def test_a_foreign_exchange_is_bound_and_never_declared(rig: Rig) -> None:
    transport = await rig.transport()
    exchange = f"ironic.{id(rig)}"
    with pytest.raises(QueueMissing):
        await transport.bind_foreign("ours", exchange, ["info.#"])
    await rig.foreign_exchange(exchange)  # type: ignore[attr-defined]
    await transport.bind_foreign("ours", exchange, ["info.#"])
    await transport.bind_foreign("ours", exchange, ["info.#"])
    assert await transport.depth("ours") == 0


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
