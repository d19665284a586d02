"""Rows that are confirmed are deleted together: after a pause, or at once where there is nothing to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from bus.bus import Bus
from bus.clock import SystemClock
from bus.contracts.cell import CellDelete
from bus.faults import DatabaseUnavailable
from bus.persistence.outbox import OutboxMessage
from bus.persistence.relay import DELETE_BATCH, DELETE_PAUSE_S, SWEEP_EVERY_S, Relay
from bus.retrying import RELAY
from tests.kit.posting import PostedBus

UUID = "0b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e"
PATIENCE_S = 20.0
CELL = "c1"
OUTGOING = [OutboxMessage(CELL, CellDelete(instance_uuid=UUID, project_id="p"))]


class Gate(SystemClock):
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
async def relaying(clock: Gate, rows: Rows) -> AsyncIterator[Relay]:
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
    clock, rows = Gate(), Rows()
    async with relaying(clock, rows) as relay:
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
    clock, rows = Gate(), Rows()
    async with relaying(clock, rows) as relay:
        relay.send([1], OUTGOING)
        await clock.waiting.wait()
        await relay.drain(PATIENCE_S)
        assert relay.held == 0
        assert rows.statements == [[1]]


async def test_draining_deletes_what_is_confirmed_only_then_and_tries_again() -> None:
    clock, rows = Gate(), Rows()
    rows.failures = 1
    async with relaying(clock, rows) as relay:
        draining = asyncio.create_task(relay.drain(PATIENCE_S))
        relay.send([1], OUTGOING)
        await draining
        relay.send([2], OUTGOING)
        await relay.drain(PATIENCE_S)
        assert [*filter(None, rows.swept), *rows.statements] == [[1], [2]]  # a drain sweeps, too


async def test_after_a_drain_rows_gather_again() -> None:
    clock, rows = Gate(), Rows()
    async with relaying(clock, rows) as relay:
        relay.send([1], OUTGOING)
        await relay.drain(PATIENCE_S)
        clock.waiting.clear()
        relay.send([2], OUTGOING)
        await clock.waiting.wait()
        assert rows.statements == [[1]]


async def test_a_full_batch_waits_for_no_more() -> None:
    clock, rows = Gate(), Rows()
    async with relaying(clock, rows) as relay:
        for row in range(DELETE_BATCH + 1):
            relay.send([row + 1], OUTGOING)
        await rows.deleted.wait()
        assert [len(ids) for ids in rows.statements] == [DELETE_BATCH]
        await relay.drain(PATIENCE_S)
        assert sum(map(len, rows.statements)) == DELETE_BATCH + 1


async def test_a_sweep_takes_along_what_is_confirmed() -> None:
    clock, rows = Gate(), Rows()
    async with relaying(clock, rows) as relay:
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
    clock, rows = Gate(), Rows()
    async with relaying(clock, rows) as relay:
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
    clock, rows = Gate(), Rows()
    async with relaying(clock, rows) as relay:
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
