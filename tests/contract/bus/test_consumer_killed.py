"""A consumer that hangs or dies with its deliveries, over both transports alike."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence

import pytest

from bus.batcher import SLOW_S
from bus.bus import Bus
from bus.codec import batch, pack
from bus.consuming import consumer as consuming
from bus.consuming.consumer import POISON_RETRY_S, Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Meta
from bus.contracts.build import BuildRequest
from bus.contracts.queues import BY_QUEUE, COMMANDS
from bus.faults import DatabaseUnavailable
from bus.published_key import dead_letter_code_of
from bus.transport import BusUnavailable, Delivery
from tests.contract.rig import KINDS, REQUESTS, Answering, House, Rig, boot, collect, depth_is, settled
from tests.kit.waiting import PATIENCE_S, until

# --- The deliveries of a consumer that dies with them, over both transports alike.


POISON = boot(999)
GIVEN_UP = "scheduler.dead_letters"


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


async def deliver_together(bus: Bus, messages: Sequence[BuildRequest], name: str = "") -> None:
    """As one broker message, whose id begins with a name."""
    packed = [pack(message, Meta(id=f"{name}.{number}")) for number, message in enumerate(messages)]
    await bus.transport.publish(batch(packed, COMMANDS, "build.request.p", mandatory=True))


@KINDS
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


@KINDS
@pytest.mark.parametrize(("tries", "batches"), [(1, [1, 2, 2]), (2, [1, 1, 1, 1, 1])])
async def test_from_its_third_delivery_on_a_message_is_taken_apart_and_from_its_fourth_on_alone(
    house: House, tries: int, batches: list[int]
) -> None:
    """Five messages of one delivery, whose halves have two of them, and whose quarters one."""
    bus = await house.bus()
    await bus.declare(REQUESTS)
    returned = [boot(number) for number in range(5)]
    await deliver_together(bus, returned)
    counts: list[int] = []

    def give_back(delivery: Delivery) -> None:
        counts.append(delivery.delivery_count)
        if len(counts) <= tries:
            delivery.nack(requeue=True)

    looking = await bus.transport.consume(REQUESTS, give_back, prefetch=1)
    await until(lambda: len(counts) == tries + 1)
    assert counts == [*range(tries + 1)]
    await looking.cancel()
    await bus.close()
    again = await house.bus()
    handler = Mortal()
    await house.consume(again, REQUESTS, handler, concurrency=1)
    await until(lambda: len(handler.got) == 5)
    # Closing the connection was one delivery more.
    assert sorted(handler.batches) == batches
    assert sorted(one.instance_uuid for one in handler.got) == [one.instance_uuid for one in returned]
    await deliver_together(again, returned)
    await until(lambda: len(handler.got) == 10)
    assert handler.batches[-1] == 5
    await settled(again)


@KINDS
async def test_a_message_that_ends_its_consumer_is_given_up_alone(house: House) -> None:
    """Sixty good ones are prefetched with it each time; in the queue's order half of them would die with it."""
    watching = await house.bus()
    await watching.declare(REQUESTS)
    await watching.declare(GIVEN_UP)
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
            return handler.died.is_set() or await depth_is(watching, GIVEN_UP, 1)

        await until(is_over)
        handled |= {one.instance_uuid for one in handler.got}
        if not handler.died.is_set():
            break
        await bus.transport.close()
        await consumer.drain(0.0)
        deaths += 1
    await until(lambda: depth_is(watching, GIVEN_UP, 1))
    assert handled == {one.instance_uuid for one in good}
    assert deaths == BY_QUEUE[REQUESTS].delivery_limit + 1
    dead_letter = await watching.transport.get(GIVEN_UP)
    assert dead_letter is not None and dead_letter_code_of(dead_letter) == "broker.delivery_limit"
    assert POISON.instance_uuid in dead_letter.body.decode()


