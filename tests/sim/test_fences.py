"""A service's hosts die, an operator fences them, and they come back: it holds.

Its defects: `test_mutants_of_fences.py`.
"""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.moves import MoveKind
from lab.simulation.draw import plan_of
from lab.simulation.moves import DRAIN, FENCE
from lab.simulation.plan import Action, Order, Plan
from lab.simulation.run import run
from lab.simulation.widening import Widening

VERBS = tuple(kind.value for kind in MoveKind)
DIED_AGAIN = (7, 15)


def hosts_are_fenced(seed: int) -> Plan:
    """The builds of this seed without any fault; one fence; and a third of the builds is deleted just after it."""
    plan = plan_of(seed).without_faults()
    service, _ = plan.cells[0].services[0]
    builds = [order for order in plan.orders if order.action is Action.BUILD and order.at < 20.0]
    uuid = "f0000000-0000-4000-8000-000000000001"
    fence = Order(at=20.0, action=Action.MOVE, verb=FENCE, service=service, seconds=10.0, uuid=uuid)
    deletes = [replace(order, at=20.2, action=Action.DELETE) for order in builds[::3]]
    return replace(plan, orders=(*builds, fence, *deletes), widenings=(Widening.FENCES,), load_s=50.0)


def hosts_burn_while_fenced(seed: int) -> Plan:
    """The same, and the fenced hosts do not come back."""
    plan = hosts_are_fenced(seed)
    service = next(order.service for order in plan.orders if order.action is Action.MOVE)
    return replace(plan, orders=(*plan.orders, Order(at=25.0, action=Action.DIE, service=service)))


@pytest.mark.parametrize("seed", [1, 4])
def test_it_holds_when_fenced_hosts_have_burnt_down(seed: int) -> None:
    held = run(hosts_burn_while_fenced(seed))
    assert held.breach == "", held.detail


@pytest.mark.parametrize("seed", [1, 4])
def test_it_holds(seed: int) -> None:
    held = run(hosts_are_fenced(seed))
    assert held.breach == "", held.detail


def hosts_die_again(seed: int) -> Plan:
    """Moves of every kind while hosts die, are fenced, are back at once, die again, and are drained."""
    rng = random.Random(f"hosts die again {seed}")
    plan = plan_of(seed).without_faults()
    builds = [order for order in plan.orders if order.action is Action.BUILD and order.at < 14.0]
    (first, second), at = (rng.choices([name for _, name in plan.services], k=2)), rng.uniform(16.0, 20.0)
    gap = rng.choice((0.2, 1.0, 4.0, 12.0))

    def order(at: float, verb: str, service: str = "", host: int = 0, seconds: float = 0.0) -> Order:
        uuid = new_uuid(rng)
        return Order(at=at, action=Action.MOVE, verb=verb, service=service, host=host, seconds=seconds, uuid=uuid)

    fences = (
        order(at, FENCE, first, seconds=gap),
        order(at + gap + rng.uniform(0.3, 6.0), FENCE, first, seconds=rng.choice((0.5, 8.0))),
        order(at + rng.uniform(0.0, 5.0), FENCE, second, seconds=rng.choice((0.2, 3.0, 10.0))),
    )
    moves = [order(at + rng.uniform(-3.0, 8.0), rng.choice(VERBS), host=rng.randrange(1000)) for _ in range(50)]
    drains = [order(at + rng.uniform(-4.0, 4.0), DRAIN, name, seconds=5.0) for _, name in plan.services]
    return replace(
        plan,
        orders=(*builds, *fences, *moves, *drains),
        widenings=(Widening.FENCES,),
        drains_by_schedulers=True,
        load_s=50.0,
    )


@pytest.mark.parametrize("seed", DIED_AGAIN)
def test_it_holds_when_hosts_are_back_at_once_and_die_again(seed: int) -> None:
    held = run(hosts_die_again(seed))
    assert held.breach == "", held.detail
