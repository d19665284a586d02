"""Runs some of Nova's functional tests, one after the other, with the scheduler where `--mode` says.

Run by Nova's own interpreter, not by berth's; see scripts/nova. Each test runs in a fork of this process, which has
imported Nova and made the schemas of its databases, and is killed before its cleanups: to stop the services of one test
took half of its time, as each waits for RabbitMQ. It reads {"ids": [...], "vhosts": [`world.Vhosts` of
each test]} from a file and appends one line of JSON for each test to another.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import unittest
from importlib.metadata import version
from pathlib import Path
from typing import Any

# As its services run: from Nova 34 on in threads, before it in greenlets.
os.environ["OS_NOVA_DISABLE_EVENTLET_PATCHING"] = str(int(version("nova").split(".")[0]) >= 34)
os.environ.setdefault("OS_TEST_TIMEOUT", "400")

import nova.tests.functional  # noqa: F401  (it has to be the first)
import outside
import testtools
from forks import wait_for_locks
from nova import test as nova_test
from nova.conf import paths
from oslo_config import cfg
from oslo_utils.fixture import uuidsentinel
from world import World

# A test has a limit of its own, of 400 s, which cannot interrupt everything.
HANG_S = 600.0
POLL_S = 0.02


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


class Schemas(nova_test.TestCase):  # type: ignore[misc]
    """Nova's base class keeps the schemas that it has made, for all tests to come."""

    def runTest(self) -> None:  # noqa: N802
        """Nothing."""


def leave_out_cleanups() -> None:
    """After a test its process ends. What fixtures have collected about a failure is wanted."""

    def run_cleanups(self: Any, _result: Any) -> None:
        for function, arguments, named in reversed(self.case._cleanups):
            if getattr(function, "__name__", "") == "gather_details":
                function(*arguments, **named)

    testtools.RunTest._run_cleanups = run_cleanups


def run(name: str, calls: outside.Calls, folder: Path) -> dict[str, Any]:
    """One test, by its id."""
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


def run_apart(name: str, calls: outside.Calls, folder: Path, results: Path) -> None:
    """The same in a fork; one that ends otherwise, or does not end, has failed."""
    before = results.stat().st_size
    child = os.fork()
    if child == 0:
        log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for handle in (1, 2):
            os.dup2(log, handle)
        write(run(name, calls, folder), results)
        os._exit(0)
    until = time.monotonic() + HANG_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(POLL_S)
    if results.stat().st_size == before:
        why = f"no result within {HANG_S:.0f} s, or its process ended"
        write({"id": name, "outcome": "failed", "why": why, "calls": 0, "seconds": HANG_S}, results)


def write(outcome: dict[str, Any], results: Path) -> None:
    """Append it as one line of JSON, with Nova's release."""
    with results.open("a") as file:
        file.write(json.dumps(outcome | {"nova": version("nova")}) + "\n")


def main() -> None:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["stock", "apart", "front"], required=True)
    parser.add_argument("--berth", required=True, help="the Python that has berth")
    parser.add_argument("--work", type=Path, required=True, help="a directory for logs")
    parser.add_argument("tests", type=Path)
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    # A wheel has Nova's etc/ in the virtualenv's root, a clone beside the package.
    cfg.set_defaults(paths.ALL_OPTS, pybasedir=sys.prefix)
    given = json.loads(options.tests.read_text())
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    wait_for_locks()
    Schemas().run(Result())
    leave_out_cleanups()
    calls = outside.Calls(options.work / "specs.jsonl")
    if options.mode == "stock":
        for name in given["ids"]:
            run_apart(name, calls, options.work, options.results)
        return
    world = World(options.mode, options.berth, given["vhosts"], uuidsentinel.cell1, options.work)
    outside.install(world)
    try:
        for name in given["ids"]:
            world.next()
            run_apart(name, calls, options.work, options.results)
    finally:
        world.close()


if __name__ == "__main__":
    main()
