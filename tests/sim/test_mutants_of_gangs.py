"""Deliberate defects of gangs are found, and the same seeds find nothing without them."""

from __future__ import annotations

import pytest

from lab.simulation.run import simulate
from lab.simulation.widening import Widening
from tests.sim.mutants_of_gangs import FOUND_BY, MUTANTS_OF_GANGS

GANGS = frozenset({Widening.GANGS})
MUTANTS = {mutant.__name__: mutant for mutant in MUTANTS_OF_GANGS}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_defect_of_gangs_is_found(name: str) -> None:
    with MUTANTS[name]():
        assert simulate(FOUND_BY[name], GANGS).breach


@pytest.mark.parametrize("seed", sorted(set(FOUND_BY.values())))
def test_without_a_defect_of_gangs_the_same_seeds_find_nothing(seed: int) -> None:
    result = simulate(seed, GANGS)
    assert result.breach == "", result.detail
