"""scripts/nightly, .ci/run and scripts/mutation: what they run, and what they state of it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.executed import STEPS, Untold, executed
from tests.fuzz import __main__ as fuzz
from tests.fuzz.doors import DOORS
from tests.kit.distribution import FOLDERS, LONGEST
from tests.mutation.__main__ import (
    EQUIVALENT,
    OF_NO_PRODUCT,
    ONLY_WITH_SERVERS,
    TESTS_OF,
    WITH_SERVERS,
    Reasons,
    product,
)
from tests.mutation.planting import PLANT, Functions, OnlyByImport, changed_functions
from tests.mutation.warm import KILLED, MOST_MEMORY_BYTES, SURVIVED, bounded, by_import, forked

# --- scripts/nightly, .ci/run, what they state of what was executed, and that the suite is complete.


# --- the steps of scripts/nightly and of .ci/run: none is left out, and none is named that is not there


ROOT = Path(__file__).parents[3]
NIGHTLY = (ROOT / "scripts" / "nightly").read_text()
CI = (ROOT / ".ci" / "run").read_text()
COMMANDS = sorted(path.name for path in (ROOT / "scripts" / "steps").iterdir())
TABLE = re.findall(r'^    "([^"|]+)\|([^"|]+)\|?([^"]*)"$', NIGHTLY, re.MULTILINE)
# Commands that act, or need an argument: no step of every night.
WITHOUT_A_STEP = {"pair", "debian-package", "package-trial"}


def nightly(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(root / "scripts" / "nightly"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The script with three commands of its own: one that works, one that fails, and one that prints its arguments."""
    (tmp_path / "scripts" / "steps").mkdir(parents=True)
    rows = [
        '    "works|scripts/steps/works now"',
        '    "fails|scripts/steps/fails"',
        '    "demo|scripts/steps/works"',
        '    "late|rests FILE|demo.json"',
    ]
    table = re.sub(r"^steps=\(\n.*?^\)$", "\n".join(["steps=(", *rows, ")"]), NIGHTLY, flags=re.MULTILINE | re.DOTALL)
    texts = {
        "nightly": table,
        "late": '#!/bin/sh\necho "$@" "${0##*/}"\n',
        "steps/works": '#!/bin/sh\necho "$@" "${0##*/}"\n',
        "steps/fails": "#!/bin/sh\nexit 3\n",
    }
    for name, text in {**texts, "steps/acts": texts["steps/works"]}.items():
        path = tmp_path / "scripts" / name
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def test_each_command_below_steps_is_a_step_or_known_to_have_none() -> None:
    used = {word.removeprefix("scripts/steps/").split()[0] for _, word, _ in TABLE if word.startswith("scripts/steps/")}
    assert used | WITHOUT_A_STEP == set(COMMANDS)
    assert not used & WITHOUT_A_STEP


def test_each_command_of_a_step_is_there() -> None:
    assert len(TABLE) > len(COMMANDS)
    assert len({name for name, _, _ in TABLE}) == len(TABLE)
    commands = [words.split()[0] for _, words, _ in TABLE] + re.findall(r"^step (scripts/\S+)", CI, re.MULTILINE)
    assert [one for one in commands if one != "rests" and not (ROOT / one).is_file()] == []


def test_each_module_that_a_script_runs_is_there() -> None:
    scripts = [path for path in [*(ROOT / "scripts").rglob("*"), ROOT / ".ci" / "run"] if path.is_file()]
    named = {name for path in scripts for name in re.findall(r"-m ((?:berth|lab|tests)(?:\.\w+)*)", path.read_text())}
    files = {name: ROOT / name.replace(".", "/") for name in sorted(named)}
    assert [
        one for one, at in files.items() if not ((at / "__main__.py").is_file() or at.with_suffix(".py").is_file())
    ] == []


def test_each_file_of_a_step_is_read_in_the_end_and_each_that_is_read_is_left_by_a_step() -> None:
    of_nightly = {file for _, _, file in TABLE if file}
    of_ci = set(re.findall(r'"\$results/([\w.-]+)"', CI))
    assert of_nightly | of_ci == set(STEPS)
    read = CI.partition('-m tests.executed "$results"')[2]
    assert set(re.findall(r"[\w-]+\.(?:xml|json)", read)) == of_ci
    assert all(("FILE" in words) == bool(file) for _, words, file in TABLE)


def test_continuous_integration_has_what_it_must_have() -> None:
    for step in ("test", "simulate", "mutants", "conformance", "differential", "drills", "steps/ironic short"):
        assert f"\nstep scripts/{step} " in CI, step
    assert "--seeds 60 " in CI and '--share 4 --of "$commit"' in CI


def test_what_continuous_integration_does_not_run_whole_is_a_step() -> None:
    words = {name: words for name, words, _ in TABLE}
    assert words["mutants"] == "scripts/mutants --junitxml=FILE"
    assert words["ironic"] == "scripts/steps/ironic test --junitxml=FILE"
    assert "--seeds 1000 " in words["simulate"]


