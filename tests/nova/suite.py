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
from pathlib import Path
from typing import Any

from berth.trial.embedded.rabbitmq import RabbitMQ

HERE = Path(__file__).parent
# The runner's own limit of a test is 150 s; past this it hangs as a whole.
HANG_S = 240.0
STOP_S = 60.0
POLL_S = 0.5
AT_A_TIME = 25  # tests to one runner: threads that a test leaves behind disturb few others
SHORT = 3

Outcome = dict[str, Any]


def listed(python: str, work: Path, *words: str) -> list[str]:
    """The ids of all tests that can be run here, sorted; `--checks`: of berth's own."""
    command = [python, str(HERE / "listing.py"), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=work)
    ids: list[str] = json.loads(done.stdout.splitlines()[-1])
    return ids


def run(options: argparse.Namespace, mode: str, ids: list[str], amqp: list[str], work: Path) -> list[Outcome]:
    """Run tests in runners of their own. A test that ends its runner, or hangs, has failed, and the others go on."""
    results: list[Outcome] = []
    left = list(zip(ids, amqp, strict=True)) if amqp else [(name, "") for name in ids]
    while left:
        given, left = left[:AT_A_TIME], left[AT_A_TIME:]
        got, why = _runner(options, mode, given, work)
        results += got
        unrun = given[len(got) :]
        if unrun:
            failed = {"id": unrun[0][0], "outcome": "failed", "why": why, "calls": 0, "seconds": 0.0}
            results.append(failed)
            notify(failed)
            left = unrun[1:] + left
    return results


def _runner(
    options: argparse.Namespace, mode: str, given: list[tuple[str, str]], work: Path
) -> tuple[list[Outcome], str]:
    """The results of one runner, and how it ended when there are too few."""
    tests = Path(tempfile.mkstemp(dir=work, suffix=".json")[1])
    tests.write_text(json.dumps({"ids": [name for name, _ in given], "amqp": [url for _, url in given]}))
    lines = tests.with_suffix(".jsonl")
    lines.touch()
    command = [options.nova, str(HERE / "runner.py"), "--mode", mode, "--berth", options.berth, "--work", str(work)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OS_", "BERTH_"))}
    with tests.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [*command, str(tests), str(lines)], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=work
        )
        try:
            return _watched(process, lines)
        finally:
            process.terminate()  # it ends the servers of its test
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _watched(process: subprocess.Popen[bytes], lines: Path) -> tuple[list[Outcome], str]:
    got: list[Outcome] = []
    last = time.monotonic()
    while True:
        ended = process.poll() is not None
        found = [json.loads(line) for line in lines.read_text().splitlines()]
        for one in found[len(got) :]:
            notify(one)
            last = time.monotonic()
        got = found
        if ended:
            return got, f"the runner ended with {process.returncode}: {lines.with_suffix('.log')}"
        if time.monotonic() > last + HANG_S:
            return got, f"no result in {HANG_S:.0f} s"
        time.sleep(POLL_S)


def discover(options: argparse.Namespace, work: Path) -> list[Outcome]:
    """As many tests as wanted that call select_destinations and pass with stock, in the order of the seed."""
    ids = listed(options.nova, work)
    random.Random(options.seed).shuffle(ids)
    found: list[Outcome] = []
    while ids and len(found) < options.draw:
        some, ids = ids[:AT_A_TIME], ids[AT_A_TIME:]
        found += [one for one in run(options, "stock", some, [], work) if one["calls"] and one["outcome"] == "passed"]
    return found[: options.draw]


def notify(one: Outcome) -> None:
    """Say it now."""
    name = one["id"].removeprefix("nova.tests.functional.")
    sys.stdout.write(f"{one['outcome']:8}{one['seconds']:6.1f} s {one['calls']:3} calls  {name}  {one['why'][:160]}\n")
    sys.stdout.flush()


def main() -> int:
    """0 when as many passed as wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nova", required=True, help="the Python that has Nova")
    parser.add_argument("--berth", required=True, help="the berth command")
    parser.add_argument("--mode", choices=["front", "apart", "stock"], default="front")
    parser.add_argument("--tests", type=Path, help="JSON: a list of ids, or what an earlier run wrote")
    parser.add_argument("--draw", type=int, default=150, help="how many to draw when there are no --tests")
    parser.add_argument("--seed", type=int, default=43)
    parser.add_argument("--checks", action="store_true", help="berth's own checks instead of Nova's tests")
    parser.add_argument("--only", nargs="+", metavar="ID", help="just these tests")
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
        if options.only:
            ids = list(options.only)
        elif options.tests:
            ids = [one if isinstance(one, str) else one["id"] for one in json.loads(options.tests.read_text())]
        elif options.checks:
            ids = listed(options.nova, work, "--checks")
        else:
            ids = [one["id"] for one in discover(options, work)]
        ids = ids[:SHORT] if options.short else ids
        if options.mode == "stock":
            results = run(options, options.mode, ids, [], work)
        else:
            with RabbitMQ(schedulers=1) as broker:
                names = [f"nova-{number}" for number in range(len(ids))]
                urls = broker.add_vhosts(names)
                results = run(options, options.mode, ids, [urls[name] for name in names], work)
    counts = collections.Counter(one["outcome"] for one in results)
    passed, counted = counts["passed"], len(results) - counts["skipped"]
    sys.stdout.write(f"{passed} of {counted} passed ({options.mode}), {counts['skipped']} skipped\n")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if counted and passed >= options.share * counted else 1


if __name__ == "__main__":
    sys.exit(main())
