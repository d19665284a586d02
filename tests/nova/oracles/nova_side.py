"""What Nova's sides of the oracles share: JSON lines on stdin and stdout, the branches that were reached, test suites.
Imported before Nova is.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# What the other side speaks to: Nova's tests replace stdout, and Nova prints.
SAID, HEARD = os.fdopen(os.dup(1), "w", buffering=1), os.fdopen(os.dup(0), "r")
os.dup2(2, 1)

Modules = Mapping[str, Sequence[str]]  # {file: the functions that decide}


def say(line: dict[str, Any]) -> None:
    SAID.write(json.dumps(line) + "\n")


def branches(tracer: Any, modules: Modules, decides: Callable[[str, Sequence[str]], bool]) -> dict[str, Any]:
    """How many branches of the deciding functions were taken, and the lines of those that were not. decides: whether a
    function is one of these names.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "coverage.json")
        tracer.json_report(outfile=path, pretty_print=False)
        with open(path, encoding="utf-8") as file:
            files = json.load(file)["files"]
    taken, missed = 0, []
    for path, names in modules.items():
        functions = next(one for name, one in files.items() if os.path.samefile(name, path))["functions"]
        for name, found in functions.items():
            if not decides(name, names):
                continue
            taken += len(found["executed_branches"])
            missed += [f"{name}: line {a} to {b}" for a, b in found["missing_branches"]]
            missed += [f"{name}: line {line}" for line in found["missing_lines"]]
    return {"taken": taken, "missed": missed}


def answer_cases(
    answer: Callable[[dict[str, Any]], dict[str, Any]], modules: Modules, decides: Callable[[str, Sequence[str]], bool]
) -> None:
    """Answer each line that is heard; at the end say the branches."""
    sys.path.append(os.environ.get("COVERAGE_IN", ""))
    import coverage  # noqa: PLC0415

    tracer = coverage.Coverage(branch=True, include=list(modules), data_file=None, messages=False)
    tracer.start()
    for line in HEARD:
        say(answer(json.loads(line)))
    tracer.stop()
    say(branches(tracer, modules, decides))


class Result(unittest.TestResult):
    """Counts, and says what fails."""

    passed = 0

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        self.passed += 1
        super().addSuccess(test)


def each_test(suite: Any) -> Iterator[Any]:
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from each_test(one)
        else:
            yield one


def loaded(names: Sequence[str]) -> list[Any]:
    """The tests of these modules."""
    return list(each_test(unittest.defaultTestLoader.loadTestsFromNames(names)))


def run_tests(suite: Sequence[Any], ask: Callable[[dict[str, Any]], int]) -> None:
    """Run them, and say how many pass, and which have asked for a decision. ask: the other side, which counts."""
    result = Result()
    deciding: list[str] = []
    for test in suite:
        before = ask({"do": "asked"})
        test.run(result)
        if ask({"do": "asked"}) - before > 1:
            deciding.append(test.id())
    failed = {one.id(): text for one, text in [*result.failures, *result.errors]}
    say({"tests": len(suite), "passed": result.passed, "deciding": deciding, "failed": failed})
