"""The test suite's own tools: each test can fail, rules about docstrings, distribution, shares, plants, mutants."""

from __future__ import annotations

import ast
import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from tests import test_house
from tests.kit import sources as kit
from tests.kit import tasks
from tests.kit.distribution import FOLDERS, LONGEST, ByFile, borrows, in_order, next_of
from tests.kit.share import drawn
from tests.kit.tasks import unfinished
from tests.mutation import __main__ as mutation
from tests.mutation.__main__ import CannotCheck, Copy, Outcome, Verdict
from tests.plants import PLANTS, Plant
from tests.sim.mutants import MUTANTS, UNPROVEN, Mutant
from tests.sim.mutants_of_moves import FOUND_BY_THE_TABLE, MUTANTS_OF_MOVES
from tests.sim.mutants_of_other_tenants import breaker_never_trips, survived_machine_kept

# --- every test can fail of what it looks at


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


# --- each rule about docstrings fails on a planted violation, and passes on the same text without it


# (the rule, the file, the violation, the same without it)
PLANTED: dict[str, tuple[Callable[[], None], str, str, str]] = {
    "docstring: none": (
        test_house.test_what_is_public_is_described,
        "bus/one.py",
        '"""A module."""\ndef run(): ...',
        '"""A module."""\ndef run():\n    """Run."""',
    ),
    "docstring: a field that is not there": (
        test_house.test_a_docstring_of_a_class_names_fields_that_it_has,
        "bus/one.py",
        'class One:\n    """One. lost: how many."""\n    found = 1',
        'class One:\n    """One. found: how many."""\n    found = 1',
    ),
    "docstring: silent about its error": (
        test_house.test_a_docstring_names_what_is_raised,
        "bus/one.py",
        'def run():\n    """Run."""\n    if not 1:\n        raise BusError("no")',
        'def run():\n    """Run. Raises BusError."""\n    if not 1:\n        raise BusError("no")',
    ),
    "docstring: a number without its unit": (
        test_house.test_a_number_has_its_unit_in_its_name_or_docstring,
        "bus/one.py",
        'def wait(time: float):\n    """Wait."""',
        'def wait(time_s: float):\n    """Wait."""',
    ),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_rule_finds_what_breaks_it(plant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, name, wrong, right = PLANTED[plant]
    for folder in ("scripts", "docs", "bus", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "README.md").write_text("# A project\n")
    (tmp_path / "CONTRIBUTING.md").write_text("# Tasks\n")

    def sources(*packages: str) -> list[Path]:
        return sorted(path for package in packages for path in (tmp_path / package).rglob("*.py"))

    for module in (test_house, kit):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(test_house, "sources", sources)
    file = tmp_path / name
    for text, is_wrong in ((wrong, True), (right, False)):
        file.write_text(text + "\n")
        kit.parsed.cache_clear()
        kit.nodes.cache_clear()
        if is_wrong:
            with pytest.raises(AssertionError, match="one"):
                rule()
        else:
            rule()


# --- tasks that are left on a closed loop are named


def test_a_task_of_a_closed_loop_is_named_once() -> None:
    loop = asyncio.new_event_loop()
    left = loop.create_task(asyncio.Event().wait(), name="left-behind")
    loop.run_until_complete(asyncio.sleep(0))
    assert unfinished() == []
    loop.close()
    (named,) = unfinished()
    assert "left-behind" in named
    assert unfinished() == []
    left._log_destroy_pending = False  # type: ignore[attr-defined]  # this one is left on purpose


class ChangedWhileRead(set["asyncio.Task[object]"]):
    """A set that another thread's loop adds to while it is read the first time."""

    readings = 0

    def __iter__(self) -> Iterator[asyncio.Task[object]]:
        self.readings += 1
        yield from super().__iter__()
        if self.readings == 1:
            raise RuntimeError("Set changed size during iteration")


def test_the_tasks_are_read_again_when_another_thread_begins_one_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = ChangedWhileRead()
    monkeypatch.setattr(tasks, "_TASKS", changed)
    assert unfinished() == [] and changed.readings == 2


# --- a quarter of the deliberate defects, drawn by a commit's hash


NAMES = tuple(f"tests/sim/test_mutants.py::test_a_defect_is_found[{number}]" for number in range(71))


def test_a_share_is_its_part_rounded_up_and_the_same_in_any_order() -> None:
    for share, expected in ((1, 71), (4, 18), (71, 1), (100, 1)):
        assert len(drawn(NAMES, share, "af7eaa46")) == expected
    assert drawn(NAMES, 4, "af7eaa46") == drawn(NAMES[::-1], 4, "af7eaa46")
    assert drawn((), 4, "af7eaa46") == frozenset()


def test_another_commit_draws_others_and_enough_commits_draw_all() -> None:
    """With 40 commits one of 71 is left out in one case of 1,400."""
    assert drawn(NAMES, 4, "a") != drawn(NAMES, 4, "b")
    assert frozenset().union(*(drawn(NAMES, 4, str(commit)) for commit in range(40))) == frozenset(NAMES)


def test_pytest_collects_the_share() -> None:
    def collected(*options: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "-n0", "-q", "--collect-only", "tests/sim/test_mutants_of_cells.py"]
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
        return {line for line in done.stdout.splitlines() if "::" in line}

    whole = collected()
    assert collected("--share", "4", "--of", "af7eaa46") == drawn(whole, 4, "af7eaa46") < whole


# --- the planted defects (tests/plants.py) stay applicable: what each replaces is in its file exactly once


@pytest.mark.parametrize("one", PLANTS, ids=lambda one: one.name)
def test_a_planted_defect_applies_to_the_code_as_it_is(one: Plant) -> None:
    assert (ROOT / one.file).read_text().count(one.old) == 1
    for path in (word.partition("::")[0] for word in one.tests.split()):
        assert (ROOT / path).exists()


@pytest.mark.parametrize(
    "mutant",
    [
        *MUTANTS.values(),
        *UNPROVEN.values(),
        *MUTANTS_OF_MOVES,
        *FOUND_BY_THE_TABLE,
        survived_machine_kept,
        breaker_never_trips,
    ],
    ids=lambda mutant: mutant.__name__,
)
def test_a_deliberate_defect_replaces_what_there_is(mutant: Mutant) -> None:
    """`patch` raises for a name that is not there (any more)."""
    with mutant():
        pass


# --- a mutant of scripts/mutation is found by a test, hangs, or survives, and none survives because it hangs


DOMAIN = "one/domain/__init__.py"
TESTS = ("tests/unit/one", "tests/contract")
RULE = "def rule(number):\n    return number > 3\n"
PROCESSOR_S = 60.0


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    """Of a clone of one rule, its unit test, and a contract test that looks at less."""
    clone, place = tmp_path / "clone", tmp_path / "copy"
    texts = {
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\nmarkers = ["postgres", "rabbitmq"]\n',
        DOMAIN: RULE,
        "tests/unit/one/test_rule.py": "from one.domain import rule\ndef test_it():\n    assert rule(5) > rule(1)\n",
        "tests/contract/test_port.py": "from one.domain import rule\ndef test_four():\n    assert rule(4)\n",
    }
    for name, text in texts.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(clone)], check=True)
    monkeypatch.setattr(mutation, "ROOT", clone)
    return Copy(place)


