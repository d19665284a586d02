"""Runs some of Nova's functional tests, one after the other, with the scheduler where `--mode` says.

Run by Nova's own interpreter, not by berth's; see scripts/nova. It reads {"ids": [...], "amqp": [URL of a vhost, one a
test]} from a file and appends one line of JSON for each test to another.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
import unittest
from pathlib import Path
from typing import Any

os.environ["OS_NOVA_DISABLE_EVENTLET_PATCHING"] = "true"  # as nova-scheduler, nova-conductor and nova-compute run
os.environ.setdefault("OS_TEST_TIMEOUT", "150")

import nova.tests.functional  # noqa: F401  (it has to be the first)
import outside
import testtools
from nova.conf import paths
from oslo_config import cfg
from oslo_utils.fixture import uuidsentinel
from world import World


class Result(testtools.TestResult):  # type: ignore[misc]
    """The outcome of one test, and why. unittest has the methods' names."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome = "passed"
        self.why = ""
        self.details = ""

    def _set(self, outcome: str, details: dict[str, Any] | None, why: str = "") -> None:
        if self.outcome != "passed":
            return
        self.outcome = outcome
        texts = {name: content.as_text() for name, content in (details or {}).items()}
        lines = texts.get("traceback", "").splitlines()
        frames = [number for number, line in enumerate(lines) if line.startswith("    ")]
        self.why = why or " ".join(lines[frames[-1] + 1 :] if frames else lines)[:300]
        self.details = "\n".join(f"== {name}\n{text}" for name, text in texts.items())

    def addError(self, test: Any, err: Any = None, details: Any = None) -> None:  # noqa: N802
        self._set("failed", details)

    addFailure = addError  # noqa: N815

    def addExpectedFailure(self, test: Any, err: Any = None, details: Any = None) -> None:  # noqa: N802
        """As wanted."""

    def addUnexpectedSuccess(self, test: Any, details: Any = None) -> None:  # noqa: N802
        self._set("failed", details, "unexpected success")

    def addSkip(self, test: Any, reason: str | None = None, details: Any = None) -> None:  # noqa: N802
        self._set("skipped", details, reason or "skipped")


def run(name: str, calls: outside.Calls, folder: Path) -> dict[str, Any]:
    """One test, by its id."""
    calls.count = 0
    began = time.monotonic()
    result = Result()
    try:
        unittest.defaultTestLoader.loadTestsFromName(name).run(result)
    except Exception as error:
        result.outcome, result.why = "failed", f"{type(error).__name__}: {error}"
    if result.details:
        (folder / f"{name}.txt").write_text(result.details)
    seconds = round(time.monotonic() - began, 1)
    return {"id": name, "outcome": result.outcome, "why": result.why, "calls": calls.count, "seconds": seconds}


def main() -> None:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["stock", "apart", "front"], required=True)
    parser.add_argument("--berth", required=True, help="the berth command")
    parser.add_argument("--work", type=Path, required=True, help="a directory for logs")
    parser.add_argument("tests", type=Path)
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    # A wheel has Nova's etc/ in the virtualenv's root, a clone beside the package.
    cfg.set_defaults(paths.ALL_OPTS, pybasedir=sys.prefix)
    given = json.loads(options.tests.read_text())
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    calls = outside.Calls()
    world = None
    if options.mode != "stock":
        world = World(options.mode, options.berth, given["amqp"], uuidsentinel.cell1, options.work)
        outside.install(world)
    try:
        with options.results.open("a") as file:
            for name in given["ids"]:
                file.write(json.dumps(run(name, calls, options.work)) + "\n")
                file.flush()
    except Exception:
        traceback.print_exc()
    finally:
        if world is not None:
            world.close()
        os._exit(0)  # threads of a test that hung are of no interest


if __name__ == "__main__":
    main()
