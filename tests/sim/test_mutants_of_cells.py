"""Deliberate defects of cells added and removed are found, and their seeds find nothing without them."""

from __future__ import annotations

import pytest

from lab.simulation.run import simulate
from tests.sim.mutants_of_cells import FOUND_BY, MUTANTS_OF_CELLS
from tests.sim.test_fences import KINDS

MUTANTS = {mutant.__name__: mutant for mutant in MUTANTS_OF_CELLS}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_defect_of_cells_is_found(name: str) -> None:
    with MUTANTS[name]():
        assert simulate(FOUND_BY[name], KINDS).breach


@pytest.mark.parametrize("seed", sorted(set(FOUND_BY.values())))
def test_without_a_defect_of_cells_the_same_seeds_find_nothing(seed: int) -> None:
    result = simulate(seed, KINDS)
    assert result.breach == "", result.detail
