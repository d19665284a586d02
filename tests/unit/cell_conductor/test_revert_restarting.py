"""A revert or abort whose source is silent when it is to be started again."""

from __future__ import annotations

from bus.contracts.actions import ActionEvent, ActionKind
from cell_conductor.awaited_request import awaited_request_of
from cell_conductor.state import events as e
from cell_conductor.state.instance import State
from tests.unit.cell_conductor.move_scenario import OTHER, request, seen, to_resized
from tests.unit.cell_conductor.scenario import host


def test_why_a_revert_waits_for_the_start_of_its_source_is_reported() -> None:
    made = to_resized()
    made.apply(request(ActionKind.REVERT, request_id=OTHER))

    made.apply(seen(awaited_request_of(made.instance)))
    made.apply(e.Destroyed(at=220.0, attempt=2, host_uuid=host(2), service="s1"))
    q = awaited_request_of(made.instance)
    made.apply(e.Reverted(at=221.0, attempt=q.attempt, consumer_generation=11))
    assert made.instance.state is State.RESTARTING, made.instance.phase
    before = len(made.commands)
    for n in range(5):
        made.apply(e.TimedOut(at=1000.0 + 700 * n))
    told = [
        (m.state, m.code, m.terminal)
        for m in made.commands[before:]
        if isinstance(m, ActionEvent) and m.request_id == OTHER
    ]
    assert told and any(code for _, code, _ in told), "no event of the revert in an hour"
