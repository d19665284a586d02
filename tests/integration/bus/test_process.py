"""A worker as a process: its ends, and its watchdog."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from berth.up.embedded.process import Account, GuardedProcess
from berth.up.in_processes import ABORT_S, Supervisor
from berth.up.worker_processes import WatchdogPings, WorkerProcesses
from berth.up.worker_processes import Worker as WorkersWorker
from tests.kit.waiting import until
from tests.unit.berth.world import HandClock

# --- a worker as a real process: ready, drained by SIGTERM, ended at once by a second one, and its exit statuses


PATIENCE_S = 60.0

WORKER = """
import asyncio, random, sys
from functools import partial
from bus.clock import SystemClock
from bus.faults import BrokenInvariant, Fault
from bus.memory import MemoryBroker, MemoryTransport
from bus.transport import BusRightsMissing
from bus.service.environment import Environment
from bus.service.main import run_process
from bus.service.service import WorkerRuntime

how = sys.argv[1]

def build(env):
    service = WorkerRuntime("worker", clock=env.clock, grace_s=20.0)
    bus = env.bus("api")
    service.add_resource(bus.open, bus.close)
    service.add_check("bus api", lambda: bus.transport.connected)
    async def side():
        if how == "invariant":
            raise BrokenInvariant("used > capacity")
        if how == "fault":
            raise Fault("gone", code="side.gone")
        if how == "rights":
            raise BusRightsMissing("taken away")
        await asyncio.Event().wait()
    async def slow(grace_s):
        print("draining", flush=True)
        if how == "slow":
            await asyncio.Event().wait()
    service.add_task("side", side)
    service.add_drain(slow)
    if how == "reload":
        service.on_reload = lambda: print("reloaded", flush=True)
    if how == "database":
        service.add_resource(env.database("x").open, bus.close)
    async def report():
        await service.ready.wait()
        print("ready", flush=True)
        await asyncio.Event().wait()
    service.add_task("report", report)
    return service

def environment():
    broker = MemoryBroker(SystemClock())
    return Environment("w1", transports=partial(MemoryTransport, broker), rng=random.Random(1))

sys.exit(run_process(build, environment, role="test", process="w1", http=("127.0.0.1", 0), log_style="json"))
"""


class Worker:
    def __init__(self, how: str, log: Path, stdin: int = subprocess.DEVNULL) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER, how], stdin=stdin, stdout=subprocess.PIPE, stderr=errors, text=True,
                cwd=os.getcwd(),
            )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    workers: list[Worker] = []

    def starting(how: str, stdin: int = subprocess.DEVNULL) -> Worker:
        workers.append(Worker(how, tmp_path / f"log{len(workers)}", stdin))
        return workers[-1]

    yield starting
    for worker in workers:
        worker.process.kill()
        worker.process.wait()
        assert worker.process.stdout is not None
        worker.process.stdout.close()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP], ids=lambda stop: stop.name)
def test_ready_then_drained_by_a_signal(start: object, stop: signal.Signals) -> None:
    """SIGHUP (a terminal that hangs up) killed the process without draining."""
    worker: Worker = start("well")  # type: ignore[operator]
    assert worker.line() == "ready"
    port = next(line["port"] for line in worker.lines() if line["event"] == "health.listening")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=PATIENCE_S) as answer:
        assert json.load(answer) == {"ready": True, "not_ready": [], "pid": worker.process.pid}
    worker.process.send_signal(stop)
    assert worker.line() == "draining"
    assert worker.process.wait(PATIENCE_S) == 0
    assert {(line["process"], line["role"]) for line in worker.lines()} == {("w1", "test")}
    assert worker.lines()[-1]["event"] == "process.ended"


def test_a_worker_that_reads_settings_again_does_so_at_a_signal(start: object) -> None:
    worker: Worker = start("reload")  # type: ignore[operator]
    assert worker.line() == "ready"
    for _ in range(2):
        worker.process.send_signal(signal.SIGHUP)
        assert worker.line() == "reloaded"
    worker.process.send_signal(signal.SIGTERM)
    assert (worker.line(), worker.process.wait(PATIENCE_S)) == ("draining", 0)


def test_on_a_terminal_the_same_signal_stops_it(start: object) -> None:
    """Nobody could end it by closing its terminal."""
    ours, its = os.openpty()
    worker: Worker = start("reload", its)  # type: ignore[operator]
    os.close(its)
    assert worker.line() == "ready"
    worker.process.send_signal(signal.SIGHUP)
    assert (worker.line(), worker.process.wait(PATIENCE_S)) == ("draining", 0)
    os.close(ours)


def test_a_second_signal_ends_it_at_once(start: object) -> None:
    worker: Worker = start("slow")  # type: ignore[operator]
    assert worker.line() == "ready"
    worker.process.send_signal(signal.SIGINT)
    assert worker.line() == "draining"
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(PATIENCE_S) == 128 + signal.SIGTERM


ENDS = [
    ("invariant", 70, "invariant.broken"),
    ("fault", 1, "side.gone"),
    ("rights", 1, "bus.forbidden"),  # its supervisor starts it again, and its start waits
    ("database", 2, "environment.not_configured"),
]


@pytest.mark.parametrize(("how", "status", "code"), ENDS)
def test_the_exit_status_shows_how_it_ended(start: object, how: str, status: int, code: str) -> None:
    worker: Worker = start(how)  # type: ignore[operator]
    assert worker.process.wait(PATIENCE_S) == status
    assert worker.lines()[-1]["code"] == code


# --- a worker process whose event loop stands still is noticed by its supervisor, ended with its stacks, and restarted


LIMIT_S = 60.0
ROOT = Path(__file__).parents[3]

WORKERS_WORKER = """
import asyncio, random, sys
from functools import partial
from bus.clock import SystemClock
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from bus.service.main import run_process
from bus.service.service import WorkerRuntime

