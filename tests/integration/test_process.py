"""A worker as a real process: ready, drained by SIGTERM, ended at once by a second one, and its exit statuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

PATIENCE_S = 60.0

WORKER = """
import asyncio, random, sys
from functools import partial
from bus.clock import SystemClock
from bus.faults import BrokenInvariant, Fault
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from bus.service.main import run_process
from bus.service.service import Service

how = sys.argv[1]

def build(env):
    service = Service("worker", clock=env.clock, grace_s=20.0)
    bus = env.bus("api")
    service.add_resource(bus.open, bus.close)
    service.add_check("bus api", lambda: bus.transport.connected)
    async def side():
        if how == "invariant":
            raise BrokenInvariant("used > capacity")
        if how == "fault":
            raise Fault("gone", code="side.gone")
        await asyncio.Event().wait()
    async def slow(grace_s):
        print("draining", flush=True)
        if how == "slow":
            await asyncio.Event().wait()
    service.add_task("side", side)
    service.add_drain(slow)
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
    def __init__(self, how: str, log: Path) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER, how], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=os.getcwd()
            )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    workers: list[Worker] = []

    def starting(how: str) -> Worker:
        workers.append(Worker(how, tmp_path / f"log{len(workers)}"))
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
    ("database", 2, "environment.not_configured"),
]


@pytest.mark.parametrize(("how", "status", "code"), ENDS)
def test_the_exit_status_shows_how_it_ended(start: object, how: str, status: int, code: str) -> None:
    worker: Worker = start(how)  # type: ignore[operator]
    assert worker.process.wait(PATIENCE_S) == status
    assert worker.lines()[-1]["code"] == code
