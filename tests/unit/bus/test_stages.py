"""Times: of stages, of clocks that are apart, and of a process that stood still."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest

from bus import topology
from bus.bus import Bus
from bus.clock import SystemClock, shared_delay_s
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Handler, Outcome, Received, Retry
from bus.consuming.stall_watch import BACKLOG_S, STALL_S, StallWatch
from bus.contracts.base import Meta, Refusal
from bus.contracts.build import BuildAccepted, BuildEvent, BuildRequest, BuildState
from bus.contracts.catalogue import routing_key
from bus.contracts.operations import ForgetHost
from bus.contracts.queues import BUILD_EVENTS, BY_QUEUE, COMMANDS
from bus.contracts.stages import STAGES, Stamps, durations
from bus.memory import MemoryBroker, MemoryTransport
from bus.port import Delivery, Outgoing, Subscription
from bus.publishing import BusLimits
from bus.service.stages import BUCKETS_S, MAX_STAGE_S, StageSeconds
from bus.wire import Codec, Read, headers_of, pack
from tests.contract.rig import REQUESTS, Answering, accepted, boot
from tests.kit.waiting import until

# --- Times of stages, of clocks that are apart, and the order of events.


# --- the stages of a build: durations that add up whatever the clocks read, and a histogram that counts each once

WHOLE = Stamps(requested=10.0, queued=11.0, decided=13.0, claimed=16.0, dispatched=20.0, built=25.0, announced=31.0)


def test_a_whole_build_has_every_stage_in_its_order() -> None:
    assert list(durations(WHOLE)) == list(STAGES)
    assert list(durations(WHOLE).values()) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_readers_own_times_come_first_and_last() -> None:
    found = durations(WHOLE, since=9.0, until=33.0)
    assert (found["queued"], found["announced"], sum(found.values())) == (2.0, 8.0, 24.0)


@pytest.mark.parametrize("skew", [-1000.0, -8.0, -3.0, 0.0, 2.0, 9.0, 1000.0])
@pytest.mark.parametrize("machine", [("queued", "decided", "claimed"), ("dispatched", "built"), ("announced",)])
def test_clocks_that_differ_move_time_between_stages_but_neither_lose_nor_invent_any(
    machine: tuple[str, ...], skew: float
) -> None:
    skewed = msgspec.structs.replace(WHOLE, **{stage: getattr(WHOLE, stage) + skew for stage in machine})
    found = durations(skewed, since=10.0, until=31.0)
    assert min(found.values()) >= 0
    assert sum(found.values()) == pytest.approx(21.0)


def test_what_never_happened_is_absent_and_its_time_is_in_the_next_stage() -> None:
    nowhere = Stamps(requested=10.0, queued=11.0, decided=13.0)
    assert durations(nowhere) == {"queued": 1.0, "decided": 2.0}
    assert durations(nowhere, until=14.0) == {"queued": 1.0, "decided": 2.0, "announced": 1.0}
    assert durations(Stamps(requested=10.0, built=12.0)) == {"built": 2.0}
    assert durations(Stamps(queued=10.0, decided=12.0)) == {"queued": 0.0, "decided": 2.0}
    assert durations(Stamps()) == {}


def test_stamps_travel_as_a_short_array_and_an_older_writer_is_understood() -> None:
    assert msgspec.json.encode(Stamps(requested=1.5, queued=2.5)) == b"[1.5,2.5,0.0,0.0,0.0,0.0,0.0,0]"
    assert msgspec.json.decode(b"[1.5,2.5]", type=Stamps) == Stamps(requested=1.5, queued=2.5)


def test_the_histogram_reads_as_prometheus_has_it() -> None:
    registry = CollectorRegistry()
    stages = StageSeconds()
    registry.register(stages)
    stages.observe("built", [0.0005, 0.0006, 3.0])
    stages.observe("built", [-2.0, 1e12])
    found = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in generate_latest(registry).decode().splitlines()
        if not line.startswith("#")
    }
    assert found['berth_stage_seconds_bucket{le="0.0005",stage="built"}'] == 2.0, "a bound is in its own bucket"
    assert found['berth_stage_seconds_bucket{le="0.001",stage="built"}'] == 3.0
    assert found['berth_stage_seconds_bucket{le="5.0",stage="built"}'] == 4.0
    assert found['berth_stage_seconds_bucket{le="+Inf",stage="built"}'] == 5.0
    assert found['berth_stage_seconds_count{stage="built"}'] == 5.0
    assert found['berth_stage_seconds_sum{stage="built"}'] == pytest.approx(3.0011 + MAX_STAGE_S)
    assert not any("queued" in name for name in found), "stages of other workers"
    assert list(BUCKETS_S) == sorted(BUCKETS_S)


# --- two machines' clocks may be minutes apart: a request is answered, and given up, by the time that passes

REQUEST = BuildRequest(instance_uuid="5f1bd4b0-6a3e-4c27-9a6f-4d0d1e2d7d11", flavor="m1.small", project_id="p")


class Ahead(SystemClock):
    """A clock that is off."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def time(self) -> float:
        return super().time() + self._ahead_s


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("ahead_s", [240.0, -240.0])
async def test_a_request_is_answered_by_a_worker_whose_clock_is_minutes_off(ahead_s: float, retries: int) -> None:
    """It was dropped as too late by every worker ahead of the asker by more than the asker's patience; its retried copy
    by one that was 30 s further ahead (seed 4300188).
    """
    broker = MemoryBroker(SystemClock())
    asker, server = (
        Bus("api", MemoryTransport(broker, name), process=name, clock=clock, rng=random.Random(1))
        for name, clock in (("asker", SystemClock()), ("server", Ahead(ahead_s)))
    )

    async def answer(batch: Sequence[Received]) -> Sequence[Outcome]:
        done = Done(BuildAccepted(instance_uuid=REQUEST.instance_uuid))
        late = Done(Refusal(code="test.late", reason=""))
        retry = Retry("test.early", "")
        return [retry if one.meta.attempt < retries else late if one.is_late() else done for one in batch]

    await asker.open()
    await server.open()
    consumer = Consumer(server, "scheduler.requests", answer)
    await consumer.start()
    try:
        reply = await asker.request(REQUEST, BuildAccepted, timeout_s=60.0)
        assert reply.instance_uuid == REQUEST.instance_uuid
    finally:
        await consumer.drain(1.0)
        await asker.close()
        await server.close()


