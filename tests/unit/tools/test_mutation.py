"""How scripts/mutation plants a mutant, and which survivors it does not print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.mutation.__main__ import EQUIVALENT, ROOT, Reasons
from tests.mutation.planting import PLANT, Functions, OnlyByImport, changed_functions
from tests.mutation.warm import KILLED, MOST_MEMORY_BYTES, SURVIVED, bounded, by_import, forked

SOURCE = """
LIMIT = 3
def is_few(count):
    return count < LIMIT
class Box:
    size = 1
    def has_room(self, count):
        return all(one < self.size for one in range(count))
"""


def compiled(source: str) -> Any:
    return compile(source, "rules.py", "exec", dont_inherit=True)


def imported(place: Path) -> ModuleType:
    spec = spec_from_file_location("rules_of_a_test", place)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("count < LIMIT", "count <= LIMIT", ["is_few"]),
        ("one < self.size", "True", ["Box.has_room"]),
        ("count < LIMIT", "count < LIMIT", []),
    ],
)
def test_the_functions_of_a_mutant_are_those_whose_code_it_changes(before: str, after: str, changed: list[str]) -> None:
    mutant = SOURCE.replace(before, after)
    found = list(changed_functions(compiled(SOURCE), compiled(mutant)))
    assert [one.co_qualname for one, _ in found] == changed


@pytest.mark.parametrize(("before", "after"), [("LIMIT = 3", "LIMIT = 4"), ("size = 1", "size = 2")])
def test_what_an_import_runs_is_not_changed_in_a_function(before: str, after: str) -> None:
    with pytest.raises(OnlyByImport):
        list(changed_functions(compiled(SOURCE), compiled(SOURCE.replace(before, after))))


def test_a_function_that_is_planted_is_another_wherever_it_was_imported_to(tmp_path: Path) -> None:
    place = tmp_path / "rules.py"
    place.write_text(SOURCE)
    module = imported(place)
    is_few, box = module.is_few, module.Box()
    functions = Functions(tmp_path)
    functions.plant("rules.py", SOURCE.replace("count < LIMIT", "count > LIMIT"))
    functions.plant("rules.py", SOURCE.replace("one < self.size", "True"))
    assert (is_few(2), is_few(4), box.has_room(5)) == (False, True, True)
    with pytest.raises(OnlyByImport):
        functions.plant("rules.py", SOURCE)
    assert "rules_of_a_test" not in sys.modules


def test_what_an_import_runs_is_planted_before_a_conftest_imports_it(tmp_path: Path) -> None:
    """It survived every test: the module was there already when its mutant was to come in its place."""
    (tmp_path / "rules.py").write_text(SOURCE)
    (tmp_path / "conftest.py").write_text("import rules\n")
    (tmp_path / "test_rules.py").write_text("import rules\n\ndef test_limit():\n    assert not rules.is_few(3)\n")
    plant = tmp_path / "plant"
    for limit, ended in ((3, pytest.ExitCode.OK), (4, pytest.ExitCode.TESTS_FAILED)):
        source = SOURCE.replace("LIMIT = 3", f"LIMIT = {limit}")
        plant.write_text(json.dumps({"path": "rules.py", "source": source, "first": []}))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.mutation.planting"]
        environment = {**os.environ, PLANT: str(plant), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, check=False
        )
        assert done.returncode == ended, done.stdout


@pytest.mark.parametrize(("limit", "outcome"), [(3, SURVIVED), (4, KILLED)])
def test_what_an_import_runs_is_shown_to_tests_that_run_no_line_of_its_module(
    limit: int, outcome: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each default of an event survived: a test that only reads it runs no line of the events."""
    (tmp_path / "rules.py").write_text(SOURCE)
    (tmp_path / "test_rules.py").write_text(
        "import rules\n\ndef test_few():\n    rules.is_few(1)\n\ndef test_limit():\n    assert rules.LIMIT == 3\n"
    )
    mutant = {"path": "rules.py", "source": SOURCE.replace("LIMIT = 3", f"LIMIT = {limit}")}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def check(_: int) -> int:
        return by_import(mutant, ["test_rules.py::test_few"], ["test_rules.py"], tmp_path)

    assert list(forked([0], check, 1)) == [(0, outcome)]


def test_a_mutant_that_takes_memory_without_end_fails_before_the_machine_does() -> None:
    """An array that doubled with each host took 20 GB."""

    def grows(_: int) -> int:
        bounded(1.0)
        try:
            return len(bytearray(2 * MOST_MEMORY_BYTES))
        except MemoryError:
            return KILLED

    assert list(forked([7], grows, 1)) == [(7, KILLED)]


def test_a_mutant_is_equivalent_by_its_text_wherever_it_stands(tmp_path: Path) -> None:
    place = tmp_path / "equivalent.toml"
    place.write_text('[[mutant]]\npath = "a.py"\nbefore = "  x > 0"\nafter = "  x >= 0"\nreason = "x is never 0"\n')
    reasons = Reasons(place)
    mutant = {"path": "a.py", "line": 7, "before": "    x > 0", "after": "    x >= 0"}
    assert reasons.of(mutant) == "x is never 0"
    assert reasons.of(mutant | {"after": "    x < 0"}) == ""
    assert Reasons(EQUIVALENT).of(mutant) == ""
