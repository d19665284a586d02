"""The instance state machine and its table of desires as a whole, and what a scheduler's query is answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from bus.contracts.cell import UNKNOWN_ATTEMPT, Selection
from bus.contracts.moves import Condition, MoveEvent, MoveKind, MoveState
from cell_conductor.domain import events as e
from cell_conductor.domain.desires import DESIRES, in_text, of_text
from cell_conductor.domain.instance import FIRST_SEQUENCE, Instance, State
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import TABLE, IllegalStep, question_of, rules_of, step
from tests.unit.conductor.move_scenario import MOVE, OTHER, Scenario, active, request, unbegun
from tests.unit.conductor.move_scenario import claimed as move_claimed
from tests.unit.conductor.scenario import (
    DELETE,
    PATIENCE,
    RELEASED,
    TIMED_OUT,
    UUID,
    announced,
    answering,
    claimed,
    failed,
    host,
    queried,
    refused,
    run,
    spawned,
)

# --- The instance state machine, pair by pair: its table as a whole.


def test_every_state_is_reached_and_left() -> None:
    rules = {state: [rule for cell in row.values() for rule in rules_of(cell)] for state, row in TABLE.items()}
    assert {target for row in rules.values() for rule in row for target in rule.to} == set(State) - {State.ABSENT}
    assert all(any(rule.to for rule in row) for row in rules.values())


def test_an_unfulfilled_question_is_repeated() -> None:
    waiting = run(queried(), failed()).instance
    again = run(e.TimedOut(at=125.0), start=waiting)
    assert again.instance.deadline == 140.0 and question_of(again.instance) == question_of(waiting)


def test_illegal_pairs_raise_with_the_history() -> None:
    with pytest.raises(IllegalStep, match=r"spawn\.no_disk"):
        run(TIMED_OUT, start=run(queried(), failed(), claimed(), spawned(2)).instance)
    with pytest.raises(IllegalStep):
        run(TIMED_OUT)


@pytest.mark.parametrize("answer", [claimed(), refused(), RELEASED, e.Reverted(at=120.0, attempt=2)])
@pytest.mark.parametrize("start", [Instance(uuid=UUID), run(queried()).instance])
def test_an_answer_to_what_no_record_asks_changes_nothing(answer: e.Event, start: Instance) -> None:
    """A database that was set back has forgotten the question. It ended the process (seed 51)."""
    after = step(start, answer, PATIENCE)
    assert (after.instance, after.commands) == (start, ())


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
        stepped = step(instance, answering(instance, event), PATIENCE)
        instance = stepped.instance
        numbers += [s.sequence for s in announced(stepped)]
    assert numbers == list(range(FIRST_SEQUENCE, FIRST_SEQUENCE + 5))


# --- What a record proves to be over, state by state, against a table of values from before the table of desires.
# `wanted_by_state.json` is an oracle, not a derived file: it was written once by the hand-kept sets of states that
# were there before, and shares no code with what it checks. Its 33 states have become 21, of which three say what
# follows: `NAMES` has what each of them was.


FROZEN: dict[str, str] = json.loads((Path(__file__).parent / "data" / "wanted_by_state.json").read_text())
HERE, SOURCE, ELSEWHERE = "here", "source", "elsewhere"
# The current attempt is 3, its move's source has 2, and 5 was the last that was given out.
ATTEMPTS = (UNKNOWN_ATTEMPT, 1, 2, 3, 4, 6)
IN_PLACE, NO_SOURCE = "in place", "none"


# --- The table of desires is total, and the orders that follow from it destroy nothing that is wanted.


# A resize is under way in these; elsewhere a request for any change.
RESIZES = {(State.RESIZING, None), (State.DESTROYING, State.REVERTING)}


def at(host: str) -> Selection:
    return Selection(host_uuid=host, host=host, service="s1", allocations={host: {}})


def test_a_state_has_the_same_name_in_the_database_and_back() -> None:
    assert [of_text(in_text(phase)) for phase in DESIRES] == list(DESIRES)
    assert len({in_text(phase) for phase in DESIRES}) == len(DESIRES)


# --- A scheduler without news of a request queries its cell: the answer begins nothing, and always leads to an end.


def queries(kind: MoveKind = MoveKind.MIGRATE, request_id: str = MOVE) -> e.MoveRequested:
    return unbegun(request(kind, request_id=request_id))


def answer(instance: Instance, query: e.MoveRequested) -> tuple[Step, MoveEvent]:
    stepped = step(instance, query, PATIENCE)
    (event,) = stepped.commands
    assert isinstance(event, MoveEvent) and event.request_id == query.request.request_id
    return stepped, event


def test_a_request_without_a_record_ends_as_lost_and_a_late_copy_of_it_is_not_begun() -> None:
    stepped, event = answer(active(), queries())
    assert (event.state, event.code, event.terminal) == (MoveState.FAILED, "move.lost", True)
    assert (event.condition, stepped.instance.state) == (Condition.ACTIVE, State.ACTIVE)
    late = step(stepped.instance, request(MoveKind.MIGRATE, 2), PATIENCE)
    (repeated,) = late.commands
    assert isinstance(repeated, MoveEvent)
    assert (repeated.state, repeated.code, late.instance.state) == (MoveState.FAILED, "move.lost", State.ACTIVE)


def test_the_end_of_a_request_is_announced_again_under_a_new_number() -> None:
    stopped = Scenario(active())
    stopped.apply(request(MoveKind.STOP))
    stopped.end(1, 1)
    first = stopped.commands[-1]
    assert isinstance(first, MoveEvent) and first.terminal
    stepped, event = answer(stopped.instance, queries(MoveKind.STOP))
    assert (event.state, event.terminal, event.condition) == (MoveState.DONE, True, Condition.STOPPED)
    assert event.sequence == first.sequence + 1 and stepped.instance.sequence == event.sequence + 1


@pytest.mark.parametrize(
    ("happened", "state"),
    [
        ((), MoveState.CLAIMING),
        ((move_claimed(),), MoveState.PREPARING),
        ((move_claimed(), request(MoveKind.ABORT, request_id=OTHER)), MoveState.UNDOING),
    ],
)
def test_a_request_under_way_is_answered_with_its_progress(happened: tuple[e.Event, ...], state: MoveState) -> None:
    moving = Scenario(active())
    moving.apply(request(MoveKind.MIGRATE, 2), *happened)
    stepped, event = answer(moving.instance, queries())
    assert (event.state, event.terminal, event.condition) == (state, False, Condition.MOVING)
    assert stepped.instance == replace(moving.instance, sequence=moving.instance.sequence + 1)


def test_an_abort_under_way_is_answered_too() -> None:
    moving = Scenario(active())
    moving.apply(request(MoveKind.MIGRATE, 2), request(MoveKind.ABORT, request_id=OTHER))
    stepped, event = answer(moving.instance, queries(MoveKind.ABORT, OTHER))
    assert not event.terminal and stepped.instance.move == moving.instance.move


def test_an_instance_that_the_cell_does_not_know_ends_the_request() -> None:
    stepped, event = answer(Instance(uuid=UUID), queries())
    assert (event.state, event.code, event.condition) == (MoveState.FAILED, "instance.unknown", Condition.UNKNOWN)
    assert event.terminal and stepped.instance == Instance(uuid=UUID)


def test_a_lost_request_ends_while_another_one_is_under_way() -> None:
    moving = Scenario(active())
    moving.apply(request(MoveKind.MIGRATE, 2))
    stepped, event = answer(moving.instance, queries(MoveKind.STOP, OTHER))
    assert (event.state, event.code) == (MoveState.FAILED, "move.lost")
    assert stepped.instance.move == moving.instance.move and stepped.instance.phase == (State.CLAIMING, State.PREPARING)
