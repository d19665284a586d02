"""Every test can fail of what it looks at: it asserts, expects an error, or waits with a limit; itself, or by a helper.

Helpers are known by name: a function of `tests/` that does one of these, or calls one that does. A method whose name
berth's own code has too, as `publish`, is none.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
PRODUCT = ("bus", "placement_worker", "scheduler_worker", "cell_conductor", "compute_sim", "ironic_sync", "berth")
# Calls that fail by themselves: pytest's, those with a limit by the clock, jsonschema's.
FAILING = {"raises", "warns", "fail", "timeout", "check_schema"}
# What they are about is that nothing is raised.
NOTHING_RAISED = {"test_a_defect_can_be_planted", "test_a_deliberate_defect_replaces_what_there_is"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def called(function: Function, methods_of_others: frozenset[str] = frozenset()) -> set[str]:
    """The names of what a function calls, without what they are called on."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    methods = {one.attr for one in calls if isinstance(one, ast.Attribute)}
    return (methods - methods_of_others) | {one.id for one in calls if isinstance(one, ast.Name)}


def can_fail(function: Function) -> bool:
    """By itself."""
    return any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(function)) or bool(
        FAILING & called(function)
    )


def without_assertions(functions: list[Function], methods_of_others: frozenset[str] = frozenset()) -> list[str]:
    """The tests among these that cannot fail, each with its line."""
    calls = [(one, called(one, methods_of_others)) for one in functions]
    failing = {one.name for one in functions if can_fail(one)}
    while more := {one.name for one, names in calls if one.name not in failing and names & failing}:
        failing |= more
    return [
        f"{one.name}:{one.lineno}"
        for one, names in calls
        if one.name.startswith("test_") and not can_fail(one) and not names & failing
    ]


def functions_of(source: str) -> list[Function]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_every_test_asserts() -> None:
    functions = [one for path in sorted((ROOT / "tests").rglob("*.py")) for one in functions_of(path.read_text())]
    assert len(functions) > 4_000
    product = [path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py"))]
    theirs = frozenset(one.name for path in product for one in functions_of(path.read_text()))
    assert {one.partition(":")[0] for one in without_assertions(functions, theirs)} == NOTHING_RAISED


def test_a_test_that_only_calls_is_found() -> None:
    source = (
        "def helper():\n    inner()\ndef inner():\n    assert x\n"
        "def test_by_helper():\n    helper()\ndef test_bare():\n    print(open())\n"
    )
    assert without_assertions(functions_of(source)) == ["test_bare:7"]
