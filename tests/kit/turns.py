"""The event loop's turns and tasks."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

# --- counts calls by the turn of the event loop that they are made in


class Turns:
    """Counts calls by the turn of the event loop that they are made in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None, *counted: tuple[Any, str]) -> None:
        self.turn = 0
        self.calls: dict[str, Counter[int]] = defaultdict(Counter)
        for owner, name in counted:
            assert monkeypatch is not None
            monkeypatch.setattr(owner, name, self.counted(name, getattr(owner, name)))

    def counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            self.calls[name][self.turn] += 1
            return method(*args, **more)

        return counted

    def most(self, name: str) -> int:
        return max(self.calls[name].values(), default=0)

    def total(self, name: str) -> int:
        return self.calls[name].total()

    @asynccontextmanager
    async def counting(self) -> AsyncIterator[None]:
        async def count() -> None:
            while True:
                self.turn += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count())
        try:
            yield
        finally:
            counter.cancel()


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and wait for its end; raises what else it ended of."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


# --- tasks that a test leaves unfinished on a loop that is closed
# Such a task is collected at any later time, in the middle of another test, and runs its `finally` there.

# asyncio keeps its tasks in a weak set, which has another name from Python 3.12 on.
_TASKS: weakref.WeakSet[asyncio.Task[object]] = getattr(
    asyncio.tasks, "_scheduled_tasks", getattr(asyncio.tasks, "_all_tasks", weakref.WeakSet())
)
_reported: weakref.WeakSet[asyncio.Task[object]] = weakref.WeakSet()
SNAPSHOTS_TRIED = 1000  # as many as asyncio.all_tasks itself tries


def known() -> list[asyncio.Task[object]]:
    """Every task of every loop of this process, read again where another thread begins one meanwhile.

    :raises RuntimeError: tasks were begun during each of SNAPSHOTS_TRIED readings
    """
    for _ in range(SNAPSHOTS_TRIED - 1):
        with contextlib.suppress(RuntimeError):
            return list(_TASKS)
    return list(_TASKS)


def unfinished() -> list[str]:
    """Each task that can never end, because its loop is closed. Each is reported once."""
    left = [task for task in known() if task.get_loop().is_closed() and not task.done() and task not in _reported]
    _reported.update(left)
    return sorted(repr(task) for task in left)
