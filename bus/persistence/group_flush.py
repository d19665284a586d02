"""One flush for all who have committed without waiting for the disk.

A handler whose commits may be done again hands its messages back at once, and they are acknowledged when a flush that
came after those commits is done: four flushes a second, however many batches there are, and at the same times in all
processes of a machine, so that one flush of the disk serves all of them.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from bus.clock import shared_delay_s
from bus.faults import DatabaseUnavailable

# Acknowledgements gather for longer than this anyway (bus.rabbitmq.delivery), so no task waits for it. What is not
# acknowledged counts against the prefetch, so it cannot be much longer.
GATHER_S = 0.25


class FlushedDatabase(Protocol):
    """What it flushes."""

    @property
    def losses(self) -> int:
        """How many connections have ended by themselves; the server may have restarted, and forgotten what it could."""

    async def flush(self) -> None:
        """Return when everything that was committed here before is on disk. Raises Transient."""


class GroupFlush:
    """The flushes of one database's connections."""

    def __init__(self, database: FlushedDatabase) -> None:
        self._database = database
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    def after(self, losses: int) -> asyncio.Future[None]:
        """Done when everything committed so far is on disk.

        losses: the database's before those commits. It fails with DatabaseUnavailable when a connection was lost since,
        with what the flush raised, or is cancelled by `close`: then those commits may be lost and are to be done again.
        """
        loop = asyncio.get_running_loop()
        flushed: asyncio.Future[None] = loop.create_future()
        self._waiting.append((losses, flushed))
        if self._task is None:
            self._task = loop.create_task(self._flush())
        return flushed

    async def close(self) -> None:
        """Flush no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._end(self._waiting, asyncio.CancelledError())
        self._waiting = []

    async def _flush(self) -> None:
        while self._waiting:
            await asyncio.sleep(shared_delay_s(asyncio.get_running_loop().time(), GATHER_S))
            waiting, self._waiting = self._waiting, []
            try:
                await self._database.flush()
            except BaseException as error:  # all who wait get it, a cancellation too
                self._end(waiting, error)
                if not isinstance(error, Exception):
                    raise
            else:
                self._end(waiting, None)
        self._task = None

    def _end(self, waiting: list[tuple[int, asyncio.Future[None]]], error: BaseException | None) -> None:
        for losses, flushed in waiting:
            if flushed.done():
                continue
            if isinstance(error, asyncio.CancelledError):
                flushed.cancel()
            elif error is not None:
                flushed.set_exception(error)
            elif losses != self._database.losses:
                flushed.set_exception(DatabaseUnavailable("a connection was lost before what it committed was flushed"))
            else:
                flushed.set_result(None)
