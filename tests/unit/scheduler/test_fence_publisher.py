"""Publishing one fence takes time, and cells lift others meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.stall_watch import StallWatch
from bus.contracts.base import Message
from bus.contracts.fences import CellFence
from bus.contracts.objects import FenceRecord
from scheduler_worker import fences
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.fences import FencePublisher
from scheduler_worker.objects import ObjectRegistry
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_table import MemoryBuildTable
from tests.unit.scheduler.hosts import Hosts

PATIENCE_S = 20.0
FENCED = FenceRecord(host="h", cell="c1", version=2)
FIRST, SECOND = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab")


class CellBus(Bus):
    """Where commands of fences go. meanwhile: happens while one is published."""

    def __init__(self, meanwhile: Callable[[str], None]) -> None:
        self.name = "c1"
        self._meanwhile = meanwhile

    async def publish(self, message: Message, *, cause: str | None = None) -> None:
        assert isinstance(message, CellFence)
        self._meanwhile(message.host_uuid)


async def test_a_fence_that_is_lifted_while_another_is_published_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 1795360394: the task ended with a KeyError, and its scheduler with it."""
    monkeypatch.setattr(fences, "REPUBLISH_S", 0.001)
    store = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    registry = ObjectRegistry(
        store, Hosts([]).selector, SchedulerConfig(), clock=SystemClock(), stall_watch=StallWatch()
    )
    registry.fences = {FIRST: FENCED, SECOND: FENCED}
    published: list[str] = []
    twice = asyncio.Event()

    def lifted(host_uuid: str) -> None:
        published.append(host_uuid)
        registry.fences = {FIRST: FENCED}
        if len(published) == 2:
            twice.set()

    task = asyncio.create_task(FencePublisher(registry, {"c1": CellBus(lifted)}, clock=SystemClock()).run())
    waiting = asyncio.create_task(twice.wait())
    await asyncio.wait([task, waiting], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    assert not task.done(), task
    assert published == [FIRST, FIRST]
    task.cancel()
    waiting.cancel()