# --- the times at which all processes of a machine do what nothing waits for


@pytest.mark.parametrize("now", [1_700_000_000.0, 1_700_000_000.1, 1_700_000_000.249, 1_700_000_000.26, 0.49, 0.0])
def test_it_ends_at_a_shared_time_neither_soon_nor_late(now: float) -> None:
    delay_s = shared_delay_s(now, 0.5)
    assert 0.25 <= delay_s < 0.75
    at = now + delay_s
    assert abs(at / 0.5 - round(at / 0.5)) < 1e-6


def test_two_that_begin_within_half_of_it_end_together() -> None:
    assert 100.3 + shared_delay_s(100.3, 0.5) == pytest.approx(100.7 + shared_delay_s(100.7, 0.5))


# --- however they leave (alone, in batches, behind a question), a client receives events in their order

UUID = "0b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e"
CODEC = Codec([BuildEvent])
STATES = (BuildState.ACCEPTED, BuildState.SCHEDULED, BuildState.ACTIVE)
MAX_TURNS = 10_000

# One step: that many events of one call, their states drawn; or that many confirms come in.
CALL = st.tuples(st.just("call"), st.lists(st.sampled_from(STATES), min_size=1, max_size=6))
CONFIRMS = st.tuples(st.just("confirm"), st.integers(1, 4))
STEPS = st.lists(CALL | CONFIRMS, max_size=20)


