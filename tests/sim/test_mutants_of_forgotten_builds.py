"""Deliberate defects of the search for forgotten builds' machines are found, and their seeds find nothing without
them.
"""

from __future__ import annotations

import pytest

from lab.simulation.run import run
from tests.sim.mutants_of_forgotten_builds import BREAKS, FOUND_BY, MUTANTS_OF_FORGOTTEN_BUILDS
from tests.sim.test_forgotten_builds import builds_forgotten

MUTANTS = {mutant.__name__: mutant for mutant in MUTANTS_OF_FORGOTTEN_BUILDS}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_defect_of_the_search_is_found(name: str) -> None:
    with MUTANTS[name]():
        assert run(builds_forgotten(FOUND_BY[name])).breach == BREAKS[name]


@pytest.mark.parametrize("seed", sorted(set(FOUND_BY.values())))
def test_without_a_defect_of_the_search_the_same_seeds_find_nothing(seed: int) -> None:
    held = run(builds_forgotten(seed))
    assert held.breach == "", held.detail
