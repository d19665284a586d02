"""What the scheduler's loops wait for, and what its handlers remember."""

from __future__ import annotations

import asyncio

import pytest

from bus.clock import SystemClock
from bus.consuming.outcome import Refuse
from scheduler_worker import changes
from scheduler_worker.changes import REFUSED_BEFORE, RefusedCommands
from scheduler_worker.keepers import changed_within
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.sent import Sent
from tests.kit.virtual_time import on_virtual_time


@pytest.mark.parametrize(
    ("seconds", "changes_after_s", "changed", "took_s"),
    [
        (-1.0, None, False, 0.0), (0.0, None, False, 0.0), (2.0, None, False, 2.0), (2.0, 1.0, True, 1.0),
        (None, 5.0, True, 5.0), (2.0, 0.0, True, 0.0),
    ],
)  # fmt: skip
def test_a_change_is_waited_for_and_cleared(
    seconds: float | None, changes_after_s: float | None, changed: bool, took_s: float
) -> None:
    @on_virtual_time
    async def test() -> None:
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        if changes_after_s is not None:
            loop.call_later(changes_after_s, event.set)
            await asyncio.sleep(0)
        begun_s = loop.time()
        assert await changed_within(event, seconds) is changed
        assert loop.time() - begun_s == pytest.approx(took_s, abs=1e-3)
        assert not event.is_set()

    test()


async def test_of_so_many_refusals_the_newest_reasons_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_REASONS", 2)
    store = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    store.publish_through(Sent())  # type: ignore[arg-type]
    await store.open()
    refused = RefusedCommands(store)
    for number in range(4):
        await refused.add(f"m{number}", Refuse(f"code.{number}", "no"))
    found = [await refused.find(f"m{number}") for number in range(5)]
    assert [one and one.code for one in found] == [REFUSED_BEFORE, REFUSED_BEFORE, "code.2", "code.3", None]
    await store.close()
