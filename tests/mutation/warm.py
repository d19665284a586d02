"""Checks mutants in forks of a process that has imported and collected a package's tests once; see scripts/mutation.

Which test runs which line is measured once. A mutant's fork gives the functions that it changes their new code, and
runs the tests that run its lines, narrow and quick ones first, until one fails; a mutant on a line that no test runs
survives at once. What is run by an import is imported anew, by another process that runs the tests of the same module,
and then all.
"""

from __future__ import annotations

import ast
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from coverage import Coverage

from tests.mutation.planting import PLANT, Functions, OnlyByImport

# Of the processor time of the same tests without a mutant: more is a mutant that does not end.
HUNG_FACTOR = 10
LEAST_PROCESSOR_S = 30
LONGEST_PROCESSOR_S = 3600
MOST_MEMORY_BYTES = 2**31  # beside what the tests without a mutant have
# A mutant that waits for what never comes uses no processor: the bound by the clock is far more than any of these tests
# takes on a busy machine.
OPTIONS = ("-n0", "-q", "-p", "no:cacheprovider", "--timeout", "240")
SURVIVED, KILLED, FAULT, UNREACHED = 0, 10, 20, 30


class Ran(NamedTuple):
    """What running the tests as they are has shown."""

    lines: dict[str, dict[int, set[int]]]  # the tests that run each line of each file
    seconds: dict[int, float]  # of processor time
    failed: list[int]

    def narrowest_first(self, tests: Iterable[int]) -> list[int]:
        """What is quick and runs few lines is likely to be a case of a table, beside the decision."""
        lines = Counter(test for of_file in self.lines.values() for tests_of in of_file.values() for test in tests_of)
        return sorted(tests, key=lambda test: (self.seconds[test] * lines[test], test))


