"""A change that takes longer than its step, and a revert whose instance is deleted."""

from __future__ import annotations

from bus.contracts.moves import ChangeMachine, MoveKind
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import State
from tests.unit.conductor.move_scenario import (
    begun,
)


def test_a_change_that_takes_longer_than_its_step_comes_to_an_end() -> None:
    made = begun(MoveKind.SHELVE, offload=True)
    assert made.instance.state is State.CHANGING
    for number in range(20):  # the snapshot takes 400 s, the step 300: its host gives it up each time, and begins anew
        at = 500.0 + 400 * number
        made.end(1, 1, done=False, runs=None, code="change.timeout")
        made.apply(e.TimedOut(at=at))
    timeouts = {m.timeout_s for m in made.commands if isinstance(m, ChangeMachine)}
    assert made.instance.state is not State.CHANGING or len(timeouts) > 1, (
        "20 times from the beginning, with the same limit"
    )
