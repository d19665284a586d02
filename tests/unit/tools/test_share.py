"""A quarter of the deliberate defects, drawn by a commit's hash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kit.share import drawn

ROOT = Path(__file__).parents[3]
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
