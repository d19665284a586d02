"""The messages that a consumer holds, settles, gives back and gives up, tested on every adapter alike."""

from __future__ import annotations

import asyncio

import pytest

from bus import topology
from bus.contracts.catalogue import DEAD, DEAD_LETTERS, QueueKind
from bus.port import Outgoing
from bus.topology import delay_exchange, delayed_queue
from tests.contract.queues import EVERY_ADAPTER, command, declare, depth_is, row
from tests.contract.rig import PATIENCE_S, Collector, Rig, until

pytestmark = EVERY_ADAPTER


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
    await until(lambda: depth_is(transport, queue, 4))  # what is given back is not confirmed
    got = Collector()
    await transport.consume(queue, got, prefetch=1)
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
    got = Collector()
    await transport.consume(queue, got, prefetch=10)
    await got.wait(2)
    await until(lambda: depth_is(transport, queue, 0))
    assert b"1" in held.bodies and got.bodies == [b"2", b"3"]


async def test_no_more_than_prefetch_is_outstanding(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    got = Collector(ack=False)
    await transport.consume(queue, got, prefetch=2)
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
    letter = await transport.get(DEAD_LETTERS)
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
    await until(lambda: depth_is(other, DEAD_LETTERS, 1))


async def test_what_is_given_up_is_a_dead_letter(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    got = Collector(ack=False)
    await transport.consume(queue, got, prefetch=1)
    await transport.publish(command(b"bad"))
    (delivery,) = await got.wait(1)
    delivery.nack(requeue=False)
    await until(lambda: depth_is(transport, DEAD_LETTERS, 1))


async def test_the_dead_letter_exchange_leads_to_the_parking_queue(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    await transport.publish(Outgoing(exchange=DEAD, routing_key=queue, body=b"x", mandatory=True))
    assert await transport.depth(DEAD_LETTERS) == 1


async def test_a_message_comes_back_after_its_delay(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "DELAYS_S", (0.05, 60.0))
    transport = await rig.transport()
    queue = await declare(transport)
    got = Collector()
    await transport.consume(queue, got, prefetch=10)
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
