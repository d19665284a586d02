"""What becomes of deliveries whose consumer dies with them in its hands, over both transports alike."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bus.bus import Bus
from bus.consuming import dead_letters
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Meta
from bus.contracts.build import BuildRequest
from bus.contracts.catalogue import BY_QUEUE, COMMANDS, DEAD_LETTERS
from bus.port import Delivery
from bus.wire import batch, pack
from tests.contract.house import KINDS, REQUESTS, Answering, House, boot, depth_is, settled
from tests.contract.rig import PATIENCE_S, Collector, until

pytestmark = KINDS

POISON = boot(999)


class Mortal:
    """A handler that stands still for ever when it is called the so-manieth time, or with POISON."""

    def __init__(self, *, calls: int = 10**6) -> None:
        self.got: list[BuildRequest] = []
        self.batches: list[int] = []
        self.died = asyncio.Event()
        self._calls = calls

    async def __call__(self, received: Sequence[Received]) -> Sequence[Outcome]:
        messages = [one.message for one in received if isinstance(one.message, BuildRequest)]
        self.batches.append(len(messages))
        if len(self.batches) >= self._calls or POISON in messages:
            self.died.set()
            await asyncio.Event().wait()
        self.got += messages
        return [Done()] * len(received)


async def deliver_together(bus: Bus, messages: Sequence[BuildRequest]) -> None:
    """As one broker message."""
    packed = [pack(message, Meta(id=str(number))) for number, message in enumerate(messages)]
    await bus.transport.publish(batch(packed, COMMANDS, "build.request.p", mandatory=True))


async def test_a_consumer_killed_in_the_middle_of_a_batched_delivery_loses_none_of_it(house: House) -> None:
    """A delivery is acknowledged when the last of its messages is settled, not the first."""
    publisher, doomed = await house.bus(), await house.bus()
    await publisher.declare(REQUESTS)
    wanted = [boot(number) for number in range(16)]
    await deliver_together(publisher, wanted)
    handler = Mortal(calls=2)
    await house.consume(doomed, REQUESTS, handler, max_batch=4, concurrency=1)
    async with asyncio.timeout(PATIENCE_S):
        await handler.died.wait()
    assert handler.got == wanted[:4]
    await doomed.transport.close()  # with what it has acknowledged so far
    after = Answering()
    await house.consume(await house.bus(), REQUESTS, after)
    await after.wait(16)
    await settled(publisher)
    assert [one.message for one in after.got] == wanted
    assert all(one.redelivered for one in after.got)


async def test_from_its_third_delivery_on_a_message_is_taken_alone(house: House) -> None:
    bus = await house.bus()
    await bus.declare(REQUESTS)
    returned = [boot(number) for number in range(5)]
    await deliver_together(bus, returned)
    counts: list[int] = []

    def give_back(delivery: Delivery) -> None:
        counts.append(delivery.delivery_count)
        if len(counts) <= 2:
            delivery.nack(requeue=True)

    looking = await bus.transport.consume(REQUESTS, give_back, prefetch=1)
    await until(lambda: len(counts) == 3)
    assert counts == [0, 1, 2]
    await looking.cancel()
    await bus.close()
    again = await house.bus()
    handler = Mortal()
    await house.consume(again, REQUESTS, handler, concurrency=1)
    await until(lambda: len(handler.got) == 5)
    assert handler.batches == [1] * 5
    assert sorted(one.instance_uuid for one in handler.got) == [one.instance_uuid for one in returned]
    await deliver_together(again, returned)
    await until(lambda: len(handler.got) == 10)
    assert handler.batches == [1] * 5 + [5]
    await settled(again)


async def test_a_message_that_ends_its_consumer_is_given_up_alone(house: House) -> None:
    """Sixty good ones are prefetched with it each time; in the queue's order half of them would die with it."""
    watching = await house.bus()
    await watching.declare(REQUESTS)
    good = [boot(number) for number in range(60)]
    for number, message in enumerate(good):
        if number == 10:
            await watching.publish(POISON)
        await watching.publish(message)
    handled: set[str] = set()
    deaths = 0
    while deaths <= BY_QUEUE[REQUESTS].delivery_limit + 1:
        bus = await house.bus()
        handler = Mortal()
        consumer = await house.consume(bus, REQUESTS, handler, concurrency=1)

        async def is_over(handler: Mortal = handler) -> bool:
            return handler.died.is_set() or await depth_is(watching, DEAD_LETTERS, 1)

        await until(is_over)
        handled |= {one.instance_uuid for one in handler.got}
        if not handler.died.is_set():
            break
        await bus.transport.close()
        await consumer.drain(0.0)
        deaths += 1
    await until(lambda: depth_is(watching, DEAD_LETTERS, 1))
    assert handled == {one.instance_uuid for one in good}
    assert deaths == BY_QUEUE[REQUESTS].delivery_limit + 1
    (letter,) = await dead_letters.list_dead(watching.transport, REQUESTS)
    assert letter.code == "broker.delivery_limit"
    assert POISON.instance_uuid in letter.body.decode()


async def test_what_a_consumer_gives_up_on_is_not_taken_by_the_next(house: House) -> None:
    """A message that is rejected as it came leaves the queue for the dead letters at once."""
    bus = await house.bus()
    await bus.declare(REQUESTS)
    await bus.publish(boot(1))
    held = Collector(ack=False)
    await bus.transport.consume(REQUESTS, held, prefetch=1)
    (delivery,) = await held.wait(1)
    delivery.nack(requeue=False)
    await settled(bus, dead=1)
    (letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert letter.code == "broker.rejected"
