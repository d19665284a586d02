"""Handles in batches what arrives one by one: while one batch is under way, further items gather for the next.

The items wait in a line of their owner's, who says how many there are and takes a batch of them; a `Batcher` decides
when. The rule is the same wherever batches are made: in consumers, publishers, flushes and placement's writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import copy_context
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# A batch that takes longer is slow: a server that hangs must not hold up what could be handled beside it.
SLOW_S = 0.05


class Batcher(Generic[T]):
    """Begins the next batch when fewer than `at_once` that are not slow are under way, or when what waits fills a
    batch; never more than `most` at once. A batch that hangs therefore holds up no other.
    """

    # Batches are tasks in the context in which the Batcher was made.

    def __init__(
        self,
        take: Callable[[], Sequence[T]],  # the next batch of the items; empty: nothing is left
        # handles one batch; ends the entries of its batch when cancelled
        handle: Callable[[Sequence[T]], Awaitable[None]],
        *,
        waiting: Callable[[], int],  # how many items may be taken now
        most: int,
        at_once: int = 1,
        is_full: Callable[[], bool] = lambda: False,  # whether what waits fills a batch
        slow_s: float = 0.0,  # after so many seconds a batch is slow (0: SLOW_S)
        # seconds to wait before a batch is taken; what arrives then joins it
        pause_s: Callable[[], float] = lambda: 0.0,
        enough: Callable[[], bool] = lambda: False,  # whether there is no pause, or it ends, which each `wake` asks
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,  # waits for a pause
        on_idle: Callable[[], None] = lambda: None,  # called when nothing is under way any more
        # called with what take, pause_s or handle raised: nobody awaits the batches. What was taken before is handled.
        on_error: Callable[[Exception], None],
    ) -> None:
        self.in_progress = 0  # batches
        self.slow = 0  # of these
        self._take = take
        self._handle = handle
        self._waiting = waiting
        self._most = most
        self._at_once = at_once
        self._is_full = is_full
        self._slow_s = slow_s
        self._pause_s = pause_s
        self._enough = enough
        self._sleep = sleep
        self._on_idle = on_idle
        self._on_error = on_error
        self._context = copy_context()
        self._next: asyncio.Task[None] | None = None  # takes the next batch, and has not done so yet
        self._pause: asyncio.Task[None] | None = None  # of this one
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def wake(self) -> None:
        """Something waits: have it taken in the next turn of the event loop, if a batch may begin."""
        if self._next is None and self._may_start():
            self._next = self._spawn(self._start())
        elif self._pause is not None and self._enough():
            self._pause.cancel()

    def start_batch(self, batch: Sequence[T]) -> None:
        """Handle a batch that was made elsewhere, beside those under way."""
        self.in_progress += 1
        self._spawn(self._run(batch))

    @property
    def is_busy(self) -> bool:
        """Whether something is under way, or about to begin."""
        return bool(self._tasks)

    async def idle(self) -> None:
        """Wait until nothing waits and nothing is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Begin no further batch, and cancel those under way. What still waits stays in the owner's line."""
        self._closed = True
        await asyncio.sleep(0)  # a task that is cancelled before its first step would not end its batch
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _may_start(self) -> bool:
        if self._closed or self.in_progress >= self._most:
            return False
        return (self.in_progress - self.slow < self._at_once or self._is_full()) and self._waiting() > 0

    async def _start(self) -> None:
        """Take the next batch and handle it; further ones that may begin, too, are tasks of their own."""
        first: Sequence[T] = ()
        try:
            if not self._enough() and (seconds := self._pause_s()) > 0:
                self._pause = self._spawn(self._sleep(seconds))
                await asyncio.wait((self._pause,))
            while self._may_start() and (batch := self._take()):
                if first:
                    self.start_batch(batch)
                else:
                    self.in_progress += 1
                    first = batch
        except Exception as error:  # the owner decides what it ends
            self._on_error(error)
        finally:
            self._next = self._pause = None
        if first:
            await self._run(first)
        elif not self.in_progress:
            self._on_idle()

    async def _run(self, batch: Sequence[T]) -> None:
        is_slow = False

        def become_slow() -> None:
            nonlocal is_slow
            is_slow = True
            self.slow += 1
            self.wake()

        timer = asyncio.get_running_loop().call_later(self._slow_s or SLOW_S, become_slow)
        try:
            await self._handle(batch)
        except Exception as error:  # the owner decides what it ends
            self._on_error(error)
        finally:
            timer.cancel()
            self.in_progress -= 1
            self.slow -= is_slow
        self.wake()
        if not self.in_progress and self._next is None:
            self._on_idle()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
