"""Rows and events of the outbox that leave or are deleted together, in order and after a pause."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

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
from bus.persistence.outbox import OutboxMessage, Sweep
from bus.persistence.relay import DELETE_BATCH, DELETE_PAUSE_S, Lingering, Relay, StreamPosition
from bus.transport import Outgoing
from cell_conductor.app import is_progress, position_of
from scheduler_worker.wiring import position_of_event
from tests.kit.posting import PostedBus
from tests.kit.turns import cancelled
from tests.kit.virtual_time import on_virtual_time

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

    async def claim_stale(self, sweep: Sweep) -> list[tuple[int, bytes]]:
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
        await cancelled(running)


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
DAY_S = 86_400.0
OUTGOING = [OutboxMessage(CELL, CellDelete(instance_uuid=UUID, project_id="p"))]


class Rows:
    """Remembers what each statement deleted."""

    def __init__(self) -> None:
        self.statements: list[list[int]] = []
        self.swept: list[list[int]] = []  # by the sweeps
        self.gone: list[list[int]] = []  # by both
        self.failures = 0
        self.deleted = asyncio.Event()
        self.answered = asyncio.Event()  # a statement that deletes ends when this is set
        self.answered.set()

    async def delete(self, row_ids: Sequence[int]) -> None:
        ids = list(row_ids)
        await self._answer()
        self.statements.append(ids)
        self.gone.append(ids)
        self.deleted.set()

    async def claim_stale(self, sweep: Sweep) -> list[tuple[int, bytes]]:
        ids = list(sweep.confirmed)
        if ids:
            await self._answer()
            self.gone.append(ids)
        self.swept.append(ids)
        return []

    async def _answer(self) -> None:
        await self.answered.wait()
        if self.failures:
            self.failures -= 1
            raise DatabaseUnavailable("unavailable")

    async def purge_handled(self, keep_s: float, limit: int) -> None: ...


@asynccontextmanager
async def relaying_deletes(rows: Rows) -> AsyncIterator[Relay]:
    buses: dict[str, Bus] = {CELL: PostedBus(CELL)}  # type: ignore[dict-item]
    relay = Relay(rows, buses, clock=SystemClock())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bus.persistence.relay.SWEEP_EVERY_S", DAY_S)
        running = asyncio.create_task(relay.run())
        await asyncio.sleep(0.01)  # the first sweep is over
        try:
            yield relay
        finally:
            await cancelled(running)


def sweep(relay: Relay, bus: str) -> None:
    """A further bus may take what waits in the table."""
    relay.add_bus(PostedBus(bus))  # type: ignore[arg-type]


async def send(relay: Relay, *rows: int) -> None:
    """Rows whose messages are confirmed a moment later."""
    for row in rows:
        relay.send([row], OUTGOING)
    await asyncio.sleep(0.01)


@on_virtual_time
async def test_what_is_confirmed_in_the_pause_goes_in_one_statement() -> None:
    rows = Rows()
    async with relaying_deletes(rows) as relay:
        for row in (1, 2, 3):
            await send(relay, row)
        assert (rows.statements, relay.held) == ([], 3)
        await rows.deleted.wait()
        await asyncio.sleep(0)
        assert (rows.statements, relay.held) == ([[1, 2, 3]], 0)


@on_virtual_time
async def test_what_is_confirmed_while_a_statement_runs_gathers_again() -> None:
    rows = Rows()
    rows.answered.clear()
    async with relaying_deletes(rows) as relay:
        await send(relay, 1)
        await asyncio.sleep(2 * DELETE_PAUSE_S)
        await send(relay, 2)
        rows.answered.set()
        await send(relay, 3)
        assert (rows.statements, relay.held) == ([[1]], 2)
        await asyncio.sleep(2 * DELETE_PAUSE_S)
        assert (rows.statements, relay.held) == ([[1], [2, 3]], 0)


@on_virtual_time
async def test_what_a_failed_statement_had_comes_first_again() -> None:
    rows = Rows()
    rows.failures = 1
    async with relaying_deletes(rows) as relay:
        await send(relay, 1, 2)
        while rows.failures:  # noqa: ASYNC110  (time is virtual)
            await asyncio.sleep(0.01)
        await send(relay, 3)
        assert relay.held == 3
        await rows.deleted.wait()
        assert rows.statements == [[1, 2, 3]]


@on_virtual_time
async def test_draining_does_not_wait_for_the_pause() -> None:
    rows = Rows()
    async with relaying_deletes(rows) as relay:
        await send(relay, 1)
        began = asyncio.get_running_loop().time()
        await relay.drain(PATIENCE_S)
        assert asyncio.get_running_loop().time() == began
        assert (relay.held, rows.gone) == (0, [[1]])


@on_virtual_time
async def test_draining_deletes_what_is_confirmed_only_then_and_tries_again() -> None:
    rows = Rows()
    rows.failures = 1
    async with relaying_deletes(rows) as relay:
        draining = asyncio.create_task(relay.drain(PATIENCE_S))
        relay.send([1], OUTGOING)
        await draining
        relay.send([2], OUTGOING)
        await relay.drain(PATIENCE_S)
        assert rows.gone == [[1], [2]]


@on_virtual_time
async def test_after_a_drain_rows_gather_again() -> None:
    rows = Rows()
    async with relaying_deletes(rows) as relay:
        relay.send([1], OUTGOING)
        await relay.drain(PATIENCE_S)
        await send(relay, 2)
        assert (relay.held, rows.gone) == (1, [[1]])


@on_virtual_time
async def test_a_full_batch_waits_for_no_more() -> None:
    rows = Rows()
    async with relaying_deletes(rows) as relay:
        began = asyncio.get_running_loop().time()
        for row in range(DELETE_BATCH + 1):
            relay.send([row + 1], OUTGOING)
        await rows.deleted.wait()
        assert asyncio.get_running_loop().time() == began
        assert [len(ids) for ids in rows.gone] == [DELETE_BATCH]
        await relay.drain(PATIENCE_S)
        assert [len(ids) for ids in rows.gone] == [DELETE_BATCH, 1]


@on_virtual_time
async def test_a_sweep_takes_along_what_is_confirmed() -> None:
    rows = Rows()
    async with relaying_deletes(rows) as relay:
        await send(relay, 1)
        rows.failures = 1  # the first sweep fails: the row waits for the next
        sweep(relay, "c2")
        await asyncio.sleep(0.01)
        assert (relay.held, rows.swept, rows.failures) == (1, [[]], 0)
        sweep(relay, "c3")
        await asyncio.sleep(0.01)
        assert (relay.held, rows.swept) == (0, [[], [1]])
        await send(relay, 2)
        await rows.deleted.wait()
        assert rows.statements == [[2]], "and not what has gone already"


@on_virtual_time
async def test_draining_while_a_sweep_takes_the_rows_along_leaves_the_loop_to_others() -> None:
    """The simulation's seed 80014: the sweep's answer could not arrive, as nothing else ran any more."""
    rows = Rows()
    async with relaying_deletes(rows) as relay:
        await send(relay, 1)
        rows.answered.clear()
        sweep(relay, "c2")
        await asyncio.sleep(0.01)
        draining = asyncio.create_task(relay.drain(PATIENCE_S))
        await asyncio.sleep(0.01)
        assert not draining.done()
        rows.answered.set()
        await draining
        assert (relay.held, rows.statements) == (0, [])


@on_virtual_time
async def test_rows_of_a_sweep_that_failed_do_not_wait_for_the_next_sweep() -> None:
    """Found by reading: the pause before deleting had ended meanwhile, and nobody was woken for them."""
    rows = Rows()
    async with relaying_deletes(rows) as relay:
        await send(relay, 1)
        rows.answered.clear()
        sweep(relay, "c2")
        await asyncio.sleep(2 * DELETE_PAUSE_S)
        assert rows.statements == [], "the sweep has them"
        rows.failures = 1
        rows.answered.set()
        await rows.deleted.wait()
        assert rows.statements == [[1]]