def goes_round():
    print("goes round", flush=True)
    while True:
        pass

def build(env):
    service = WorkerRuntime("worker", clock=env.clock)
    async def side():
        await service.ready.wait()
        if sys.argv[1] == "spin":
            goes_round()
        print("ready", flush=True)
        await asyncio.Event().wait()
    service.add_task("side", side)
    return service

def environment():
    return Environment("w1", transports=partial(MemoryTransport, MemoryBroker(SystemClock())), rng=random.Random(1))

sys.exit(run_process(build, environment, role="test", process="w1"))
"""


class TestWorkers(WorkerProcesses):
    """Workers of the program above, with the environment of real ones."""

    __test__ = False

    def start(self, name: str, *arguments: str, settings: Mapping[str, str] | None = None) -> WorkersWorker:
        log = self.directory / f"{name}.log"
        process = GuardedProcess(
            [sys.executable, "-c", WORKERS_WORKER, *arguments],
            env={**self._env, "PYTHONPATH": str(ROOT)},
            cwd=self.directory,
            log=log,
            account=Account(()),
        )
        self.workers[name] = WorkersWorker(
            name=name, arguments=arguments, port=1, log=log, process=process, settings={}
        )
        return self.workers[name]


@pytest.fixture
def pings() -> Iterator[WatchdogPings]:
    pings = WatchdogPings(limit_s=LIMIT_S)
    yield pings
    pings.close()


@pytest.fixture
def processes(tmp_path: Path, pings: WatchdogPings) -> Iterator[TestWorkers]:
    processes = TestWorkers(tmp_path, {}, pings=pings)
    yield processes
    for worker in processes.workers.values():
        worker.process.kill()


def stand_still(supervisor: Supervisor, clock: HandClock, seconds: float) -> None:
    """Time goes by, looked at as often as a supervisor does, and no worker sends anything."""
    for _ in range(5):
        supervisor.check_workers()
        clock.now += seconds / 4


async def test_a_loop_that_goes_round_is_ended_with_its_stack_and_the_worker_restarted(processes: TestWorkers) -> None:
    clock, logged = HandClock(), list[str]()
    supervisor = Supervisor(processes, clock=clock, notify=logged.append)
    worker = processes.start("scheduler1", "spin")
    await until(lambda: "goes round" in worker.process.tail())
    stand_still(supervisor, clock, LIMIT_S)
    assert worker.process.running and logged == []
    supervisor.check_workers()
    assert logged == [
        f"the event loop of scheduler1 stood still for 60 s, so it is ended; its log: {worker.log}",
    ]
    await until(lambda: not worker.process.running)
    text = worker.log.read_text()
    assert "Fatal Python error: Aborted" in text and "in goes_round" in text
    supervisor.check_workers()
    assert "scheduler1 died with status 134; started again" in logged[1]
    assert processes.workers["scheduler1"].process is not worker.process


async def test_a_process_that_is_stopped_and_cannot_abort_is_killed(processes: TestWorkers) -> None:
    clock, logged = HandClock(), list[str]()
    supervisor = Supervisor(processes, clock=clock, notify=logged.append)
    worker = processes.start("scheduler1", "well")
    await until(lambda: "ready" in worker.process.tail())
    os.kill(worker.process.pid, signal.SIGSTOP)
    stand_still(supervisor, clock, LIMIT_S)
    supervisor.check_workers()
    assert len(logged) == 1 and worker.process.running
    clock.now += ABORT_S
    supervisor.check_workers()
    assert not worker.process.running
    supervisor.check_workers()
    assert processes.workers["scheduler1"].process is not worker.process


async def test_a_loop_that_runs_is_left_alone(tmp_path: Path) -> None:
    pings = WatchdogPings(limit_s=0.2)
    processes = TestWorkers(tmp_path, {}, pings=pings)
    clock, logged = HandClock(), list[str]()
    supervisor = Supervisor(processes, clock=clock, notify=logged.append)
    worker = processes.start("scheduler1", "well")
    supervisor.check_workers()
    try:
        for _ in range(10):  # in half the limit each time at least one ping comes
            clock.now += pings.limit_s / 2

            def is_received() -> bool:
                supervisor.check_workers()
                return pings.stalled_s(worker.process.pid, clock.now) == 0.0

            await until(is_received)
        assert worker.process.running and logged == []
    finally:
        worker.process.kill()
        pings.close()


async def test_a_supervisor_that_stood_still_itself_ends_no_worker(processes: TestWorkers) -> None:
    """Pings are lost meanwhile: a socket holds few."""
    clock, logged = HandClock(), list[str]()
    supervisor = Supervisor(processes, clock=clock, notify=logged.append)
    processes.start("scheduler1", "well")
    supervisor.check_workers()
    clock.now += 10 * LIMIT_S
    supervisor.check_workers()
    assert logged == []


def test_a_ping_counts_for_the_process_that_sent_it(pings: WatchdogPings) -> None:
    import socket  # noqa: PLC0415

    pings.receive(0.0)
    assert pings.stalled_s(1, 0.0) == 0.0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        address = "\0" + pings.variables["NOTIFY_SOCKET"][1:]
        for body in (b"", b"\xff" * 9000, b"STATUS=WATCHDOG=1", b"READY=1\nWATCHDOG=1"):
            other.sendto(body, address)
    pings.receive(20.0)
    assert pings.stalled_s(1, 20.0) == 20.0
    assert pings.stalled_s(os.getpid(), 25.0) == 5.0
