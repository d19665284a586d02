"""For how long a service bears that another process has its name, and how many machines its journal is measured by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bus.clock import SystemClock
from compute_agent.hosts.service_name import ServiceName
from compute_sim.fleet import DestroyedRow, Fleet, MachineRow, SimulatedMachine

WAIT_S = 30.0


class Moved(SystemClock):
    """A clock that a test moves."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("moments", "lost"),
    [
        ([("locked", 0.0), ("locked", 29.0)], False),
        ([("locked", 0.0), ("locked", 30.0)], True),
        ([("locked", 0.0), ("back", 10.0), ("locked", 31.0)], False),
        ([("locked", 0.0), ("back", 10.0), ("locked", 31.0), ("locked", 60.0)], False),
        ([("locked", 0.0), ("back", 10.0), ("locked", 31.0), ("locked", 61.0)], True),
    ],
)
def test_the_name_is_lost_when_it_was_locked_for_so_long_without_a_break(
    moments: list[tuple[str, float]], lost: bool
) -> None:
    clock = Moved()
    never: Any = None
    name = ServiceName(never, service="s", cell="c1", records=never, clock=clock, wait_s=WAIT_S)
    for what, clock.now_s in moments:
        (name._is_locked if what == "locked" else name._is_back)()
    assert name._lost.is_set() is lost


def test_a_fleet_counts_its_machines() -> None:
    fleet: Any = Fleet.__new__(Fleet)
    fleet._machine_count, fleet._hosts = 0, {name: SimpleNamespace(machines=None) for name in ("a", "b")}
    counted = []
    for row in (
        MachineRow("a", SimulatedMachine("1", 1, {})),
        MachineRow("a", SimulatedMachine("2", 1, {}, complete=False)),
        MachineRow("a", SimulatedMachine("2", 1, {})),  # completed
        MachineRow("b", SimulatedMachine("3", 1, {})),
        DestroyedRow("a", "2"),
        DestroyedRow("a", "2"),
        DestroyedRow("b", "3"),
        DestroyedRow("gone", "1"),
        DestroyedRow("a", "1"),
    ):
        fleet._apply(row)
        counted.append(fleet._machine_count)
    assert counted == [1, 2, 2, 3, 2, 2, 1, 1, 0]