class Flapping:
    """A handler under whom the bus is cut at each sixth of its calls, so often at most."""

    def __init__(self, rig: Rig, bus: Bus, cuts: int) -> None:
        self.got: list[Received] = []
        self.cuts = 0
        self._rig = rig
        self._bus = bus
        self._calls = 0
        self._most = cuts
        self._back = asyncio.Event()
        bus.transport.on_reconnect(self._back.set)

    async def __call__(self, received: Sequence[Received]) -> Sequence[Outcome]:
        self._calls += 1
        self.got += received
        if self._calls % 6 == 0 and self.cuts < self._most:
            self.cuts += 1
            self._back.clear()
            await self._bus.transport.depth(REQUESTS)  # there and back: what was acknowledged before is there, too
            await self._rig.cut()
            async with asyncio.timeout(PATIENCE_S):
                await self._back.wait()
        return [Done()] * len(received)


@KINDS
async def test_a_flapping_bus_exhausts_nothing_that_no_handler_ever_had(house: House) -> None:
    """44 builds and 32 moves of a chaos run were given up untried: what had come over lost connections was worked
    through first, for nothing, while what came in its place was lost in turn; and each loss counted as a try.
    """
    watching, bus = await house.bus(), await house.bus()
    await watching.declare(REQUESTS)
    wanted = [boot(number) for number in range(96)]
    for start in range(0, 96, 4):
        await deliver_together(watching, wanted[start : start + 4], name=f"{start}")
    handler = Flapping(house.rig, bus, cuts=BY_QUEUE[REQUESTS].delivery_limit + 5)
    consumer = await house.consume(bus, REQUESTS, handler, max_batch=4, concurrency=1, prefetch=24)

    async def is_over() -> bool:
        """Nothing waits here or in the queue, and nothing was on its way in between."""
        for _ in range(2):
            if consumer.in_flight or consumer._waiting() or not watching.transport.connected:
                return False
            with contextlib.suppress(BusUnavailable):
                if not (await depth_is(bus, REQUESTS, 0) and await depth_is(watching, REQUESTS, 0)):
                    return False
        return len({one.meta.id for one in handler.got}) == 96

    await until(is_over)
    await settled(watching)
    assert not any(one.at_delivery_limit for one in handler.got), handler.cuts
    assert handler.cuts < BY_QUEUE[REQUESTS].delivery_limit - 5, "each connection settles what it has had time for"


@KINDS
async def test_what_a_consumer_gives_up_on_is_not_taken_by_the_next(house: House) -> None:
    """A message that is rejected as it came leaves the queue at once, for the one that announces its end."""
    bus = await house.bus()
    await bus.declare(REQUESTS)
    await bus.declare(GIVEN_UP)
    await bus.publish(boot(1))
    held = await collect(bus.transport, REQUESTS, 1, ack=False)
    (delivery,) = await held.wait(1)
    delivery.nack(requeue=False)
    await until(lambda: depth_is(bus, GIVEN_UP, 1))
    dead_letter = await bus.transport.get(GIVEN_UP)
    assert dead_letter is not None and dead_letter_code_of(dead_letter) == "broker.rejected"


# --- A hung batch holds up only itself, also after a further batch has come and gone.


SOON_S = 3.0  # sixty times as long as a batch counts as slow after


@KINDS
@pytest.mark.parametrize("hangs", ["handler", "transient"])
async def test_a_hung_batch_does_not_hold_up_the_third_message(house: House, hangs: str) -> None:
    bus = await house.bus()
    go_on = asyncio.Event()
    done: list[str] = []

    async def handle(batch: Sequence[Received]) -> Sequence[Outcome]:
        uuids = [one.message.instance_uuid for one in batch]  # type: ignore[attr-defined]
        if boot(1).instance_uuid in uuids and not go_on.is_set():
            if hangs == "transient":
                raise DatabaseUnavailable("a lock that is not to be had")
            await go_on.wait()
        done.extend(uuids)
        return [Done()] * len(batch)

    await house.consume(bus, REQUESTS, handle, concurrency=2)
    await bus.publish(boot(1))
    await asyncio.sleep(2 * SLOW_S)
    await bus.publish(boot(2))
    await until(lambda: boot(2).instance_uuid in done, SOON_S)  # the second passes the hung one
    await bus.publish(boot(3))
    try:
        await until(lambda: boot(3).instance_uuid in done, SOON_S)  # and so should the third
    except TimeoutError:
        pytest.fail(f"the third message was not handled within {SOON_S} s beside a hung batch")
    finally:
        go_on.set()
        await until(lambda: len(done) == 3)


