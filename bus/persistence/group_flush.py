"""One flush for all commits that did not wait for the disk, at most two a second, at the same times in all processes of
a machine. Messages of repeatable commits are acknowledged after it. Any other commit that waits for the disk counts as
a flush (`GroupFlush.by_commit`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from msgspec import Struct

from bus.batcher import Batcher
from bus.clock import shared_delay_s
from bus.faults import DatabaseUnavailable

# Acknowledgements gather for as long anyway (bus.rabbitmq.channels), so no task waits for it. Unacknowledged messages
# count against the prefetch, so it cannot be much longer.
BATCH_S = 0.5
# A relay that deletes confirmed rows at the same moment comes first: its commit is the flush.
AFTER_OTHERS_S = 0.01
MOST_FLUSHES = 2  # one that hangs holds up only those who wait for it

_Waiter = tuple[int, asyncio.Future[None]]  # with the database's losses before its commits


class FlushedDatabase(Protocol):
    """The database that is flushed."""

    @property
    def connection_losses(self) -> int:
        """The number of connections that were lost; the server may have restarted then, and lost commits that were not
        on disk.
        """

    @property
    def servers(self) -> int:
        """How often it was another server, or one that was started anew: its disk may have been exchanged."""

    async def flush(self) -> None:
        """Return when everything that was committed here before is on disk. Raises Transient."""


class Flushed(FlushedDatabase, Protocol):
    """What commits without waiting for the disk: a database, and a store over it."""

    def flushed(self, losses: int) -> asyncio.Future[None]:
        """Done when everything committed here so far is on disk; fails if that is not so, or if `losses`, taken before
        those commits, has changed by then. Shared by many callers, so it takes some tenths of a second.
        """


class FlushedStore:
    """Base of a store: it flushes as its database does."""

    def __init__(self, connections: Flushed) -> None:
        self._connections = connections

    @property
    def connection_losses(self) -> int:
        """How many connections to the database have ended by themselves: unflushed commits may be lost with them."""
        return self._connections.connection_losses

    @property
    def servers(self) -> int:
        """How often it was another server, or one that was started anew."""
        return self._connections.servers

    async def flush(self) -> None:
        """Return when everything that was committed is on disk."""
        await self._connections.flush()

    def flushed(self, losses: int) -> asyncio.Future[None]:
        """Done when everything that was committed so far is on disk."""
        return self._connections.flushed(losses)


class FlushingCommit(Struct, kw_only=True):
    """A commit that may flush earlier commits."""

    wanted: bool  # something waits for a flush
    # set when the commit has written something and is on disk; one that wrote nothing flushes nothing
    is_done: bool = False


class GroupFlush:
    """The flushes of one database's connections."""

    def __init__(self, database: FlushedDatabase) -> None:
        self._database = database
        self._waiting: list[_Waiter] = []
        self._closed = False
        self._flushes: Batcher[_Waiter] = Batcher(
            self._take,
            self._flush,
            waiting=lambda: len(self._waiting),
            most=MOST_FLUSHES,
            pause_s=lambda: shared_delay_s(asyncio.get_running_loop().time(), BATCH_S) + AFTER_OTHERS_S,
            on_error=lambda _: None,  # all waiters of a flush get its error
        )

    def after(self, losses: int) -> asyncio.Future[None]:
        """Return a future that is done when everything committed so far is on disk. losses: the database's `losses`
        before those commits. The future fails with DatabaseUnavailable when a connection was lost since, or with the
        flush's own error, or is cancelled by `close`: the commits may then be lost, and must be repeated.
        """
        flushed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wait([*self._waiting, (losses, flushed)])
        return flushed

    @contextmanager
    def by_commit(self) -> Iterator[FlushingCommit]:
        """Use this around a commit that begins inside: when the commit is done, all earlier commits are flushed."""
        waiting = self._take()
        commit = FlushingCommit(wanted=bool(waiting))
        try:
            yield commit
        finally:
            if commit.is_done:
                self._end(waiting, None)
            elif waiting:
                self._wait([*waiting, *self._waiting])

    async def close(self) -> None:
        """Stop flushing."""
        self._closed = True
        await self._flushes.close()
        self._end(self._take(), asyncio.CancelledError())

    def _wait(self, waiting: list[_Waiter]) -> None:
        """Have the next flush end these. After `close` there is none."""
        if self._closed:
            self._end(waiting, asyncio.CancelledError())
        else:
            self._waiting = waiting
            self._flushes.wake()

    def _take(self) -> list[_Waiter]:
        waiting, self._waiting = self._waiting, []
        return waiting

    async def _flush(self, waiting: Sequence[_Waiter]) -> None:
        try:
            await self._database.flush()
        except BaseException as error:  # all waiters get the error, a cancellation, too
            self._end(waiting, error)
            raise
        self._end(waiting, None)

    def _end(self, waiting: Sequence[_Waiter], error: BaseException | None) -> None:
        for losses, flushed in waiting:
            if flushed.done():
                continue
            if isinstance(error, asyncio.CancelledError):
                flushed.cancel()
            elif error is not None:
                flushed.set_exception(error)
            elif losses != self._database.connection_losses:
                flushed.set_exception(DatabaseUnavailable("a connection was lost before its commits were flushed"))
            else:
                flushed.set_result(None)