def test_every_step_runs_and_one_that_fails_ends_no_other(clone: Path) -> None:
    done = nightly(clone)
    assert (done.returncode, done.stdout.split("\n")) == (1, ["now works", "works", ""])
    assert re.findall(r"^==== (\w+) took \d+ s$", done.stderr, re.MULTILINE) == ["works", "fails", "demo", "late"]
    assert re.findall(r"^ +\d+ s  (\w+)$", done.stderr, re.MULTILINE) == ["works", "fails", "demo", "late"]
    assert done.stderr.endswith("==== failed: fails\n")


def test_a_step_with_arguments_has_these_alone_and_its_own_exit_status(clone: Path) -> None:
    done = nightly(clone, "works", "--seed", "2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "--seed 2 works\n", "")
    assert nightly(clone, "fails", "once").returncode == 3


@pytest.mark.parametrize("words", [("invented",), ("works", "demo", "invented"), ("invented", "--seed", "2")])
def test_a_step_that_is_not_there_is_refused_before_any_runs(clone: Path, words: tuple[str, ...]) -> None:
    done = nightly(clone, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no step invented" in done.stderr


def test_each_step_that_a_page_names_is_there() -> None:
    known = {*COMMANDS, *(name for name, _, _ in TABLE), "STEP"}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {word for page in pages for word in re.findall(r"scripts/nightly ([a-z][\w-]*)", page.read_text())}
    assert {"docs", "ironic"} <= named <= known


# --- the last line of .ci/run and of scripts/nightly names what was executed, or there is no such line


PYTEST = '<testsuites><testsuite name="pytest" errors="{}" failures="{}" skipped="{}" tests="{}"/></testsuites>'
TESTS = {"pytest.xml": 2858, "more.xml": 90, "mutants.xml": 71, "drills.xml": 20}
TESTS |= {"postgresql-16.xml": 130, "ironic.xml": 7, "ironic-drill.xml": 2}
TESTS |= {"supported-trixie.xml": 3000, "supported-sid.xml": 3000, "supported-mixed.xml": 900}
FIGURES: dict[str, Any] = {
    "nova.json": [{"id": "checks.one", "outcome": "passed"}, {"id": "checks.two", "outcome": "skipped"}],
    "demo.json": {"requests": 1000, "verdicts": [{"holds": True}, {"holds": True}]},
    "conformance.json": {"passed": 1315, "failed": 0, "total": 1316},
    "conformance-memory.json": {"passed": 1314, "failed": 0, "total": 1316},
    "differential.json": {"requests": 3000, "failed": 0, "failures": []},
    "simulate.json": {"seeds": 130, "failed": [], "requests": 4466},
    "simulate-alone.json": {"seeds": 15, "failed": [], "requests": 540},
    "mutation.json": {"checked": 40, "killed": 38, "survivors": [{"line": 1}, {"line": 2}]},
    "clients.json": {"passed": True, "openstack command": {"steps": 40}, "openstacksdk": {"steps": 17}},
    "bad-input.json": {"passed": True, "requests": 1524},
    "bad-input-web.json": {"passed": True, "requests": 2262},
    "pages.json": {"passed": True, "steps": 10},
    "side-by-side.json": {"built": 304, "dead_letters": {}, "at_rest": True}
    | {name: [] for name in ("failed", "broken", "not_migrated")},
    "fuzz.json": {"passed": True, "inputs": 15000, "defects": 0},
    "chaos.json": {"requests": 2000, "at_rest": True, "invariants": {"capacity": True}}
    | dict.fromkeys(("lost", "doubled", "leaked", "overcommitted"), 0),
    "street.json": {"boots": 20000, "invariants_hold": True},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, tests in TESTS.items():
        (tmp_path / name).write_text(PYTEST.format(0, 0, 0, tests))
    for name, content in FIGURES.items():
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def test_no_file_and_one_that_no_step_leaves_are_no_pass(folder: Path) -> None:
    with pytest.raises(Untold, match="no step left a file"):
        executed(folder, ())
    with pytest.raises(Untold, match=r"invented\.json"):
        executed(folder, ("demo.json", "invented.json"))


def test_a_step_that_a_shallow_checkout_leaves_out_is_named(folder: Path) -> None:
    (folder / "side-by-side.json").write_text('{"left_out": true}')
    assert "NOT two versions side by side builds: this checkout has not the commits" in executed(
        folder, ("side-by-side.json",)
    )
    (folder / "demo.json").write_text('{"left_out": true}')
    with pytest.raises(Untold, match=r"demo\.json"):
        executed(folder, ("demo.json",))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("text", [None, "{}", '{"passed": true}'])
def test_a_file_that_is_missing_or_holds_nothing_is_no_pass(folder: Path, name: str, text: str | None) -> None:
    path = folder / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(Untold, match=name):
        executed(folder, tuple(STEPS))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("demo.json", {"requests": 0}),
        ("demo.json", {"verdicts": [{"holds": True}, {"holds": False}]}),
        ("conformance.json", {"failed": 1}),
        ("differential.json", {"requests": 0}),
        ("differential.json", {"failed": 1}),
        ("differential.json", {"failures": ["one"]}),
        ("simulate.json", {"failed": [7]}),
        ("simulate.json", {"requests": 0}),
        ("clients.json", {"passed": False}),
        ("clients.json", {"openstacksdk": {"wrong": "Unexpected"}}),
        ("side-by-side.json", {"built": 0}),
        ("side-by-side.json", {"at_rest": False}),
        ("side-by-side.json", {"broken": ["capacity"]}),
        ("side-by-side.json", {"not_migrated": ["cell_cell1"]}),
        ("side-by-side.json", {"dead_letters": {"scheduler.requests": 1}}),
        ("fuzz.json", {"inputs": 0}),
        ("mutation.json", {"killed": 0, "checked": 2}),
        ("mutation.json", {"checked": 41}),
        ("chaos.json", {"requests": 0}),
        ("chaos.json", {"leaked": 1}),
        ("chaos.json", {"at_rest": False}),
        ("chaos.json", {"invariants": {"capacity": False}}),
        ("street.json", {"invariants_hold": False}),
        ("nova.json", [{"outcome": "passed"}, {"outcome": "failed"}]),
    ],
)
def test_a_failure_or_nothing_done_is_no_pass(folder: Path, name: str, changed: Any) -> None:
    (folder / name).write_text(json.dumps({**FIGURES[name], **changed} if isinstance(changed, dict) else changed))
    with pytest.raises(Untold, match=name):
        executed(folder, tuple(STEPS))


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (0, 0, 9, 9), (1, 0, 0, 9), (0, 1, 0, 9)])
def test_no_test_executed_or_one_that_failed_is_no_pass(folder: Path, counts: tuple[int, ...]) -> None:
    (folder / "pytest.xml").write_text(PYTEST.format(*counts))
    with pytest.raises(Untold, match=r"pytest\.xml"):
        executed(folder, ("pytest.xml",))


