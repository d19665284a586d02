"""Times of stages, of clocks that are apart, and the order of events."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest

from bus.bus import Bus
from bus.clock import SystemClock, shared_delay_s
from bus.codec import BATCH, Codec, Read
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received, Retry
from bus.contracts.base import Refusal
from bus.contracts.build import BuildAccepted, BuildEvent, BuildRequest, BuildState
from bus.contracts.stages import STAGES, StageTimes, durations
from bus.memory import MemoryBroker, MemoryTransport
from bus.publishing import BusLimits
from bus.service.stages import BUCKETS_S, MAX_STAGE_S, StageSeconds
from bus.transport import Delivery, Outgoing

# --- the stages of a build: durations that add up whatever the clocks read, and a histogram that counts each once

WHOLE = StageTimes(requested=10.0, queued=11.0, decided=13.0, claimed=16.0, dispatched=20.0, built=25.0, announced=31.0)


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
    nowhere = StageTimes(requested=10.0, queued=11.0, decided=13.0)
    assert durations(nowhere) == {"queued": 1.0, "decided": 2.0}
    assert durations(nowhere, until=14.0) == {"queued": 1.0, "decided": 2.0, "announced": 1.0}
    assert durations(StageTimes(requested=10.0, built=12.0)) == {"built": 2.0}
    assert durations(StageTimes(queued=10.0, decided=12.0)) == {"queued": 0.0, "decided": 2.0}
    assert durations(StageTimes()) == {}


def test_stamps_travel_as_a_short_array_and_an_older_writer_is_understood() -> None:
    assert msgspec.json.encode(StageTimes(requested=1.5, queued=2.5)) == b"[1.5,2.5,0.0,0.0,0.0,0.0,0.0,0]"
    assert msgspec.json.decode(b"[1.5,2.5]", type=StageTimes) == StageTimes(requested=1.5, queued=2.5)


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


# --- two computers' clocks may be minutes apart: a request is answered, and given up, by the time that passes

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
        return [retry if one.meta.retries < retries else late if one.is_late() else done for one in batch]

    await asker.open()
    await server.open()
    consumer = Consumer(server, "scheduler.operators", answer)
    await consumer.start()
    try:
        request = structs.replace(REQUEST, host="h")  # an operator's: to a queue that gets its own retries
        reply = await asker.request(request, BuildAccepted, timeout_s=60.0)
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


# --- however they leave (alone, in batches), a client receives events of a key in their order

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
def test_a_client_receives_all_of_them_once_and_in_order_by_key(steps: list[tuple[str, object]], listens: bool) -> None:
    published, client, other_client, _ = asyncio.run(play(steps, listens=listens))
    assert sorted(client.numbers()) == list(range(published))
    for state in STATES:
        assert client.numbers(state) == sorted(client.numbers(state))
    if listens:
        for state in STATES:
            assert other_client.numbers(state) == client.numbers(state)


def test_a_busy_bus_gathers_what_comes_one_by_one() -> None:
    """Behind the two of a key that may be under way, the others gather."""
    published, client, _, sent = asyncio.run(play([("call", [STATES[0]])] * 6, listens=False))
    assert client.numbers() == list(range(published))
    assert [message.content_type == BATCH for message in sent] == [False, False, True, False]
