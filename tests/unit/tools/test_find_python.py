"""Which Python scripts/setup makes the virtualenv with, among those it finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BASH = "/bin/bash"
TIMEOUT_S = 60.0

# A Python's answer to the query for its rank.
OPTIMISED, SLOW, WITHOUT_VENV, TOO_OLD = "echo 0", "echo 1", "echo 2", "exit 1"
NONSENSE = "echo nothing of the kind"


def sourced(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A command after scripts/pythons, as strict as scripts/setup is."""
    script = f". {ROOT}/scripts/pythons; {command}"
    return subprocess.run(
        [BASH, "-euo", "pipefail", "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def python(folder: Path, name: str, answer: str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return str(path)


def found(folders: list[Path], distribution: str = "/nowhere/python3", **env: str) -> str:
    """The path printed, or nothing when find_python fails."""
    path = ":".join(map(str, folders))
    result = sourced(f"distribution_python={distribution}; find_python", PATH=path, **env)
    assert result.stderr == ""
    assert (result.returncode == 0) == bool(result.stdout)
    return result.stdout.strip()


@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [
        (OPTIMISED, OPTIMISED, 0),
        (SLOW, OPTIMISED, 1),
        (SLOW, SLOW, 0),
        (SLOW, WITHOUT_VENV, 0),
        (WITHOUT_VENV, SLOW, 1),
        (WITHOUT_VENV, WITHOUT_VENV, 0),
        (TOO_OLD, WITHOUT_VENV, 1),
        (NONSENSE, SLOW, 1),
        (TOO_OLD, NONSENSE, None),
    ],
)
def test_the_best_is_taken_and_of_equals_the_first(tmp_path: Path, first: str, second: str, taken: int | None) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    there = [python(folder, "python3", answer) for folder, answer in zip(folders, (first, second), strict=True)]
    assert found(folders) == ("" if taken is None else there[taken])


@pytest.mark.parametrize(("distribution", "taken"), [(OPTIMISED, 1), (WITHOUT_VENV, 0), (TOO_OLD, 0)])
def test_the_distributions_is_used_when_it_is_not_on_the_path(tmp_path: Path, distribution: str, taken: int) -> None:
    there = [python(tmp_path / "a", "python3", SLOW), python(tmp_path / "usr", "python3", distribution)]
    assert found([tmp_path / "a"], there[1]) == there[taken]


def test_a_version_of_its_own_name_is_found(tmp_path: Path) -> None:
    old, new = python(tmp_path, "python3", TOO_OLD), python(tmp_path, "python3.12", OPTIMISED)
    assert found([tmp_path], old) == new


def test_what_the_user_names_is_taken_however_slow_unless_it_is_too_old(tmp_path: Path) -> None:
    on_path = python(tmp_path / "a", "python3", OPTIMISED)
    slow, old = python(tmp_path / "b", "python3", SLOW), python(tmp_path / "c", "python3", TOO_OLD)
    assert found([tmp_path / "a"], PYTHON=slow) == slow
    assert found([tmp_path / "a"], PYTHON=old) == on_path
    assert found([tmp_path / "a"], PYTHON="/nowhere/python3") == on_path


def test_none_at_all_is_reported(tmp_path: Path) -> None:
    assert found([tmp_path]) == ""


def test_the_one_that_runs_this_test_has_a_rank_and_an_old_one_has_none() -> None:
    program = sourced('printf %s "$python_rank"', PATH=os.environ["PATH"]).stdout
    rank = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert rank in {"0", "1", "2"}
    aged = f"import sys; sys.version_info = (3, 10, 9)\n{program}"
    old = subprocess.run([sys.executable, "-c", aged], capture_output=True, text=True, check=False)
    assert (old.returncode, old.stdout) == (1, "")
    built_by_a_distribution = f"import sys; sys.base_prefix = '/usr'\n{program}"
    distribution = subprocess.run([sys.executable, "-c", built_by_a_distribution], capture_output=True, text=True)  # noqa: PLW1510
    assert distribution.stdout.strip() in {"0", "2"}
