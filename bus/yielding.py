"""Long work in parts, between which the event loop runs other tasks."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable
from contextvars import Context
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

# The rows that are worked on in one turn with what comes before and after: 5 ms.
ROWS_AT_ONCE = 500


class _Yields:
    """One event loop's turns for long work: one task goes on in each, the one that waited longest first. Several parts
    in one turn would add up, those of two batches and a list of hosts to 30 ms. A task that waits alone goes on in the
    next turn.
    """

    # A turn is passed on by the loop, in a context of no task: a task that never goes on (in the simulation its process
    # may be killed or paused) holds up no other.

    def __init__(self) -> None:
        self._context = Context()
        self._is_taken = False  # the next turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        if not self._is_taken:
            self._is_taken = True
            asyncio.get_running_loop().call_soon(self._pass_on, context=self._context)
            await asyncio.sleep(0)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._pass_on, context=self._context)
                return
        self._is_taken = False


_yields: WeakKeyDictionary[asyncio.AbstractEventLoop, _Yields] = WeakKeyDictionary()


async def yield_to_loop() -> None:
    """Wait for a turn of the event loop in which no other long work goes on that waited here as well."""
    loop = asyncio.get_running_loop()
    turns = _yields.get(loop)
    if turns is None:
        turns = _yields[loop] = _Yields()
    await turns.wait()


async def yield_for(rows: int) -> None:
    """Wait for the next turn (`yield_to_loop`) before work on many rows: what came before was as long."""
    if rows > ROWS_AT_ONCE:
        await yield_to_loop()


class YieldingParts(Generic[T]):
    """The items in order, in lists of at most `most`. Other tasks run between two lists (`yield_to_loop`).

    It is no generator: one that is left early is closed by a task of its own.
    """

    def __init__(self, items: Iterable[T], most: int) -> None:
        self._rest = iter(items)
        self._most = most
        self._begun = False

    def __aiter__(self) -> YieldingParts[T]:
        return self

    async def __anext__(self) -> list[T]:
        part = list(itertools.islice(self._rest, self._most))
        if not part:
            raise StopAsyncIteration
        if self._begun:
            await yield_to_loop()
        self._begun = True
        return part
