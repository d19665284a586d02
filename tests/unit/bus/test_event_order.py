"""However they leave (alone, in batches, behind a question), a client receives events in their order."""

from __future__ import annotations

import asyncio
import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from bus.bus import Bus, BusLimits
from bus.clock import SystemClock
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.catalogue import BUILD_EVENTS
from bus.memory import MemoryBroker, MemoryTransport
from bus.port import Delivery, Outgoing
from bus.wire import Codec, Read

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


@settings(max_examples=150, deadline=None)
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
