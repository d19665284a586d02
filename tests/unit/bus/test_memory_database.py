"""Locks, circles and lost connections of the in-memory database."""

from __future__ import annotations

import asyncio

import pytest

from bus.clock import SystemClock
from bus.contracts.placement import Release
from bus.faults import DatabaseUnavailable, Transient
from bus.persistence.memory_database import UNFLUSHED_S, MemoryDatabase, MemorySession
from bus.persistence.outbox import OutboxMessage


async def change(session: MemorySession, rows: list[str], *keys: str) -> None:
    async with session.transaction() as transaction:
        for key in keys:
            await transaction.lock([key])
            await asyncio.sleep(0)
        transaction.will(lambda: rows.append("".join(keys)))


async def test_a_circle_is_noticed_by_who_closes_it() -> None:
    database, rows = MemoryDatabase(SystemClock()), []
    outcomes = await asyncio.gather(
        change(database.session(), rows, "a", "b"), change(database.session(), rows, "b", "a"), return_exceptions=True
    )
    faults = [fault for fault in outcomes if fault is not None]
    assert [getattr(fault, "code", "") for fault in faults] == ["database.deadlock"]
    assert len(rows) == 1
    assert database.deadlocks == 1
    assert not database.is_locked("a")


async def test_a_lost_connection_commits_nothing_and_frees_its_rows() -> None:
    database, rows = MemoryDatabase(SystemClock()), []
    lost = database.session()
    with pytest.raises(DatabaseUnavailable):
        async with lost.transaction() as transaction:
            await transaction.lock(["a"])
            transaction.will(lambda: rows.append("never"))
            lost.cut()
    await change(database.session(), rows, "a")
    assert rows == ["a"]


async def test_who_waits_is_served_in_order_and_the_cancelled_are_passed_over() -> None:
    database, rows = MemoryDatabase(SystemClock()), []
    async with database.session().transaction() as transaction:
        await transaction.lock(["a"])
        waiting = [asyncio.create_task(change(database.session(), rows, "a", extra)) for extra in "xyz"]
        for _ in range(100):  # each waits by then; nothing but this loop decides when
            await asyncio.sleep(0)
        waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert rows == ["ay", "az"]


async def test_a_fault_after_the_commit_leaves_it_committed() -> None:
    async def pause(point: str) -> None:
        if point == "committed":
            raise Transient("lost", code="database.unavailable")

    database, rows = MemoryDatabase(SystemClock()), []
    with pytest.raises(Transient):
        await change(database.session(pause), rows, "a")
    assert rows == ["a"]


class Hands:
    """A clock that is moved by hand."""

    now = 100.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def handle(session: MemorySession, message: str, *, durable: bool) -> int:
    async with session.transaction() as transaction:
        transaction.durable = durable
        assert await transaction.first_time("h", [message]) == {message}
    return transaction.number


async def test_a_crash_takes_back_what_is_not_on_disk_and_gives_its_numbers_again() -> None:
    database = MemoryDatabase(Hands())
    session = database.session()
    await handle(session, "kept", durable=True)
    lost = [await handle(session, message, durable=False) for message in ("one", "two")]
    losses = session.losses
    session.cut()
    database.crash()
    assert [message for _, message in database.handled] == ["kept"]
    assert database.taken_back == 2
    assert await handle(session, "one", durable=False) == lost[0]
    assert session.losses == losses + 1


@pytest.mark.parametrize("how", ["by a commit that waits for the disk", "by a flush", "by the time"])
async def test_what_has_come_to_the_disk_survives_a_crash(how: str) -> None:
    database = MemoryDatabase(clock := Hands())
    session = database.session()
    await handle(session, "early", durable=False)
    if how == "by the time":
        await clock.sleep(UNFLUSHED_S + 0.1)
    elif how == "by a flush":
        await session.flush()
    else:
        await handle(session, "late", durable=True)
    database.crash()
    assert ("h", "early") in database.handled
    assert database.taken_back == 0


async def test_a_number_of_the_outbox_never_comes_again() -> None:
    """A relay that still holds the old row under it would forget the new one."""
    database = MemoryDatabase(Hands())
    messages = [OutboxMessage("api", Release(consumer="a"))]

    async def notify() -> int | None:
        async with database.session().transaction() as transaction:
            transaction.durable = False
            return await transaction.send_later(messages)

    before = await notify()
    database.crash()
    assert not database.outbox
    assert await notify() != before
