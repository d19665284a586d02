"""Tasks that a test leaves unfinished on a loop that is closed.

Such a task is collected at any later time, in the middle of another test, and runs its `finally` there.
"""

from __future__ import annotations

import asyncio
import weakref

# asyncio keeps its tasks in a weak set, which has another name from Python 3.12 on.
_TASKS: weakref.WeakSet[asyncio.Task[object]] = getattr(
    asyncio.tasks, "_scheduled_tasks", getattr(asyncio.tasks, "_all_tasks", weakref.WeakSet())
)
_reported: weakref.WeakSet[asyncio.Task[object]] = weakref.WeakSet()


def unfinished() -> list[str]:
    """Each task that can never end, because its loop is closed. Each is reported once."""
    left = [task for task in list(_TASKS) if task.get_loop().is_closed() and not task.done() and task not in _reported]
    _reported.update(left)
    return sorted(repr(task) for task in left)
