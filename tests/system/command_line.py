"""A `berth up`, and commands beside it: each is forked from a process that has berth imported."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from bus.local import LocalTransport
from bus.transport import Outgoing

# No host has built this one. Fixed: every process of a test run must collect the same tests.

UNKNOWN = "00000000-0000-4000-8000-00000000dead"
ROOT = Path(__file__).parents[2]
STOP_TIMEOUT_S = 90.0
TIMEOUT_S = 60.0
NO, USAGE, UNREACHABLE, TIME = 1, 2, 3, 4


class Ran(Struct):
    """The results of a command."""

    status: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """The output of `-o json`; of a list its items."""
        data = json.loads(self.out)
        return data["items"] if isinstance(data, dict) and data.keys() == {"items", "next"} else data


class Berth:
    """Runs `berth` in a directory of its own, with settings of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
        self.env = {
            **kept,
            "PYTHONPATH": str(ROOT),
            "BERTH_STATE_DIR": str(directory / "state"),
            "BERTH_UP__NODES": "2",
            "BERTH_COMPUTE__SIMULATED__HOSTS": "4",
            # One host always fails: builds that begin there go to an alternate.
            "BERTH_COMPUTE__SIMULATED__FAULTS__FAIL_HOSTS": '["cell1-c1-00000"]',
            "BERTH_SCHEDULER__ACTIONS_ACROSS_CELLS": "true",
            "COLUMNS": "200",
        }

        self.output = ""  # by `berth up`
        self.first = Ran(1, "", "")  # what the first fifty boots printed
        self.zygote = self.start("tests.system.zygote", stdin=subprocess.PIPE, stderr=None)

    def __call__(self, *arguments: str, settings: Mapping[str, str] | None = None, given: str = "") -> Ran:
        return self._run("berth", arguments, settings or {}, given)

    def load(self, *arguments: str) -> Ran:
        """Run `scripts/load`."""
        return self._run("scripts/load", arguments, {}, "")

    def _run(self, program: str, arguments: tuple[str, ...], settings: Mapping[str, str], given: str) -> Ran:
        requested = {
            "program": program,
            "arguments": arguments,
            "settings": settings,
            "given": given,
            "directory": str(self.directory),
        }
        assert self.zygote.stdin is not None and self.zygote.stdout is not None
        self.zygote.stdin.write(json.dumps(requested) + "\n")
        self.zygote.stdin.flush()
        done = Ran(**json.loads(self.zygote.stdout.readline()))
        assert "Traceback" not in done.err + done.out, done.err
        return done

    def start(
        self, module: str, *arguments: str, stdin: int = subprocess.DEVNULL, stderr: Any
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=self.env,
            cwd=self.directory,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )


@pytest.fixture(scope="module")
def berth() -> Iterator[Berth]:
    directory = Path(tempfile.mkdtemp(prefix="berth-cli-"))  # short: it holds a socket
    directory.chmod(0o755)  # the embedded PostgreSQL of root runs as another user
    berth = Berth(directory)
    with (directory / "up.log").open("w") as log, berth.start("berth", "up", stderr=log) as up:
        try:
            assert up.stdout is not None
            result = ""
            for line in up.stdout:
                result += line
                if line.startswith("Ctrl-C"):
                    break
            # People read this, so no line of the log is in between.
            assert result.startswith("\nberth is up: one process\n"), (directory / "up.log").read_text()
            assert "{" not in result and "  berth boot --flavor m1.small --count 50 --wait\n" in result
            berth.output = result
            berth.first = berth("boot", "--flavor", "m1.small", "--count", "50", "--wait")
            yield berth
        finally:
            berth.zygote.communicate(timeout=STOP_TIMEOUT_S)
            up.send_signal(signal.SIGTERM)
            status = up.wait(STOP_TIMEOUT_S)
    shutil.rmtree(directory)
    assert status == 0, "SIGTERM drains and ends with 0"


def boot(berth: Berth, *arguments: str) -> list[dict[str, Any]]:
    done = berth("boot", "--flavor", "m1.small", "--wait", "-o", "json", *arguments)
    assert done.status == 0, done.err
    builds: list[dict[str, Any]] = done.data
    return builds


def timeline_of(berth: Berth, instance: str, last: list[str]) -> list[tuple[str, str]]:
    """A build's timeline (what, detail), once it ends as expected: what was overtaken is written down after the end."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        lines = berth("show", instance, "-o", "json").data["timeline"]
        timeline = [(line["what"], line.get("detail", "")) for line in lines]
        if [what for what, _ in timeline][-len(last) :] == last:
            return timeline
        assert time.monotonic() < deadline, timeline


def parked(berth: Berth, instance: str) -> list[dict[str, Any]]:
    """The dead letters that name an instance, once there are any: nothing announces that one is parked."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        letters = berth("dead-letter", "list", "scheduler.requests", "-o", "json").data
        shown = [berth("dead-letter", "show", one["queue"], one["id"], "-o", "json").data for one in letters]
        if mine := [one for one in shown if instance in one["body"]]:
            return mine
        assert time.monotonic() < deadline, letters


async def publish(berth: Berth, body: bytes) -> None:
    """As any program might, at the socket of `berth up`."""
    transport = LocalTransport(berth.directory / "state" / "bus.sock", name="api")
    await transport.open()
    await transport.publish(Outgoing(exchange="berth", routing_key="build.request.p", body=body))
    await transport.close()
