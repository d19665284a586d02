"""The example of docs/reference/messages.md, read out of the page and run as written, against real servers."""

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


def test_the_example_publishes_a_build_and_receives_its_events(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    with small_processes() as small:
        mistyped = run(script.replace('"build.request.demo"', '"build.reqest.demo"'), small.amqp_url, tmp_path)
        done = run(script, small.amqp_url, tmp_path)
    assert mistyped.returncode == 1 and "NO_ROUTE" in mistyped.stderr, "it does not wait for what never comes"
    assert done.returncode == 0, done.stderr
    events = [line.split() for line in done.stdout.splitlines()]
    states = [state for _, state, *_ in events]
    assert states[-1] == "active"
    assert {"accepted", "scheduled", "building"} >= set(states[:-1])  # one that was overtaken is not published
    assert len({instance for instance, *_ in events}) == 1
    assert events[-1][2].startswith("cell1-c1-")


def run(script: str, amqp_url: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={"PATH": os.environ["PATH"], "AMQP_URL": amqp_url},
        cwd=directory,  # nothing of berth's own is imported
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
