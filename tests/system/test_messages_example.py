"""The examples of docs/reference/messages.md, read out of the page and run as written, against real servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.small import small_processes

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "messages.md"
TIMEOUT_S = 120.0

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]


def test_the_examples_publish_a_build_and_a_move_and_receive_their_events(tmp_path: Path) -> None:
    build, move = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    with small_processes() as small:
        mistyped = run(
            build.replace('"build.request.{LANE}.demo"', '"build.reqest.{LANE}.demo"'), small.amqp_url, tmp_path
        )
        done = run(build, small.amqp_url, tmp_path)
        events = [line.split() for line in done.stdout.splitlines()]
        instance = events[-1][0] if events else ""
        moved = run(move, small.amqp_url, tmp_path, INSTANCE=instance)
    assert mistyped.returncode == 1 and "NO_ROUTE" in mistyped.stderr, "it does not wait for what never comes"
    assert done.returncode == 0, done.stderr
    states = [state for _, state, *_ in events]
    assert states[-1] == "active"
    assert {"accepted", "scheduled", "building"} >= set(states[:-1])  # one that was overtaken is not published
    assert {uuid for uuid, *_ in events} == {instance}
    assert events[-1][2].startswith("cell1-c1-")
    assert moved.returncode == 0, moved.stderr
    state, host, *_ = moved.stdout.splitlines()[-1].split()
    assert state == "done" and host == events[-1][2]


def run(script: str, amqp_url: str, directory: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={"PATH": os.environ["PATH"], "AMQP_URL": amqp_url, **more},
        cwd=directory,  # nothing of berth's own is imported
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
