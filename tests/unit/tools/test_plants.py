"""The planted defects (tests/plants.py) stay applicable: what each replaces is in its file exactly once."""

from __future__ import annotations

import pytest

from tests.plants import PLANTS, ROOT, Plant
from tests.sim.mutants import MUTANTS, UNPROVEN, Mutant
from tests.sim.mutants_of_moves import FOUND_BY_THE_TABLE, MUTANTS_OF_MOVES
from tests.sim.mutants_of_other_tenants import breaker_never_trips, survived_machine_kept


@pytest.mark.parametrize("one", PLANTS, ids=lambda one: one.name)
def test_a_planted_defect_applies_to_the_code_as_it_is(one: Plant) -> None:
    assert (ROOT / one.file).read_text().count(one.old) == 1
    for path in (word.partition("::")[0] for word in one.tests.split()):
        assert (ROOT / path).exists()


@pytest.mark.parametrize(
    "mutant",
    [
        *MUTANTS.values(),
        *UNPROVEN.values(),
        *MUTANTS_OF_MOVES,
        *FOUND_BY_THE_TABLE,
        survived_machine_kept,
        breaker_never_trips,
    ],
    ids=lambda mutant: mutant.__name__,
)
def test_a_deliberate_defect_replaces_what_there_is(mutant: Mutant) -> None:
    """`patch` raises for a name that is not there (any more)."""
    with mutant():
        pass
