"""`berth up` with servers of its own, as a user has it: a load, a murder, a check, Ctrl-C; servers that are killed are
started again, and one that cannot start is tried with longer and longer pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from berth.up import server_restart as module
from berth.up.broker_probe import probe
from berth.up.embedded.postgres import Postgres
from berth.up.embedded.rabbitmq import RabbitMQ
from berth.up.server_restart import kept_running
from bus.rabbitmq import channels
from lab.load.record import LoadRecord, decode
from tests.kit.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.postgres, pytest.mark.rabbitmq, pytest.mark.timeout(600)]


ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0


def berth(env: dict[str, str], *arguments: str, module: str = "berth") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=env, capture_output=True, text=True, timeout=PATIENCE_S * 2, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    return done


def load(env: dict[str, str], directory: Path, *arguments: str) -> LoadRecord:
    done = berth(env, *arguments, "--json", str(directory / "load.json"), module="lab.load.command")
    assert done.returncode == 0, done.stderr + done.stdout
    return decode((directory / "load.json").read_bytes())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def commands() -> Iterator[bytes]:
    """Of every process of this computer."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            yield path.read_bytes()


@pytest.fixture
def directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="berth-up-"))
    directory.chmod(0o755)  # the embedded PostgreSQL of root runs as another user
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def env(directory: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "BERTH_STATE_DIR": str(directory / "state"),
        "BERTH_UP__NODES": "6",
        "BERTH_COMPUTE__SIMULATED__HOSTS": "10",
    }


def test_ctrl_c_while_it_starts(directory: Path, env: dict[str, str]) -> None:
    """It used to be received when everything was up; a worker that did not get ready made that a minute and more."""
    command = [sys.executable, "-m", "berth", "up", "--processes", "-o", "json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as up:
        until = time.monotonic() + PATIENCE_S
        while not list((directory / "state").glob("logs/*.log")):
            assert time.monotonic() < until and up.poll() is None
            time.sleep(0.02)
        up.send_signal(signal.SIGINT)
        output, wrong = up.communicate(timeout=PATIENCE_S)
    assert (up.returncode, output, wrong) == (130, "", "")
    assert not [line for line in commands() if directory.name.encode() in line]


def test_everything_as_processes(directory: Path, env: dict[str, str]) -> None:
    """A load of all kinds ends well, a killed worker comes back, the invariants hold, and nothing outlives Ctrl-C."""
    command = [sys.executable, "-m", "berth", "up", "--processes", "--schedulers", "1", "-o", "json"]
    log = directory / "up.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True) as up,
    ):
        try:
            assert up.stdout is not None
            output = ""
            for line in up.stdout:
                output += line
                if line.rstrip() == "}":
                    break
            state = json.loads(output or "{}")
            assert state.get("up") is True, log.read_text()
            assert state["numbers"]["schedulers"] == 1 and len(state["workers"]) == 2 + 2 * 3 + 1
            token = Path(state["placement_token"]).read_text().strip()
            served = httpx.get(
                f"{state['placement_api']}/resource_providers", headers={"x-auth-token": token}, timeout=PATIENCE_S
            )
            assert served.status_code == 200 and served.json()["resource_providers"]
            assert len(json.loads(berth(env, "host", "list", "-o", "json").stdout)["items"]) == 2 * 10 + 6, (
                log.read_text()
            )
            # More metal than there is: some fail with a reason; nothing is lost.
            record = load(
                env, directory, "--boots", "200", "--rate", "100", "--churn", "0.3", "--mix", "small=8,large=2,metal=1"
            )
            assert set(record.totals.outcomes) <= {"active", "failed"} and record.totals.outcomes["active"] > 150
            assert record.totals.delete_outcomes == {"deleted": record.totals.deletes} and record.totals.deletes > 20
            assert record.totals.by_code.keys() <= {"no_valid_host"}
            assert {"scheduler.requests", "cell1/conductor.requests"} <= record.samples.depths.keys()
            killed = state["workers"]["scheduler1"]["pid"]
            os.kill(killed, signal.SIGKILL)
            until = time.monotonic() + PATIENCE_S
            while "scheduler1 died with status 137; started again" not in log.read_text():
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.05)
            assert load(env, directory, "--boots", "20").totals.outcomes == {"active": 20}
            assert Path(state["workers"]["scheduler1"]["log"]).stat().st_size > 0
            check = berth(env, "check")
            assert check.returncode == 0, check.stdout
        finally:
            up.send_signal(signal.SIGINT)
            status = up.wait(PATIENCE_S)
    assert status == 0, log.read_text()
    assert not [name for name, worker in state["workers"].items() if alive(worker["pid"])]
    assert not (directory / "state" / "runtime.json").exists()


# --- the broker and the database that it started are killed: it starts them again, and builds go on


ROUNDS = 4  # of boots, before a broker is killed


