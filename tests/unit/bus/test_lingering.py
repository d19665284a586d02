"""An event that is not waited for leaves with the next one, or a moment later: in order, and as one broker message."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from msgspec import structs

from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.catalogue import BUILD_EVENTS
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.lingering import Lingering, StreamPosition
from bus.persistence.outbox import OutboxMessage
from bus.persistence.relay import Relay
from bus.port import Outgoing
from cell_conductor.app import is_progress, position_of
from scheduler_worker.app import position_of_event
from tests.kit.posting import PostedBus

UUID = "0b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e"
LINGER_S = 0.25
TURNS = 20  # of the loop: more than publishing at once takes
CELL = "c1"


def event(state: BuildState, sequence: int) -> BuildEvent:
    terminal = state is BuildState.ACTIVE
    return BuildEvent(instance_uuid=UUID, project_id="p", state=state, sequence=sequence, terminal=terminal)


BUILDING = event(BuildState.BUILDING, 2)
ACTIVE = event(BuildState.ACTIVE, 3)
AGAIN = event(BuildState.BUILDING, 5)


class Gate(SystemClock):
    """Sleeps of the length that is waited here end when the test ends them."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.over = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds != LINGER_S / 2:
            await asyncio.Event().wait()
        self.waiting.set()
        await self.over.wait()
        await asyncio.sleep(0)


class Halves(Gate):
    """Each half of the lingering ends when the test ends it."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        self.over.clear()

    async def pass_one(self) -> None:
        self.over.set()
        await turns()


class NoRows:
    async def delete(self, row_ids: Sequence[int]) -> None: ...

    async def claim_stale(
        self,
        age_s: float,
        limit: int,
        closed: Sequence[str],
        confirmed: Sequence[int] = (),
        back: Sequence[int] = (),
    ) -> list[tuple[int, bytes]]:
        return []

    async def purge_handled(self, keep_s: float, limit: int) -> None: ...


@asynccontextmanager
async def relaying(
    clock: Gate, receiver: PostedBus, place: Callable[[Message], StreamPosition | None] | None = None
) -> AsyncIterator[Relay]:
    """As a cell's conductor has it; place: as a scheduler has it."""
    buses: dict[str, Bus] = {CELL: receiver}  # type: ignore[dict-item]
    lingering = Lingering(LINGER_S, is_progress, place or position_of, keeps=place is None)
    relay = Relay(NoRows(), buses, clock=clock, lingering=lingering)
    running = asyncio.create_task(relay.run())
    await turns()  # its first sweep is over
    try:
        yield relay
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def test_progress_leaves_with_the_end_that_follows_it_and_before_it() -> None:
    receiver = PostedBus(CELL)
    async with relaying(Gate(), receiver) as relay:
        relay.send([1], [OutboxMessage(CELL, BUILDING)])
        await turns()
        assert receiver.batches == []
        relay.send([2], [OutboxMessage(CELL, ACTIVE)])
        await turns()
        assert receiver.batches == [[BUILDING, ACTIVE]]


async def test_progress_does_not_leave_with_what_is_about_another_instance() -> None:
    """Under load something always leaves: the next round's commands, other builds' ends."""
    clock, receiver = Gate(), PostedBus(CELL)
    others = structs.replace(ACTIVE, instance_uuid=OTHER.instance_uuid)
    async with relaying(clock, receiver) as relay:
        relay.send([1], [OutboxMessage(CELL, BUILDING)])
        relay.send([2], [OutboxMessage(CELL, others)])
        await turns()
        assert receiver.batches == [[others]]
        relay.send([3], [OutboxMessage(CELL, AGAIN)])  # on another host
        relay.send([4], [OutboxMessage(CELL, structs.replace(ACTIVE, sequence=9))])
        await turns()
        assert receiver.batches[1:] == [[BUILDING, AGAIN, structs.replace(ACTIVE, sequence=9)]], "none is dropped"
        relay.send([5], [OutboxMessage(CELL, BUILDING)])
        relay.send([6], [OutboxMessage(CELL, AGAIN)])
        clock.over.set()
        await turns()
        assert receiver.batches[2:] == [[BUILDING, AGAIN]]
        assert not relay._tickets


async def test_progress_that_has_just_come_lingers_on_when_older_progress_leaves() -> None:
    clock, receiver = Halves(), PostedBus(CELL)
    younger = structs.replace(BUILDING, instance_uuid=OTHER.instance_uuid)
    async with relaying(clock, receiver) as relay:
        relay.send([1], [OutboxMessage(CELL, BUILDING)])
        await turns()
        await clock.pass_one()
        assert receiver.batches == []
        relay.send([2], [OutboxMessage(CELL, younger)])
        await clock.pass_one()
        assert receiver.batches == [[BUILDING]]
        await clock.pass_one()
        assert receiver.batches == [[BUILDING], [younger]]


