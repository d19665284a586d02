"""Nova's own functional tests with their scheduler outside: draws them, runs them, says which passed; see scripts/nova.

Run by berth's interpreter. The tests themselves run in `runner.py`, by Nova's.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from berth.up.embedded.rabbitmq import RabbitMQ

HERE = Path(__file__).parent
STOP_S = 60.0
POLL_S = 0.2
AT_A_TIME = 25  # that are drawn
A_BROKER = 60  # tests of one broker: each has virtual hosts of its own
SHORT = 3

BENCH = ("bench.Select.test_100_hosts", "bench.Select.test_1000_hosts")

Outcome = dict[str, Any]
Vhosts = dict[str, str]  # of one test; see world.py
RESTART = "restart-broker"  # see world.py
# Those that start and kill schedulers themselves; one at a time, as they restart the broker.
KILLS = ("checks.kills.", "bench.")
CHECKS = "checks."


def listed(python: str, work: Path, *words: str) -> list[str]:
    """The ids of all tests that can be run here, sorted; `--checks`: of berth's own."""
    command = [python, str(HERE / "listing.py"), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=work)
    ids: list[str] = json.loads(done.stdout.splitlines()[-1])
    return ids


def run(
    options: argparse.Namespace,
    mode: str,
    ids: list[str],
    *,
    work: Path,
    vhosts: Sequence[Vhosts] = (),
    broker: RabbitMQ | None = None,
) -> list[Outcome]:
    """Run tests in as many runners as wanted: each takes every second, third ... of them. A test may have the broker
    restarted.
    """
    restart = work / RESTART
    runners = [
        _Runner(options, mode, ids[at :: options.processes], vhosts[at :: options.processes], work)
        for at in range(min(options.processes, len(ids)))
    ]
    try:
        while sum(runner.runs() for runner in runners):
            time.sleep(POLL_S)
            if broker is not None and restart.exists():
                broker.restart()
                restart.unlink()
    finally:
        for runner in runners:
            runner.stop()
    order = {name: at for at, name in enumerate(ids)}
    return sorted((one for runner in runners for one in runner.got), key=lambda one: order[one["id"]])


