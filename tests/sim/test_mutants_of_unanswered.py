"""Deliberate defects of what ends a request that its cell has forgotten are found."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest

from cell_conductor.domain import departure_rules, move_events
from cell_conductor.domain.rules import Step
from lab.simulation.run import run, simulate
from lab.simulation.widening import Widening
from scheduler_worker.unanswered import UnansweredRequests
from tests.sim.mutants import Mutant
from tests.sim.test_forgotten_builds import a_cell_forgets


def cells_are_not_queried() -> AbstractContextManager[Any]:
    """A scheduler waits for the end of a request however long."""

    async def look(self: UnansweredRequests) -> None:
        return None

    return patch.object(UnansweredRequests, "look", look)


def lost_requests_are_not_ended() -> AbstractContextManager[Any]:
    """A cell that has no record of a request does not answer."""
    right = departure_rules.answer_query

    def answer(instance: Any, event: Any, context: Any) -> Step:
        answered = right(instance, event, context)
        is_lost = any(getattr(one, "code", "") == move_events.MOVE_LOST for one in answered.commands)
        return Step(instance) if is_lost else answered

    return patch.object(departure_rules, "answer_query", answer)


@pytest.mark.parametrize("mutant", [cells_are_not_queried, lost_requests_are_not_ended])
def test_a_request_that_waits_for_ever_is_found(mutant: Mutant) -> None:
    with mutant():
        assert run(a_cell_forgets(2)).breach == "one_terminal_event"


@pytest.mark.parametrize("seed", [7, 20], ids=["a build", "a delete"])
def test_a_build_or_a_delete_that_waits_for_ever_is_found(seed: int) -> None:
    with cells_are_not_queried():
        assert simulate(seed, {Widening.CELL_RESTORED}).breach == "one_terminal_event"
