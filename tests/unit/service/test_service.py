"""The lifecycle: its order, its ends, and what a dead side task does."""

from __future__ import annotations

import asyncio

import pytest

from bus.clock import SystemClock
from bus.faults import BrokenInvariant, Fault
from bus.service.service import Service, SideTaskEnded


class Recorder:
    """A consumer, a resource and a list of what happened."""

    queue = "q"

    def __init__(self) -> None:
        self.logged: list[str] = []
        self.ended = asyncio.Event()

    def step(self, name: str) -> object:
        async def run(*_: object) -> None:
            self.logged.append(name)

        return run

    async def start(self) -> None:
        self.logged.append("consume")

    async def drain(self, grace_s: float) -> None:
        self.logged.append("drain consumer")
        self.ended.set()

    async def run(self) -> None:
        await self.ended.wait()


def service_of(recorder: Recorder) -> Service:
    service = Service("test", clock=SystemClock(), grace_s=1.0)
    for name in ("one", "two"):
        service.add_resource(recorder.step(f"open {name}"), recorder.step(f"close {name}"))  # type: ignore[arg-type]
    service.add_declaration(recorder.step("declare"))  # type: ignore[arg-type]
    service.add_preparation(recorder.step("prepare"))  # type: ignore[arg-type]
    service.add_drain(recorder.step("drain relay"))  # type: ignore[arg-type]
    service.add_consumer(recorder)
    return service


async def until_cancelled() -> None:
    await asyncio.Event().wait()


async def test_the_order_of_a_whole_life() -> None:
    recorder = Recorder()
    service = service_of(recorder)
    service.add_task("side", until_cancelled)
    stop = asyncio.Event()
    life = asyncio.create_task(service.run(stop))
    await service.ready.wait()
    assert service.not_ready() == []
    stop.set()
    await life
    assert recorder.logged == [
        "open one", "open two", "declare", "prepare", "consume",
        "drain consumer", "drain relay", "close two", "close one",
    ]  # fmt: skip
    assert service.not_ready() == ["service is closed"]


async def test_a_check_names_what_is_not_ready() -> None:
    service = service_of(Recorder())
    service.add_check("bus api", lambda: False)
    service.add_check("database", lambda: True)
    assert service.not_ready() == ["service is new", "bus api"]


async def test_a_bus_reports_why_nothing_can_be_published_on_it() -> None:
    class UnavailableBusPort:
        unavailable_reason = "not connected"

    service, bus = service_of(Recorder()), UnavailableBusPort()
    service.add_bus_check("bus api", bus)
    assert service.not_ready() == ["service is new", "bus api: not connected"]
    bus.unavailable_reason = ""
    assert service.not_ready() == ["service is new"]


async def test_a_side_task_that_dies_ends_the_service_undrained_with_its_fault() -> None:
    recorder = Recorder()
    service = service_of(recorder)
    die = asyncio.Event()

    async def side() -> None:
        await die.wait()
        raise Fault("gone", code="side.gone")

    service.add_task("side", side)
    life = asyncio.create_task(service.run(asyncio.Event()))
    await service.ready.wait()
    die.set()
    with pytest.raises(Fault) as caught:
        await life
    assert caught.value.code == "side.gone"
    assert "drain consumer" not in recorder.logged
    assert recorder.logged[-2:] == ["close two", "close one"]


async def test_a_side_task_that_just_ends_is_a_fault_too() -> None:
    service = service_of(Recorder())

    async def side() -> None:
        return

    service.add_task("side", side)
    with pytest.raises(SideTaskEnded):
        await service.run(asyncio.Event())


async def test_of_a_group_the_broken_invariant_is_reported() -> None:
    service = service_of(Recorder())

    async def side() -> None:
        raise ExceptionGroup("both", [KeyError("other"), BrokenInvariant("used > capacity")])

    service.add_task("side", side)
    with pytest.raises(BrokenInvariant):
        await service.run(asyncio.Event())


async def test_a_consumer_that_dies_ends_the_service() -> None:
    class Dying(Recorder):
        async def run(self) -> None:
            raise BrokenInvariant("handler")

    service = service_of(Dying())
    with pytest.raises(BrokenInvariant):
        await service.run(asyncio.Event())


async def test_stop_while_a_resource_waits_to_open_closes_what_was_opened() -> None:
    recorder = Recorder()
    service = service_of(recorder)
    waits = asyncio.Event()

    async def opening() -> None:
        waits.set()
        await until_cancelled()

    service.add_resource(opening, recorder.step("close waiting"))  # type: ignore[arg-type]
    stop = asyncio.Event()
    life = asyncio.create_task(service.run(stop))
    await waits.wait()
    stop.set()
    await life
    assert recorder.logged == ["open one", "open two", "close waiting", "close two", "close one"]


async def test_a_resource_that_cannot_open_raises_and_the_opened_ones_close() -> None:
    recorder = Recorder()
    service = service_of(recorder)

    async def opening() -> None:
        raise Fault("no", code="resource.no")

    service.add_resource(opening, recorder.step("close failed"))  # type: ignore[arg-type]
    with pytest.raises(Fault, match="no"):
        await service.run(asyncio.Event())
    assert recorder.logged == ["open one", "open two", "close failed", "close two", "close one"]


async def test_a_closing_that_fails_does_not_keep_the_others_open() -> None:
    recorder = Recorder()
    service = service_of(recorder)

    async def closing() -> None:
        raise OSError("broken pipe")

    service.add_resource(recorder.step("open three"), closing)  # type: ignore[arg-type]
    stop = asyncio.Event()
    life = asyncio.create_task(service.run(stop))
    await service.ready.wait()
    stop.set()
    await life
    assert recorder.logged[-2:] == ["close two", "close one"]


async def test_a_closing_that_hangs_keeps_no_other_open_in_a_service_that_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A killed compute service had not closed its connection, which held its name: the next one waited in vain."""
    monkeypatch.setattr("bus.service.service.CLOSE_TIMEOUT_S", 0.01)
    recorder = Recorder()
    service = service_of(recorder)
    service.add_resource(recorder.step("open slow"), until_cancelled)  # type: ignore[arg-type]
    life = asyncio.create_task(service.run(asyncio.Event()))
    await service.ready.wait()
    life.cancel()
    with pytest.raises(asyncio.CancelledError):
        await life
    assert recorder.logged[-2:] == ["close two", "close one"]
    assert service.phase == "closed"


async def test_a_side_task_dead_while_draining_is_reported_after_the_drain() -> None:
    recorder = Recorder()
    service = service_of(recorder)
    draining, dead = asyncio.Event(), asyncio.Event()

    async def side() -> None:
        await draining.wait()
        dead.set()
        raise Fault("late", code="side.late")

    async def drain(grace_s: float) -> None:
        draining.set()
        await dead.wait()

    service.add_task("side", side)
    service.add_drain(drain)
    stop = asyncio.Event()
    life = asyncio.create_task(service.run(stop))
    await service.ready.wait()
    stop.set()
    with pytest.raises(Fault, match="late"):
        await life
    assert recorder.logged[-1] == "close one"