async def test_a_process_that_ends_waits_for_no_lingering() -> None:
    receiver = PostedBus(CELL)
    async with relaying(Gate(), receiver) as relay:
        relay.send([1], [OutboxMessage(CELL, BUILDING)])
        await turns()
        draining = asyncio.create_task(relay.drain(60.0))
        await turns()
        relay.send([2], [OutboxMessage(CELL, AGAIN)])
        await asyncio.wait_for(draining, 10)
        assert receiver.batches == [[BUILDING], [AGAIN]]


async def test_progress_that_nothing_follows_leaves_after_a_moment() -> None:
    clock, receiver = Gate(), PostedBus(CELL)
    async with relaying(clock, receiver) as relay:
        relay.send([1], [OutboxMessage(CELL, BUILDING)])
        await asyncio.wait_for(clock.waiting.wait(), 10)
        assert receiver.batches == []
        clock.over.set()
        await turns()
        assert receiver.batches == [[BUILDING]]
        relay.send([2], [OutboxMessage(CELL, BUILDING)])
        await turns()
        assert len(receiver.batches) == 2, "and so does the next"


ACCEPTED, SCHEDULED = event(BuildState.ACCEPTED, 1), event(BuildState.SCHEDULED, 2)
OTHER = structs.replace(ACCEPTED, instance_uuid="1b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e")


async def test_a_state_that_the_next_one_overtook_is_not_published() -> None:
    clock, receiver = Gate(), PostedBus(CELL)
    async with relaying(clock, receiver, position_of_event) as relay:
        relay.send([1], [OutboxMessage(CELL, ACCEPTED)])
        relay.send([2], [OutboxMessage(CELL, OTHER)])
        relay.send([3], [OutboxMessage(CELL, SCHEDULED)])
        relay.send([4], [OutboxMessage(CELL, ACTIVE)])
        await turns()
        assert receiver.batches == [[ACTIVE]], "the other build's lingers on"
        clock.over.set()
        await turns()
        assert receiver.batches == [[ACTIVE], [OTHER]]
        assert relay.held == 4 and not relay._tickets, "all four rows are done with, and wait to be deleted"


async def test_the_newest_state_leaves_after_the_linger_though_it_came_in_the_wrong_order() -> None:
    clock, receiver = Gate(), PostedBus(CELL)
    async with relaying(clock, receiver, position_of_event) as relay:
        relay.send([1], [OutboxMessage(CELL, SCHEDULED)])
        relay.send([2], [OutboxMessage(CELL, ACCEPTED)])  # of a dead process, found by a sweep
        await asyncio.wait_for(clock.waiting.wait(), 10)
        clock.over.set()
        await turns()
        assert receiver.batches == [[SCHEDULED]]
        assert not relay._tickets


async def test_an_end_and_an_event_without_a_number_are_never_dropped() -> None:
    clock, receiver = Gate(), PostedBus(CELL)
    refused = structs.replace(ACTIVE, state=BuildState.REFUSED, sequence=0)
    deleting = event(BuildState.DELETING, 9)
    async with relaying(clock, receiver, position_of_event) as relay:
        relay.send([1], [OutboxMessage(CELL, deleting)])
        relay.send([2], [OutboxMessage(CELL, refused), OutboxMessage(CELL, ACTIVE), OutboxMessage(CELL, ACTIVE)])
        await turns()
        assert receiver.batches == [[refused, ACTIVE, ACTIVE]]
        clock.over.set()
        await turns()
        assert receiver.batches[1:] == [[deleting]], "what is newer than the end outlives it"


async def test_on_a_cells_bus_all_states_travel_as_one_broker_message() -> None:
    sent: list[Outgoing] = []
    transport = MemoryTransport(MemoryBroker(SystemClock()), CELL)
    publish = transport.publish

    async def watched(message: Outgoing) -> None:
        sent.append(message)
        await publish(message)

    transport.publish = watched  # type: ignore[method-assign]
    bus = Bus(CELL, transport, process="t", clock=SystemClock(), rng=random.Random(1))
    assert bus.name != API
    await bus.open()
    await bus.declare("scheduler.builds")
    await bus.publish_all([(BUILDING, ""), (ACTIVE, "")])
    assert [message.routing_key for message in sent] == [BUILD_EVENTS]
    assert await transport.depth("scheduler.builds") == 1
    await bus.close()
