"""A scheduler without news of a request queries its cell: the answer begins nothing, and always leads to an end."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.moves import Condition, MoveEvent, MoveKind, MoveState
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.rules import Step
from cell_conductor.domain.table import step
from tests.unit.conductor.move_scenario import MOVE, OTHER, Scenario, active, claimed, request, unbegun
from tests.unit.conductor.scenario import PATIENCE, UUID


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
        ((claimed(),), MoveState.PREPARING),
        ((claimed(), request(MoveKind.ABORT, request_id=OTHER)), MoveState.UNDOING),
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
