"""Instances leave their cell for another one while everything fails: it holds.

Its defects, and the other seeds that find them: `test_mutants_of_transfers.py`.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from lab.simulation.draw import plan_of
from lab.simulation.plan import Plan
from lab.simulation.run import run
from lab.simulation.widening import DRAWS, Widening
from tests.sim.mutants_of_transfers import FOUND_BY


def transfers(seed: int) -> Plan:
    """The plan of this seed, and instances that are unshelved in another cell."""
    plan = plan_of(seed)
    drawn = DRAWS[Widening.TRANSFERS](random.Random(seed), plan)
    assert drawn is not plan, "it has one cell"
    orders = tuple(sorted(drawn.orders, key=lambda order: order.at))
    return replace(drawn, widenings=(*plan.widenings, Widening.TRANSFERS), orders=orders)


def test_it_holds() -> None:
    held = run(transfers(min(FOUND_BY.values())))
    assert held.breach == "", held.detail
