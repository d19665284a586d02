"""A service's hosts die, an operator fences them, and they come back: it holds, and finds its defects."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from berth.sim.draw import plan_of
from berth.sim.moves import FENCE
from berth.sim.plan import Action, Order, Plan
from berth.sim.run import run
from berth.sim.widening import Widening
from tests.sim.mutants import Mutant
from tests.sim.mutants_of_fences import (
    choice_never_released,
    delete_on_a_fenced_host_keeps_its_claim,
    fence_never_lifted,
    losses_never_forgotten,
)


def hosts_are_fenced(seed: int) -> Plan:
    """The builds of this seed without any fault; one fence; and a third of the builds is deleted just after it."""
    plan = plan_of(seed).without_faults()
    service, _ = plan.cells[0].services[0]
    builds = [order for order in plan.orders if order.action is Action.BUILD and order.at < 20.0]
    uuid = "f0000000-0000-4000-8000-000000000001"
    fence = Order(at=20.0, action=Action.MOVE, verb=FENCE, service=service, seconds=10.0, uuid=uuid)
    deletes = [replace(order, at=20.2, action=Action.DELETE) for order in builds[::3]]
    return replace(plan, orders=(*builds, fence, *deletes), widenings=(Widening.FENCES,), load_s=50.0)


@pytest.mark.parametrize("seed", [1, 4])
def test_it_holds(seed: int) -> None:
    held = run(hosts_are_fenced(seed))
    assert held.breach == "", held.detail


@pytest.mark.parametrize(
    ("seed", "mutant", "breach"),
    [
        pytest.param(1, fence_never_lifted, "fences_are_lifted", id="never lifted"),
        pytest.param(1, losses_never_forgotten, "fences_are_lifted", id="losses kept"),
        pytest.param(1, delete_on_a_fenced_host_keeps_its_claim, "hosts_instances_allocations_agree", id="claim kept"),
        pytest.param(1, choice_never_released, "replica_agrees", id="choice held"),
    ],
)
def test_a_defect_of_fences_is_found(seed: int, mutant: Mutant, breach: str) -> None:
    with mutant():
        assert run(hosts_are_fenced(seed)).breach == breach
