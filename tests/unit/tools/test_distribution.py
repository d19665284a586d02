"""How tests are handed to pytest's processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.kit.distribution import FOLDERS, LONGEST, borrows, in_order, next_of
from tests.kit.prefork import Prefork, Worker

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


def test_a_process_is_handed_the_tests_of_a_file_of_its_kind() -> None:
    config = cast(pytest.Config, SimpleNamespace(rootpath=ROOT))
    ids = [f"{path}::test_{number}[x::y]" for path in FILES for number in range(4)]
    session = cast(
        pytest.Session,
        SimpleNamespace(items=[SimpleNamespace(nodeid=one) for one in ids], shouldstop="", shouldfail=""),
    )
    master = Prefork(config, 4)
    master.divide(session.items)
    handed = [master.next_for(session, Worker(number, pid=0)) for number in range(4)]
    assert [[ids[at] for at in one] for one in handed] == [
        [f"{FILES[at]}::test_{number}[x::y]" for number in range(4)] for at in (1, 4, 0, 2)
    ]
