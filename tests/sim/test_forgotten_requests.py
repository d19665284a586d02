"""The schedulers' database is set back to before all requests, and their clients publish these again; what runs is
judged as ever.

Its defects, and the seeds that find them: `test_mutants_of_forgotten_requests.py`.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from lab.simulation.draw import plan_of
from lab.simulation.plan import Plan
from lab.simulation.run import run
from lab.simulation.widening import DRAWS, Widening


def requests_forgotten(seed: int) -> Plan:
    """The builds of this seed, in one cell whose schedulers forget them."""
    drawn = DRAWS[Widening.REQUESTS_FORGOTTEN](random.Random(seed), plan_of(seed))
    orders = tuple(sorted(drawn.orders, key=lambda order: order.at))
    return replace(drawn, orders=orders, widenings=(Widening.REQUESTS_FORGOTTEN,))


HOST_UNANNOUNCED = 18  # for longer than a request is retried: it ends as claim.stranded


def test_it_holds() -> None:
    held = run(requests_forgotten(HOST_UNANNOUNCED))
    assert held.breach == "", held.detail
