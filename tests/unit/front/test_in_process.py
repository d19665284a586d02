"""Workers side by side in one process: one that dies is reported with its reason, and at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from berth.commands import processes
from berth.in_process import InProcessWorkers, WorkerEnded
from berth.rest_address import AtUp
from berth.settings import Settings, UpSettings
from berth.site import Brokers, Site
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


class TwoWorkers:
    """A system of two workers, started one after the other."""

    def __init__(self, first: Service, second: Service) -> None:
        self.pair = (("a", first), ("b", second))
        self.in_process = InProcessWorkers()
        self.computes, self.services = (), dict[str, list[str]]()
        self.site: Site

    def __call__(self, here: Site) -> TwoWorkers:
        self.site = here
        return self

    async def start(self, *, ironic_url: str | None = None) -> None:
        for one in self.pair:
            await self.in_process.start(one)


Up = Callable[[TwoWorkers, asyncio.Event], Awaitable[int]]


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Up:
    """`berth up` of these workers, without database and Ironic, until the event."""
    settings = Settings(state_dir=str(tmp_path), up=UpSettings(web=False))

    @contextlib.asynccontextmanager
    async def here(*_: object, **options: object) -> AsyncIterator[Site]:
        yield Site(settings, brokers=Brokers(SystemClock()), database_url="")

    @contextlib.asynccontextmanager
    async def no_ironic(_: Site) -> AsyncIterator[str]:
        yield ""

    def up_here(system: TwoWorkers, stop: asyncio.Event) -> Awaitable[int]:
        monkeypatch.setattr(processes, "LocalSystem", system)
        return processes._up_here(AtUp(settings=settings), stop, as_json=True)

    monkeypatch.setattr(processes, "site", here)
    monkeypatch.setattr(processes, "ironic_of", no_ironic)
    return up_here


async def test_item_29_a_signal_while_a_worker_is_waited_for_stops_all_and_ends_up(up: Up) -> None:
    """The start would go on until the worker is ready, or a minute has passed."""
    stop, first, second = asyncio.Event(), lasting(), Service("late", clock=SystemClock())

    async def wait() -> None:
        stop.set()
        await asyncio.Event().wait()

    async def close() -> None: ...

    second.add_resource(wait, close)
    async with asyncio.timeout(PATIENCE_S):
        assert await up(TwoWorkers(first, second), stop) == 0
    assert (first.phase, second.phase) == ("closed", "closed")


async def test_item_29_a_worker_that_dies_later_ends_up_with_its_reason(
    up: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies, first = asyncio.Event(), lasting()
    monkeypatch.setattr(processes, "_print_summary", lambda *_: dies.set())  # everything is up
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(WorkerEnded, match="worker b ended: its side is gone"):
            await up(TwoWorkers(first, dying(dies)), asyncio.Event())
    assert first.phase == "closed"
