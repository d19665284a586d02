"""No deliberate defect is stale: each finds what it replaces. Whether it is found takes minutes (`scripts/mutants`)."""

from __future__ import annotations

import pytest

from tests.sim.mutants import MUTANTS, UNPROVEN
from tests.sim.mutants_of_moves import FOUND_BY_THE_TABLE, MUTANTS_OF_MOVES

ALL = {**MUTANTS, **UNPROVEN, **{one.__name__: one for one in (*MUTANTS_OF_MOVES, *FOUND_BY_THE_TABLE)}}


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_defect_can_be_planted(name: str) -> None:
    with ALL[name]():
        pass
