"""A cell's database is set back while its instances are moved: every request has its end.

Its defects: `test_mutants_of_unanswered.py`.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.moves import MoveKind
from compute_sim.domain.faults import Faults
from lab.simulation.draw import plan_of
from lab.simulation.plan import Action, Order, Plan
from lab.simulation.run import run, simulate
from lab.simulation.widening import Widening

MOVES = (MoveKind.STOP, MoveKind.MIGRATE, MoveKind.LIVE_MIGRATE, MoveKind.REBUILD)


def a_cell_forgets(seed: int) -> Plan:
    """The builds of this seed without any fault; moves; and the first cell's database is what it was before them."""
    plan = plan_of(seed).without_faults()
    builds = [order for order in plan.orders if order.action is Action.BUILD and order.at < 20.0]
    moves = [
        Order(
            at=30.0 + number * 0.05,
            action=Action.MOVE,
            verb=MOVES[number % len(MOVES)],
            host=number,
            uuid=f"f0000000-0000-4000-8000-0000000000{number:02}",
        )
        for number in range(8)
    ]
    schema, uuid = f"cell_{plan.cells[0].name}", "e0000000-0000-4000-8000-000000000001"
    copied = Order(at=29.9, action=Action.BACKUP, service=schema, uuid=uuid)
    set_back = Order(at=30.7, action=Action.RESTORE, service=schema, uuid=uuid, seconds=1.0)
    orders = (*builds, copied, *moves, set_back)
    return replace(
        plan,
        computes=Faults(delay_min_s=1.0, delay_max_s=3.0),  # the moves are under way when their cell forgets them
        orders=tuple(sorted(orders, key=lambda order: order.at)),
        widenings=(Widening.CELL_RESTORED, Widening.FENCES),
        load_s=50.0,
    )


@pytest.mark.parametrize("seed", [1, 3])
def test_every_request_has_its_end(seed: int) -> None:
    held = run(a_cell_forgets(seed))
    assert held.breach == "", held.detail
    assert held.counts


@pytest.mark.parametrize("seed", [7, 20, 25])
def test_builds_and_deletes_that_a_cell_has_forgotten_have_an_end(seed: int) -> None:
    """Found when a restored database was no excuse for no end: builds (7, 20) and deletes (20, 25) waited for ever."""
    held = simulate(seed, {Widening.CELL_RESTORED})
    assert held.breach == "", held.detail
