"""Workers as processes: whose answer shows that one is ready."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from berth.trial.embedded.process import Account, GuardedProcess, ServerFailed, free_port
from berth.trial.worker_processes import Worker, WorkerProcesses
from bus.service.health import Health

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
PATIENCE_S = 30.0


class Given(WorkerProcesses):
    """Worker processes that run the given command, at the given port."""

    def begin(self, name: str, command: tuple[str, ...], port: int) -> Worker:
        log = self.directory / f"{name}.log"
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        process = GuardedProcess(command, env=env, cwd=self.directory, log=log, account=Account())
        self.workers[name] = Worker(name=name, arguments=(), port=port, log=log, process=process, settings={})
        return self.workers[name]


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Given]:
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


async def test_a_worker_at_whose_port_another_process_answers_is_not_ready(
    processes: Given, other_process: Health
) -> None:
    """Two workers had drawn one port; the second died of it, and the first one's answer passed for both.

    Seen: four cells with 2,500 hosts each, all workers "ready", and 7,500 hosts in the book for ever.
    """
    processes.begin("compute-cell4-c1", LIVES, other_process.port)
    with pytest.raises(ServerFailed, match=f"not ready after.*compute-cell4-c1: process {os.getpid()} answers"):
        await processes.ready(timeout_s=SOON_S)


async def test_every_worker_that_was_waited_for_in_vain_is_named_with_what_it_waits_for(processes: Given) -> None:
    ports = [free_port(), free_port()]
    processes.begin("scheduler1", (sys.executable, "-c", ANSWERS, str(ports[0]), "replica"), ports[0])
    processes.begin("compute-c1", LIVES, ports[1])
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient() as http:
        answered = False
        while not answered:
            with contextlib.suppress(httpx.HTTPError):
                answered = (await http.get(f"http://127.0.0.1:{ports[0]}/readyz")).status_code == 503
    with pytest.raises(ServerFailed) as fault:
        await processes.ready(timeout_s=SOON_S)
    first = str(fault.value).splitlines()[0]
    assert "scheduler1: replica" in first and f"compute-c1: its port {ports[1]} does not answer" in first


async def test_a_worker_that_ended_is_not_ready_even_if_its_port_answers(
    processes: Given, other_process: Health
) -> None:
    processes.begin("compute-cell4-c1", FALLS, other_process.port)
    with pytest.raises(ServerFailed, match=r"(?s)compute-cell4-c1 ended.*cannot listen"):
        await processes.ready(timeout_s=PATIENCE_S)


async def test_a_worker_that_answers_itself_is_ready(processes: Given) -> None:
    port = free_port()
    processes.begin("compute-cell4-c1", (sys.executable, "-c", ANSWERS, str(port)), port)
    await processes.ready(timeout_s=PATIENCE_S)
    assert processes.workers["compute-cell4-c1"].process.running


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