class Warm:
    """A plugin of pytest that runs mutants in place of tests."""

    def __init__(self, job: dict[str, Any], imports: Coverage, tell: Callable[[dict[str, Any]], None]) -> None:
        self._job, self._imports, self._tell = job, imports, tell
        self._root = Path.cwd()
        self._failed = False
        self._items: list[pytest.Item] = []
        self._options = options_of(job)

    def pytest_sessionstart(self) -> None:
        """What fails is known: no smaller example is looked for, and the same are drawn for each mutant."""
        import hypothesis  # noqa: PLC0415  (pytest's plugin of it wants to be the first)

        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        drawing = {"derandomize": True, "database": None, "phases": phases, "max_examples": 100}
        hypothesis.settings.register_profile("mutation", **drawing)
        hypothesis.settings.load_profile("mutation")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """A server that a test starts itself would outlive the fork."""
        items[:] = [one for one in items if "own_broker" not in getattr(one, "fixturenames", ())]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._imports.stop()
        self._items = session.items
        with tempfile.TemporaryDirectory() as place:
            self._check(Path(place))
        return True

    def _check(self, place: Path) -> None:
        imported = {path: set(_lines_of(self._imports, self._root / path)) for path in self._job["files"]}
        ran = self._measured(place)
        self._tell({"tests": len(self._items), "seconds": sum(ran.seconds.values())})
        for test in ran.failed:  # what fails without a mutant finds none
            self._tell({"left_out": self._items[test].nodeid})
            for of_file in ran.lines.values():
                for tests in of_file.values():
                    tests.discard(test)
        functions = Functions(self._root)
        said = place / "verdict"

        def check(at: int) -> int:
            mutant = self._job["mutants"][at]
            source = _Source(self._root / mutant["path"])
            lines = range(mutant["line"], mutant["line"] + max(1, len(mutant["before"].splitlines())))
            of_file = ran.lines[mutant["path"]]
            # Of an operand that stands on a line of its own, the tests that reach its function, too.
            chosen = _union(of_file, lines) or _union(of_file, source.function(mutant["line"]))
            bounded(sum(ran.seconds[test] for test in chosen))
            try:
                if imported[mutant["path"]].intersection(lines) and source.function(mutant["line"]):
                    raise OnlyByImport
                functions.plant(mutant["path"], mutant["source"])
            except OnlyByImport:
                first = [self._items[test].nodeid for test in ran.narrowest_first(_union(of_file, of_file))]
                without = [f"--deselect={self._items[test].nodeid}" for test in ran.failed]
                return by_import(mutant, first, [*self._options, *without, *self._job["tests"]], place)
            if not chosen:
                return UNREACHED
            failed = self._run(ran.narrowest_first(chosen), until_one_fails=True)
            if failed:
                (said.with_suffix(f".{at}")).write_text(self._items[failed[0]].nodeid)
            return KILLED if failed else SURVIVED

        for at, status in forked(range(len(self._job["mutants"])), check, self._job["jobs"]):
            by = said.with_suffix(f".{at}")
            self._tell({"mutant": at, "status": status, "by": by.read_text() if by.exists() else ""})

    def _measured(self, place: Path) -> Ran:
        """Which test runs which line."""
        ran = Ran({path: {} for path in self._job["files"]}, {}, [])
        by_module = [list(tests) for _, tests in groupby(range(len(self._items)), lambda at: self._items[at].path)]
        parts: list[list[int]] = [[] for _ in range(self._job["jobs"])]
        for tests in by_module:
            min(parts, key=len).extend(tests)
        parts = [part for part in parts if part]

        def measure(part: int) -> int:
            coverage = Coverage(
                data_file=None, include=[str(self._root / path) for path in ran.lines], config_file=False
            )
            coverage.set_option("run:disable_warnings", ["no-data-collected"])  # what is only imported
            coverage.start()
            spent: dict[int, float] = {}
            failed = self._run(parts[part], before=lambda test: coverage.switch_context(str(test)), spent=spent)
            coverage.stop()
            lines = {path: _contexts(coverage, self._root / path) for path in ran.lines}
            (place / f"ran.{part}").write_text(json.dumps([lines, spent, failed]))
            return SURVIVED

        for part, _ in forked(range(len(parts)), measure, self._job["jobs"]):
            lines, seconds, failed = json.loads((place / f"ran.{part}").read_text())
            ran.failed.extend(failed)
            ran.seconds.update({int(test): spent for test, spent in seconds.items()})
            for path, tests_of in lines.items():
                for line, tests in tests_of.items():
                    ran.lines[path].setdefault(int(line), set()).update(tests)
        return ran

    def _run(
        self,
        tests: Sequence[int],
        *,
        until_one_fails: bool = False,
        before: Callable[[int], None] = lambda _: None,
        spent: dict[int, float] | None = None,
    ) -> list[int]:
        """Run these here; returns those that fail."""
        failed = []
        for test, following in zip_longest(tests, tests[1:]):
            before(test)
            began = time.process_time()
            item, next_item = self._items[test], None if following is None else self._items[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            if spent is not None:
                spent[test] = time.process_time() - began
            if self._failed:
                failed.append(test)
                self._failed = False
                if until_one_fails:
                    break
        return failed


class _Source:
    """The functions of a file, as ranges of lines."""

    def __init__(self, path: Path) -> None:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        self._bodies = [range(each.body[0].lineno, (each.end_lineno or 0) + 1) for each in found]

    def function(self, line: int) -> range:
        """The lines of the innermost that this line is in; none outside of all."""
        return min((body for body in self._bodies if line in body), key=len, default=range(0))


def by_import(mutant: dict[str, Any], first: Sequence[str], tests: Sequence[str], place: Path) -> int:
    """Tests in a process that imports the mutant: those that run a line of its module, and then all. What only reads a
    constant or a default runs no line.
    """
    plant = place / f"plant.{os.getpid()}"
    plant.write_text(json.dumps({"path": mutant["path"], "source": mutant["source"], "first": list(first)}))
    bounded(LONGEST_PROCESSOR_S / HUNG_FACTOR)
    for chosen in filter(None, (first, tests)):
        command = [sys.executable, "-m", "pytest", "-x", *OPTIONS, "-p", "tests.mutation.planting", *chosen]
        done = subprocess.run(
            command, env=os.environ | {PLANT: str(plant)}, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        # A test that failed, or a module that cannot be imported; else a signal, which the bound sends.
        if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return KILLED if done.returncode > 0 else -done.returncode
    return SURVIVED


def bounded(known_s: float) -> None:
    """Bound the processor time and the memory of this process and of each that it starts."""
    most = int(max(LEAST_PROCESSOR_S, HUNG_FACTOR * known_s) + time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def forked(tasks: Iterable[int], run: Callable[[int], int], jobs: int) -> Iterator[tuple[int, int]]:
    """Each task with its exit status, or the negative number of the signal that ended it; at most so many at once."""
    waiting, running = iter(tasks), {}
    while True:
        for task in waiting:
            pid = _fork(task, run)
            running[os.pidfd_open(pid)] = pid, task
            if len(running) == jobs:
                break
        if not running:
            return
        # Of these alone: a process of pytest may have children that others wait for.
        first = select.select(list(running), [], [])[0][0]
        pid, task = running.pop(first)
        _, status = os.waitpid(pid, 0)
        os.close(first)
        yield task, os.waitstatus_to_exitcode(status)


def _fork(task: int, run: Callable[[int], int]) -> int:
    if pid := os.fork():
        return pid
    status = FAULT
    try:
        status = run(task)
    except BaseException as fault:
        sys.__stderr__.write(f"{fault!r}\n")
        raise
    finally:
        os._exit(status)


def _union(tests_of: dict[int, set[int]], lines: Iterable[int]) -> set[int]:
    return set().union(*(tests_of.get(line, ()) for line in lines))


def _lines_of(coverage: Coverage, path: Path) -> list[int]:
    return coverage.get_data().lines(str(path)) or []


def _contexts(coverage: Coverage, path: Path) -> dict[int, list[int]]:
    found = coverage.get_data().contexts_by_lineno(str(path))
    return {line: [int(each) for each in contexts if each] for line, contexts in found.items()}


def options_of(job: dict[str, Any]) -> tuple[str, ...]:
    """Of pytest, beside the tests."""
    return (*OPTIONS, "-m", "not system" + ("" if job["servers"] else " and not postgres and not rabbitmq"))


def main() -> int:
    """The job is a file; what is found goes to standard output, an object of JSON a line."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    told = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def tell(what: dict[str, Any]) -> None:
        told.write(json.dumps(what) + "\n")
        told.flush()

    imports = Coverage(data_file=None, include=[str(Path.cwd() / path) for path in job["files"]], config_file=False)
    imports.start()
    return int(pytest.main(["--capture=sys", *options_of(job), *job["tests"]], plugins=[Warm(job, imports, tell)]))


if __name__ == "__main__":
    sys.exit(main())