def test_a_test_that_was_skipped_was_not_executed(folder: Path) -> None:
    (folder / "pytest.xml").write_text(PYTEST.format(0, 0, 8, 10))
    assert executed(folder, ("pytest.xml",)) == "all passed: 2 tests (pytest)"


# --- the doors of the fuzz


INPUTS = range(60)


@pytest.mark.parametrize("name", DOORS)
def test_each_door_takes_what_is_invented_for_it(name: str) -> None:
    result = fuzz.tried(name, DOORS[name](), 1, INPUTS, math.inf)
    assert result["inputs"] == len(INPUTS)
    assert [defect for defect in result["defects"] if "ms of processor time" not in defect["wrong"]] == []


# --- the servers that scripts/test installs before the tests that need them


def test_each_server_that_can_be_installed_is_installed_for_the_tests() -> None:
    """On a machine without a Prometheus two system tests failed: scripts/test had lost the line."""
    can = re.findall(r"^(need_\w+)\(\)", (ROOT / "scripts" / "setup").read_text(), re.MULTILINE)
    does = re.findall(r"^ +(need_\w+)$", (ROOT / "scripts" / "test").read_text(), re.MULTILINE)
    assert "need_prometheus" in can and does == can


# --- how tests are handed to pytest's processes


def test_each_file_that_comes_first_and_each_folder_is_there() -> None:
    assert [path for path in (*LONGEST, *FOLDERS) if not (ROOT / path).exists()] == []


# --- How scripts/mutation plants a mutant, and which survivors it does not print.


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
        "\ndef test_that_fails_without_a_mutant():\n    raise AssertionError\n"
    )
    known = "--deselect=test_rules.py::test_that_fails_without_a_mutant"
    mutant = {"path": "rules.py", "source": SOURCE.replace("LIMIT = 3", f"LIMIT = {limit}")}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def check(_: int) -> int:
        return by_import(mutant, ["test_rules.py::test_few"], [known, "test_rules.py"], tmp_path)

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


def test_mutants_are_drawn_from_all_of_the_product_and_shown_to_tests_that_there_are() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert sorted(TESTS_OF) == sorted(name.removesuffix("*") for name in named)
    assert [
        path for of in (TESTS_OF, WITH_SERVERS) for path in sum(of.values(), ()) if not (ROOT / path).is_dir()
    ] == []
    everything = [str(path.relative_to(ROOT)) for name in TESTS_OF for path in (ROOT / name).rglob("*.py")]
    left_out = set(everything).difference(*map(product, TESTS_OF))
    assert all(any(fnmatch(path, f"{one}/*") for path in left_out) for one in OF_NO_PRODUCT)
    assert all(any(fnmatch(path, one) for path in everything) for one in ONLY_WITH_SERVERS)
