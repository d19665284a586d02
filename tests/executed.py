"""The tests that a run of .ci/run executed, in one line, read from the files that its steps left in a folder.

    python -m tests.executed FOLDER

Exit status 1, and no such line, when a file is missing or cannot be read, reports a failure, or nothing at all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree


class Untold(Exception):
    """A file that does not show that its step did something and passed."""


class Step(NamedTuple):
    """One step's file, how to count what was done, whether all of it passed, and how that is printed."""

    file: str
    count: Callable[[Any], int]
    passed: Callable[[Any], bool]
    words: str
    needs: str = ""  # what a checkout may lack; without it the step is left out, and the last line names it


LEFT_OUT = {"left_out": True}


def _suites(report: ElementTree.Element, name: str) -> int:
    return sum(int(suite.attrib[name]) for suite in report.iter("testsuite"))


STEPS = (
    Step(
        "pytest.xml",
        lambda content: _suites(content, "tests") - _suites(content, "skipped"),
        lambda content: _suites(content, "failures") == _suites(content, "errors") == 0,
        "{} tests (pytest)",
    ),
    Step(
        "mutants.xml",
        lambda content: _suites(content, "tests") - _suites(content, "skipped"),
        lambda content: _suites(content, "failures") == _suites(content, "errors") == 0,
        "{} tests of deliberate defects",
    ),
    Step(
        "drills.xml",
        lambda content: _suites(content, "tests") - _suites(content, "skipped"),
        lambda content: _suites(content, "failures") == _suites(content, "errors") == 0,
        "{} drills",
    ),
    Step(
        "postgresql-16.xml",
        lambda content: _suites(content, "tests") - _suites(content, "skipped"),
        lambda content: _suites(content, "failures") == _suites(content, "errors") == 0,
        "{} tests on PostgreSQL 16.2",
    ),
    Step(
        "demo.json",
        lambda content: content["requests"],
        lambda content: bool(content["verdicts"]) and all(verdict["holds"] is True for verdict in content["verdicts"]),
        "demo {} boots",
    ),
    Step(
        "conformance.json", lambda content: content["passed"], lambda content: content["failed"] == 0, "conformance {}"
    ),
    Step(
        "differential.json",
        lambda content: content["requests"],
        lambda content: content["failed"] == 0 and content["failures"] == [],
        "differential {} requests",
    ),
    Step(
        "simulate.json",
        lambda content: content["requests"],
        lambda content: content["failed"] == [],
        "simulation {} requests",
    ),
    Step(
        "simulate-alone.json",
        lambda content: content["requests"],
        lambda content: content["failed"] == [],
        "simulation alone {} requests",
    ),
    Step(
        "clients.json",
        lambda content: sum(life["steps"] for life in content.values() if isinstance(life, dict)),
        lambda content: content["passed"] is True,
        "clients {} calls",
    ),
    Step(
        "bad-input.json",
        lambda content: content["requests"],
        lambda content: content["passed"] is True,
        "bad input {} requests",
    ),
    Step(
        "bad-input-web.json",
        lambda content: content["requests"],
        lambda content: content["passed"] is True,
        "bad input to the HTTP API {} requests",
    ),
    Step("pages.json", lambda content: content["steps"], lambda content: content["passed"] is True, "pages {} steps"),
    Step(
        "ironic.xml",
        lambda content: _suites(content, "tests") - _suites(content, "skipped"),
        lambda content: _suites(content, "failures") == _suites(content, "errors") == 0,
        "Ironic {} tests",
    ),
    Step(
        "side-by-side.json",
        lambda content: content["built"],
        lambda content: (
            content["failed"] == content["broken"] == content["not_migrated"] == []
            and content["dead_letters"] == {}
            and content["at_rest"]
        ),
        "two versions side by side {} builds",
        needs="the commits of earlier versions",
    ),
    Step("fuzz.json", lambda content: content["inputs"], lambda content: content["passed"] is True, "fuzz {} inputs"),
)


def executed(folder: Path) -> str:
    """The line; raises Untold."""
    return "all passed: " + ", ".join(_in_words(folder / step.file, step) for step in STEPS)


def _in_words(path: Path, step: Step) -> str:
    if step.needs and path.exists() and path.read_bytes() == json.dumps(LEFT_OUT).encode():
        return f"NOT {step.words.replace('{} ', '')}: this checkout has not {step.needs}"
    return step.words.format(_counted(path, step))


def _counted(path: Path, step: Step) -> int:
    try:
        content = ElementTree.parse(path).getroot() if path.suffix == ".xml" else json.loads(path.read_text())
        count, passed = step.count(content), step.passed(content)
        nothing = count < 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ElementTree.ParseError) as wrong:
        raise Untold(f"{path} does not show what was executed: {type(wrong).__name__}: {wrong}") from wrong
    if not passed:
        raise Untold(f"{path} reports a failure")
    if nothing:
        raise Untold(f"{path} shows that nothing was executed")
    return count


def main() -> int:
    """Print the line; 0 when there is one."""
    try:
        sys.stdout.write(f"==== {executed(Path(sys.argv[1]))}\n")
    except Untold as untold:
        sys.stderr.write(f"==== {untold}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
