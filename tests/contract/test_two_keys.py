"""A message with a second routing key, asked of every adapter alike: memory, memory behind a socket, RabbitMQ."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from bus.contracts.catalogue import COMMANDS, DEAD_LETTERS, QueueKind, QueueRow, Where
from bus.port import CC, Outgoing, Transport, Unroutable
from bus.topology import DELAYS_S, delay_exchange
from tests.contract.rig import Collector, Rig, rig_for, until

pytestmark = pytest.mark.parametrize("kind", ["local", "memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])


@pytest.fixture
async def rig(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with rig_for(kind, lambda: request.getfixturevalue("amqp")) as found:
        yield found


async def declare(transport: Transport, name: str, *keys: str, kind: QueueKind = QueueKind.DURABLE) -> str:
    bindings = tuple((COMMANDS, key) for key in keys)
    row = QueueRow(name=name, where=Where.BOTH, kind=kind, consumer="tests", bindings=bindings)
    await transport.declare_queue(row, name, bindings)
    return name


def message(body: bytes = b"x", key: str = "one.by.one", also: str = "together", **fields: object) -> Outgoing:
    return Outgoing(exchange=COMMANDS, routing_key=key, also=also, body=body, **fields)  # type: ignore[arg-type]


async def depth_is(transport: Transport, queue: str, count: int) -> bool:
    return await transport.depth(queue) == count


async def test_it_reaches_the_queues_of_either_key_and_one_of_both_once(rig: Rig) -> None:
    transport = await rig.transport()
    got = {name: Collector() for name in ("first", "second", "both", "neither")}
    await declare(transport, "first", "one.#", kind=QueueKind.PRIVATE)
    await declare(transport, "second", "together")
    await declare(transport, "both", "one.*.one", "together")
    await declare(transport, "neither", "one", "two")
    for name, collector in got.items():
        await transport.consume(name, collector, prefetch=10)
    await transport.publish(message(headers={"berth-cause": "why", "n": 7}, type="t.v1", message_id="m"))
    await transport.publish(message(b"last", also=""))
    await transport.publish(message(b"last", key="together", also=""))
    await got["first"].wait(2)
    await got["second"].wait(2)
    await got["both"].wait(3)
    assert got["first"].bodies == got["second"].bodies == [b"x", b"last"]
    assert got["both"].bodies == [b"x", b"last", b"last"]
    assert got["neither"].bodies == []
    for collector in (got["first"], got["second"], got["both"]):
        seen = collector.got[0]
        assert (seen.exchange, seen.routing_key, seen.type, seen.message_id) == (COMMANDS, "one.by.one", "t.v1", "m")
        assert (seen.headers["berth-cause"], seen.headers["n"], seen.headers[CC]) == ("why", 7, ["together"])
        assert CC not in collector.got[1].headers


async def test_it_is_unroutable_when_neither_key_leads_anywhere(rig: Rig) -> None:
    transport = await rig.transport()
    with pytest.raises(Unroutable):
        await transport.publish(message(mandatory=True))
    await transport.publish(message())
    queue = await declare(transport, "work", "together")
    await transport.publish(message(mandatory=True))
    await transport.publish(message(key="together", also="one.by.one", mandatory=True))
    assert await transport.depth(queue) == 2


async def test_where_a_key_is_a_queues_name_the_second_is_of_the_same_system(rig: Rig) -> None:
    one, two = await rig.transport("one", "a."), await rig.transport("two", "b.")
    for transport in (one, two):
        await declare(transport, "work")
        await declare(transport, "copies")
    await one.publish(Outgoing(exchange="", routing_key="work", also="copies", body=b"x", mandatory=True))
    assert [await one.depth(name) for name in ("work", "copies")] == [1, 1]
    assert [await two.depth(name) for name in ("work", "copies")] == [0, 0]


async def test_a_dead_letter_goes_nowhere_by_it(rig: Rig) -> None:
    transport = await rig.transport()
    queue, other = await declare(transport, "work", "work"), await declare(transport, "other", "other")
    got = Collector(ack=False)
    await transport.consume(queue, got, prefetch=1)
    await transport.publish(message(key="work", also=other))
    (delivery,) = await got.wait(1)
    delivery.nack(requeue=False)
    await until(lambda: depth_is(transport, DEAD_LETTERS, 1))
    letter = await transport.get(DEAD_LETTERS)
    assert letter is not None  # RabbitMQ 4.3 still shows the header, 3.10 does not
    assert (await transport.depth(other), await transport.depth(DEAD_LETTERS)) == (1, 0)


async def test_what_is_delayed_under_two_keys_comes_back_under_both(rig: Rig) -> None:
    """Berth delays nothing so."""
    transport = await rig.transport()
    queue, other = await declare(transport, "work"), await declare(transport, "other")
    got = Collector()
    await transport.consume(queue, got, prefetch=1)
    await transport.publish(
        Outgoing(exchange=delay_exchange(DELAYS_S[0]), routing_key=queue, also=other, body=b"x", mandatory=True)
    )
    await got.wait(1)
    await until(lambda: depth_is(transport, other, 1))
    assert (len(got.got), await transport.depth(DEAD_LETTERS)) == (1, 0)
