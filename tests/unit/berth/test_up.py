"""berth up: how many processes, how one that dies is started again, when it is up, and what it prints."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from msgspec.structs import replace

from berth.cli.fleet import status as commands
from berth.cli.fleet.status import as_processes, block, one_process
from berth.cli.output import Form
from berth.config.ports import ServerFailed, free_port
from berth.config.rest_address import AtUp
from berth.config.settings import CellSettings, Settings, UpSettings
from berth.config.site import Brokers, Site
from berth.up import in_processes as supervisor_module
from berth.up.embedded.process import Account, GuardedProcess
from berth.up.in_one_process import WAIT_S, message_of, unusable_hosts
from berth.up.in_processes import (
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
from berth.up.worker_processes import Worker, WorkerProcesses
from bus.clock import SystemClock, new_uuid
from bus.consuming.consumer import Consumer
from bus.contracts.cell import ServiceDown, ServiceStates
from bus.service.health import Health
from placement_worker.rest.config import RestConfig
from scheduler_worker.hosts.worker_table import WorkerTable
from scheduler_worker.queries.status_queries import StatusHandler
from tests.kit.waiting import wait_until
from tests.unit.berth.world import HandClock
from tests.unit.scheduler_worker.hosts import Hosts

# --- how many processes suit a machine, and how often one that dies is started again


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
    """Worker processes that have ended when they are started, so that no clock runs ahead of them."""

    def start(self, name: str, *arguments: str, settings: Mapping[str, str] | None = None) -> Worker:
        log = self.directory / f"{name}.log"
        process = GuardedProcess(
            ["/bin/sh", "-c", "echo I fell; exit 7"],
            env=dict(os.environ),
            cwd=self.directory,
            log=log,
            account=Account(),
        )
        wait_until(lambda: not process.running)
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


def test_a_dead_worker_is_started_again_with_what_it_had_and_not_for_ever(processes: ShortLived) -> None:
    clock, logged = HandClock(), list[str]()
    supervisor = Supervisor(processes, clock=clock, notify=logged.append)
    before = processes.workers["scheduler1"]
    supervisor.check_workers()
    again = processes.workers["scheduler1"]
    assert again.process is not before.process
    assert (again.arguments, again.settings) == (("scheduler",), {"BERTH_X": "1"})
    for _ in range(MAX_DEATHS - 1):
        fallen = processes.workers["scheduler1"]
        supervisor.check_workers()
        assert processes.workers["scheduler1"] is fallen, "a pause first"
        clock.now += supervisor_module.LONGEST_PAUSE_S
        supervisor.check_workers()
        assert processes.workers["scheduler1"] is not fallen
    with pytest.raises(ServerFailed, match=r"(?s)status 7, 5 times within 60 s.*I fell"):
        supervisor.check_workers()
    assert len(logged) == MAX_DEATHS and all("scheduler1 died with status 7" in one for one in logged)


def test_deaths_long_ago_are_forgiven(processes: ShortLived) -> None:
    clock = HandClock()
    supervisor = Supervisor(processes, clock=clock, notify=lambda logged: None)
    for _ in range(MAX_DEATHS + 2):
        fallen = processes.workers["scheduler1"]
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
        await commands._up_processes(cast("Any", None), NOTHING, form=Form.JSON)


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
    with pytest.raises(ServerFailed, match="scheduler1 died with status 7, 5 times"):
        await commands._up_processes(cast("Any", None), NOTHING, form=Form.JSON)
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


# --- workers as processes: whose answer shows that one is ready


LIVES = ("/bin/sh", "-c", "exec sleep 600")
FALLS = ("/bin/sh", "-c", "echo cannot listen; exit 2")
ANSWERS = """
import asyncio, sys
from bus.service.health import Health

async def main():
    await Health(lambda: sys.argv[2:], port=int(sys.argv[1])).open()
    await asyncio.sleep(600)

