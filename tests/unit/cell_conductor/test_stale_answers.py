"""Answers of compute services about a record that has changed meanwhile, or of a database that was restored since."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.actions import ActionKind
from bus.contracts.cell import AttemptOnHost, MachineLookupResult
from cell_conductor.placement_question import awaited_request_of
from cell_conductor.rules.rollback_rules import answer_about
from cell_conductor.state import events as e
from cell_conductor.state.events import SourceQuery
from cell_conductor.state.instance import State
from tests.unit.cell_conductor.move_scenario import ACTION, OTHER, Scenario, claimed, request, to_resized
from tests.unit.cell_conductor.records import fenced
from tests.unit.cell_conductor.scenario import PATIENCE, UUID, host, spawned

S = State
THIRD = "d0000000-0000-4000-8000-000000000003"


# --- Of the services that were asked about the source of a move.


def _fence(made: Scenario, n: int) -> SourceQuery:
    made.context = fenced(n)
    made.apply(e.HostFenced(at=220.0, host_uuid=host(n)))
    query = awaited_request_of(made.instance)
    assert isinstance(query, SourceQuery)
    return query


def _seen(query: SourceQuery) -> e.SourceAnswered:
    machine = AttemptOnHost(instance_uuid=UUID, host_uuid=query.host_uuid, service=query.service, attempt=query.attempt)
    answer = MachineLookupResult(machines=(machine,), hosts=(query.host_uuid,))
    return answer_about(UUID, query, [(query.service, answer)], 230.0)


def test_the_answer_about_an_earlier_moves_source_undoes_no_later_move() -> None:
    """A conductor is paused with the answer; meanwhile the move is confirmed, and the next one's destination fenced."""
    made = to_resized()
    late = _seen(asked := _fence(made, 2))
    made.context = PATIENCE
    made.apply(request(ActionKind.CONFIRM, request_id=OTHER))
    made.apply(e.Destroyed(at=240.0, attempt=1, host_uuid=host(1), service="s1"))
    made.apply(e.Released(at=241.0, consumer=ACTION))
    assert made.instance.phase == (State.ACTIVE, None) and made.instance.action is None
    made.apply(request(ActionKind.MIGRATE, 3, request_id=THIRD))
    made.apply(claimed(attempt=(number := made.instance.next_attempt)))
    made.end(3, number)
    made.end(2, 2)
    made.apply(replace(spawned(attempt=number, n=3), at=250.0))
    assert _fence(made, 3) != asked
    made.apply(late)
    assert made.instance.phase == (State.RESIZED, None), "nobody has seen the source of this move"


def test_an_answer_from_before_the_destination_was_used_again_undoes_nothing() -> None:
    """The same move: fenced, the answer is held back, the fence lifted, the source's host reinstalled, fenced again."""
    made = to_resized(auto_confirm_s=1000.0)
    late = _seen(_fence(made, 2))
    made.context = PATIENCE
    made.apply(e.TimedOut(at=260.0))  # it is used again, and waits for nothing
    assert made.instance.action is not None and not made.instance.action.rollback_code
    _fence(made, 2)
    made.apply(late)
    assert made.instance.state is State.RESIZED, "that its source is there was answered to another question"


def test_an_answer_that_takes_as_long_as_it_may_is_to_the_question_that_is_asked_then() -> None:
    """Each question was numbered anew before the services had answered it: the move waited for its source for ever."""
    made = to_resized()
    made.context = replace(fenced(2), answer_timeout_s=60.0)
    made.apply(e.HostFenced(at=220.0, host_uuid=host(2)))
    for at in (400.0, 600.0):
        made.apply(e.TimedOut(at=at))
        assert made.instance.deadline is not None and made.instance.deadline > at + 60.0