def test_each_mutant_is_killed_hung_or_survives_and_the_copy_is_as_it_was(copy: Copy) -> None:
    def verdict(source: str, processor_s: float = PROCESSOR_S) -> Verdict:
        return copy.check(DOMAIN, source, TESTS, processor_s)

    assert verdict(RULE.replace("> 3", "< 3")) == (Outcome.KILLED, TESTS[0])
    assert verdict(RULE.replace("> 3", "> 2")) == (Outcome.SURVIVED, "")
    assert verdict("def rule(number):\n    while True:\n        pass\n", 1.0) == (Outcome.HUNG, TESTS[0])
    assert (copy.place / DOMAIN).read_text() == RULE


def test_a_mutant_that_waits_without_the_processor_is_hung(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation, "LONGEST_WAIT_S", 0.1)
    assert copy.check(DOMAIN, RULE, TESTS, PROCESSOR_S).outcome is Outcome.HUNG


def test_tests_that_fail_without_a_mutant_and_tests_that_pass_with_any_check_nothing(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutation, "TESTS_OF", {"one": TESTS[:1]})
    (copy.place / "tests/unit/one/test_rule.py").write_text("def test_it():\n    assert False\n")
    with pytest.raises(CannotCheck, match="fails without a mutant"):
        mutation.bounds(copy, ["one"])
    (copy.place / "tests/unit/one/test_rule.py").write_text("def test_it():\n    assert True\n")
    with pytest.raises(CannotCheck, match="do not import it"):
        mutation.bounds(copy, ["one"])


