"""A cell's database is set back while its instances are moved: every request has its end, and its defects are found."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from berth.sim.draw import plan_of
from berth.sim.plan import Action, Order, Plan
from berth.sim.run import run
from berth.sim.widening import Widening
from bus.contracts.moves import MoveKind
from cell_conductor.domain import move_events
from cell_conductor.domain.rules import Step
from compute_sim.domain.faults import Faults
from scheduler_worker.unanswered import UnansweredMoves
from tests.sim.mutants import Mutant

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


def cells_are_not_queried() -> AbstractContextManager[Any]:
    """A scheduler waits for the end of a request however long."""

    async def look(self: UnansweredMoves) -> None:
        return None

    return patch.object(UnansweredMoves, "look", look)


def lost_requests_are_not_ended() -> AbstractContextManager[Any]:
    """A cell that has no record of a request does not answer."""
    right = move_events.answer_query

    def answer(instance: Any, event: Any, context: Any) -> Step:
        answered = right(instance, event, context)
        is_lost = any(getattr(one, "code", "") == move_events.MOVE_LOST for one in answered.commands)
        return Step(instance) if is_lost else answered

    return patch.object(move_events, "answer_query", answer)


@pytest.mark.parametrize("seed", [1, 3])
def test_every_request_has_its_end(seed: int) -> None:
    held = run(a_cell_forgets(seed))
    assert held.breach == "", held.detail
    assert held.counts


@pytest.mark.parametrize("mutant", [cells_are_not_queried, lost_requests_are_not_ended])
def test_a_request_that_waits_for_ever_is_found(mutant: Mutant) -> None:
    with mutant():
        assert run(a_cell_forgets(1)).breach == "one_terminal_event"
