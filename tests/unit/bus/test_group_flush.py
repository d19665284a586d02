"""One flush for all commits that did not wait for the disk."""

from __future__ import annotations

import asyncio

from bus.faults import DatabaseUnavailable
from bus.persistence.group_flush import GroupFlush

PATIENCE_S = 20.0


class Server:
    """It flushes at once."""

    losses = 0

    async def flush(self) -> None: ...


async def test_a_commit_after_the_end_waits_for_no_flush() -> None:
    """Found by reading: nothing flushed it, and what waited for it never ended."""
    flushes = GroupFlush(Server())
    await flushes.close()
    flushed = flushes.after(0)
    await asyncio.wait({flushed}, timeout=PATIENCE_S)
    assert flushed.cancelled()


async def test_a_commit_that_ends_after_the_end_and_flushes_nothing_ends_who_waits() -> None:
    flushes = GroupFlush(Server())
    flushed = flushes.after(0)
    with flushes.by_commit() as commit:
        assert commit.wanted
        await flushes.close()
    assert flushed.cancelled()


async def test_a_commit_flushes_all_before_it() -> None:
    flushes = GroupFlush(Server())
    flushed = flushes.after(0)
    with flushes.by_commit() as commit:
        commit.done()
    assert await flushed is None
    await flushes.close()


async def test_a_flush_vouches_for_no_commit_before_a_loss() -> None:
    flushes = GroupFlush(server := Server())
    flushed = flushes.after(0)
    server.losses = 1
    with flushes.by_commit() as commit:
        commit.done()
    assert isinstance(flushed.exception(), DatabaseUnavailable)
    await flushes.close()
