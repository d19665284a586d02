"""The messages that a consumer of a transport holds, settles and gives up, and those that a full queue refuses."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from bus import topology
from bus.contracts.queues import DEAD, DEAD_LETTERS, QueueKind
from bus.topology import delay_exchange, delayed_queue
from bus.transport import Delivery, Outgoing, PublishRefused
from tests.contract.rig import EVERY_ADAPTER, Collector, Rig, collect, command, declare, depth_is, row, with_queue
from tests.kit.waiting import PATIENCE_S, until

# --- The messages that a consumer holds, settles, gives back and gives up, tested on every adapter alike.


pytestmark = EVERY_ADAPTER


async def test_what_is_given_back_comes_again_before_the_rest_and_in_order(rig: Rig) -> None:
    transport, queue = await with_queue(rig)
    for body in (b"1", b"2", b"3", b"4"):
        await transport.publish(command(body))
    held = Collector(ack=False)
    first = await transport.consume(queue, held, prefetch=2)
    await held.wait(2)
    await first.cancel()
    for delivery in held.got:
        delivery.nack(requeue=True)
    await until(lambda: depth_is(transport, queue, 4))  # what is given back is not confirmed
    got = await collect(transport, queue, 1)
    await got.wait(4)
    assert got.bodies == [b"1", b"2", b"3", b"4"]
    assert [delivery.redelivered for delivery in got.got] == [True, True, False, False]
    assert [delivery.delivery_count for delivery in got.got] == [1, 1, 0, 0]


async def test_what_expired_while_it_was_held_does_not_come_again(rig: Rig) -> None:
    """It keeps its time when it is given back; what has no end, or a later one, comes again."""
    transport = await rig.transport()
    queue, other = await declare(transport), "work.other"
    await transport.declare_queue(row(), other, ())
    held = Collector(ack=False)
    first = await transport.consume(queue, held, prefetch=10)
    for expiration_s in (0.05, 1.0, 20.0):  # on a machine that stands still it expires on its way
        await transport.publish(command(b"1", expiration_s=expiration_s))
        await until(lambda: depth_is(transport, queue, 0))
        if b"1" in held.bodies:
            break
    await transport.publish(command(b"2", expiration_s=600.0))
    await transport.publish(command(b"3"))
    await until(lambda: b"3" in held.bodies)
    await first.cancel()
    await transport.publish(Outgoing(exchange="", routing_key=other, body=b"4", expiration_s=expiration_s))
    await until(lambda: depth_is(transport, other, 0))  # so much time has passed
    for delivery in held.got:
        delivery.nack(requeue=True)
    got = await collect(transport, queue, 10)
    await got.wait(2)
    await until(lambda: depth_is(transport, queue, 0))
    assert b"1" in held.bodies and got.bodies == [b"2", b"3"]


async def test_no_more_than_prefetch_is_outstanding(rig: Rig) -> None:
    transport, queue = await with_queue(rig)
    got = await collect(transport, queue, 2, ack=False)
    for number in range(5):
        await transport.publish(command(b"%d" % number))
    await got.wait(2)
    await until(lambda: depth_is(transport, queue, 3))
    assert len(got.got) == 2
    got.got[0].ack()
    await got.wait(3)
    await until(lambda: depth_is(transport, queue, 2))
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
    await until(lambda: depth_is(transport, DEAD_LETTERS, 1))
    assert counts == [0, 1, 2]
    dead_letter = await transport.get(DEAD_LETTERS)
    assert dead_letter is not None
    assert (dead_letter.body, dead_letter.message_id) == (b"poison", "m1")
    assert dead_letter.headers["x-first-death-reason"] == "delivery_limit"


async def test_what_is_lost_with_its_connection_counts_as_given_back(rig: Rig) -> None:
    """A message that takes its worker down again and again comes to its delivery limit, too."""
    other = await rig.transport("looker")
    queue = await declare(other, delivery_limit=1)
    await other.publish(command(b"poison"))
    counts: list[int] = []
    for name in ("one", "two"):
        transport = await rig.transport(name)
        held = await collect(transport, queue, 1, ack=False)
        counts.append((await held.wait(1))[0].delivery_count)
        await transport.close()
    assert counts == [0, 1]
    await until(lambda: depth_is(other, DEAD_LETTERS, 1))


async def test_what_is_given_up_is_a_dead_letter(rig: Rig) -> None:
    transport, queue = await with_queue(rig)
    got = await collect(transport, queue, 1, ack=False)
    await transport.publish(command(b"bad"))
    (delivery,) = await got.wait(1)
    delivery.nack(requeue=False)
    await until(lambda: depth_is(transport, DEAD_LETTERS, 1))


async def test_the_dead_letter_exchange_leads_to_the_parking_queue(rig: Rig) -> None:
    transport, queue = await with_queue(rig)
    await transport.publish(Outgoing(exchange=DEAD, routing_key=queue, body=b"x", mandatory=True))
    assert await transport.depth(DEAD_LETTERS) == 1


async def test_a_message_comes_back_after_its_delay(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "DELAYS_S", (0.05, 60.0))
    transport, queue = await with_queue(rig)
    got = await collect(transport, queue, 10)
    loop = asyncio.get_running_loop()
    started = loop.time()
    for delay_s, body in ((60.0, b"much later"), (0.05, b"soon")):
        await transport.publish(
            Outgoing(exchange=delay_exchange(delay_s), routing_key=queue, body=body, mandatory=True, message_id="m")
        )
    await got.wait(1)
    assert loop.time() - started >= 0.045
    assert got.bodies == [b"soon"]
    assert got.got[0].message_id == "m"
    assert await transport.depth(delayed_queue(60.0)) == 1


async def test_what_was_got_and_not_settled_is_back_after_close(rig: Rig) -> None:
    transport, other = await rig.transport("one"), await rig.transport("two")
    queue = await declare(transport)
    await transport.publish(command(b"1"))
    assert await transport.get(queue) is not None
    await transport.close()
    await until(lambda: depth_is(other, queue, 1))


async def test_after_cancel_nothing_comes_and_what_is_held_may_be_settled(rig: Rig) -> None:
    transport, queue = await with_queue(rig)
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
    await until(lambda: depth_is(after, queue, 1))


async def test_a_consumer_that_gives_back_at_once_stops_no_other(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, QueueKind.EXPIRING)
    subscription = await transport.consume(queue, lambda delivery: delivery.nack(requeue=True), prefetch=1)
    await transport.publish(command(b"1"))
    async with asyncio.timeout(PATIENCE_S):
        await subscription.cancel()
    await until(lambda: depth_is(transport, queue, 1))


async def test_many_at_once_are_all_confirmed_and_all_acknowledged(rig: Rig) -> None:
    transport, queue = await with_queue(rig)
    got = await collect(transport, queue, 50)
    await asyncio.gather(*(transport.publish(command(b"%d" % number)) for number in range(500)))
    await got.wait(500)
    await transport.close()
    after = await rig.transport("after")
    assert await after.depth(queue) == 0
    assert [int(body) for body in got.bodies] == list(range(500))


# --- The messages that a queue without room refuses, drops and still takes, tested on every adapter alike.


# A RabbitMQ in its default configuration offers what a full queue refused again after three minutes; our own at once.
ROOM_S = 200.0


@pytest.mark.parametrize("queue_kind", [QueueKind.DURABLE, QueueKind.EXPIRING])
async def test_a_full_queue_refuses(rig: Rig, queue_kind: QueueKind) -> None:
    transport = await rig.transport()
    queue = await declare(transport, queue_kind, max_length=2)
    with pytest.raises(PublishRefused):
        for _ in range(100):  # a quorum queue notices a little later
            await transport.publish(command(b"x"))
    assert await transport.depth(queue) >= 2


@pytest.mark.parametrize("queue_kind", [QueueKind.DURABLE, QueueKind.EXPIRING])
async def test_a_queue_is_full_by_bytes_as_well(rig: Rig, queue_kind: QueueKind) -> None:
    """And takes more again when a consumer has fetched what waited."""
    transport = await rig.transport()
    queue = await declare(transport, queue_kind, max_bytes=1000)
    with pytest.raises(PublishRefused):
        for _ in range(100):
            await transport.publish(command(b"x" * 400))
    assert await transport.depth(queue) < 100
    got = await collect(transport, queue, 10)

    async def taken() -> bool:
        try:
            await transport.publish(command(b"after"))
        except PublishRefused:
            return False
        return True

    await until(taken)
    await got.wait(2)
    assert got.bodies[0] == b"x" * 400


async def test_what_one_of_two_queues_refuses_the_other_has(rig: Rig) -> None:
    """The publisher learns that it was refused, and publishes it again: a listener receives it twice."""
    transport = await rig.transport()
    roomy = await declare(transport, name="roomy")
    await declare(transport, QueueKind.EXPIRING, name="narrow", max_length=1)
    sent: list[bytes] = []
    with pytest.raises(PublishRefused):
        for number in range(100):  # a quorum queue notices a little later
            sent.append(b"%d" % number)
            await transport.publish(command(sent[-1]))
    got = await collect(transport, roomy, 10)
    await got.wait(len(sent))
    assert got.bodies == sent


async def test_a_private_queue_drops_its_oldest(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, QueueKind.PRIVATE, max_length=2)
    for body in (b"1", b"2", b"3"):
        await transport.publish(command(body))
    got = await collect(transport, queue, 10)
    await got.wait(2)
    assert got.bodies == [b"2", b"3"]


@pytest.mark.timeout(ROOM_S + 60)
async def test_what_waits_for_its_retry_comes_back_to_a_full_queue(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher is refused; what was accepted once is not lost over it, and holds up no other queue's."""
    monkeypatch.setattr(topology, "DELAYS_S", (0.05,))
    transport = await rig.transport()
    queue = await declare(transport, max_length=3)
    with contextlib.suppress(PublishRefused):
        for _ in range(20):
            await transport.publish(command(b"x"))
    witness = row(name="witness")
    await transport.declare_queue(witness, witness.name, ())
    for name in (queue, witness.name):
        again = Outgoing(exchange=delay_exchange(0.05), routing_key=name, body=b"again", mandatory=True)
        await transport.publish(again)
    passed = await collect(transport, witness.name, 1)
    await passed.wait(1)  # so the other one's time is over, too, and the queue is full
    got = await collect(transport, queue, 1)
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
    filler = Outgoing(exchange="", routing_key=DEAD_LETTERS, body=b"filler", mandatory=True)
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
        while (dead_letter := await transport.get(DEAD_LETTERS)) is not None:
            parked.append(dead_letter.body)
            dead_letter.ack()
        return parked.count(b"poison") == 2

    await until(both_are_parked, ROOM_S)
    assert await transport.depth(queue) == 0
