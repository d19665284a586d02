"""Several `berth up` in one state directory, and one that is stopped while its servers start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.postgres, pytest.mark.timeout(400)]

WAIT_S = 150.0


@pytest.fixture
def state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="berth-up-") as name:
        Path(name).chmod(0o755)  # the database runs as another user where this runs as root
        yield Path(name) / "state"


@contextmanager
def up(state: Path) -> Iterator[subprocess.Popen[str]]:
    variables: Mapping[str, str] = {
        **os.environ,
        "BERTH_STATE_DIR": str(state),
        "BERTH_UP__NODES": "0",
        "BERTH_UP__WEB": "false",
        "BERTH_UP__REST": "false",
    }
    command = [sys.executable, "-m", "berth", "up"]
    with subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as one:
        try:
            yield one
        finally:
            one.terminate()
            one.wait(WAIT_S)


def postmaster(state: Path) -> int | None:
    """The process of the database in this directory; None: none runs."""
    try:
        pid = int((state / "postgres" / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(pid, 0)
    except (OSError, ValueError, IndexError):
        return None
    return pid


def test_of_two_that_start_at_once_one_is_refused_and_the_other_runs(state: Path) -> None:
    with up(state) as first, up(state) as second:
        until = time.monotonic() + WAIT_S
        while first.poll() is None and second.poll() is None:
            assert time.monotonic() < until, "both run"
            time.sleep(0.05)
        refused, runs = (first, second) if first.poll() is not None else (second, first)
        assert refused.stderr is not None
        assert (refused.returncode, "(up.running)" in refused.stderr.read()) == (2, True)
        assert runs.poll() is None
    assert postmaster(state) is None


def test_one_that_is_stopped_while_its_database_starts_leaves_none(state: Path) -> None:
    with up(state) as one:
        until = time.monotonic() + WAIT_S
        while not (state / "postgres").exists():
            assert time.monotonic() < until and one.poll() is None
            time.sleep(0.01)
        one.send_signal(signal.SIGTERM)
        assert one.wait(WAIT_S) == 130, one.stderr.read() if one.stderr is not None else ""
    assert postmaster(state) is None
