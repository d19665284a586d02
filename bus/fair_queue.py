"""Turns of several projects, counted in requests (a batch counts its items, a gang its machines) and bytes. Each
waiting project has its turn before another has a second one of the same size. What has begun is bounded, in all and for
one project, because what follows waits behind it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

T = TypeVar("T")

# So many bytes count as a request: the usual one is shorter.
BYTES_PER_REQUEST = 1024
# What may have started: a fifth of a second's work of the schedulers. And of one project, so that several go on at
# once.
MAX_STARTED = 512
MAX_STARTED_BY_ONE = 64
# Projects that are remembered before those are forgotten of which nothing waits: what they had counts no more.
MAX_IDLE = 1024
# A turn that has lasted this long counts as begun no more: what one project waits for keeps no other waiting.
MAX_TURN_S = 0.5


def cost_of(requests: int, size: int) -> int:
    """Return how many requests something counts as. size: its bytes."""
    return max(1, requests, math.ceil(size / BYTES_PER_REQUEST))


class _Line(Generic[T]):
    __slots__ = ("had", "started", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, T]] = deque()
        self.had = self.started = 0


class FairQueue(Generic[T]):
    """What waits, by project, and which of it is next."""

    def __init__(self, most: int = MAX_STARTED, most_of_one: int = MAX_STARTED_BY_ONE) -> None:
        # most, most_of_one: what may have begun; a larger one begins all the same, where nothing else has
        self._most = most
        self._most_of_one = most_of_one
        self._lines: dict[str, _Line[T]] = {}
        self._started = 0
        self._floor = 0  # what the project had that began last
        self._drop_idle_from = MAX_IDLE

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    def put(self, project: str, cost: int, item: T) -> None:
        """Have something wait, behind what waits of its project."""
        if project not in self._lines:
            self._drop_idle()
            self._lines[project] = _Line()
        line = self._lines[project]
        if not line.waiting:
            line.had = max(line.had, self._floor)  # a project that had nothing to begin has saved up nothing
        line.waiting.append((cost, item))

    def take(self) -> T | None:
        """Begin what is next; None: nothing may begin now."""
        if self._started >= self._most:
            return None
        ready = [line for line in self._lines.values() if line.waiting and line.started < self._most_of_one]
        if not ready:
            return None
        line = min(ready, key=lambda one: one.had)
        self._floor = line.had
        cost, item = line.waiting.popleft()
        line.had += cost
        line.started += cost
        self._started += cost
        return item

    def end(self, project: str, cost: int) -> None:
        """Something that has begun counts no more."""
        line = self._lines[project]
        line.started -= cost
        self._started -= cost

    def drop(self, project: str, cost: int, item: T) -> None:
        """Something that waits is not to begin."""
        self._lines[project].waiting.remove((cost, item))

    def _drop_idle(self) -> None:
        if len(self._lines) < self._drop_idle_from:
            return
        self._lines = {project: line for project, line in self._lines.items() if line.waiting or line.started}
        self._drop_idle_from = max(MAX_IDLE, 2 * len(self._lines))


class _Turn:
    __slots__ = ("has_started", "started")

    def __init__(self, started: asyncio.Future[None]) -> None:
        self.started = started
        self.has_started = False


class Turns:
    """A fair queue of tasks."""

    def __init__(self, most: int = MAX_STARTED, most_of_one: int = MAX_STARTED_BY_ONE) -> None:
        self._queue: FairQueue[_Turn] = FairQueue(most, most_of_one)

    @asynccontextmanager
    async def turn(self, project: str, cost: int) -> AsyncIterator[None]:
        """Wait for a turn, and have it while the block runs, at most for MAX_TURN_S."""
        loop = asyncio.get_running_loop()
        turn = _Turn(loop.create_future())
        self._queue.put(project, cost, turn)
        self._start()

        def end() -> None:
            if turn.has_started:
                turn.has_started = False
                self._queue.end(project, cost)
                self._start()

        try:
            await turn.started
        except asyncio.CancelledError:
            if turn.has_started:  # it was cancelled just as it began
                end()
            else:
                self._queue.drop(project, cost, turn)
            raise
        limit = loop.call_later(MAX_TURN_S, end)
        try:
            yield
        finally:
            limit.cancel()
            end()

    def _start(self) -> None:
        while (turn := self._queue.take()) is not None:
            turn.has_started = True
            if not turn.started.done():
                turn.started.set_result(None)
