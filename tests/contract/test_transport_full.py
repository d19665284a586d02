"""The messages that a queue without room refuses, drops and still takes, tested on every adapter alike."""

from __future__ import annotations

import contextlib

import pytest

from bus import topology
from bus.contracts.catalogue import DEAD_LETTERS, QueueKind
from bus.port import Delivery, Outgoing, PublishRefused
from bus.topology import delay_exchange
from tests.contract.queues import EVERY_ADAPTER, command, declare, row
from tests.contract.rig import Collector, Rig, until

# A RabbitMQ in its default configuration offers what a full queue refused again after three minutes; our own at once.
ROOM_S = 200.0

pytestmark = EVERY_ADAPTER


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
    got = Collector()
    await transport.consume(roomy, got, prefetch=10)
    await got.wait(len(sent))
    assert got.bodies == sent


async def test_a_private_queue_drops_its_oldest(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport, QueueKind.PRIVATE, max_length=2)
    for body in (b"1", b"2", b"3"):
        await transport.publish(command(body))
    got = Collector()
    await transport.consume(queue, got, prefetch=10)
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
        while (letter := await transport.get(DEAD_LETTERS)) is not None:
            parked.append(letter.body)
            letter.ack()
        return parked.count(b"poison") == 2

    await until(both_are_parked, ROOM_S)
    assert await transport.depth(queue) == 0
