"""How tests are handed to pytest's processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.kit.distribution import FOLDERS, LONGEST, ByFile, in_order

ROOT = Path(__file__).parents[3]


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
