"""A process that stood still: a request that waited in its connection meanwhile may have been given up since."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from bus import topology
from bus.bus import Bus
from bus.clock import SystemClock
from bus.codec import headers_of, pack
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Handler, Outcome, Received, Retry
from bus.consuming.stall_watch import BACKLOG_S, STALL_S, StallWatch
from bus.contracts.base import Meta
from bus.contracts.build import BuildAccepted
from bus.contracts.catalogue import routing_key
from bus.contracts.operations import DeleteHost
from bus.contracts.placement import Release, ReleaseResult
from bus.contracts.queues import BY_QUEUE, COMMANDS
from bus.faults import Transient
from bus.memory import MemoryBroker, MemoryTransport
from bus.transport import Delivery, Outgoing, Subscription
from tests.contract.rig import REQUESTS, Answering, accepted, boot
from tests.kit.waiting import until

TIMEOUT_S = 10.0
STALLED_S = 18.0


class SetAhead(SystemClock):
    """A clock that can be moved on: nothing of the process runs meanwhile."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


class Connection(MemoryTransport):
    """A connection in which deliveries wait while its process stands still."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        super().__init__(broker, name)
        self.stands_still = False
        self.arrived = 0
        self.waiting: list[tuple[Callable[[Delivery], None], Delivery]] = []

    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], *, prefetch: int) -> Subscription:
        def arrive(delivery: Delivery) -> None:
            self.arrived += 1
            if self.stands_still:
                self.waiting.append((on_delivery, delivery))
            else:
                on_delivery(delivery)

        return await super().consume(queue, arrive, prefetch=prefetch)

    def go_on(self) -> None:
        self.stands_still = False
        waiting, self.waiting = self.waiting, []
        for on_delivery, delivery in waiting:
            on_delivery(delivery)


class House:
    """A requester, and a server that can stand still."""

    consumer: Consumer

    def __init__(self) -> None:
        self.clock = SetAhead()
        broker = MemoryBroker(self.clock)
        self.connection = Connection(broker, "server")
        self.requester, self.server = (
            Bus("api", transport, process=transport.name, clock=self.clock, rng=random.Random(1))
            for transport in (MemoryTransport(broker, "requester"), self.connection)
        )
        self.handler = Answering(accepted)
        self._requests: list[asyncio.Task[Any]] = []

    async def consume(self, handler: Handler) -> None:
        self.consumer = Consumer(self.server, REQUESTS, handler, concurrency=1)
        await self.consumer.start()

    def look(self) -> None:
        self.server.stall_watch.look(self.clock.monotonic())

    async def close(self) -> None:
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        await self.consumer.drain(1.0)
        await self.requester.close()
        await self.server.close()

    def request(self, number: int, timeout_s: float) -> asyncio.Task[BuildAccepted]:
        """Its requester waits by the loop's time, which is not moved on, so what is not answered is cancelled at the
        end.
        """
        request = self.requester.request(boot(number), BuildAccepted, timeout_s=timeout_s)
        self._requests.append(asyncio.create_task(request))
        return self._requests[-1]

    def request_release(self, attempt: int, timeout_s: float) -> asyncio.Task[ReleaseResult]:
        """The same, of a release."""
        request = self.requester.request(
            Release(consumer=boot(1).instance_uuid, attempt=attempt), ReleaseResult, timeout_s=timeout_s
        )
        self._requests.append(asyncio.create_task(request))
        return self._requests[-1]

    def latest_end(self, timeout_s: float) -> float:
        """The time after which no answer is of use to a requester that sent its request before the clock was first
        moved on. However long the machine itself took since then, it is no earlier.
        """
        return self.clock.monotonic() - self.clock.ahead_s + timeout_s + 0.001  # the headers carry milliseconds

    async def stand_still(self, *, under_way: int = 0) -> None:
        """The server stands still, while so many messages come into its connection."""
        self.connection.stands_still = True
        await until(lambda: len(self.connection.waiting) == under_way)
        self.clock.ahead_s += STALLED_S
        self.connection.go_on()


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(topology, "DELAYS_S", (0.02,))
    monkeypatch.setitem(BY_QUEUE, REQUESTS, replace(BY_QUEUE[REQUESTS], retries_to="", retry_s=(0.02,)))
    made = House()
    await made.requester.open()
    await made.server.open()
    await made.consume(made.handler)
    made.look()
    try:
        yield made
    finally:
        await made.close()


async def test_a_request_that_was_given_up_while_its_server_stood_still_is_not_carried_out(house: House) -> None:
    house.connection.stands_still = True
    house.request(1, TIMEOUT_S)
    await house.stand_still(under_way=1)
    await house.request(2, 10 * TIMEOUT_S)
    assert house.handler.uuids == [boot(2).instance_uuid]


async def test_a_new_request_soon_after_a_stall_is_answered(house: House) -> None:
    """The server cannot see that it is new. The broker can: given back, it is delivered again, once."""
    await house.stand_still()
    reply = await house.request(1, TIMEOUT_S)
    assert reply.instance_uuid == boot(1).instance_uuid
    await house.request(2, 10 * TIMEOUT_S)  # longer than the stall: its time cannot be over
    assert [one.redelivered for one in house.handler.got] == [True, False]


async def test_a_request_whose_time_is_not_over_has_waited_since_the_stall_began(house: House) -> None:
    house.connection.stands_still = True
    request = house.request(1, 60.0)
    await house.stand_still(under_way=1)
    await request
    (got,) = house.handler.got
    assert not got.redelivered
    assert house.clock.monotonic() + got.remaining_s() <= house.latest_end(60.0)


async def test_a_retried_request_whose_requester_has_stopped_waiting_is_not_given_back(house: House) -> None:
    """It was given back until the broker gave it up: it waited in no queue, so it has no time left after any stall."""
    await house.stand_still()
    sent_at = house.clock.time() - 20.0
    meta = Meta(id="m", sent_at=sent_at, timeout_s=1.0, waited_s=2.0, retries=1)
    packed = pack(boot(1), meta)
    await house.requester.transport.publish(
        Outgoing(
            exchange=COMMANDS,
            routing_key=routing_key(boot(1)),
            body=packed.body,
            type=packed.type,
            message_id=meta.id,
            headers=headers_of(meta),
        )
    )
    (got,) = await house.handler.wait(1)
    assert not got.redelivered


async def test_a_message_without_a_requester_is_handled_after_any_stall(house: House) -> None:
    house.connection.stands_still = True
    await house.requester.publish(boot(1))
    await house.stand_still(under_way=1)
    (got,) = await house.handler.wait(1)
    assert not got.redelivered


async def test_a_request_that_waits_for_a_busy_handler_is_dated_from_its_arrival(house: House) -> None:
    """It was dated from when the handler had time for it, and carried out after its requester had given it up."""
    is_busy, may_go_on = asyncio.Event(), asyncio.Event()

    async def slow(batch: Sequence[Received]) -> Sequence[Outcome]:
        is_busy.set()
        await may_go_on.wait()
        return await house.handler(batch)

    await house.consumer.drain(1.0)
    await house.consume(slow)
    house.request(1, 10 * TIMEOUT_S)
    await is_busy.wait()
    house.request(2, TIMEOUT_S)
    await until(lambda: house.connection.arrived == 2)
    for _ in range(18):
        house.clock.ahead_s += 1.0
        house.look()
    may_go_on.set()
    await house.request(3, TIMEOUT_S)
    assert house.handler.uuids == [boot(1).instance_uuid, boot(3).instance_uuid]


async def test_of_a_batch_that_waited_for_a_server_only_what_is_still_awaited_is_handled(house: House) -> None:
    """While one requester of the batch still waited, what the others had given up was carried out."""
    is_busy, may_go_on = asyncio.Event(), asyncio.Event()
    asked: list[list[int | None]] = []

    async def away_once(batch: Sequence[Received]) -> Sequence[Outcome]:
        asked.append([one.message.attempt for one in batch if isinstance(one.message, Release)])
        if len(asked) == 1:
            is_busy.set()
            await may_go_on.wait()
        elif len(asked) == 2:
            house.clock.ahead_s += STALLED_S
            raise Transient("the database is away", code="database.unavailable")
        return [Done(ReleaseResult(outcome="released"))] * len(batch)

    await house.consumer.drain(1.0)
    house.consumer = Consumer(house.server, "placement.requests", away_once, concurrency=1)
    await house.consumer.start()
    house.request_release(1, 10 * TIMEOUT_S)
    await is_busy.wait()
    house.request_release(2, TIMEOUT_S)
    await until(lambda: house.connection.arrived == 2)
    awaited = house.request_release(3, 10 * TIMEOUT_S)
    await until(lambda: house.connection.arrived == 3)
    may_go_on.set()
    await awaited
    assert asked == [[1], [2, 3], [3]]


async def test_a_request_that_comes_again_has_so_much_less_time(house: House) -> None:
    """Each retry gave it its whole time anew."""

    def later(received: Received) -> Outcome:
        house.clock.ahead_s += 1.0
        return accepted(received) if received.meta.retries else Retry("not.yet")

    handler = Answering(later)
    await house.consumer.drain(1.0)
    await house.consume(handler)
    of_retries = Consumer(house.server, "scheduler.operators", handler)
    await of_retries.start()
    await house.request(1, 60.0)
    await of_retries.drain(1.0)
    ends = [house.clock.monotonic() + one.remaining_s() for one in handler.got]
    assert len(ends) == 2
    assert all(end <= house.latest_end(60.0) for end in ends)


async def test_a_retried_command_whose_operator_waits_no_longer_is_dropped_and_not_given_back(house: House) -> None:
    """It has no expiration: it was given back until the broker gave it up."""
    handler = Answering(lambda _: Done())
    await house.consumer.drain(1.0)
    house.consumer = Consumer(house.server, "scheduler.changes", handler, concurrency=1)
    await house.consumer.start()
    await house.stand_still()
    before, sent_at = house.connection.arrived, house.clock.time() - 20.0
    live, late = DeleteHost(host="live", reason="r", by="o"), DeleteHost(host="late", reason="r", by="o")
    meta = Meta(id="late", sent_at=sent_at, timeout_s=1.0, waited_s=2.0, retries=1)
    packed = pack(late, meta)
    copy = Outgoing(
        exchange=COMMANDS,
        routing_key=routing_key(late),
        body=packed.body,
        type=packed.type,
        message_id=meta.id,
        headers=headers_of(meta),
        reply_to="client.reply.gone",
    )
    await house.requester.transport.publish(copy)
    await house.requester.publish(live)
    assert [one.message for one in await handler.wait(1)] == [live]
    assert house.connection.arrived == before + 2


def test_stalls() -> None:
    watch = StallWatch()
    assert watch.waiting_since(99.0) == 99.0  # without a look an idle process is no stalled one
    for now in (100.0, 100.5, 101.0):
        watch.look(now)
    assert watch.waiting_since(101.0 + STALL_S - 0.1) == 101.0 + STALL_S - 0.1
    assert watch.waiting_since(119.0) == 101.0  # read before the first look after the stall
    for now in (119.0, 120.0, 121.0, 122.0):
        watch.look(now)
        assert watch.waiting_since(now) == 101.0
    assert watch.waiting_since(130.0) == 101.0  # another one: what waited in the first may still wait
    for step in range(5):
        watch.look(130.0 + step)
        assert watch.waiting_since(130.0 + step) == 101.0
    assert watch.waiting_since(130.0 + BACKLOG_S) == 130.0 + BACKLOG_S
    watch.look(130.0 + BACKLOG_S)
    assert watch.waiting_since(150.0) == 130.0 + BACKLOG_S
