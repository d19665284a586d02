"""`berth up --processes` as a user has it: real servers, real workers; a load, a murder, a check, and Ctrl-C."""

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
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from berth.load.record import LoadRecord, decode

pytestmark = [pytest.mark.system, pytest.mark.postgres, pytest.mark.rabbitmq, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


def berth(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "berth", *arguments],
        env=env, capture_output=True, text=True, timeout=PATIENCE_S * 2, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    return done


def load(env: dict[str, str], directory: Path, *arguments: str) -> LoadRecord:
    done = berth(env, "load", *arguments, "--json", str(directory / "load.json"))
    assert done.returncode == 0, done.stderr + done.stdout
    return decode((directory / "load.json").read_bytes())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def commands() -> Iterator[bytes]:
    """Of every process of this machine."""
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
        "BERTH_COMPUTE__HOSTS": "10",
    }


def test_ctrl_c_while_it_starts(directory: Path, env: dict[str, str]) -> None:
    """It used to be received when everything was up; a worker that did not get ready made that a minute and more."""
    command = [sys.executable, "-m", "berth", "up", "--processes", "--json"]
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
    command = [sys.executable, "-m", "berth", "up", "--processes", "--schedulers", "1", "--json"]
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
            assert len(json.loads(berth(env, "hosts", "--json").stdout)) == 2 * 10 + 6, log.read_text()
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