class _Runner:
    """A process that runs some of the tests; see runner.py."""

    def __init__(
        self, options: argparse.Namespace, mode: str, ids: list[str], vhosts: Sequence[Vhosts], work: Path
    ) -> None:
        self.got: list[Outcome] = []
        self._wanted = len(ids)
        tests = Path(tempfile.mkstemp(dir=work, suffix=".json")[1])
        tests.write_text(json.dumps({"ids": ids, "vhosts": list(vhosts)}))
        self._lines, self._log = tests.with_suffix(".jsonl"), tests.with_suffix(".log")
        self._lines.touch()
        command = [options.nova, str(HERE / "runner.py"), "--mode", mode, "--berth", sys.executable]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("OS_", "BERTH_"))}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--work", str(work), str(tests), str(self._lines)],
                env=env | {"TMPDIR": str(work)}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=work,
            )  # fmt: skip

    def runs(self) -> bool:
        """Whether it goes on; says what has ended since."""
        ended = self._process.poll() is not None
        found = [json.loads(line) for line in self._lines.read_text().splitlines()]
        for one in found[len(self.got) :]:
            notify(one)
        self.got = found
        if ended and len(found) < self._wanted:
            raise SystemExit(f"the runner ended with {self._process.returncode}:\n{self._log.read_text()[-2000:]}")
        return not ended

    def stop(self) -> None:
        """End it, if it has not; it ends the servers of its test."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def discover(options: argparse.Namespace, work: Path) -> list[Outcome]:
    """As many tests as wanted that call select_destinations and pass with stock, in the order of the seed."""
    ids = listed(options.nova, work)
    random.Random(options.seed).shuffle(ids)
    found: list[Outcome] = []
    while ids and len(found) < options.draw:
        some, ids = ids[:AT_A_TIME], ids[AT_A_TIME:]
        found += [one for one in run(options, "stock", some, work=work) if one["calls"] and one["outcome"] == "passed"]
    return found[: options.draw]


def _with_broker(options: argparse.Namespace, ids: list[str], work: Path) -> list[Outcome]:
    """Run tests on a broker of their own; with stock there is none."""
    if options.mode == "stock":
        return run(options, options.mode, ids, work=work)
    with RabbitMQ(schedulers=1) as broker:
        vhosts = _vhosts(broker, ids, options.processes)
        return run(options, options.mode, ids, work=work, vhosts=vhosts, broker=broker)


def _vhosts(broker: RabbitMQ, ids: list[str], processes: int) -> list[Vhosts]:
    """Of each test. It shares that of its fallback with tests that have ended: a vhost takes the broker a while."""
    names = [{"main": f"main-{at}"} for at in range(len(ids))]
    for at, (name, of_test) in enumerate(zip(ids, names, strict=True)):
        if name.startswith(KILLS):
            of_test["bus"] = f"bus-{at}"
        elif not name.startswith(
            CHECKS
        ):  # a second process on a test's SQLite files has the first one's writes refused
            of_test["stock"] = f"stock-{at % (2 * processes)}"
    urls = broker.add_vhosts({name: None for of_test in names for name in of_test.values()})
    return [{part: urls[name] for part, name in of_test.items()} for of_test in names]


def notify(one: Outcome) -> None:
    """Say it now."""
    name = one["id"].removeprefix("nova.tests.functional.")
    sys.stdout.write(f"{one['outcome']:8}{one['seconds']:6.1f} s {one['calls']:3} calls  {name}  {one['why'][:160]}\n")
    sys.stdout.flush()


def main() -> int:
    """0 when as many passed as wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nova", required=True, help="the Python that has Nova")
    parser.add_argument("--mode", choices=["front", "apart", "stock"], default="front")
    parser.add_argument("--tests", type=Path, help="JSON: a list of ids, or what an earlier run wrote")
    parser.add_argument("--draw", type=int, default=150, help="how many to draw when there are no --tests")
    parser.add_argument("--seed", type=int, default=43)
    parser.add_argument("--checks", action="store_true", help="berth's own checks instead of Nova's tests")
    parser.add_argument("--all", action="store_true", help="all of Nova's tests that ask for hosts; some hours")
    parser.add_argument("--bench", action="store_true", help="the figures of a front and of a stock nova-scheduler")
    parser.add_argument("--only", nargs="+", metavar="ID", help="just these tests")
    parser.add_argument("-n", "--processes", type=int, default=1, help="tests at a time")
    parser.add_argument("--short", action="store_true", help=f"the first {SHORT} of them")
    parser.add_argument("--share", type=float, default=0.85, help="of tests that have to pass")
    parser.add_argument("--work", type=Path, help="keep logs there")
    parser.add_argument("--json", type=Path, help="write the outcome of each test there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="berth-nova-") as folder:
        work = options.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        work = work.resolve()
        if options.only or options.bench:
            ids = list(options.only or BENCH)
        elif options.tests:
            ids = [one if isinstance(one, str) else one["id"] for one in json.loads(options.tests.read_text())]
        elif options.checks or options.all:
            ids = listed(options.nova, work, *(["--checks"] if options.checks else []))
        else:
            ids = [one["id"] for one in discover(options, work)]
        ids = ids[:SHORT] if options.short else ids
        results: list[Outcome] = []
        while ids:
            some, ids = ids[:A_BROKER], ids[A_BROKER:]
            results += [one | {"mode": options.mode} for one in _with_broker(options, some, work)]
            if options.all:
                results = [one for one in results if one["calls"] or one["outcome"] == "failed"]
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
        if (figures := work / "bench.jsonl").exists():
            sys.stdout.write(figures.read_text())
    counts = collections.Counter(one["outcome"] for one in results)
    passed, counted = counts["passed"], len(results) - counts["skipped"]
    sys.stdout.write(f"{passed} of {counted} passed ({options.mode}), {counts['skipped']} skipped\n")
    return 0 if counted and passed >= options.share * counted else 1


if __name__ == "__main__":
    sys.exit(main())
