"""The one way to make a virtualenv (scripts/virtualenv), with a Python that notes what it is started for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BASH = "/bin/bash"
# It makes a virtualenv as Python does, its own interpreter in it under another name.
PYTHON = """#!/bin/sh
case "$*" in
"-c import ensurepip, venv") exit ${NO_ENSUREPIP:-0} ;;
-c*) exit 0 ;;
"-m pip --version") exit 0 ;;
"-m pip install"*) echo "install $*" >>"$NOTES"; exit ${PIP_FAILS:-0} ;;
"-m venv "*)
    echo "make $3" >>"$NOTES"
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    printf '#!%s/bin/python3\\n' "$PWD/$3" >"$3/bin/pip" ;;
*) exit 9 ;;
esac
"""
STUBS = 'report() { echo "$*"; }; give_up() { echo "$*"; exit 2; }; apt_install() { return 1; }'
UV = '#!/bin/sh\nfor place; do :; done\necho "uv $place" >>"$NOTES"\nexec "$BASE" -m venv "$place"\n'


class Clone:
    """A folder with a Python to make virtualenvs with."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bin").mkdir(parents=True)
        (root / "tests").mkdir()
        (root / "tests" / "requirements.txt").write_text("one==1\n")
        self.program("base", PYTHON)

    def program(self, name: str, text: str) -> None:
        path = self.root / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, command: str, **env: str) -> subprocess.CompletedProcess[str]:
        script = f"root={self.root}; {STUBS}; . {ROOT}/scripts/virtualenv; {command}"
        base = str(self.root / "bin" / "base")
        return subprocess.run(
            [BASH, "-euo", "pipefail", "-c", script],
            cwd=self.root, capture_output=True, text=True, timeout=60, check=False,
            env={"PATH": f"{self.root}/bin:/usr/bin:/bin", "NOTES": str(self.root / "notes"), "BASE": base, **env},
        )  # fmt: skip

    def made(self, wanted: str = "one", **env: str) -> list[str]:
        """What a virtualenv of this content takes: the first words of what was started."""
        done = self.run(f"virtualenv place bin/base it {wanted} -e .", **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.notes()

    def notes(self) -> list[str]:
        path = self.root / "notes"
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line.split()[0] for line in found]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "clone")


def test_it_is_made_once(clone: Clone) -> None:
    assert clone.made() == ["make", "install"]
    assert clone.made() == []


def test_another_content_is_installed_into_the_one_that_is_there(clone: Clone) -> None:
    """Where pip names its interpreter `python3`, as that of a pyenv does, .venv was made anew for each change."""
    clone.made()
    assert clone.made("two") == ["install"]


def test_one_that_was_moved_and_one_without_its_interpreter_are_made_anew(clone: Clone, tmp_path: Path) -> None:
    clone.made()
    clone.root = clone.root.rename(tmp_path / "moved")
    assert clone.made() == ["make", "install"]
    (clone.root / "place" / "bin" / "python").unlink()
    assert clone.made() == ["make", "install"]


def test_one_that_pip_did_not_finish_is_not_taken_as_made(clone: Clone) -> None:
    done = clone.run("virtualenv place bin/base it one -e .", PIP_FAILS="1")
    assert (done.returncode, "pip could not install it" in done.stdout) == (2, True)
    clone.notes()
    assert clone.made() == ["install"]


def test_a_tool_has_its_requirements_and_its_constraints(clone: Clone) -> None:
    """Of an absolute path, which a program that changes its directory can be given."""
    (clone.root / ".venv").symlink_to("bin")
    clone.program("python", PYTHON)
    (clone.root / "bin" / "bin").symlink_to(".")

    def made() -> tuple[str, str]:
        done = clone.run('tool name tests "a tool"; echo "$tool"')
        assert done.returncode == 0, done.stdout + done.stderr
        notes = clone.root / "notes"
        text = notes.read_text() if notes.exists() else ""
        notes.unlink(missing_ok=True)
        return done.stdout.splitlines()[-1], text

    place, notes = made()
    assert place == str(clone.root / ".berth" / "name") and notes.endswith("-r tests/requirements.txt\n")
    assert made() == (place, "")
    (clone.root / "tests" / "constraints.txt").write_text("two==2\n")
    assert "-c tests/constraints.txt -r tests/requirements.txt" in made()[1]


def test_without_ensurepip_uv_makes_it_for_a_tool_too(clone: Clone) -> None:
    """The tools' virtualenvs were made by `python -m venv` alone, which needs python3-venv on Debian."""
    clone.program("uv", UV)
    assert clone.made(NO_ENSUREPIP="1") == ["uv", "make", "install"]


def test_where_none_can_be_made_the_reason_is_printed(clone: Clone) -> None:
    clone.program("base", PYTHON.replace('"-m pip --version") exit 0', '"-m pip --version") exit 1'))
    done = clone.run("virtualenv place bin/base it one -e .", NO_ENSUREPIP="1")
    assert (done.returncode, "install the package python3-venv" in done.stdout) == (2, True)
