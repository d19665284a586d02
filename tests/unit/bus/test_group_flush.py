"""One flush for many commits; what it cannot vouch for fails."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from bus.faults import DatabaseUnavailable
from bus.persistence.group_flush import GroupFlush

PATIENCE_S = 20.0


class Disk:
    """A database that counts its flushes; `away` is what the next one raises."""

    def __init__(self) -> None:
        self.losses = 0
        self.flushes = 0
        self.failure: Exception | None = None
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def flush(self) -> None:
        self.flushes += 1
        self.reached.set()
        await self.go_on.wait()
        if self.failure is not None:
            raise self.failure


async def ended(*flushed: asyncio.Future[None]) -> None:
    await asyncio.wait(flushed, timeout=PATIENCE_S)


async def test_many_commits_share_a_flush() -> None:
    disk = Disk()
    group = GroupFlush(disk)
    flushed = [group.after(0) for _ in range(10)]
    assert not any(one.done() for one in flushed)
    await ended(*flushed)
    assert [one.exception() for one in flushed] == [None] * 10
    assert disk.flushes == 1


async def test_who_commits_while_a_flush_is_under_way_gets_another() -> None:
    disk = Disk()
    group = GroupFlush(disk)
    disk.go_on.clear()
    first = group.after(0)
    await asyncio.wait_for(disk.reached.wait(), PATIENCE_S)
    second = group.after(0)
    disk.go_on.set()
    await ended(first)
    assert not second.done()
    await ended(second)
    assert disk.flushes == 2


async def test_a_flush_that_fails_fails_for_all_and_the_next_is_tried() -> None:
    disk = Disk()
    group = GroupFlush(disk)
    disk.failure = DatabaseUnavailable("away")
    flushed = [group.after(0), group.after(0)]
    await ended(*flushed)
    assert [type(one.exception()) for one in flushed] == [DatabaseUnavailable] * 2
    disk.failure = None
    later = group.after(0)
    await ended(later)
    assert later.exception() is None


async def test_what_was_committed_before_a_connection_was_lost_is_not_vouched_for() -> None:
    """The server may have restarted in between: its next flush does not cover what it has lost."""
    disk = Disk()
    group = GroupFlush(disk)
    before = group.after(disk.losses)
    disk.losses += 1
    after = group.after(disk.losses)
    await ended(before, after)
    assert isinstance(before.exception(), DatabaseUnavailable)
    assert after.exception() is None


@pytest.mark.parametrize("when", ["before the flush", "in the flush"])
async def test_at_the_end_nothing_is_vouched_for(when: str) -> None:
    disk = Disk()
    group = GroupFlush(disk)
    disk.go_on.clear()
    flushed = group.after(0)
    if when == "in the flush":
        await asyncio.wait_for(disk.reached.wait(), PATIENCE_S)
    await group.close()
    assert flushed.cancelled()


async def test_a_commit_that_waits_for_the_disk_is_the_flush_of_those_before_it() -> None:
    disk = Disk()
    group = GroupFlush(disk)
    before = group.after(0)
    with group.by_commit() as commit:
        assert commit.wanted
        meanwhile = group.after(0)
        commit.done()
    assert before.done() and before.exception() is None and not meanwhile.done()
    await ended(meanwhile)
    assert disk.flushes == 1
    with group.by_commit() as commit:
        assert not commit.wanted, "nothing waits"


@pytest.mark.parametrize("fails", [True, False])
async def test_a_commit_that_fails_or_wrote_nothing_leaves_it_to_a_flush(fails: bool) -> None:
    disk = Disk()
    group = GroupFlush(disk)
    waiting = group.after(0)
    with suppress(DatabaseUnavailable), group.by_commit():
        if fails:
            raise DatabaseUnavailable("away")
    assert not waiting.done()
    await ended(waiting)
    assert (waiting.exception(), disk.flushes) == (None, 1)


async def test_a_commit_does_not_flush_what_a_lost_connection_committed() -> None:
    disk = Disk()
    group = GroupFlush(disk)
    waiting = group.after(disk.losses)
    disk.losses += 1
    with group.by_commit() as commit:
        commit.done()
    assert isinstance(waiting.exception(), DatabaseUnavailable)


async def test_a_commit_under_way_at_the_end_leaves_nothing_waiting() -> None:
    disk = Disk()
    group = GroupFlush(disk)
    waiting = group.after(0)
    with group.by_commit():
        await group.close()
    assert waiting.cancelled() and disk.flushes == 0
