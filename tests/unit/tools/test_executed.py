"""The last line of .ci/run and of scripts/nightly names what was executed, or there is no such line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.executed import STEPS, Untold, executed

PYTEST = '<testsuites><testsuite name="pytest" errors="{}" failures="{}" skipped="{}" tests="{}"/></testsuites>'
FIGURES: dict[str, Any] = {
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
    "side-by-side.json": {
        "built": 304,
        "failed": [],
        "broken": [],
        "dead_letters": {},
        "at_rest": True,
        "not_migrated": [],
    },
    "fuzz.json": {"passed": True, "inputs": 15000, "defects": 0},
    "chaos.json": {
        "requests": 2000,
        "lost": 0,
        "doubled": 0,
        "leaked": 0,
        "overcommitted": 0,
        "at_rest": True,
        "invariants": {"capacity": True},
    },
    "street.json": {"boots": 20000, "invariants_hold": True},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.xml").write_text(PYTEST.format(0, 0, 0, 2858))
    (tmp_path / "mutants.xml").write_text(PYTEST.format(0, 0, 0, 71))
    (tmp_path / "drills.xml").write_text(PYTEST.format(0, 0, 0, 20))
    (tmp_path / "postgresql-16.xml").write_text(PYTEST.format(0, 0, 0, 130))
    (tmp_path / "ironic.xml").write_text(PYTEST.format(0, 0, 0, 7))
    (tmp_path / "ironic-drill.xml").write_text(PYTEST.format(0, 0, 0, 2))
    for name, content in FIGURES.items():
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def test_what_every_step_did_is_printed_in_one_line(folder: Path) -> None:
    assert executed(folder, tuple(STEPS)) == (
        "all passed: 2858 tests (pytest), 71 tests of deliberate defects, 20 drills, "
        "130 tests on PostgreSQL 16.2, Ironic 7 tests, Ironic 2 drills, demo 1000 boots, "
        "conformance 1315, conformance in memory 1314, differential 3000 requests, "
        "simulation 4466 requests, simulation alone 540 requests, mutation 38 killed, clients 57 calls, "
        "bad input 1524 requests, bad input to the HTTP API 2262 requests, pages 10 steps, fuzz 15000 inputs, "
        "chaos 2000 builds, street 20000 boots, two versions side by side 304 builds"
    )
    assert executed(folder, ("demo.json", "drills.xml")) == "all passed: demo 1000 boots, 20 drills"


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
@pytest.mark.parametrize("text", [None, "", "{}", "[]", "null", "<a/>", "<testsuite/>", '{"passed": true}'])
def test_a_file_that_is_missing_or_holds_nothing_is_no_pass(folder: Path, name: str, text: str | None) -> None:
    path = folder / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(Untold, match=name):
        executed(folder, tuple(STEPS))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("demo.json", {"requests": 0}),
        ("demo.json", {"verdicts": []}),
        ("demo.json", {"verdicts": [{"holds": True}, {"holds": False}]}),
        ("conformance.json", {"passed": 0}),
        ("conformance.json", {"failed": 1}),
        ("differential.json", {"requests": 0}),
        ("differential.json", {"requests": "3000"}),
        ("differential.json", {"failed": 1}),
        ("differential.json", {"failures": ["one"]}),
        ("simulate.json", {"failed": [7]}),
        ("simulate.json", {"requests": 0}),
        ("simulate-alone.json", {"failed": [7]}),
        ("clients.json", {"passed": False}),
        ("clients.json", {"openstacksdk": {"wrong": "Unexpected"}}),
        ("bad-input.json", {"passed": False}),
        ("bad-input.json", {"requests": 0}),
        ("bad-input-web.json", {"passed": False}),
        ("pages.json", {"passed": False}),
        ("side-by-side.json", {"built": 0}),
        ("side-by-side.json", {"at_rest": False}),
        ("side-by-side.json", {"broken": ["capacity"]}),
        ("side-by-side.json", {"not_migrated": ["cell_cell1"]}),
        ("side-by-side.json", {"dead_letters": {"scheduler.requests": 1}}),
        ("fuzz.json", {"passed": False}),
        ("fuzz.json", {"inputs": 0}),
        ("mutation.json", {"killed": 0, "checked": 2}),
        ("mutation.json", {"checked": 41}),
        ("chaos.json", {"requests": 0}),
        ("chaos.json", {"leaked": 1}),
        ("chaos.json", {"at_rest": False}),
        ("chaos.json", {"invariants": {"capacity": False}}),
        ("chaos.json", {"invariants": {}}),
        ("street.json", {"invariants_hold": False}),
        ("conformance-memory.json", {"failed": 1}),
    ],
)
def test_a_failure_or_nothing_done_is_no_pass(folder: Path, name: str, changed: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps({**FIGURES[name], **changed}))
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


def test_as_a_command_it_answers_by_its_exit_status(folder: Path) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.executed", str(folder), *STEPS]
        root = Path(__file__).parents[3]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)

    good = run()
    assert (good.returncode, good.stdout.splitlines()[-1][:30]) == (0, "==== all passed: 2858 tests (p")
    (folder / "demo.json").unlink()
    bad = run()
    assert (bad.returncode, bad.stdout) == (1, "") and "demo.json" in bad.stderr
