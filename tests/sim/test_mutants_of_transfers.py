"""Deliberate defects of instances that leave their cell are found; `test_transfers.py`: without them all holds."""

from __future__ import annotations

import pytest

from berth.sim.run import run
from tests.sim.mutants_of_transfers import FOUND_BY, MUTANTS_OF_TRANSFERS
from tests.sim.test_transfers import transfers

MUTANTS = {mutant.__name__: mutant for mutant in MUTANTS_OF_TRANSFERS}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_defect_of_transfers_is_found(name: str) -> None:
    with MUTANTS[name]():
        assert run(transfers(FOUND_BY[name])).breach
