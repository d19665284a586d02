"""Deliberate defects that need two rare things at once are found by the simulation, where it is made to bring them."""

from __future__ import annotations

import random

import pytest

from lab.simulation.draw import plan_of
from lab.simulation.run import run, simulate
from lab.simulation.steering import deleted_amid
from lab.simulation.widening import Widening
from tests.sim.mutants_of_rare_pairs import (
    Mutant,
    old_error_ends_a_power_order,
    refused_while_another_bus_is_away,
    release_under_the_reverts_number,
)

MOVES = frozenset({Widening.MOVES})
BUSES_APART = frozenset({Widening.BUSES_APART})
MAX_SEEDS = 60
NODE_POWER = frozenset({Widening.NODE_POWER})
# {defect: the kind of the world, and a seed that finds it}
FOUND_BY: dict[Mutant, tuple[frozenset[Widening], int]] = {
    old_error_ends_a_power_order: (NODE_POWER, 15),
    refused_while_another_bus_is_away: (BUSES_APART, 113),
}


@pytest.mark.parametrize("mutant", FOUND_BY, ids=lambda mutant: mutant.__name__)
def test_a_defect_of_a_rare_pair_is_found(mutant: Mutant) -> None:
    kinds, seed = FOUND_BY[mutant]
    clean = simulate(seed, kinds)
    assert clean.breach == "", clean.detail
    with mutant():
        assert simulate(seed, kinds).breach


@pytest.mark.timeout(900)
def test_a_release_under_the_number_of_a_revert_is_found_by_a_run_steered_to_reverts() -> None:
    """By the seed and the draw on record, or another of the first ones."""
    for seed, draw in ((25, 0), *((seed, draw) for seed in range(1, MAX_SEEDS) for draw in range(4))):
        plan = plan_of(seed, MOVES)
        if Widening.MOVES not in plan.widenings or plan.placements < 2:
            continue
        steered = deleted_amid(plan, run(plan).seen.stays, "reverting", random.Random(draw))
        with release_under_the_reverts_number():
            found = run(steered).breach
        if found:
            clean = run(steered)
            assert (found, clean.breach) == ("hosts_instances_allocations_agree", ""), clean.detail
            return
    pytest.fail(f"it was not found in {MAX_SEEDS} seeds")
