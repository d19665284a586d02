"""Each kind of others' actions finds the defect that it is there for."""

from __future__ import annotations

import pytest

from lab.simulation.plan import Plan
from lab.simulation.run import run
from tests.sim.mutants import Mutant
from tests.sim.mutants_of_other_tenants import (
    breaker_never_trips,
    failed_machine_left_running,
    overtaken_404_accepted,
    survived_machine_kept_for_good,
)
from tests.sim.test_other_tenants import hosts_come_back, machines_are_lost_at_once, nodes_come_again


@pytest.mark.parametrize(
    ("plan", "mutant", "breach"),
    [
        pytest.param(
            hosts_come_back(lost=True), failed_machine_left_running, "hosts_instances_allocations_agree", id="failed"
        ),
        pytest.param(
            hosts_come_back(lost=False),
            survived_machine_kept_for_good,
            "hosts_instances_allocations_agree",
            id="undead",
        ),
        pytest.param(machines_are_lost_at_once(), breaker_never_trips, "breaker_holds", id="breaker"),
        pytest.param(nodes_come_again(), overtaken_404_accepted, "removed_on_fresh_word", id="overtaken 404"),
    ],
)
def test_it_finds_its_defect(plan: Plan, mutant: Mutant, breach: str) -> None:
    with mutant():
        assert run(plan).breach == breach
