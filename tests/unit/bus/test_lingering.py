"""Rows and events of the outbox that leave or are deleted together, in order and after a pause."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import pytest
from msgspec import structs

from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import CellDelete
from bus.contracts.queues import BUILD_EVENTS
from bus.faults import DatabaseUnavailable
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.lingering import Lingering, StreamPosition
from bus.persistence.outbox import OutboxMessage
from bus.persistence.relay import DELETE_BATCH, DELETE_PAUSE_S, SWEEP_EVERY_S, Relay
from bus.port import Outgoing
from bus.retrying import RELAY
from cell_conductor.app import is_progress, position_of
from scheduler_worker.app import position_of_event
from tests.kit.posting import PostedBus

# --- An event that is not waited for leaves with the next one, or a moment later: in order, and as one broker
# message.


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


# --- Rows that are confirmed are deleted together: after a pause, or at once where there is nothing to wait for.


PATIENCE_S = 20.0
OUTGOING = [OutboxMessage(CELL, CellDelete(instance_uuid=UUID, project_id="p"))]


class DeleteGate(SystemClock):
    """The pause before deleting ends when the test ends it, or never, and so does a sweep's; no other sleep ends."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.over = asyncio.Event()
        self.sweeping = asyncio.Semaphore(0)

    async def sleep(self, seconds: float) -> None:
        if seconds == RELAY.first_s:
            await asyncio.sleep(0)
        elif seconds < 2 * DELETE_PAUSE_S <= SWEEP_EVERY_S / 2:  # at a shared time: between a half and one and a half
            self.waiting.set()
            await self.over.wait()
        elif seconds < 2 * SWEEP_EVERY_S:
            await self.sweeping.acquire()
        else:
            await asyncio.Event().wait()


class Rows:
    """Remembers what each statement deleted."""

    def __init__(self) -> None:
        self.statements: list[list[int]] = []
        self.swept: list[list[int]] = []  # by the sweeps
        self.failures = 0
        self.deleted = asyncio.Event()
        self.sweeping = asyncio.Event()  # a sweep has taken confirmed rows along,
        self.swept_on = asyncio.Event()  # and gets its answer when this is set
        self.swept_on.set()

    async def delete(self, row_ids: Sequence[int]) -> None:
        if self.failures:
            self.failures -= 1
            raise DatabaseUnavailable("unavailable")
        self.statements.append(list(row_ids))
        self.deleted.set()

    async def claim_stale(
        self,
        age_s: float,
        limit: int,
        closed: Sequence[str],
        confirmed: Sequence[int] = (),
        back: Sequence[int] = (),
    ) -> list[tuple[int, bytes]]:
        if confirmed:
            self.sweeping.set()
            await self.swept_on.wait()
            if self.failures:
                self.failures -= 1
                raise DatabaseUnavailable("unavailable")
        self.swept.append(list(confirmed))
        return []

    async def purge_handled(self, keep_s: float, limit: int) -> None: ...


@asynccontextmanager
async def relaying_deletes(clock: DeleteGate, rows: Rows) -> AsyncIterator[Relay]:
    buses: dict[str, Bus] = {CELL: PostedBus(CELL)}  # type: ignore[dict-item]
    relay = Relay(rows, buses, clock=clock)
    running = asyncio.create_task(relay.run())
    await asyncio.sleep(0)  # it runs,
    await asyncio.sleep(0)  # and its first sweep is over
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield relay
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_what_is_confirmed_in_the_pause_goes_in_one_statement() -> None:
    clock, rows = DeleteGate(), Rows()
    async with relaying_deletes(clock, rows) as relay:
        relay.send([1], OUTGOING)
        await clock.waiting.wait()
        relay.send([2], OUTGOING)
        relay.send([3], OUTGOING)
        while relay._confirmed.to_delete < 3:  # noqa: ASYNC110  (it needs only turns of the loop)
            await asyncio.sleep(0)
        assert rows.statements == []
        clock.over.set()
        await rows.deleted.wait()
        assert rows.statements == [[1, 2, 3]]


