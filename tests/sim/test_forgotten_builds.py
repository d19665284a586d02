"""A cell's database is set back to before all its builds, which are judged as all others are.

Its defects, and the seeds that find them: `test_mutants_of_forgotten_builds.py`.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from lab.simulation.draw import plan_of
from lab.simulation.plan import Plan
from lab.simulation.run import run
from lab.simulation.widening import DRAWS, Widening


def builds_forgotten(seed: int) -> Plan:
    """The builds of this seed, in one cell that forgets them."""
    drawn = DRAWS[Widening.BUILDS_FORGOTTEN](random.Random(seed), plan_of(seed))
    orders = tuple(sorted(drawn.orders, key=lambda order: order.at))
    return replace(drawn, orders=orders, widenings=(Widening.BUILDS_FORGOTTEN,))


BEFORE_THE_SWEEP = 7  # a command came between the set-back and the sweep that noticed it


def test_it_holds() -> None:
    held = run(builds_forgotten(BEFORE_THE_SWEEP))
    assert held.breach == "", held.detail