class Ear:
    """One queue's listener."""

    def __init__(self) -> None:
        self.received: list[BuildEvent] = []

    def __call__(self, delivery: Delivery) -> None:
        for read in CODEC.read(delivery, "new"):
            assert isinstance(read, Read) and isinstance(read.message, BuildEvent)
            self.received.append(read.message)
        delivery.ack()

    def numbers(self, state: BuildState | None = None) -> list[int]:
        return [event.sequence for event in self.received if state in (None, event.state)]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def play(steps: list[tuple[str, object]], *, listens: bool) -> tuple[int, Ear, Ear, list[Outgoing]]:
    """(how many were published, what a client received, what a foreign program received, what left)."""
    transport = MemoryTransport(MemoryBroker(SystemClock()), "t")
    confirms: deque[asyncio.Future[None]] = deque()
    sent: list[Outgoing] = []
    publish = transport.publish

    async def slowly(message: Outgoing) -> None:
        sent.append(message)
        confirm = asyncio.get_running_loop().create_future()
        confirms.append(confirm)
        try:
            await publish(message)
        finally:
            await confirm

    transport.publish = slowly  # type: ignore[method-assign]
    limits = BusLimits(batch_items=3, link_in_flight=2, full_in_flight=2, in_flight=4)
    bus = Bus("api", transport, process="t", clock=SystemClock(), rng=random.Random(1), limits=limits)
    await bus.open()
    client, other_client = Ear(), Ear()
    await transport.consume(await bus.declare("client.feed.{process}"), client, prefetch=1000)
    if listens:
        await transport.consume(await bus.declare("client.builds.{process}"), other_client, prefetch=1000)
    published, calls = 0, set()
    for what, how in steps:
        if what == "call":
            assert isinstance(how, list)
            events = [BuildEvent(instance_uuid=UUID, project_id="p", state=state, sequence=0) for state in how]
            numbered = [(_numbered(event, published + place), "") for place, event in enumerate(events)]
            published += len(numbered)
            calls.add(asyncio.create_task(bus.publish_all(numbered)))
        else:
            assert isinstance(how, int)
            for _ in range(min(how, len(confirms))):
                confirms.popleft().set_result(None)
        await settle()
    for _ in range(MAX_TURNS):
        if all(call.done() for call in calls):
            break
        while confirms:
            confirms.popleft().set_result(None)
        await settle()
    await asyncio.gather(*calls)
    await settle()
    assert bus.publisher.waiting == 0
    await bus.close()
    return published, client, other_client, sent


def _numbered(event: BuildEvent, number: int) -> BuildEvent:
    return BuildEvent(instance_uuid=UUID, project_id="p", state=event.state, sequence=number)


@given(STEPS, st.booleans())
def test_a_client_receives_all_of_them_once_and_in_order(steps: list[tuple[str, object]], listens: bool) -> None:
    published, client, other_client, sent = asyncio.run(play(steps, listens=listens))
    assert client.numbers() == list(range(published))
    if listens:
        for state in STATES:
            assert other_client.numbers(state) == client.numbers(state)
    assert not any(message.also and message.mandatory for message in sent)


def test_the_ways_mix() -> None:
    """The property above is about something: events leave alone, in batches and with a question in one run."""
    one, many = [STATES[0]], [STATES[0]] * 6
    steps: list[tuple[str, object]] = [("call", one), ("call", many), ("call", one), ("confirm", 4), ("call", one)]
    published, client, _, sent = asyncio.run(play(steps, listens=False))
    assert client.numbers() == list(range(published))
    assert [message.also for message in sent if message.also] == [BUILD_EVENTS]
    assert any(message.mandatory for message in sent)
    assert sum(message.routing_key == BUILD_EVENTS for message in sent) > 1


def test_a_busy_bus_gathers_what_comes_one_by_one() -> None:
    """Batches that leave alone count as under way: behind the two that may be, the others gather."""
    published, client, _, sent = asyncio.run(play([("call", [state]) for state in STATES * 2], listens=False))
    assert client.numbers() == list(range(published))
    assert [bool(message.also) for message in sent[:3]] == [True, True, False]
    assert sum(bool(message.also) for message in sent) == 2


# --- A process that stood still: a request that waited in its connection meanwhile may have been given up since.


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
        self._requests: list[asyncio.Task[BuildAccepted]] = []

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
    monkeypatch.setitem(BY_QUEUE, REQUESTS, replace(BY_QUEUE[REQUESTS], retry_s=(0.02,)))
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
    assert house.clock.monotonic() + got.left_s() <= house.latest_end(60.0)


async def test_a_retried_request_whose_requester_has_stopped_waiting_is_not_given_back(house: House) -> None:
    """It was given back until the broker gave it up: it waited in no queue, so it has no time left after any stall."""
    await house.stand_still()
    sent_at = house.clock.time() - 20.0
    meta = Meta(id="m", sent_at=sent_at, patience_s=1.0, waited_s=2.0, attempt=1)
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


async def test_a_request_that_comes_again_has_so_much_less_time(house: House) -> None:
    """Each retry gave it its whole time anew."""

    def later(received: Received) -> Outcome:
        house.clock.ahead_s += 1.0
        return accepted(received) if received.meta.attempt else Retry("not.yet")

    handler = Answering(later)
    await house.consumer.drain(1.0)
    await house.consume(handler)
    await house.request(1, 60.0)
    ends = [house.clock.monotonic() + one.left_s() for one in handler.got]
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
    live, late = ForgetHost(host="live", reason="r", by="o"), ForgetHost(host="late", reason="r", by="o")
    meta = Meta(id="late", sent_at=sent_at, patience_s=1.0, waited_s=2.0, attempt=1)
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
