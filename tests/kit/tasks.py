"""Tasks that a test leaves unfinished on a loop that is closed.

Such a task is collected at any later time, in the middle of another test, and runs its `finally` there.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref

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