asyncio.run(main())
"""
SOON_S = 0.3


class Given(WorkerProcesses):
    """Worker processes that run the given command, at the given port."""

    def begin(self, name: str, command: tuple[str, ...], port: int) -> Worker:
        log = self.directory / f"{name}.log"
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        process = GuardedProcess(command, env=env, cwd=self.directory, log=log, account=Account())
        self.workers[name] = Worker(name=name, arguments=(), port=port, log=log, process=process, settings={})
        return self.workers[name]


@pytest.fixture
async def processes_processes(tmp_path: Path) -> AsyncIterator[Given]:
    made = Given(tmp_path, {})
    yield made
    await asyncio.to_thread(made.stop)


@pytest.fixture
async def other_process() -> AsyncIterator[Health]:
    """A process that is ready, at a port of its own: this one."""
    health = Health(list)
    await health.open()
    yield health
    await health.close()


@pytest.mark.parametrize(
    ("command", "timeout_s", "why"),
    [
        (LIVES, SOON_S, f"not ready after.*compute-cell4-c1: process {os.getpid()} answers"),
        (FALLS, PATIENCE_S, r"(?s)compute-cell4-c1 ended.*cannot listen"),
    ],
    ids=["it lives", "it has ended"],
)
async def test_a_worker_at_whose_port_another_process_answers_is_not_ready(
    processes_processes: Given, other_process: Health, command: tuple[str, ...], timeout_s: float, why: str
) -> None:
    """Two workers had drawn one port; the second died of it, and the first one's answer passed for both.

    Seen: four cells with 2,500 hosts each, all workers "ready", and 7,500 hosts in placement for ever.
    """
    processes_processes.begin("compute-cell4-c1", command, other_process.port)
    with pytest.raises(ServerFailed, match=why):
        await processes_processes.ready(timeout_s=timeout_s)


async def test_every_worker_that_was_waited_for_in_vain_is_named_with_what_it_waits_for(
    processes_processes: Given,
) -> None:
    ports = [free_port(), free_port()]
    processes_processes.begin("scheduler1", (sys.executable, "-c", ANSWERS, str(ports[0]), "replica"), ports[0])
    processes_processes.begin("compute-c1", LIVES, ports[1])
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient() as http:
        answered = False
        while not answered:
            with contextlib.suppress(httpx.HTTPError):
                answered = (await http.get(f"http://127.0.0.1:{ports[0]}/readyz")).status_code == 503
    with pytest.raises(ServerFailed) as fault:
        await processes_processes.ready(timeout_s=SOON_S)
    first = str(fault.value).splitlines()[0]
    assert "scheduler1: replica" in first and f"compute-c1: its port {ports[1]} does not answer" in first


async def test_a_worker_that_answers_itself_is_ready(processes_processes: Given) -> None:
    port = free_port()
    processes_processes.begin("compute-cell4-c1", (sys.executable, "-c", ANSWERS, str(port)), port)
    await processes_processes.ready(timeout_s=PATIENCE_S)
    assert processes_processes.workers["compute-cell4-c1"].process.running


def test_no_two_worker_processes_get_one_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = itertools.chain([5, 5, 5], itertools.count(9))
    monkeypatch.setattr(secrets, "randbelow", lambda _: next(drawn))
    processes = WorkerProcesses(tmp_path, {})
    monkeypatch.setattr(sys, "executable", "/bin/true")
    try:
        ports = [processes.start(name, "compute").port for name in ("one", "two")]
    finally:
        processes.stop()
    assert len(set(ports)) == 2


# --- `berth up` is up when builds can go to every host of the compute services that it started


CELLS = ["cell1", "cell1", "cell2"]
STARTED = {"cell1": ["compute-cell1"], "cell2": ["compute-cell2"]}


class House:
    """A scheduler that answers from its host table and its copy of placement."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.site = Site(Settings(), brokers=Brokers(self.clock), clock=self.clock, seed=1)
        self.hosts = Hosts([{"VCPU": 1}] * 3, cells=CELLS)

    @asynccontextmanager
    async def scheduler(self) -> AsyncIterator[None]:
        unused = cast("Any", None)
        handler = StatusHandler(self.hosts.selector, WorkerTable(), unused, clock=SystemClock())
        bus = self.site.bus("scheduler1")
        await bus.open()
        consumer = Consumer(bus, "scheduler.status", handler)
        await consumer.start()
        try:
            yield
        finally:
            await consumer.drain(1.0)
            await bus.close()

    def announce_one_more(self) -> None:
        """The service of cell1 has a host that placement does not have yet."""
        self.hosts.uuids.append(new_uuid(self.hosts.rng))
        self.hosts.announce([*CELLS, "cell1"], {}, sequence=2)

    def load_all(self) -> None:
        """The host is in placement."""
        added = self.hosts._state(3, {"VCPU": 1}, [])
        self.hosts.replica.load([*self.hosts.states, added], 1)


@pytest.fixture
def house() -> House:
    return House()


async def test_hosts_that_are_announced_and_in_the_book_are_usable_at_once(house: House) -> None:
    began_at = house.clock.now
    async with house.scheduler():
        assert await unusable_hosts(house.site, STARTED) == []
    assert house.clock.now == began_at


