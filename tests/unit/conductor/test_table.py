"""The instance state machine, pair by pair: its table as a whole."""

from __future__ import annotations

import pytest

from cell_conductor.domain import events as e
from cell_conductor.domain.desires import DESIRES
from cell_conductor.domain.instance import FIRST_SEQUENCE, Instance, State
from cell_conductor.domain.table import TABLE, ByThen, IllegalStep, question_of, rules_of, step
from tests.unit.conductor.scenario import (
    DELETE,
    PATIENCE,
    RELEASED,
    TIMED_OUT,
    UUID,
    announced,
    claimed,
    failed,
    host,
    queried,
    refused,
    run,
    spawned,
)


def test_total_over_states_and_events() -> None:
    assert set(TABLE) == set(State)
    for state, row in TABLE.items():
        assert set(row) == set(e.EVENTS), state
        follow = {then for known, then in DESIRES if known is state and then is not None}
        for event, cell in row.items():
            if isinstance(cell, ByThen):
                assert cell.rules.keys() <= follow, (state, event)
                assert all(cell.of(then) is not None for then in follow), (state, event)


def test_every_state_is_reached_and_left_except_the_last() -> None:
    rules = {state: [rule for cell in row.values() for rule in rules_of(cell)] for state, row in TABLE.items()}
    assert {target for row in rules.values() for rule in row for target in rule.to} == set(State) - {State.ABSENT}
    assert {state for state, row in rules.items() if not any(rule.to for rule in row)} == {State.DELETED}


def test_an_unfulfilled_question_is_repeated() -> None:
    waiting = run(queried(), failed()).instance
    again = run(e.TimedOut(at=125.0), start=waiting)
    assert again.instance.deadline == 140.0 and question_of(again.instance) == question_of(waiting)


def test_illegal_pairs_raise_with_the_history() -> None:
    with pytest.raises(IllegalStep, match=r"spawn\.no_disk"):
        run(RELEASED, start=run(queried(), failed(), claimed()).instance)
    with pytest.raises(IllegalStep):
        run(TIMED_OUT)
    with pytest.raises(IllegalStep, match="claim of attempt 2"):
        run(claimed(), start=run(queried()).instance)


def test_answers_to_older_questions_change_nothing() -> None:
    second = run(queried(), failed(), claimed(), failed(2)).instance
    assert second.phase == (State.CLAIMING, State.BUILDING)
    for late in (claimed(), refused(), claimed(option=1)):
        assert run(late, start=second).instance == second


def test_sequence_rises_with_every_announcement() -> None:
    instance, numbers = Instance(uuid=UUID), []
    path = (
        queried(),
        failed(),
        claimed(),
        spawned(2),
        DELETE,
        e.Destroyed(at=1.0, attempt=2, host_uuid=host(2), service="s1"),
        RELEASED,
    )
    for event in path:
        stepped = step(instance, event, PATIENCE)
        instance = stepped.instance
        numbers += [s.sequence for s in announced(stepped)]
    assert numbers == list(range(FIRST_SEQUENCE, FIRST_SEQUENCE + 5))
