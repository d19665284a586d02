"""Tests run in forked processes: handed out by file, reported as pytest reports them, none lost with a process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.kit.sources import ROOT

LIMIT_S = 120  # a process that hangs

FIRST = """
import os, sys, warnings
import pytest

@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = tmp_path_factory.mktemp("same")
    yield made
    with open(os.environ["ENDED"], "a") as file:
        file.write(__name__ + "\\n")

@pytest.mark.parametrize("number", range(3))
def test_passes(number, place, tmp_path):
    (place / str(number)).touch(exist_ok=False)
    assert len(list(place.iterdir())) == number + 1

def test_fails(place):
    print("runs in " + __name__)
    assert place is None

def test_is_skipped():
    pytest.skip("not here")

def test_warns():
    warnings.warn("seen once", UserWarning)

def test_last(record_property):
    record_property("process", os.getpid())
"""
DYING = """
import os

def test_before(): pass
def test_dies(): os._exit(3)
def test_after(record_property): record_property("process", os.getpid())
def test_fails_after(): assert False
"""


def run(directory: Path, *arguments: str, **files: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """pytest's output in a directory with these test files, and how each test ended."""
    for name, content in files.items():
        (directory / f"test_{name}.py").write_text(content)
    (directory / "pytest.ini").write_text("[pytest]\n")
    environment = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "ENDED": str(directory / "ended")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.kit.prefork", "--processes", "2", "-rfE",
         "--junitxml=results.xml", "-p", "no:cacheprovider", *arguments],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    found = ElementTree.parse(directory / "results.xml").iter("testcase")
    ends = {
        f"{one.get('classname')}.{one.get('name')}": next((end.tag for end in one if end.tag != "properties"), "")
        for one in found
    }
    return done, ends


def test_files_are_handed_out_and_reported_as_pytest_reports(tmp_path: Path) -> None:
    done, ends = run(tmp_path, a=FIRST, b=FIRST, c=FIRST)
    assert done.returncode == 1, done.stdout
    assert "3 failed, 15 passed, 3 skipped, 3 warnings" in done.stdout
    assert "seen once" in done.stdout
    failed = {name for name, end in ends.items() if end == "failure"}
    assert failed == {f"test_{file}.test_fails" for file in "abc"}
    assert {name for name, end in ends.items() if end == "skipped"} == {
        f"test_{file}.test_is_skipped" for file in "abc"
    }
    # The output of a test is shown with it, and that of another one is not.
    for shown in re.split(r"^_+ test_fails _+$", done.stdout, flags=re.MULTILINE)[1:]:
        assert len(re.findall(r"^runs in (\w+)$", shown, re.MULTILINE)) == 1
    # A file's tests have shared what its fixture made, and it ended once.
    assert sorted((tmp_path / "ended").read_text().split()) == ["test_a", "test_b", "test_c"]


def test_each_process_runs_some_of_the_files(tmp_path: Path) -> None:
    _, _ = run(tmp_path, a=FIRST, b=FIRST)
    processes = re.findall(r'name="process" value="(\d+)"', (tmp_path / "results.xml").read_text())
    assert len(set(processes)) == 2


def test_a_process_that_dies_fails_its_test_and_loses_no_other(tmp_path: Path) -> None:
    done, ends = run(tmp_path, a=DYING, b=FIRST)
    assert done.returncode == 1, done.stdout
    assert {name: end for name, end in ends.items() if name.startswith("test_a.")} == {
        "test_a.test_before": "",
        "test_a.test_dies": "failure",
        "test_a.test_after": "",
        "test_a.test_fails_after": "failure",
    }
    assert re.search(r"process \d ended with 3 in this test", done.stdout)
    assert len(ends) == 4 + 7


def test_no_file_is_handed_out_after_the_first_failure(tmp_path: Path) -> None:
    done, ends = run(tmp_path, "-x", **dict.fromkeys("abcdefgh", "def test_fails(): assert False"))
    assert done.returncode == 1, done.stdout
    assert 1 <= len(ends) <= 2  # a process each
    assert "stopping after" in done.stdout


def test_nothing_is_forked_when_a_file_cannot_be_collected(tmp_path: Path) -> None:
    done, _ = run(tmp_path, a="import nothing_of_this_name", b=FIRST)
    assert done.returncode == 2
    assert "1 error during collection" in done.stdout
    assert not (tmp_path / "ended").exists()
