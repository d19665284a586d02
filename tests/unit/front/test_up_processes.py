"""How many processes suit a machine, and how often one that dies is started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from berth.commands import processes as commands
from berth.settings import CellSettings, Settings, UpSettings
from berth.site import Site
from berth.trial import up_processes as supervisor_module
from berth.trial.embedded.process import Account, GuardedProcess, ServerFailed
from berth.trial.up_processes import (
    MAX_DEATHS,
    WITHIN_S,
    ProcessCounts,
    RunningProcesses,
    Supervisor,
    computes_on_record,
    numbers,
    start,
    supervised,
)
from berth.trial.worker_processes import Worker, WorkerProcesses
from tests.unit.front.world import HandClock

PATIENCE_S = 30.0
NOTHING: dict[str, int | None] = {"schedulers": None, "placements": None, "conductors": None, "computes": None}


@pytest.mark.parametrize(
    ("cpus", "cells", "expected"),
    [
        (1, 2, ProcessCounts(schedulers=1, placements=1, conductors=1, computes=1)),
        (2, 4, ProcessCounts(schedulers=1, placements=1, conductors=1, computes=1)),
        (16, 2, ProcessCounts(schedulers=4, placements=4, conductors=2, computes=2)),
        (128, 1, ProcessCounts(schedulers=16, placements=16, conductors=8, computes=8)),
    ],
)
def test_numbers_suit_the_machine(cpus: int, cells: int, expected: ProcessCounts) -> None:
    assert numbers(cpus, cells, UpSettings(), NOTHING) == expected


def test_each_compute_service_that_has_machines_here_is_started_again(tmp_path: Path) -> None:
    """`berth up` has two for each cell; `berth up --processes` started one, and the other was silent."""
    for name in ("cell1.cell1-c2", "cell1.cell1-metal", "gone.gone-c7", "cell1.cell2-c5", "x.y.x.y-c3"):
        (tmp_path / f"{name}.machines").touch()
    assert computes_on_record(tmp_path, ("cell1", "cell2")) == 2
    assert computes_on_record(tmp_path, ("x.y",)) == 3
    assert computes_on_record(tmp_path / "none", ("cell1",)) == 0
    assert numbers(2, 2, UpSettings(), NOTHING, earlier=2).computes == 2
    assert numbers(16, 2, UpSettings(), NOTHING, earlier=1).computes == 2, "no fewer than suit the machine"
    assert numbers(2, 2, UpSettings(), {**NOTHING, "computes": 1}, earlier=2).computes == 1
    assert numbers(2, 2, UpSettings(computes_per_cell=3), NOTHING, earlier=4).computes == 3


def test_settings_come_before_what_suits_and_options_before_both() -> None:
    up = UpSettings(schedulers=3, placements=5)
    found = numbers(2, 2, up, {**NOTHING, "placements": 7})
    assert found == ProcessCounts(schedulers=3, placements=7, conductors=1, computes=1)
    assert found.total(2) == 14


class ShortLived(WorkerProcesses):
    """Worker processes that end at once, in the same kind of process as real ones."""

    def start(self, name: str, *arguments: str, settings: Mapping[str, str] | None = None) -> Worker:
        log = self.directory / f"{name}.log"
        process = GuardedProcess(
            ["/bin/sh", "-c", "echo I fell; exit 7"],
            env=dict(os.environ),
            cwd=self.directory,
            log=log,
            account=Account(),
        )
        self.workers[name] = Worker(
            name=name, arguments=arguments, port=1, log=log, process=process, settings=settings or {}
        )
        return self.workers[name]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[ShortLived]:
    processes = ShortLived(tmp_path, {})
    processes.start("scheduler1", "scheduler", settings={"BERTH_X": "1"})
    try:
        yield processes
    finally:
        processes.stop()


async def died(processes: WorkerProcesses, name: str = "scheduler1") -> Worker:
    async with asyncio.timeout(20):
        while processes.workers[name].process.running:  # noqa: ASYNC110  (a process does not announce its end)
            await asyncio.sleep(0.01)
    return processes.workers[name]


async def test_a_dead_worker_is_started_again_with_what_it_had_and_not_for_ever(processes: ShortLived) -> None:
    clock, logged = HandClock(), list[str]()
    supervisor = Supervisor(processes, clock=clock, notify=logged.append)
    before = await died(processes)
    supervisor.check_workers()
    again = processes.workers["scheduler1"]
    assert again.process is not before.process
    assert (again.arguments, again.settings) == (("scheduler",), {"BERTH_X": "1"})
    for _ in range(MAX_DEATHS - 1):
        fallen = await died(processes)
        supervisor.check_workers()
        assert processes.workers["scheduler1"] is fallen, "a pause first"
        clock.now += supervisor_module.LONGEST_PAUSE_S
        supervisor.check_workers()
        assert processes.workers["scheduler1"] is not fallen
    await died(processes)
    with pytest.raises(ServerFailed, match=r"(?s)status 7, 5 times within 60 s.*I fell"):
        supervisor.check_workers()
    assert len(logged) == MAX_DEATHS and all("scheduler1 died with status 7" in one for one in logged)


async def test_deaths_long_ago_are_forgiven(processes: ShortLived) -> None:
    clock = HandClock()
    supervisor = Supervisor(processes, clock=clock, notify=lambda logged: None)
    for _ in range(MAX_DEATHS + 2):
        fallen = await died(processes)
        supervisor.check_workers()
        assert processes.workers["scheduler1"] is not fallen, "at once: it had lived long enough"
        clock.now += WITHIN_S + 1


async def test_supervision_ends_on_request_or_when_it_fails(processes: ShortLived) -> None:
    stop = asyncio.Event()
    stop.set()
    await supervised(Supervisor(processes, clock=HandClock(), notify=lambda logged: None), stop)
    clock = HandClock()
    with pytest.raises(ServerFailed):
        await supervised(Supervisor(processes, clock=clock, notify=lambda logged: None), asyncio.Event())


async def test_item_29_a_signal_while_a_worker_is_waited_for_ends_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(*_: Any, **options: Any) -> AsyncIterator[None]:
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.Event().wait()
        yield

    monkeypatch.setattr(commands, "_prepare", lambda _: (Settings(state_dir=str(tmp_path)), stop))
    monkeypatch.setattr(commands, "running", running)
    with pytest.raises(KeyboardInterrupt):
        await commands._up_processes(cast("Any", None), NOTHING, as_json=True)


async def test_item_29_a_worker_that_dies_again_and_again_is_reported_and_ends_up(
    processes: ShortLived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, logged, settings = asyncio.Event(), list[str](), Settings(state_dir=str(tmp_path), up=UpSettings(web=False))

    @contextlib.asynccontextmanager
    async def running(*_: Any, **options: Any) -> AsyncIterator[RunningProcesses]:
        site = Site(settings, clock=HandClock())
        yield RunningProcesses(processes=processes, site=site, logs=tmp_path, ironic_url="")

    monkeypatch.setattr(commands, "_prepare", lambda _: (settings, stop))
    monkeypatch.setattr(commands, "running", running)
    monkeypatch.setattr(commands, "as_processes", lambda *_: {})
    monkeypatch.setattr(commands, "_warn", logged.append)
    asyncio.get_running_loop().call_later(PATIENCE_S, stop.set)
    with pytest.raises(ServerFailed, match="scheduler1 died with status 7, 5 times"):
        await commands._up_processes(cast("Any", None), NOTHING, as_json=True)
    assert len(logged) == MAX_DEATHS and "scheduler1 died with status 7; started again" in logged[0]


class OrderOfStart(WorkerProcesses):
    """Starts nothing, and keeps the order."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, {})
        self.order: list[str] = []

    def start(self, name: str, *arguments: str, settings: Mapping[str, str] | None = None) -> Worker:
        self.order.append(name)
        return cast("Worker", None)

    async def ready(self, names: Sequence[str] | None = None, *, timeout_s: float = 0.0) -> None:
        self.order.append("ready")


async def test_placement_is_ready_before_the_first_compute_service_reports_to_it(tmp_path: Path) -> None:
    """A report that found no queue was tried again after up to ten seconds; nothing was built there meanwhile."""
    processes = OrderOfStart(tmp_path)
    count = ProcessCounts(schedulers=1, placements=2, conductors=1, computes=2)
    started = await start(processes, Settings(cells={"c1": CellSettings(), "c2": CellSettings()}), count, "")
    assert processes.order[:3] == ["placement1", "placement2", "ready"]
    assert started == {"c1": ["c1-c1", "c1-c2"], "c2": ["c2-c1", "c2-c2"]}
    assert {f"compute-{name}" for names in started.values() for name in names} < set(processes.order[3:])
