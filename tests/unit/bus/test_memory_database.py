"""Locks, circles and lost connections of the in-memory database."""

from __future__ import annotations

import asyncio

import pytest

from bus.clock import SystemClock
from bus.faults import DatabaseUnavailable, Transient
from bus.service.memory_database import MemoryDatabase, Session


async def change(session: Session, rows: list[str], *keys: str) -> None:
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
        await asyncio.sleep(0.01)
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
