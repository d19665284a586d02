"""Deliberate defects are found, each within a bounded number of seeds (the table is in docs/reliability.md)."""

from __future__ import annotations

import pytest

from berth.sim.run import simulate
from tests.sim.mutants import MUTANTS

# A seed that finds each, out of the first few dozen, so that the suite need not run all those before it:
# `python -m tests.sim.seeds_to_find` looks for them anew and prints the table.
FOUND_BY: dict[str, int] = {}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_defect_is_found(name: str) -> None:
    with MUTANTS[name]():
        result = simulate(FOUND_BY[name])
    assert result.breach, f"{name} was not found by seed {FOUND_BY[name]}"
