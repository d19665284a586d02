"""A database is set back to the middle of a move between cells: a cell's, or the schedulers'; all machines hold."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from cell_conductor import engine
from lab.simulation.draw import plan_of
from lab.simulation.plan import Plan
from lab.simulation.run import run
from lab.simulation.widening import DRAWS, Widening

# A departure below the numbers that schedulers had had was ignored, and the instance was in no cell.
NUMBERED_BELOW = 11
# A next cell gives an instance back that runs on a destination which its record does not have.
GIVEN_BACK_BESIDE = 162
# `--only transfers-restored`. A backup had a machine in quarantine that had been taken off the list since: it stayed.
TAKEN_OFF_SINCE = 71008


def transfers_restored(seed: int) -> Plan:
    """The plan of this seed, with moves between cells, and set-backs."""
    plan = plan_of(seed)
    drawn = DRAWS[Widening.TRANSFERS_RESTORED](random.Random(seed), plan)
    assert drawn is not plan, "it has one cell"
    orders = tuple(sorted(drawn.orders, key=lambda order: order.at))
    return replace(drawn, widenings=(*plan.widenings, Widening.TRANSFERS_RESTORED), orders=orders)


@pytest.mark.parametrize("seed", [NUMBERED_BELOW, GIVEN_BACK_BESIDE])
def test_it_holds(seed: int) -> None:
    held = run(transfers_restored(seed))
    assert held.breach == "", held.detail


def test_machines_in_quarantine_are_read_again_after_a_set_back() -> None:
    held = run(plan_of(TAKEN_OFF_SINCE, {Widening.TRANSFERS_RESTORED}))
    assert held.breach == "", held.detail


def test_a_give_back_without_a_search_is_found() -> None:
    with patch.object(engine, "is_searched_for", lambda _instance: False):
        assert run(transfers_restored(GIVEN_BACK_BESIDE)).breach == "never_two_running"
