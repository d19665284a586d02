"""Tasks that are left on a closed loop are named."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.kit import tasks
from tests.kit.tasks import unfinished


def test_a_task_of_a_closed_loop_is_named_once() -> None:
    loop = asyncio.new_event_loop()
    left = loop.create_task(asyncio.Event().wait(), name="left-behind")
    loop.run_until_complete(asyncio.sleep(0))
    assert unfinished() == []
    loop.close()
    (named,) = unfinished()
    assert "left-behind" in named
    assert unfinished() == []
    left._log_destroy_pending = False  # type: ignore[attr-defined]  # this one is left on purpose


class ChangedWhileRead(set["asyncio.Task[object]"]):
    """A set that another thread's loop adds to while it is read the first time."""

    readings = 0

    def __iter__(self) -> Iterator[asyncio.Task[object]]:
        self.readings += 1
        yield from super().__iter__()
        if self.readings == 1:
            raise RuntimeError("Set changed size during iteration")


def test_the_tasks_are_read_again_when_another_thread_begins_one_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = ChangedWhileRead()
    monkeypatch.setattr(tasks, "_TASKS", changed)
    assert unfinished() == [] and changed.readings == 2
