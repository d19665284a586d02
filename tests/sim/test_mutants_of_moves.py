"""Deliberate defects of moves are found: each by the seed on record, or another of the first with moves in it."""

from __future__ import annotations

import pytest

from berth.sim.draw import plan_of
from berth.sim.run import simulate
from berth.sim.widening import Widening
from tests.sim.mutants_of_moves import FOUND_BY, MUTANTS_OF_MOVES

MOVES = frozenset({Widening.MOVES})
MAX_SEEDS = 30
MUTANTS = {mutant.__name__: mutant for mutant in MUTANTS_OF_MOVES}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_defect_of_moves_is_found(name: str) -> None:
    with_moves = [seed for seed in range(1, 4 * MAX_SEEDS) if Widening.MOVES in plan_of(seed, MOVES).widenings]
    for seed in (FOUND_BY[name], *with_moves[:MAX_SEEDS]):
        with MUTANTS[name]():
            if simulate(seed, MOVES).breach:
                return
    pytest.fail(f"{name} was not found in {MAX_SEEDS} seeds")


@pytest.mark.parametrize("seed", sorted(set(FOUND_BY.values())))
def test_without_a_defect_the_same_seeds_find_nothing(seed: int) -> None:
    result = simulate(seed, MOVES)
    assert result.breach == "", result.detail
