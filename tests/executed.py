"""One line for what a run of .ci/run or scripts/nightly executed, read from the files that its steps left.

    python -m tests.executed FOLDER FILE ...

Exit status 1, and no such line, when a file is missing or cannot be read, reports a failure, or nothing at all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree


class Untold(Exception):
    """A file that does not show that its step did something and passed."""


class Step(NamedTuple):
    """How to count what one step's file shows was done, whether all of it passed, and how that is printed."""

    count: Callable[[Any], int]
    passed: Callable[[Any], bool]
    words: str
    needs: str = ""  # what a checkout may lack; without it the step is left out, and the last line names it


LEFT_OUT = {"left_out": True}


def _suites(report: ElementTree.Element, name: str) -> int:
    return sum(int(suite.attrib[name]) for suite in report.iter("testsuite"))


def _of_pytest(words: str) -> Step:
    return Step(
        lambda content: _suites(content, "tests") - _suites(content, "skipped"),
        lambda content: _suites(content, "failures") == _suites(content, "errors") == 0,
        words,
    )


def _of_placement(words: str) -> Step:
    return Step(lambda content: content["passed"], lambda content: content["failed"] == 0, words)


def _of_simulation(words: str) -> Step:
    return Step(lambda content: content["requests"], lambda content: content["failed"] == [], words)


def _of_requests(words: str, counted: str = "requests") -> Step:
    return Step(lambda content: content[counted], lambda content: content["passed"] is True, words)


STEPS = {
    "pytest.xml": _of_pytest("{} tests (pytest)"),
    "more.xml": _of_pytest("{} tests of more seeds and examples"),
    "mutants.xml": _of_pytest("{} tests of deliberate defects"),
    "drills.xml": _of_pytest("{} drills"),
    "postgresql-16.xml": _of_pytest("{} tests on PostgreSQL 16.2"),
    "supported-trixie.xml": _of_pytest("{} tests on Python 3.13, RabbitMQ 4.0 and PostgreSQL 17"),
    "supported-sid.xml": _of_pytest("{} tests on Python 3.13, RabbitMQ 4.3 and PostgreSQL 18"),
    "supported-mixed.xml": _of_pytest("{} tests on Python 3.11, RabbitMQ 4.3 and PostgreSQL 16"),
    "ironic.xml": _of_pytest("Ironic {} tests"),
    "ironic-drill.xml": _of_pytest("Ironic {} drills"),
    "demo.json": Step(
        lambda content: content["requests"],
        lambda content: bool(content["verdicts"]) and all(verdict["holds"] is True for verdict in content["verdicts"]),
        "demo {} boots",
    ),
    "conformance.json": _of_placement("conformance {}"),
    "conformance-memory.json": _of_placement("conformance in memory {}"),
    "differential.json": Step(
        lambda content: content["requests"],
        lambda content: content["failed"] == 0 and content["failures"] == [],
        "differential {} requests",
    ),
    "simulate.json": _of_simulation("simulation {} requests"),
    "simulate-alone.json": _of_simulation("simulation alone {} requests"),
    "mutation.json": Step(
        lambda content: content["killed"],
        lambda content: content["checked"] == content["killed"] + len(content["survivors"]),
        "mutation {} killed",
    ),
    "clients.json": Step(
        lambda content: sum(life["steps"] for life in content.values() if isinstance(life, dict)),
        lambda content: content["passed"] is True,
        "clients {} calls",
    ),
    "bad-input.json": _of_requests("bad input {} requests"),
    "bad-input-web.json": _of_requests("bad input to the HTTP API {} requests"),
    "pages.json": _of_requests("pages {} steps", "steps"),
    "fuzz.json": _of_requests("fuzz {} inputs", "inputs"),
    "chaos.json": Step(
        lambda content: content["requests"],
        lambda content: (
            content["lost"] == content["doubled"] == content["leaked"] == content["overcommitted"] == 0
            and content["at_rest"] is True
            and bool(content["invariants"])
            and all(content["invariants"].values())
        ),
        "chaos {} builds",
    ),
    "street.json": Step(
        lambda content: content["boots"], lambda content: content["invariants_hold"] is True, "street {} boots"
    ),
    "nova.json": Step(
        lambda content: sum(one["outcome"] == "passed" for one in content),
        lambda content: all(one["outcome"] in {"passed", "skipped"} for one in content),
        "in front of Nova {} checks",
    ),
    "side-by-side.json": Step(
        lambda content: content["built"],
        lambda content: (
            content["failed"] == content["broken"] == content["not_migrated"] == []
            and content["dead_letters"] == {}
            and content["at_rest"]
        ),
        "two versions side by side {} builds",
        needs="the commits of earlier versions",
    ),
}


def executed(folder: Path, files: Sequence[str]) -> str:
    """The line of these files; raises Untold."""
    if not files:
        raise Untold("no step left a file")
    if unknown := [name for name in files if name not in STEPS]:
        raise Untold(f"no step leaves {', '.join(unknown)}")
    return "all passed: " + ", ".join(_in_words(folder / name, STEPS[name]) for name in files)


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
        sys.stdout.write(f"==== {executed(Path(sys.argv[1]), sys.argv[2:])}\n")
    except Untold as untold:
        sys.stderr.write(f"==== {untold}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
