"""A worker process whose event loop stands still is noticed by its supervisor, ended with its stacks, and restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from berth.trial.embedded.process import Account, GuardedProcess
from berth.trial.up_processes import ABORT_S, Supervisor
from berth.trial.worker_processes import WatchdogPings, Worker, WorkerProcesses
from tests.unit.front.world import HandClock

HANG_GUARD_S = 60.0
LIMIT_S = 60.0
ROOT = Path(__file__).parents[2]

WORKER = """
import asyncio, random, sys
from functools import partial
from bus.clock import SystemClock
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from bus.service.main import run_process
from bus.service.service import Service

def goes_round():
    print("goes round", flush=True)
    while True:
        pass

def build(env):
    service = Service("worker", clock=env.clock)
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

    def start(self, name: str, *arguments: str, settings: Mapping[str, str] | None = None) -> Worker:
        log = self.directory / f"{name}.log"
        process = GuardedProcess(
            [sys.executable, "-c", WORKER, *arguments],
            env={**self._env, "PYTHONPATH": str(ROOT)},
            cwd=self.directory,
            log=log,
            account=Account(()),
        )
        self.workers[name] = Worker(name=name, arguments=arguments, port=1, log=log, process=process, settings={})
        return self.workers[name]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_GUARD_S):
        while not condition():  # noqa: ASYNC110  (a process does not announce what it does)
            await asyncio.sleep(0.01)


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
