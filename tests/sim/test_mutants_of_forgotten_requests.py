"""Deliberate defects about forgotten requests are found, and their seeds find nothing without them."""

from __future__ import annotations

import pytest

from lab.simulation.run import run
from tests.sim.mutants_of_forgotten_requests import BREAKS, FOUND_BY, MUTANTS_OF_FORGOTTEN_REQUESTS
from tests.sim.test_forgotten_builds import requests_forgotten

MUTANTS = {mutant.__name__: mutant for mutant in MUTANTS_OF_FORGOTTEN_REQUESTS}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_defect_is_found(name: str) -> None:
    with MUTANTS[name]():
        assert run(requests_forgotten(FOUND_BY[name])).breach == BREAKS[name]


@pytest.mark.parametrize("seed", sorted(set(FOUND_BY.values())))
def test_without_a_defect_the_same_seeds_find_nothing(seed: int) -> None:
    held = run(requests_forgotten(seed))
    assert held.breach == "", held.detail