class Up:
    """A running `berth up`, what it prints, and the other terminal."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
        self.state = directory / "state"
        self.env = {
            **kept,
            "PYTHONPATH": str(ROOT),
            "BERTH_STATE_DIR": str(self.state),
            "BERTH_UP__NODES": "0",
            "BERTH_COMPUTE__SIMULATED__HOSTS": "4",
        }
        self.log = directory / "up.log"
        self.output = directory / "commands.log"
        with self.output.open("w") as out, self.log.open("w") as errors:
            command = [sys.executable, "-m", "berth", "up", "-o", "json", *arguments]
            self.process = subprocess.Popen(command, env=self.env, stdout=out, stderr=errors)
        self.until(lambda: self.output.read_text().rstrip().endswith("}"), "it is up")
        self.data = json.loads(self.output.read_text())

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, f"never came: {what}\n{self.log.read_text()}"
            time.sleep(0.05)

    def kill(self, name: str, pid: int) -> None:
        """SIGKILL a server, and wait until berth has reported that it ended and is up again."""
        os.kill(pid, signal.SIGKILL)
        self.until(lambda: f"{name} ended with status" in self.log.read_text(), f"{name} ended")
        self.until(lambda: f"{name} is up again" in self.log.read_text(), f"{name} is up again")

    @property
    def postmaster(self) -> int:
        return int((self.state / "postgres" / "data" / "postmaster.pid").read_text().splitlines()[0])

    @property
    def broker(self) -> int:
        return int((self.state / "rabbitmq" / "server.pid").read_text())

    def boots(self) -> None:
        command = [sys.executable, "-m", "berth", "boot", "--flavor", "m1.tiny", "--count", "5", "--wait"]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr + self.log.read_text()

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def up(*arguments: str) -> Iterator[Up]:
    directory = Path(tempfile.mkdtemp(prefix="berth-up-"))
    directory.chmod(0o755)  # the embedded PostgreSQL of root runs as another user
    made = Up(directory, *arguments)
    try:
        yield made
        assert made.end() == 0
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def test_one_process_keeps_its_database_alive() -> None:
    with up() as one:
        assert "messages are not" in one.data["durable"]
        one.boots()
        one.kill("PostgreSQL", one.postmaster)
        one.boots()


def test_processes_keep_their_broker_and_database_alive() -> None:
    with up("--processes", "--schedulers", "1", "--placements", "1") as several:
        assert "messages in the broker" in several.data["durable"]
        # RabbitMQ 3.10 may never serve a quorum queue again that was declared within a second of its SIGKILL.
        for _ in range(ROUNDS):
            several.boots()
        several.kill("RabbitMQ", several.broker)
        several.boots()
        several.kill("PostgreSQL", several.postmaster)
        several.boots()


# --- a server that cannot start for a while is tried again, with longer and longer pauses


async def test_a_server_that_cannot_start_is_tried_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk that is freed later: here its configuration cannot be read, until it can."""
    monkeypatch.setattr(module, "RESTART", replace(module.RESTART, first_s=0.1))
    logged: list[str] = []
    server = Postgres()
    async with kept_running("PostgreSQL", server, notify=logged.append):
        broken = _hba(server)
        kept = broken.read_text()
        broken.write_text("nonsense\n")
        server.kill()
        await until(lambda: sum("does not start" in one for one in logged) >= 2, PATIENCE_S)
        assert "in 0.1 s" in logged[1] and "in 0.2 s" in logged[2], logged
        broken.write_text(kept)
        await until(lambda: bool(logged) and logged[-1] == "PostgreSQL is up again", PATIENCE_S)
        assert server.pid


async def test_a_keeper_that_is_stopped_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART", replace(module.RESTART, first_s=3_600.0, longest_s=3_600.0))
    logged: list[str] = []
    server = Postgres()
    async with asyncio.timeout(PATIENCE_S), kept_running("PostgreSQL", server, notify=logged.append):
        _hba(server).write_text("nonsense\n")
        server.kill()
        await until(lambda: any("does not start" in one for one in logged), PATIENCE_S)
    assert server.pid == 0


@pytest.mark.rabbitmq
async def test_a_broker_that_confirms_nothing_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a full disk: the log of its quorum queues is gone, and connections are taken as before."""
    monkeypatch.setattr(module, "PROBE_INTERVAL_S", 0.2)
    monkeypatch.setattr(channels, "CONFIRM_TIMEOUT_S", 5.0)
    logged: list[str] = []
    broker = RabbitMQ()
    async with kept_running("RabbitMQ", broker, notify=logged.append, probe=lambda: probe(broker.url())):
        await probe(broker.url())
        assert logged == []
        await asyncio.to_thread(broker.control, "set_vm_memory_high_watermark", "0.0000001")
        await probe(broker.url())  # an alarm ends by itself
        await asyncio.to_thread(broker.control, "set_vm_memory_high_watermark", "0.9")
        first = broker.pid
        await asyncio.to_thread(broker.control, "eval", "sys:suspend(ra_log_wal).")
        await until(lambda: bool(logged) and logged[-1] == "RabbitMQ is up again", PATIENCE_S)
        assert "did not work 3 times in a row" in logged[0] and "no confirm within" in logged[0], logged
        assert broker.pid not in (0, first)
        await probe(broker.url())


def _hba(server: Postgres) -> Path:
    return server._data / "pg_hba.conf"
