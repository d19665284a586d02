"""The broker and the database that `berth up` started are killed: it starts them again, and builds go on."""

from __future__ import annotations

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

import pytest

pytestmark = [pytest.mark.system, pytest.mark.postgres, pytest.mark.rabbitmq, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0

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
            "BERTH_COMPUTE__HOSTS": "4",
        }
        self.log = directory / "up.log"
        self.output = directory / "commands.log"
        with self.output.open("w") as out, self.log.open("w") as errors:
            command = [sys.executable, "-m", "berth", "up", "--json", *arguments]
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
