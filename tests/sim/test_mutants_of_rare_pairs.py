"""Deliberate defects that need two rare things at once are found by the simulation, where it is made to bring them."""

from __future__ import annotations

import pytest

from lab.simulation.run import simulate
from lab.simulation.widening import Widening
from tests.sim.mutants_of_rare_pairs import Mutant, old_error_ends_a_power_order

NODE_POWER = frozenset({Widening.NODE_POWER})
# {defect: the kind of the world, and a seed that finds it}
FOUND_BY: dict[Mutant, tuple[frozenset[Widening], int]] = {
    old_error_ends_a_power_order: (NODE_POWER, 3),
}


@pytest.mark.parametrize("mutant", FOUND_BY, ids=lambda mutant: mutant.__name__)
def test_a_defect_of_a_rare_pair_is_found(mutant: Mutant) -> None:
    kinds, seed = FOUND_BY[mutant]
    clean = simulate(seed, kinds)
    assert clean.breach == "", clean.detail
    with mutant():
        assert simulate(seed, kinds).breach
