"""Deliberate defects are found, each within a bounded number of seeds (docs/contributing/simulation.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import pytest

from lab.simulation.draw import plan_of
from lab.simulation.plan import Plan
from lab.simulation.run import run, simulate
from lab.simulation.widening import Widening
from tests.sim import mutants_of_kinds as kinds
from tests.sim.mutants import MUTANTS, Mutant
from tests.sim.seeds_to_find import MAX_SEEDS, recorded
from tests.sim.test_fences import KINDS
from tests.sim.test_forgotten_builds import requests_forgotten, transfers

# --- Deliberate defects are found, each within a bounded number of seeds (docs/contributing/simulation.md).


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


# --- Deliberate defects of one kind of world are found, each by the seed on record, and the same seeds find nothing.


PlanOf = Callable[[int], Plan]
OF_CELLS: PlanOf = partial(plan_of, kinds=KINDS)
OF_GANGS: PlanOf = partial(plan_of, kinds=frozenset({Widening.GANGS}))
ANY: dict[str, str] = {}  # of these the breach is not always the same


def rows(
    plan: PlanOf, mutants: Iterable[Mutant], found_by: Mapping[str, int], breaks: Mapping[str, str] = ANY
) -> list[tuple[PlanOf, Mutant, int, str]]:
    return [(plan, one, found_by[one.__name__], breaks.get(one.__name__, "")) for one in mutants]


DEFECTS = [
    *rows(OF_CELLS, kinds.MUTANTS_OF_CELLS, kinds.CELLS_FOUND_BY),
    *rows(OF_GANGS, kinds.MUTANTS_OF_GANGS, kinds.GANGS_FOUND_BY),
    *rows(transfers, kinds.MUTANTS_OF_TRANSFERS, kinds.TRANSFERS_FOUND_BY),
    *rows(requests_forgotten, kinds.MUTANTS_OF_FORGOTTEN_REQUESTS, kinds.REQUESTS_FOUND_BY, kinds.REQUESTS_BREAK),
]


@pytest.mark.parametrize(("plan", "mutant", "seed", "breach"), DEFECTS, ids=[one.__name__ for _, one, *_ in DEFECTS])
def test_a_defect_of_one_kind_is_found(plan: PlanOf, mutant: Mutant, seed: int, breach: str) -> None:
    with mutant():
        found = run(plan(seed)).breach
    assert found == breach if breach else found


@pytest.mark.parametrize(("plan", "seed"), dict.fromkeys((plan, seed) for plan, _, seed, _ in DEFECTS))
def test_without_a_defect_the_same_seeds_find_nothing(plan: PlanOf, seed: int) -> None:
    held = run(plan(seed))
    assert held.breach == "", held.detail
