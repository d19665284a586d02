"""Deliberate defects of fences and evacuations are found."""

from __future__ import annotations

import pytest

from lab.simulation.run import run
from tests.sim.mutants import Mutant
from tests.sim.mutants_of_fences import (
    choice_never_released,
    delete_on_a_fenced_host_keeps_its_claim,
    fence_acknowledged_and_not_recorded,
    fence_never_lifted,
    losses_never_forgotten,
)
from tests.sim.test_fences import hosts_are_fenced, hosts_burn_while_fenced


@pytest.mark.parametrize(
    ("seed", "mutant", "breach"),
    [
        pytest.param(1, fence_never_lifted, "fences_are_lifted", id="never lifted"),
        pytest.param(1, losses_never_forgotten, "fences_are_lifted", id="losses kept"),
        pytest.param(1, delete_on_a_fenced_host_keeps_its_claim, "hosts_instances_allocations_agree", id="claim kept"),
        pytest.param(9, choice_never_released, "replica_agrees", id="choice held"),
    ],
)
def test_a_defect_of_fences_is_found(seed: int, mutant: Mutant, breach: str) -> None:
    with mutant():
        assert run(hosts_are_fenced(seed)).breach == breach


def test_an_acknowledged_fence_that_is_not_on_record_is_found() -> None:
    """Where a host comes back soon, nothing else shows it; one that has burnt down stays fenced."""
    with fence_acknowledged_and_not_recorded():
        assert run(hosts_burn_while_fenced(1)).breach == "fences_are_on_record"
