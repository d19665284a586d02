"""Deliberate defects are found, each within a bounded number of seeds (docs/contributing/simulation.md)."""

from __future__ import annotations

import pytest

from lab.simulation.run import simulate
from tests.sim.mutants import MUTANTS
from tests.sim.seeds_to_find import MAX_SEEDS, recorded

# The seed on record for each is tried first. As the workers change so do the runs, and then another of the first seeds
# finds it: `python -m tests.sim.seeds_to_find --write` looks for quick ones anew.
FOUND_BY = recorded()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_defect_is_found(name: str) -> None:
    for seed in (FOUND_BY.get(name, 1), *range(1, MAX_SEEDS + 1)):
        with MUTANTS[name]():
            if simulate(seed).breach:
                return
    pytest.fail(f"{name} was not found in {MAX_SEEDS} seeds")