# --- the servers that scripts/test installs before the tests that need them


SCRIPTS = Path(__file__).parents[3] / "scripts"


def test_each_server_that_can_be_installed_is_installed_for_the_tests() -> None:
    """On a machine without a Prometheus two system tests failed: scripts/test had lost the line."""
    can = re.findall(r"^(need_\w+)\(\)", (SCRIPTS / "setup").read_text(), re.MULTILINE)
    does = re.findall(r"^ +(need_\w+)$", (SCRIPTS / "test").read_text(), re.MULTILINE)
    assert "need_prometheus" in can and does == can


# --- how tests are handed to pytest's processes


def test_each_file_that_comes_first_and_each_folder_is_there() -> None:
    assert [path for path in (*LONGEST, *FOLDERS) if not (ROOT / path).exists()] == []


def test_the_longest_come_first_and_a_files_tests_stay_together_and_in_order() -> None:
    ids = [
        "tests/unit/bus/test_a.py::test_z",
        "tests/unit/bus/test_a.py::test_a",
        "tests/sim/test_mutants.py::test_a",
        "tests/system/test_web.py::test_b",
        f"{LONGEST[1]}::test_a",
        f"{LONGEST[0]}::test_b",
        f"{LONGEST[0]}::test_a",
        "tests/test_house.py::test_a",
    ]
    items = cast("list[pytest.Item]", [SimpleNamespace(nodeid=one) for one in ids])
    assert [item.nodeid for item in in_order(items)] == [ids[at] for at in (5, 6, 4, 3, 2, 0, 1, 7)]


def test_a_file_is_one_unit_of_work() -> None:
    def scope(nodeid: str) -> str:
        return ByFile._split_scope(cast(Any, None), nodeid)

    assert scope("tests/system/test_web.py::test_a[x::y]") == "tests/system/test_web.py"
    assert scope("tests/sim/test_simulation.py::test_a[b]") == "tests/sim/test_simulation.py"


FILES = (
    "tests/system/test_web.py",
    "tests/system/test_permissions.py",
    "tests/sim/test_simulation.py",
    "tests/contract/test_bus.py",
    "tests/contract/test_rabbitmq.py",
    "tests/unit/bus/test_wire.py",
    "tests/test_house.py",
)


def handed_out(processes: int) -> list[str]:
    """The files as processes take them that each ask in turn."""
    left, taken = [*FILES], []
    while left:
        taken.append(next_of(left, len(taken) % processes, processes, lambda path: borrows(ROOT, path)))
        left.remove(taken[-1])
    return taken


def test_each_process_begins_with_files_of_its_kind_and_then_takes_what_is_left() -> None:
    assert handed_out(4) == [FILES[at] for at in (1, 4, 0, 2, 3, 5, 6)]
    assert handed_out(6) == [FILES[at] for at in (1, 4, 0, 3, 2, 5, 6)]
    assert handed_out(3) == [*FILES]


def test_the_files_that_borrow_a_broker_are_known() -> None:
    """By what they ask for themselves or through `small_processes` and `rig`."""
    borrowing = ("system/test_compose.py", "system/test_bad_input.py", "system/test_prometheus.py")
    none = (
        "system/test_web.py",
        "contract/test_bus.py",
        "contract/test_two_keys.py",
        "unit/tools/test_distribution.py",
    )
    assert all(borrows(ROOT, f"tests/{path}") for path in borrowing)
    assert not any(borrows(ROOT, f"tests/{path}") for path in none)


def test_the_scheduler_hands_a_file_of_its_kind_to_a_process() -> None:
    nodes = [Node() for _ in range(4)]
    config = SimpleNamespace(
        rootpath=ROOT, option=SimpleNamespace(loadscopereorder=False), getvalue=lambda _: ["popen"] * len(nodes)
    )
    scheduler = ByFile(cast(Any, config))
    ids = [f"{path}::test_{number}" for path in FILES for number in range(4)]
    for node in nodes:
        scheduler.add_node(cast(Any, node))
        scheduler.add_node_collection(cast(Any, node), ids)
    scheduler.schedule()
    assert [[ids[at].partition("::")[0] for at in node.sent[::4]] for node in nodes] == [
        [FILES[1]],
        [FILES[4]],
        [FILES[0]],
        [FILES[2]],
    ]


class Node:
    """Stands in for a process of pytest's."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.shutting_down = False
        self.gateway = SimpleNamespace(id="node")

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices
