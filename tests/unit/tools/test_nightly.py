"""The steps of scripts/nightly and of .ci/run: none is left out, and none is named that is not there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.executed import STEPS

ROOT = Path(__file__).parents[3]
NIGHTLY = (ROOT / "scripts" / "nightly").read_text()
CI = (ROOT / ".ci" / "run").read_text()
COMMANDS = sorted(path.name for path in (ROOT / "scripts" / "steps").iterdir())
TABLE = re.findall(r'^    "([^"|]+)\|([^"|]+)\|?([^"]*)"$', NIGHTLY, re.MULTILINE)
# Commands that act, or need an argument: no step of every night.
WITHOUT_A_STEP = {"pair", "release"}


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


def test_named_steps_alone_run_with_the_arguments_of_the_list(clone: Path) -> None:
    done = nightly(clone, "demo", "works")
    assert (done.returncode, done.stdout.split("\n")) == (0, ["works", "now works", ""])
    assert nightly(clone, "works").stdout == "now works\n"


def test_a_step_with_arguments_has_these_alone_and_its_own_exit_status(clone: Path) -> None:
    done = nightly(clone, "works", "--seed", "2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "--seed 2 works\n", "")
    assert nightly(clone, "fails", "once").returncode == 3


def test_a_step_that_rests_is_run_when_it_is_given_arguments(clone: Path) -> None:
    assert nightly(clone, "late", "--short").stdout == "--short late\n"


def test_a_command_without_a_step_runs_by_its_name(clone: Path) -> None:
    assert nightly(clone, "acts", "COMMIT").stdout == "COMMIT acts\n"
    assert nightly(clone, "acts").stdout == "acts\n"


@pytest.mark.parametrize("words", [("invented",), ("works", "demo", "invented"), ("invented", "--seed", "2")])
def test_a_step_that_is_not_there_is_refused_before_any_runs(clone: Path, words: tuple[str, ...]) -> None:
    done = nightly(clone, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no step invented" in done.stderr


def test_the_list_names_each_step_and_each_command(clone: Path) -> None:
    listed = nightly(clone, "--list").stdout.split()
    assert {"works", "fails", "demo", "acts"} <= set(listed)
    assert nightly(ROOT, "--list").returncode == 0


def test_each_step_that_a_page_names_is_there() -> None:
    known = {*COMMANDS, *(name for name, _, _ in TABLE), "STEP"}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {word for page in pages for word in re.findall(r"scripts/nightly ([a-z][\w-]*)", page.read_text())}
    assert {"docs", "ironic"} <= named <= known