# --- A consumer waits for further suspects before it takes one, with any number of workers.


SUSPECTS = 6


async def returned_twice(bus: Bus) -> None:
    """Each message is delivered twice and given back, as when its consumers die."""
    await bus.declare(REQUESTS)
    for number in range(SUSPECTS):
        await bus.publish(boot(number))
    for _ in range(2):
        got: list[Delivery] = []
        subscription = await bus.transport.consume(REQUESTS, got.append, prefetch=SUSPECTS)
        await until(lambda got=got: len(got) == SUSPECTS)  # type: ignore[misc]
        await subscription.cancel()
        for delivery in got:
            delivery.nack(requeue=True)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["memory"])
@pytest.mark.parametrize("concurrency", [1, 2])
async def test_no_suspect_is_taken_before_the_wait_for_others_is_over(house: House, concurrency: int) -> None:
    bus = await house.bus()
    await returned_twice(bus)
    taken: list[float] = []
    loop = asyncio.get_running_loop()

    async def handle(batch: Sequence[Received]) -> Sequence[Outcome]:
        taken.append(loop.time())
        return [Done()] * len(batch)

    arrived: list[float] = []
    consumer = Consumer(bus, REQUESTS, handle, concurrency=concurrency)
    plain = consumer._on_delivery

    def on_delivery(delivery: Delivery) -> None:
        arrived.append(loop.time())
        plain(delivery)

    consumer._on_delivery = on_delivery  # type: ignore[method-assign]
    await consumer.start()
    await asyncio.sleep(0)
    try:
        await until(lambda: taken)
        waited = taken[0] - arrived[0]
        assert waited >= POISON_RETRY_S * 0.9, f"the first suspect was taken after {waited:.4f} s"
    finally:
        await consumer.drain(1.0)


@pytest.mark.parametrize("kind", ["memory"])
async def test_suspects_have_their_turn_however_many_others_wait(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consuming, "MAX_SKIPPED", 3)
    bus = await house.bus()
    await returned_twice(bus)
    for number in range(SUSPECTS, SUSPECTS + 100):
        await bus.publish(boot(number))
    handler = Answering()
    await house.consume(bus, REQUESTS, handler, max_batch=1, concurrency=1, prefetch=200)
    await handler.wait(SUSPECTS + 100)
    assert max(at for at, one in enumerate(handler.got) if one.redelivered) < 3 * (SUSPECTS + 2)


@pytest.mark.parametrize("kind", ["memory"])
@pytest.mark.parametrize("concurrency", [1, 2])
async def test_the_first_to_arrive_is_not_always_the_first_taken(house: House, concurrency: int) -> None:
    """What the wait is for: a process that the first taken one ends must not take the same one each time."""
    firsts: set[str] = set()
    loop = asyncio.get_running_loop()
    for seed in range(6):
        bus = await house.bus(f"s{seed}")
        await returned_twice(bus)
        taken: list[str] = []

        async def handle(batch: Sequence[Received], taken: list[str] = taken) -> Sequence[Outcome]:
            taken += [one.message.instance_uuid for one in batch]  # type: ignore[attr-defined]
            return [Done()] * len(batch)

        consumer = Consumer(bus, REQUESTS, handle, concurrency=concurrency, max_batch=1)
        plain, arrivals = consumer._on_delivery, itertools.count()

        def apart(delivery: Delivery, plain=plain, arrivals=arrivals) -> None:  # type: ignore[no-untyped-def]
            loop.call_later(0.005 * next(arrivals), plain, delivery)  # as from a network

        consumer._on_delivery = apart  # type: ignore[method-assign]
        await consumer.start()
        await until(lambda taken=taken: len(taken) == SUSPECTS)  # type: ignore[misc]
        await consumer.drain(1.0)
        firsts.add(taken[0])
    assert len(firsts) > 1, f"of six runs each took {firsts} first"
