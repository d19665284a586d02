"""`berth bus url`: what a program of the user's own connects to."""

from __future__ import annotations

import os
from pathlib import Path

from typer.testing import CliRunner

from berth.cli import app
from berth.site import Runtime, write_runtime

URL = "amqp://berth:hunter2@127.0.0.1:5672/berth"


def address(state: Path, *arguments: str, **more: str) -> tuple[int, str, str]:
    env = {"BERTH_STATE_DIR": str(state), **more}
    done = CliRunner().invoke(app, ["bus", "url", *arguments], env=env)
    return done.exit_code, done.stdout, done.stderr


def test_the_address_of_the_settings_is_printed_whole(tmp_path: Path) -> None:
    assert address(tmp_path, BERTH_BUS__URL=URL) == (0, URL + "\n", "")
    assert address(tmp_path, "--bus", "cell1", BERTH_BUS__URL=URL) == (0, URL + "\n", "")
    status, _, error = address(tmp_path, "--bus", "cell9", BERTH_BUS__URL=URL)
    assert status == 2 and "bus.unknown" in error


def test_the_broker_that_runs_here_has_the_address(tmp_path: Path) -> None:
    remove = write_runtime(tmp_path, Runtime(pid=os.getpid(), database_url="", buses={"api": URL}))
    assert address(tmp_path) == (0, URL + "\n", "")
    remove()
    status, printed, error = address(tmp_path)
    assert (status, printed) == (1, "") and "bus.in_memory" in error and "--processes" in error
