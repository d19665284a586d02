"""Schedulers empty hosts in the simulation: it holds. Its defects: `test_mutants_of_drains.py`."""

from __future__ import annotations

from berth.sim.draw import plan_of
from berth.sim.run import simulate
from berth.sim.widening import Widening

DRAINS = frozenset({Widening.DRAINS})
SEED = 25


def test_the_plan_has_schedulers_empty_hosts() -> None:
    assert plan_of(SEED, DRAINS).drains_by_schedulers
    held = simulate(SEED, DRAINS)
    assert held.breach == "", held.detail
