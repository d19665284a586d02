"""Plants each drawn mutant in a copy of the clone, and runs the tests of its package there; see scripts/mutation."""

from __future__ import annotations

import argparse
import json
import os
import queue
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
# The tests of each package's rules, the quickest first.
TESTS_OF = {
    "placement_worker": ("tests/unit/placement", "tests/unit/replica", "tests/unit/placement_rest", "tests/contract"),
    "scheduler_worker": ("tests/unit/scheduler", "tests/contract"),
    "cell_conductor": ("tests/unit/conductor", "tests/contract"),
}
# Of the processor time of the same tests without a mutant: more is a mutant that does not end.
HUNG_FACTOR = 10
LEAST_PROCESSOR_S = 120
# A mutant that waits for what never comes uses no processor. Far more than these tests take on a busy machine.
LONGEST_WAIT_S = 3600.0
# bash sets the bound, as no code may run between a fork and an exec beside threads.
BOUNDED = ("bash", "-c", 'ulimit -t "$0"; exec "$@"')


class CannotCheck(Exception):
    """Tests that fail without a mutant, or that pass with any."""


class Outcome(StrEnum):
    """The end of a run of tests with a mutant."""

    SURVIVED = "survived"
    KILLED = "killed"
    HUNG = "hung"


class Verdict(NamedTuple):
    """The outcome of one mutant, and the tests that it is of."""

    outcome: Outcome
    by: str = ""


class Copy:
    """A copy of the tracked files, in which one mutant at a time is planted."""

    def __init__(self, place: Path) -> None:
        self.place = place
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, place / name)

    def check(self, path: str, source: str, tests: Sequence[str], processor_s: float) -> Verdict:
        """Run the tests with this source in place of the file's, until one fails."""
        target = self.place / path
        original = target.read_text(encoding="utf-8")
        try:
            self._write(target, source)
            for test in tests:
                if (outcome := self._outcome(test, processor_s)) is not Outcome.SURVIVED:
                    return Verdict(outcome, test)
            return Verdict(Outcome.SURVIVED)
        finally:
            self._write(target, original)

    def processor_s(self, tests: Sequence[str]) -> float:
        """The processor time of the tests as they are. Raises CannotCheck when one fails."""
        took = 0.0
        for test in tests:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            if self._outcome(test, LONGEST_WAIT_S) is not Outcome.SURVIVED:
                raise CannotCheck(f"{test} fails without a mutant")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            took = max(took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return took

    def _write(self, target: Path, source: str) -> None:
        target.write_text(source, encoding="utf-8")
        # Compiled modules are known by size and second; two mutants of one file may have both.
        for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
            compiled.unlink()

    def _outcome(self, test: str, processor_s: float) -> Outcome:
        command = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*BOUNDED, str(int(processor_s)), *command, "-m", "not postgres and not rabbitmq", test],
                cwd=self.place, env=environment(), stdin=subprocess.DEVNULL, capture_output=True,
                timeout=LONGEST_WAIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome.HUNG
        if done.returncode == 0:
            return Outcome.SURVIVED
        # A test that failed, or a module that cannot be imported; else a signal, which the bound sends.
        return Outcome.KILLED if done.returncode > 0 else Outcome.HUNG


def environment() -> dict[str, str]:
    """Without the settings of servers, so that no test uses any."""
    return {name: value for name, value in os.environ.items() if name not in {"AMQP_URL", "DATABASE_URL"}}


def drawn(options: argparse.Namespace, packages: Sequence[str]) -> dict[str, Any]:
    """The mutants that the seed draws, by mutmut's own interpreter."""
    paths = sorted(str(path.relative_to(ROOT)) for name in packages for path in (ROOT / name / "domain").rglob("*.py"))
    words = ["tests/mutation/drawn.py", "--seed", str(options.seed), "--mutants", str(options.mutants), *paths]
    done = subprocess.run([options.drawing_python, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotCheck(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def bounds(copy: Copy, packages: Sequence[str]) -> dict[str, float]:
    """The processor time that a mutant of each package may use. Raises CannotCheck where any mutant would survive."""
    found = {}
    for name in packages:
        found[name] = max(LEAST_PROCESSOR_S, HUNG_FACTOR * copy.processor_s(TESTS_OF[name]))
        broken = copy.check(f"{name}/domain/__init__.py", "raise SystemError\n", TESTS_OF[name], found[name])
        if broken.outcome is Outcome.SURVIVED:
            raise CannotCheck(f"the tests of {name} do not import it from the copy")
    return found


def checked(mutants: Sequence[dict[str, Any]], packages: Sequence[str], jobs: int) -> Iterator[tuple[Any, Verdict]]:
    """Each mutant and what its tests made of it, in the order in which they were drawn."""
    with ExitStack() as stack:
        places = [stack.enter_context(tempfile.TemporaryDirectory(prefix="berth-mutation-")) for _ in range(jobs)]
        copies: queue.Queue[Copy] = queue.Queue()
        for place in places:
            copies.put(Copy(Path(place)))
        first = copies.get()
        limits = bounds(first, packages)
        copies.put(first)

        def one(mutant: dict[str, Any]) -> Verdict:
            copy = copies.get()
            try:
                name = mutant["path"].partition("/")[0]
                return copy.check(mutant["path"], mutant["source"], TESTS_OF[name], limits[name])
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            yield from zip(mutants, pool.map(one, mutants), strict=True)


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="scripts/mutation", description=__doc__)
    parser.add_argument("--seed", type=lambda text: int(text, 0), default=1)
    parser.add_argument("--mutants", type=int, default=20)
    parser.add_argument("--package", choices=sorted(TESTS_OF), action="append")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--drawing-python", required=True, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Print each survivor, and the count."""
    options = parsed()
    packages = sorted(options.package or TESTS_OF)
    began = time.monotonic()
    survivors: list[dict[str, Any]] = []
    killed = hung = 0
    try:
        found = drawn(options, packages)
        for mutant, verdict in checked(found["drawn"], packages, options.jobs):
            where = f"{mutant['path']}:{mutant['line']}"
            killed += verdict.outcome is not Outcome.SURVIVED
            hung += verdict.outcome is Outcome.HUNG
            if verdict.outcome is not Outcome.SURVIVED:
                sys.stdout.write(f"{verdict.outcome} in {verdict.by}  {where}\n")
            else:
                survivors.append({name: mutant[name] for name in ("path", "line", "before", "after")})
                sys.stdout.write(f"SURVIVED  {where}\n{lines('-', mutant['before'])}{lines('+', mutant['after'])}")
            sys.stdout.flush()
    except CannotCheck as wrong:
        sys.stderr.write(f"berth: {wrong}\n")
        return 1
    figures = {
        "packages": packages,
        "seed": options.seed,
        "there": found["there"],
        "checked": len(found["drawn"]),
        "killed": killed,
        "hung": hung,
        "survivors": survivors,
        "seconds": round(time.monotonic() - began),
    }
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    sys.stdout.write(
        f"{killed} of {figures['checked']} mutants killed, {hung} of them hanging, {len(survivors)} survived; "
        f"seed {options.seed} of {found['there']} in {', '.join(packages)}\n"
    )
    return 0


def lines(sign: str, text: str) -> str:
    """As a difference shows them."""
    return "".join(f"  {sign} {line}\n" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