async def test_a_host_that_is_not_in_the_book_is_waited_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for one host of each cell: one start in four was followed by no_valid_host."""
    house.announce_one_more()
    began_at, sleep = house.clock.now, house.clock.sleep

    async def sleep_and_load(seconds: float) -> None:
        await sleep(seconds)
        if house.clock.now >= began_at + 8.0:
            house.load_all()

    monkeypatch.setattr(house.clock, "sleep", sleep_and_load)
    async with house.scheduler():
        assert await unusable_hosts(house.site, STARTED) == []
    assert 8.0 <= house.clock.now - began_at < WAIT_S


async def test_what_was_waited_for_in_vain_is_named(house: House) -> None:
    house.announce_one_more()
    down = (ServiceDown(service="compute-cell2", epoch=1, code="service.silent"),)
    house.hosts.table.apply(ServiceStates(cell="cell2", term=1, number=1, down=down), 1.0)
    async with house.scheduler():
        missing = await unusable_hosts(house.site, {**STARTED, "cell3": ["cell3-c1"], "cell4": []})
    assert missing == [
        "compute-cell1 has 3 hosts, of which 2 are in placement",
        "compute-cell2 is down (service.silent)",
        "cell3-c1 has not announced its hosts",
    ]
    assert message_of(missing * 2).endswith("; and 1 more")


async def test_without_a_scheduler_that_is_named(house: House) -> None:
    """Nothing takes the requests of this bus."""
    (missing,) = await unusable_hosts(house.site, STARTED, wait_s=0.0)
    assert missing.startswith("no scheduler answers: ")


# --- the output of `berth up`: where everything answers, what to type next, and no password


URL = "postgresql://berth:hunter2@127.0.0.1:5433/postgres"


def messages_of(settings: Settings, ironic_url: str | None = None, **rest: Any) -> dict[str, Any]:
    here = Site(settings, database_url=URL)
    return one_process(here, ("cell1-c1", "cell2-c1"), ironic_url, AtUp(settings=settings, **rest))


def test_the_api_of_the_default_is_printed_with_its_token_and_why_it_is_not_where_one_looks(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path))
    served = replace(settings, placement=replace(settings.placement, rest=RestConfig(listen="127.0.0.1:9")))
    answer = messages_of(served, token=tmp_path / "placement.token", taken="127.0.0.1:8778")
    line = f"http://127.0.0.1:9 (127.0.0.1:8778 is in use), for the token in {tmp_path}/placement.token"
    assert line in block(answer)
    assert (answer["placement_api"], answer["placement_token"]) == ("http://127.0.0.1:9", f"{tmp_path}/placement.token")


def test_processes_are_printed_with_their_ports() -> None:
    workers = {"scheduler1": {"pid": 1, "port": 4001, "log": "/x"}, "placement1": {"pid": 2, "port": 4002, "log": "/y"}}
    text = block(
        {
            "up": True, "cells": ("a",), "cpus": 2, "numbers": None, "workers": workers, "logs": "/state/logs",
            "bus": "amqp://u:***@h/berth", "database": "d", "placement_api": None, "ironic": None,
        }
    )  # fmt: skip
    assert "berth is up: 2 processes for 2 CPUs" in text
    assert "scheduler1 4001, placement1 4002" in text and "/state/logs" in text and "amqp://u:***@h/berth" in text


def test_servers_are_printed_without_their_passwords(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path))
    settings = replace(settings, bus=replace(settings.bus, url="amqp://berth:hunter2@127.0.0.1:5672/berth"))
    here = Site(settings, database_url=URL)
    running = RunningProcesses(
        processes=WorkerProcesses(tmp_path, {}), site=here, logs=tmp_path / "logs", ironic_url="http://127.0.0.1:6385"
    )
    count = ProcessCounts(schedulers=1, placements=1, conductors=1, computes=1)
    answer = as_processes(running, count, 2, AtUp(settings=settings))
    assert (answer["bus"], answer["database"]) == (
        "amqp://berth:***@127.0.0.1:5672/berth",
        "postgresql://berth:***@127.0.0.1:5433/postgres",
    )
    assert (answer["logs"], answer["cpus"], answer["ironic"]) == (f"{tmp_path}/logs", 2, "http://127.0.0.1:6385")
    in_one = one_process(here, ("cell1-c1",), None, AtUp(settings=settings))
    assert (in_one["bus"], in_one["database"]) == (answer["bus"], answer["database"])
    assert "hunter2" not in str(answer) + str(in_one)
    assert "RabbitMQ amqp://berth:***@127.0.0.1:5672/berth" in " ".join(block(in_one).split())
