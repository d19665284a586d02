"""Letters of what other programs publish: their bytes are bounded, and they take no room of the workers' letters."""

from __future__ import annotations

import pytest

from bus import metrics, topology
from bus.consuming import dead_letters, outcome_handling
from bus.consuming.outcome import Done, Refuse
from bus.contracts.base import encode
from bus.contracts.catalogue import COMMANDS, DEAD_LETTERS
from bus.port import Outgoing, PublishRefused
from bus.topology import delay_exchange
from bus.wire import MAX_LETTER_BYTES
from tests.contract.house import REQUESTS, Answering, House, boot, depth_is, settled
from tests.contract.queues import EVERY_ADAPTER
from tests.contract.rig import Rig, until

pytestmark = EVERY_ADAPTER

KEY = "build.request.17.p"
MEGABYTE = 2**20


@pytest.mark.parametrize("size", [MAX_LETTER_BYTES + 1, MEGABYTE + 1])
async def test_the_letter_of_a_clients_message_is_cut_and_is_not_sent_back(house: House, size: int) -> None:
    """376 of a megabyte each stopped the broker for all, by its disk alarm."""
    bus = await house.bus()
    await house.consume(bus, REQUESTS, Answering())
    body = b"{" * size
    await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key=KEY, body=body))
    await settled(bus, dead=1)
    (letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert (letter.body, letter.cut_from) == (body[:MAX_LETTER_BYTES], size)
    assert letter.bars_replay == dead_letters.CUT
    assert await dead_letters.replay(bus.transport, REQUESTS) == []
    await settled(bus, dead=1)
    assert await dead_letters.purge(bus.transport, REQUESTS) == 1


async def test_a_letter_that_has_all_of_a_clients_message_is_sent_back(house: House) -> None:
    bus = await house.bus()
    await house.consume(bus, REQUESTS, Answering())
    await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key=KEY, body=b"{" * MAX_LETTER_BYTES))
    await settled(bus, dead=1)
    (letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert (letter.cut_from, letter.bars_replay) == (0, "")
    assert await dead_letters.replay(bus.transport, REQUESTS) == [letter.id]
    await settled(bus, dead=1)


async def test_letters_of_clients_leave_room_for_those_of_workers(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a worker makes of a sound request goes on: its requester's end is announced by it."""
    monkeypatch.setattr(outcome_handling, "MAX_CLIENT_LETTERS", 3)
    bus = await house.bus()
    dropped = metrics.DEAD_DROPPED.labels(bus.name, REQUESTS)._value
    before = dropped.get()
    handler = Answering(lambda one: Refuse("bad") if one.message == boot(2) else Done())
    await house.consume(bus, REQUESTS, handler, concurrency=1, max_batch=1)
    for _ in range(9):
        await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key=KEY, body=b"{"))
    await bus.publish(boot(1))
    await handler.wait(1)
    await settled(bus, dead=3)
    assert dropped.get() - before == 6
    await bus.publish(boot(2))
    await settled(bus, dead=4)
    codes = [letter.code for letter in await dead_letters.list_dead(bus.transport, REQUESTS)]
    assert sorted(codes) == ["bad", *["message.malformed"] * 3]


async def test_what_the_broker_gives_up_of_clients_requests_becomes_one_letter(house: House) -> None:
    """By way of the consumer that announces its end. In the queue of dead letters it would be whole, and while that is
    full it would stay in the queue of requests, which then takes no more.
    """
    bus = await house.bus()
    await bus.declare(REQUESTS)
    ended = Answering()
    await house.consume(bus, "scheduler.given_up", ended)
    request = boot(1, name="n" * 200)
    sound = Outgoing(exchange=COMMANDS, routing_key=KEY, body=encode(request), message_id="sound", expiration_s=0.0)
    await bus.transport.publish(sound)
    (got,) = await ended.wait(1)
    assert (got.message, got.given_up) == (request, "broker.expired")
    await settled(bus, dead=1)
    long = Outgoing(exchange=COMMANDS, routing_key=KEY, body=b"[" * MEGABYTE, message_id="long", expiration_s=0.0)
    await bus.transport.publish(long)
    await until(lambda: depth_is(bus, DEAD_LETTERS, 2))
    await until(lambda: depth_is(bus, "scheduler.given_up", 0))
    letters = {one.id: one for one in await dead_letters.list_dead(bus.transport, REQUESTS)}
    assert {one.code for one in letters.values()} == {"broker.expired"}
    assert {one.routing_key for one in letters.values()} == {KEY}
    assert (letters["sound"].body, letters["sound"].bars_replay) == (encode(request), "")
    assert (letters["long"].cut_from, letters["long"].bars_replay) == (MEGABYTE, dead_letters.CUT)
    assert await dead_letters.replay(bus.transport, REQUESTS, ["sound", "long"]) == ["sound"]


async def test_dead_letters_and_what_is_delayed_are_bounded_in_bytes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "MAX_PARKED_BYTES", 1000)
    transport = await rig.transport()
    for exchange in ("berth.dead", delay_exchange(topology.DELAYS_S[-1])):
        with pytest.raises(PublishRefused):
            for _ in range(100):  # a quorum queue notices a little later
                await transport.publish(
                    Outgoing(exchange=exchange, routing_key="gone", body=b"x" * 400, mandatory=True)
                )
