"""A change that takes longer than its step, and a revert whose instance is deleted."""

from __future__ import annotations

from bus.contracts.actions import ActionEvent, ActionKind, ChangeMachine
from bus.contracts.placement import Release
from cell_conductor.awaited_request import awaited_request_of
from cell_conductor.state import events as e
from cell_conductor.state.instance import State
from tests.unit.cell_conductor.move_scenario import OTHER, Scenario, begun
from tests.unit.cell_conductor.records import BY_REVERT, in_place
from tests.unit.cell_conductor.scenario import DELETE, missed


def test_a_revert_of_a_resize_in_place_that_was_lost_has_an_end_though_its_instance_is_deleted() -> None:
    made = Scenario(
        in_place(State.RESIZED, action={**BY_REVERT, "answered": True}, queried=False, code="", highest_attempt=0)
    )
    made.apply(missed(made.instance))
    assert made.instance.phase == (State.RELEASING, State.FAILED)
    made.apply(DELETE)
    while isinstance(query := awaited_request_of(made.instance), Release):
        made.apply(e.Released(at=400.0, consumer=query.consumer, attempt=query.attempt or 0))
    assert made.instance.state is State.DELETED
    assert [m for m in made.commands if isinstance(m, ActionEvent) and m.terminal and m.request_id == OTHER]


def test_a_change_that_takes_longer_than_its_step_comes_to_an_end() -> None:
    made = begun(ActionKind.SHELVE, offload=True)
    assert made.instance.state is State.CHANGING
    for number in range(20):  # the snapshot takes 400 s, the step 300: its host gives it up each time, and begins anew
        at = 500.0 + 400 * number
        made.end(1, 1, done=False, runs=None, code="change.timeout")
        made.apply(e.TimedOut(at=at))
    timeouts = {m.timeout_s for m in made.commands if isinstance(m, ChangeMachine)}
    assert made.instance.state is not State.CHANGING or len(timeouts) > 1, (
        "20 times from the beginning, with the same limit"
    )
