"""Every test can fail of what it looks at: it asserts, expects an error, or waits with a limit; itself, or by a helper.

Helpers are known by name: a function of `tests/` that does one of these, or calls one that does. A method whose name
berth's own code has too, as `publish`, is none.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
PRODUCT = ("bus", "placement_worker", "scheduler_worker", "cell_conductor", "compute_sim", "ironic_sync", "berth")
# Calls that fail by themselves: pytest's, those with a limit by the clock, jsonschema's.
FAILING = {"raises", "warns", "fail", "timeout", "check_schema"}
# They test that no exception is raised.
NOTHING_RAISED = {"test_a_defect_can_be_planted", "test_a_deliberate_defect_replaces_what_there_is"}

# A function of berth's own, wherever it is defined.
DEFINED = re.compile(r"^\s*(?:async )?def (\w+)", re.MULTILINE)


class Function(NamedTuple):
    """The relevant parts of a function. methods: names of what it calls on something; names: of
    what it calls plainly.
    """

    name: str
    line: int
    methods: frozenset[str]
    names: frozenset[str]
    asserts: bool

    @property
    def can_fail(self) -> bool:
        """By itself."""
        return self.asserts or not FAILING.isdisjoint(self.methods | self.names)

    def called(self, methods_of_others: frozenset[str]) -> frozenset[str]:
        """The names of what it calls, without what they are called on."""
        return (self.methods - methods_of_others) | self.names


def looked_at(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    inside = list(ast.walk(function))
    calls = [node.func for node in inside if isinstance(node, ast.Call)]
    return Function(
        function.name,
        function.lineno,
        frozenset(one.attr for one in calls if isinstance(one, ast.Attribute)),
        frozenset(one.id for one in calls if isinstance(one, ast.Name)),
        any(isinstance(node, ast.Assert | ast.Raise) for node in inside),
    )


def without_assertions(functions: list[Function], methods_of_others: frozenset[str] = frozenset()) -> list[str]:
    """The tests among these that cannot fail, each with its line."""
    calls = [(one, one.called(methods_of_others)) for one in functions]
    failing = {one.name for one in functions if one.can_fail}
    while more := {one.name for one, names in calls if one.name not in failing and names & failing}:
        failing |= more
    return [
        f"{one.name}:{one.line}"
        for one, names in calls
        if one.name.startswith("test_") and not one.can_fail and not names & failing
    ]


def functions_of(source: str) -> list[Function]:
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [looked_at(node) for node in found]


def test_every_test_asserts() -> None:
    functions = [one for path in sorted((ROOT / "tests").rglob("*.py")) for one in functions_of(path.read_text())]
    assert len(functions) > 4_000
    product = [path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py"))]
    theirs = frozenset(name for path in product for name in DEFINED.findall(path.read_text()))
    assert {one.partition(":")[0] for one in without_assertions(functions, theirs)} == NOTHING_RAISED


def test_a_test_that_only_calls_is_found() -> None:
    source = (
        "def helper():\n    inner()\ndef inner():\n    assert x\n"
        "def test_by_helper():\n    helper()\ndef test_bare():\n    print(open())\n"
    )
    assert without_assertions(functions_of(source)) == ["test_bare:7"]
