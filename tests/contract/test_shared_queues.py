"""The topology that a bus has once for all its consumers: the queues of delayed messages, and the queue of dead
letters.
"""

from __future__ import annotations

from bus.consuming import dead_letters
from bus.consuming.dead_letters import UNKNOWN
from bus.contracts.catalogue import COMMANDS, DEAD, DEAD_LETTERS, QUEUES
from bus.key_trust import CODE
from bus.port import Outgoing, Transport
from bus.topology import DELAYS_S, delay_exchange
from tests.contract.queues import EVERY_ADAPTER, command, declare, depth_is
from tests.contract.rig import Collector, Rig, until

pytestmark = EVERY_ADAPTER

SOON_S = DELAYS_S[0]
# More than RabbitMQ moves at a time: what cannot be moved stays in its hands.
MANY = 100


async def delay(transport: Transport, queue: str, body: bytes = b"x") -> None:
    await transport.publish(
        Outgoing(exchange=delay_exchange(SOON_S), routing_key=queue, body=body, mandatory=True, type="t.v1")
    )


async def park(transport: Transport, queue: str, name: str, **headers: str | int | float) -> None:
    letter = Outgoing(exchange=DEAD, routing_key=queue, body=b"{}", message_id=name, headers=headers, mandatory=True)
    await transport.publish(letter)


async def ids(transport: Transport, queue: str | None = None) -> list[str]:
    """In no order: a look may come before all that the last one held is back in line."""
    return sorted(letter.id for letter in await dead_letters.list_dead(transport, queue))


def test_every_delay_of_a_row_is_one_of_the_buss(kind: str) -> None:
    assert all(set(row.retry_s) <= set(DELAYS_S) for row in QUEUES), kind


async def test_what_was_delayed_for_a_removed_queue_delays_no_other_and_is_a_dead_letter(rig: Rig) -> None:
    """A host was taken away. RabbitMQ offered its messages again and again, and moved no other queue's meanwhile."""
    transport = await rig.transport()
    queue = await declare(transport)
    for _ in range(MANY):
        await delay(transport, "compute.gone")
    await delay(transport, queue, b"mine")
    got = Collector()
    await transport.consume(queue, got, prefetch=1)
    await got.wait(1)
    assert got.bodies == [b"mine"]
    await until(lambda: depth_is(transport, DEAD_LETTERS, MANY))
    (letter,) = await dead_letters.list_dead(transport, "compute.gone", limit=1)
    assert (letter.queue, letter.code, letter.type) == ("compute.gone", "broker.expired", "t.v1")
    assert letter.reason == "its queue was gone when its retry was due"


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


async def test_more_letters_than_are_read_are_counted(rig: Rig, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(dead_letters, "MAX_LOOKED_AT", 3)
    transport = await rig.transport()
    queue = await declare(transport)
    for number in range(5):
        await park(transport, "flood", f"f{number}")
    await park(transport, queue, "w")
    assert await dead_letters.count(transport) == dead_letters.Counts({"flood": 3}, 3)
    assert await dead_letters.purge(transport, "flood") == 5, "those that are dropped are in no other's way"
    assert await ids(transport, queue) == ["w"]


async def test_where_a_letter_comes_from_is_not_taken_from_its_publisher(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    headers = {"berth-queue": "victim", "x-first-death-queue": "victim", "x-death": "victim", CODE: "victim"}
    await transport.publish(command(b"x", message_id="m", headers=headers))
    got = Collector(ack=False)
    await transport.consume(queue, got, prefetch=1)
    (delivery,) = await got.wait(1)
    delivery.nack(requeue=False)
    await until(lambda: depth_is(transport, DEAD_LETTERS, 1))
    (letter,) = await dead_letters.list_dead(transport)
    assert (letter.queue, letter.code) == (queue, "broker.rejected")


async def test_what_is_written_past_the_exchange_comes_from_nowhere(rig: Rig) -> None:
    """Every worker may write into every queue of its bus: what names its own origin goes back nowhere."""
    transport = await rig.transport()
    queue = await declare(transport)
    await transport.publish(
        Outgoing(exchange="", routing_key=DEAD_LETTERS, body=b"{}", message_id="m", headers={"berth-queue": queue})
    )
    (letter,) = await dead_letters.list_dead(transport)
    assert letter.queue == UNKNOWN
    assert await dead_letters.replay(transport, queue) == []
    assert await dead_letters.purge(transport, UNKNOWN) == 1


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
