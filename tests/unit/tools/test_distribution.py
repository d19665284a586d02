"""How tests are handed to pytest's processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.kit.distribution import FOLDERS, LONGEST, ByFile, borrows, in_order, next_of

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
