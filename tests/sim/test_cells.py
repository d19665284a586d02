"""Cells are added and removed at run time: it holds. Its defects: `test_mutants_of_cells.py`."""

from __future__ import annotations

import pytest

from berth.sim.run import simulate
from berth.sim.widening import Widening
from tests.sim.mutants_of_cells import FOUND_BY

KINDS = frozenset({Widening.DECIDED_CELLS})


@pytest.mark.parametrize("seed", sorted(set(FOUND_BY.values())))
def test_it_holds(seed: int) -> None:
    result = simulate(seed, KINDS)
    assert result.breach == "", result.detail
