"""Deliberate defects of instances that leave their cell are found, and their seeds find nothing without them."""

from __future__ import annotations

import pytest

from lab.simulation.run import run
from tests.sim.mutants_of_transfers import FOUND_BY, MUTANTS_OF_TRANSFERS
from tests.sim.test_forgotten_builds import transfers

MUTANTS = {mutant.__name__: mutant for mutant in MUTANTS_OF_TRANSFERS}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_defect_of_transfers_is_found(name: str) -> None:
    with MUTANTS[name]():
        assert run(transfers(FOUND_BY[name])).breach


@pytest.mark.parametrize("seed", sorted(set(FOUND_BY.values())))
def test_without_a_defect_of_transfers_the_same_seeds_find_nothing(seed: int) -> None:
    held = run(transfers(seed))
    assert held.breach == "", held.detail