async def test_draining_does_not_wait_for_the_pause() -> None:
    clock, rows = DeleteGate(), Rows()
    async with relaying_deletes(clock, rows) as relay:
        relay.send([1], OUTGOING)
        await clock.waiting.wait()
        await relay.drain(PATIENCE_S)
        assert relay.held == 0
        assert rows.statements == [[1]]


async def test_draining_deletes_what_is_confirmed_only_then_and_tries_again() -> None:
    clock, rows = DeleteGate(), Rows()
    rows.failures = 1
    async with relaying_deletes(clock, rows) as relay:
        draining = asyncio.create_task(relay.drain(PATIENCE_S))
        relay.send([1], OUTGOING)
        await draining
        relay.send([2], OUTGOING)
        await relay.drain(PATIENCE_S)
        assert [*filter(None, rows.swept), *rows.statements] == [[1], [2]]  # a drain sweeps, too


async def test_after_a_drain_rows_gather_again() -> None:
    clock, rows = DeleteGate(), Rows()
    async with relaying_deletes(clock, rows) as relay:
        relay.send([1], OUTGOING)
        await relay.drain(PATIENCE_S)
        clock.waiting.clear()
        relay.send([2], OUTGOING)
        await clock.waiting.wait()
        assert rows.statements == [[1]]


async def test_a_full_batch_waits_for_no_more() -> None:
    clock, rows = DeleteGate(), Rows()
    async with relaying_deletes(clock, rows) as relay:
        for row in range(DELETE_BATCH + 1):
            relay.send([row + 1], OUTGOING)
        await rows.deleted.wait()
        assert [len(ids) for ids in rows.statements] == [DELETE_BATCH]
        await relay.drain(PATIENCE_S)
        assert sum(map(len, rows.statements)) == DELETE_BATCH + 1


async def test_a_sweep_takes_along_what_is_confirmed() -> None:
    clock, rows = DeleteGate(), Rows()
    async with relaying_deletes(clock, rows) as relay:
        relay.send([1], OUTGOING)
        await clock.waiting.wait()
        rows.failures = 1  # the first sweep fails: the row waits for the next
        clock.sweeping.release()
        while rows.failures:  # noqa: ASYNC110  (it needs only turns of the loop)
            await asyncio.sleep(0)
        assert (relay.held, rows.swept) == (1, [[]])
        clock.sweeping.release()
        while relay.held:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert rows.swept == [[], [1]]
        clock.over.set()
        clock.waiting.clear()
        relay.send([2], OUTGOING)
        await rows.deleted.wait()
        assert rows.statements == [[2]], "and not what has gone already"


@pytest.mark.timeout(60)
async def test_draining_while_a_sweep_takes_the_rows_along_leaves_the_loop_to_others() -> None:
    """The simulation's seed 80014: the sweep's answer could not arrive, as nothing else ran any more."""
    clock, rows = DeleteGate(), Rows()
    async with relaying_deletes(clock, rows) as relay:
        relay.send([1], OUTGOING)
        await clock.waiting.wait()
        rows.swept_on.clear()
        clock.sweeping.release()
        await rows.sweeping.wait()
        draining = asyncio.create_task(relay.drain(PATIENCE_S))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not draining.done()
        rows.swept_on.set()
        await draining
        assert (relay.held, rows.statements) == (0, [])


async def test_rows_of_a_sweep_that_failed_do_not_wait_for_the_next_sweep() -> None:
    """Found by reading: the pause before deleting had ended meanwhile, and nobody was woken for them."""
    clock, rows = DeleteGate(), Rows()
    async with relaying_deletes(clock, rows) as relay:
        relay.send([1], OUTGOING)
        await clock.waiting.wait()
        rows.swept_on.clear()
        clock.sweeping.release()
        await rows.sweeping.wait()
        clock.over.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert rows.statements == [], "the sweep has them"
        rows.failures = 1
        rows.swept_on.set()
        await rows.deleted.wait()
        assert rows.statements == [[1]]
