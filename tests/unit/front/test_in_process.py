"""Workers side by side in one process: one that dies is reported with its reason, and at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from berth.in_process import InProcessWorkers, WorkerEnded
from bus.clock import SystemClock
from bus.faults import Fault
from bus.service.service import Service

PATIENCE_S = 30.0  # less than a start waits for workers that are not ready


class Broken(Fault):
    """The fault of the worker that dies."""

    code = "side.gone"


def lasting() -> Service:
    """A worker that runs until it is stopped."""
    service = Service("lasting", clock=SystemClock())
    service.add_task("side", asyncio.Event().wait)
    return service


def dying(when: asyncio.Event) -> Service:
    """A worker that runs until the event."""
    service = Service("dying", clock=SystemClock())

    async def side() -> None:
        await when.wait()
        raise Broken("its side is gone")

    service.add_task("side", side)
    return service


def never_opened() -> Service:
    """A worker whose database refuses it."""
    service = Service("refused", clock=SystemClock())

    async def refuse() -> None:
        raise Broken("no such schema")

    async def close() -> None: ...

    service.add_resource(refuse, close)
    return service


@pytest.fixture
async def workers() -> AsyncIterator[InProcessWorkers]:
    made = InProcessWorkers()
    yield made
    await made.stop()


async def test_item_29_a_worker_that_ends_before_it_is_ready_ends_the_start(workers: InProcessWorkers) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(WorkerEnded, match="worker b ended: no such schema") as ended:
            await workers.start(("a", lasting()), ("b", never_opened()))
    assert isinstance(ended.value.__cause__, Broken)
    workers.members.pop("b")


async def test_item_29_a_worker_that_dies_later_is_reported(workers: InProcessWorkers) -> None:
    dies = asyncio.Event()
    await workers.start(("a", lasting()), ("b", dying(dies)))
    assert not workers.failed.done()
    dies.set()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(WorkerEnded, match="worker b ended: its side is gone"):
            await workers.failed
    workers.members.pop("b")
