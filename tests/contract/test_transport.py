"""What a transport must do, asked of every adapter alike: memory, memory behind a socket, RabbitMQ."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from bus import topology
from bus.contracts.catalogue import COMMANDS, DEAD, EVENTS, QueueKind, QueueRow, Where
from bus.port import (
    BusUnavailable,
    Delivery,
    Outgoing,
    PublishRefused,
    QueueMissing,
    Transport,
    Unroutable,
    dead_queue,
    retry_queue,
)
from tests.contract.rig import PATIENCE_S, Collector, Rig, rig_for, until

# A RabbitMQ that nobody told otherwise offers what a full queue refused again after three minutes; our own at once.
ROOM_S = 200.0

LASTING = ["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)]


def reconnects(test: Callable[..., object]) -> Callable[..., object]:
    """A test of reconnection: the socket's broker goes with its process, so there is nothing to come back to."""
    test.reconnects = True  # type: ignore[attr-defined]
    return test


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test of this module is asked of every adapter that it applies to."""
    metafunc.parametrize("kind", LASTING if hasattr(metafunc.function, "reconnects") else ["local", *LASTING])


@pytest.fixture
async def rig(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with rig_for(kind, lambda: request.getfixturevalue("amqp")) as found:
        yield found


def row(kind: QueueKind = QueueKind.DURABLE, **fields: object) -> QueueRow:
    given = {"name": "work", "where": Where.BOTH, "kind": kind, "reader": "tests", "bindings": (), **fields}
    return QueueRow(**given)  # type: ignore[arg-type]


async def declare(transport: Transport, kind: QueueKind = QueueKind.DURABLE, **fields: object) -> str:
    asked = row(kind, **{"bindings": ((COMMANDS, "work.#"),), **fields})
    await transport.declare_queue(asked, asked.name, asked.bindings)
    return asked.name


def command(body: bytes, key: str = "work.do", **fields: object) -> Outgoing:
    return Outgoing(exchange=COMMANDS, routing_key=key, body=body, mandatory=True, **fields)  # type: ignore[arg-type]


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
    await transport.publish(Outgoing(exchange=EVENTS, routing_key="nobody.listens", body=b"1"))


async def test_a_full_queue_refuses(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, QueueKind.TRANSIENT, max_length=2)
    await transport.publish(command(b"1"))
    await transport.publish(command(b"2"))
    with pytest.raises(PublishRefused):
        await transport.publish(command(b"3"))
    assert await transport.depth(queue) == 2


async def test_a_full_durable_queue_refuses_soon(rig: Rig) -> None:
    transport = await rig.transport()
    await declare(transport, max_length=2)
    with pytest.raises(PublishRefused):
        for _ in range(100):  # a quorum queue notices a little later
            await transport.publish(command(b"x"))


@pytest.mark.parametrize("queue_kind", [QueueKind.DURABLE, QueueKind.TRANSIENT])
async def test_a_queue_is_full_by_bytes_as_well(rig: Rig, queue_kind: QueueKind) -> None:
    """And takes more again when somebody has fetched what waited."""
    transport = await rig.transport()
    queue = await declare(transport, queue_kind, max_bytes=1000)
    with pytest.raises(PublishRefused):
        for _ in range(100):
            await transport.publish(command(b"x" * 400))
    assert await transport.depth(queue) < 100
    got = Collector()
    await transport.consume(queue, got, prefetch=10)

    async def taken() -> bool:
        try:
            await transport.publish(command(b"after"))
        except PublishRefused:
            return False
        return True

    await until(taken)
    await got.wait(2)
    assert got.bodies[0] == b"x" * 400


@pytest.mark.timeout(ROOM_S + 60)
async def test_what_waits_for_its_retry_comes_back_to_a_full_queue(rig: Rig) -> None:
    """A publisher is refused; what was accepted once is not lost over it."""
    transport = await rig.transport()
    queue = await declare(transport, max_length=3, retry_s=(0.05,))
    with contextlib.suppress(PublishRefused):
        for _ in range(20):
            await transport.publish(command(b"x"))
    witness = row(name="witness", retry_s=(0.05,))
    await transport.declare_queue(witness, witness.name, ())
    for name in (queue, witness.name):
        again = Outgoing(exchange="", routing_key=retry_queue(name, 0), body=b"again", mandatory=True)
        await transport.publish(again)
    passed = Collector()
    await transport.consume(witness.name, passed, prefetch=1)
    await passed.wait(1)  # so the other one's time is over, too, and the queue is full
    got = Collector()
    await transport.consume(queue, got, prefetch=1)
    await until(lambda: b"again" in got.bodies, ROOM_S)


@pytest.mark.timeout(ROOM_S + 60)
@pytest.mark.parametrize("requeue", [True, False])
async def test_what_a_queue_gives_up_waits_for_room_among_the_dead_letters(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, requeue: bool
) -> None:
    """Returned too often, or let die: the memory broker lost it when the parking queue was full."""
    monkeypatch.setattr(topology, "MAX_PARKED", 1)
    transport = await rig.transport()
    queue = await declare(transport, delivery_limit=0)
    filler = Outgoing(exchange="", routing_key=dead_queue(queue), body=b"filler", mandatory=True)
    with pytest.raises(PublishRefused):
        for _ in range(100):
            await transport.publish(filler)
    given_up: list[bytes] = []

    def give_up(delivery: Delivery) -> None:
        delivery.nack(requeue=requeue)
        given_up.append(delivery.body)

    await transport.consume(queue, give_up, prefetch=1)
    await transport.publish(command(b"poison"))
    await transport.publish(command(b"poison"))
    await until(lambda: len(given_up) >= 2)  # with a limit of no return each is handed out once
    parked: list[bytes] = []

    async def both_are_parked() -> bool:
        while (letter := await transport.get(dead_queue(queue))) is not None:
            parked.append(letter.body)
            letter.ack()
        return parked.count(b"poison") == 2

    await until(both_are_parked, ROOM_S)
    assert await transport.depth(queue) == 0


async def test_a_private_queue_drops_its_oldest(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, QueueKind.PRIVATE, max_length=2)
    for body in (b"1", b"2", b"3"):
        await transport.publish(command(body))
    got = Collector()
    await transport.consume(queue, got, prefetch=10)
    await got.wait(2)
    assert got.bodies == [b"2", b"3"]


async def test_what_is_given_back_comes_again_before_the_rest_and_in_order(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    for body in (b"1", b"2", b"3", b"4"):
        await transport.publish(command(body))
    held = Collector(ack=False)
    first = await transport.consume(queue, held, prefetch=2)
    await held.wait(2)
    await first.cancel()
    for delivery in held.got:
        delivery.nack(requeue=True)
    await until(lambda: _depth_is(transport, queue, 4))  # nobody confirms what is given back
    got = Collector()
    await transport.consume(queue, got, prefetch=1)
    await got.wait(4)
    assert got.bodies == [b"1", b"2", b"3", b"4"]
    assert [delivery.redelivered for delivery in got.got] == [True, True, False, False]
    assert [delivery.delivery_count for delivery in got.got] == [1, 1, 0, 0]


async def test_no_more_than_prefetch_is_outstanding(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    got = Collector(ack=False)
    await transport.consume(queue, got, prefetch=2)
    for number in range(5):
        await transport.publish(command(b"%d" % number))
    await got.wait(2)
    await until(lambda: _depth_is(transport, queue, 3))
    assert len(got.got) == 2
    got.got[0].ack()
    await got.wait(3)
    await until(lambda: _depth_is(transport, queue, 2))
    assert got.bodies == [b"0", b"1", b"2"]


async def test_consumers_share_a_queue(rig: Rig) -> None:
    transport, other = await rig.transport("one"), await rig.transport("two")
    queue = await declare(transport)
    here, there = Collector(), Collector()
    await transport.consume(queue, here, prefetch=1)
    await other.consume(queue, there, prefetch=1)
    for number in range(20):
        await transport.publish(command(b"%d" % number))
    await until(lambda: len(here.got) + len(there.got) == 20)
    assert here.got and there.got


async def test_past_its_delivery_limit_a_message_is_a_dead_letter(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, delivery_limit=2)
    counts: list[int] = []

    def give_back(delivery) -> None:  # type: ignore[no-untyped-def]
        counts.append(delivery.delivery_count)
        delivery.nack(requeue=True)

    await transport.consume(queue, give_back, prefetch=1)
    await transport.publish(command(b"poison", message_id="m1"))
    await until(lambda: _depth_is(transport, dead_queue(queue), 1))
    assert counts == [0, 1, 2]
    letter = await transport.get(dead_queue(queue))
    assert letter is not None
    assert (letter.body, letter.message_id) == (b"poison", "m1")
    assert letter.headers["x-first-death-reason"] == "delivery_limit"


async def test_what_is_lost_with_its_connection_counts_as_given_back(rig: Rig) -> None:
    """A message that takes its worker down again and again comes to its delivery limit, too."""
    other = await rig.transport("looker")
    queue = await declare(other, delivery_limit=1)
    await other.publish(command(b"poison"))
    counts: list[int] = []
    for name in ("one", "two"):
        transport = await rig.transport(name)
        held = Collector(ack=False)
        await transport.consume(queue, held, prefetch=1)
        counts.append((await held.wait(1))[0].delivery_count)
        await transport.close()
    assert counts == [0, 1]
    await until(lambda: _depth_is(other, dead_queue(queue), 1))


async def test_what_one_of_two_queues_refuses_the_other_has(rig: Rig) -> None:
    """The publisher is told that it was refused, and says it again: who listens hears it twice."""
    transport = await rig.transport()
    roomy = await declare(transport, name="roomy")
    await declare(transport, QueueKind.TRANSIENT, name="narrow", max_length=1)
    for body in (b"1", b"2"):
        with pytest.raises(PublishRefused) if body == b"2" else contextlib.nullcontext():
            await transport.publish(command(body))
    got = Collector()
    await transport.consume(roomy, got, prefetch=10)
    await got.wait(2)
    assert got.bodies == [b"1", b"2"]


async def test_what_is_given_up_is_a_dead_letter(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    got = Collector(ack=False)
    await transport.consume(queue, got, prefetch=1)
    await transport.publish(command(b"bad"))
    (delivery,) = await got.wait(1)
    delivery.nack(requeue=False)
    await until(lambda: _depth_is(transport, dead_queue(queue), 1))


async def test_the_dead_letter_exchange_leads_to_the_parking_queue(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    await transport.publish(Outgoing(exchange=DEAD, routing_key=queue, body=b"x", mandatory=True))
    assert await transport.depth(dead_queue(queue)) == 1


async def test_a_message_comes_back_from_a_retry_queue_after_its_delay(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, retry_s=(0.05, 60.0))
    got = Collector()
    await transport.consume(queue, got, prefetch=10)
    loop = asyncio.get_running_loop()
    started = loop.time()
    for level, body in ((1, b"much later"), (0, b"soon")):
        await transport.publish(
            Outgoing(exchange="", routing_key=retry_queue(queue, level), body=body, mandatory=True, message_id="m")
        )
    await got.wait(1)
    assert loop.time() - started >= 0.045
    assert got.bodies == [b"soon"]
    assert got.got[0].message_id == "m"
    assert await transport.depth(retry_queue(queue, 1)) == 1


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


async def test_what_was_got_and_not_settled_is_back_after_close(rig: Rig) -> None:
    transport, other = await rig.transport("one"), await rig.transport("two")
    queue = await declare(transport)
    await transport.publish(command(b"1"))
    assert await transport.get(queue) is not None
    await transport.close()
    await until(lambda: _depth_is(other, queue, 1))


async def test_after_cancel_nothing_comes_and_what_is_held_may_be_settled(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    got = Collector(ack=False)
    subscription = await transport.consume(queue, got, prefetch=1)
    await transport.publish(command(b"1"))
    await got.wait(1)
    await subscription.cancel()
    await transport.publish(command(b"2"))
    got.got[0].ack()
    await transport.close()
    after = await rig.transport("after")
    assert got.bodies == [b"1"]
    await until(lambda: _depth_is(after, queue, 1))


async def test_time_to_live_ends_a_message(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, QueueKind.TRANSIENT, ttl_s=0.03)
    await transport.publish(command(b"1"))
    await until(lambda: _depth_is(transport, queue, 0))


async def test_expiration_ends_a_message(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, QueueKind.TRANSIENT)
    await transport.publish(command(b"1", expiration_s=0.03))
    await transport.publish(command(b"2"))
    await until(lambda: _depth_is(transport, queue, 1))
    left = await transport.get(queue)
    assert left is not None and left.body == b"2"


@reconnects
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
    await transport.publish(Outgoing(exchange="", routing_key="berth.reply.x", body=b"r", mandatory=True))
    await held.wait(3)
    await got.wait(2)
    await replies.wait(1)


@reconnects
async def test_while_the_broker_is_away_publishing_says_so(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    await transport.publish(command(b"kept"))
    await rig.shut()
    await until(lambda: not transport.connected)
    with pytest.raises(BusUnavailable):
        await transport.publish(command(b"lost"))
    back = asyncio.Event()
    transport.on_reconnect(back.set)
    await rig.reopen()
    async with asyncio.timeout(PATIENCE_S):
        await back.wait()
    assert await transport.depth(queue) == 1


@reconnects
async def test_open_waits_for_a_broker_that_is_away(rig: Rig) -> None:
    await rig.shut()
    opening = asyncio.create_task(rig.transport())
    await asyncio.sleep(0)
    assert not opening.done()
    await rig.reopen()
    async with asyncio.timeout(PATIENCE_S):
        assert (await opening).connected


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


async def test_somebody_elses_exchange_is_bound_and_never_declared(rig: Rig) -> None:
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


async def test_a_consumer_that_gives_back_at_once_stops_nobody_else(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, QueueKind.TRANSIENT)
    subscription = await transport.consume(queue, lambda delivery: delivery.nack(requeue=True), prefetch=1)
    await transport.publish(command(b"1"))
    async with asyncio.timeout(PATIENCE_S):
        await subscription.cancel()
    await until(lambda: _depth_is(transport, queue, 1))


async def test_many_at_once_are_all_confirmed_and_all_acknowledged(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    got = Collector()
    await transport.consume(queue, got, prefetch=50)
    await asyncio.gather(*(transport.publish(command(b"%d" % number)) for number in range(500)))
    await got.wait(500)
    await transport.close()
    after = await rig.transport("after")
    assert await after.depth(queue) == 0
    assert [int(body) for body in got.bodies] == list(range(500))


async def _depth_is(transport: Transport, queue: str, count: int) -> bool:
    return await transport.depth(queue) == count
