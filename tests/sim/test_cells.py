"""Cells are added and removed at run time: it holds. Its defects, and their other seeds: `test_mutants_of_cells.py`."""

from __future__ import annotations

from lab.simulation.run import simulate
from lab.simulation.widening import Widening
from tests.sim.mutants_of_cells import FOUND_BY

KINDS = frozenset({Widening.DECIDED_CELLS})


def test_it_holds() -> None:
    result = simulate(min(FOUND_BY.values()), KINDS)
    assert result.breach == "", result.detail
