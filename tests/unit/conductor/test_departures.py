"""An instance without a host leaves one cell for another: never in both, never in neither, whatever comes late."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.cell import CellDelete
from bus.contracts.moves import Departure, MoveEvent, MoveKind, MoveState
from bus.contracts.placement import Release
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import question_of
from tests.unit.conductor.move_scenario import MOVE, OTHER, Scenario, active, claimed, request, unbegun
from tests.unit.conductor.scenario import PATIENCE, UUID, host

ELSEWHERE = "e0000000-0000-4000-8000-000000000009"
BACK = "e0000000-0000-4000-8000-000000000010"
THERE = replace(PATIENCE, cell="c2")


def deleted() -> e.DeleteRequested:
    return e.DeleteRequested(at=206.0, cause=UUID)


def offloaded() -> Scenario:
    """Built as attempt 1, shelved and offloaded by another request."""
    made = Scenario(active())
    made.apply(request(MoveKind.SHELVE, request_id=OTHER, offload=True))
    made.end(1, 1, image="snapshot-1")
    made.apply(e.Destroyed(at=203.0, attempt=1, host_uuid=host(1), service="s1"), e.Released(at=204.0))
    assert made.instance.state is State.OFFLOADED
    return made


def leaves(cell: str = "c2", request_id: str = MOVE) -> e.MoveRequested:
    return request(MoveKind.UNSHELVE, 2, request_id=request_id, to_cell=cell)


def leave(made: Scenario, cell: str = "c2", request_id: str = MOVE) -> Departure:
    """It leaves for host 2 of that cell, which reads its image."""
    made.apply(leaves(cell, request_id))
    made.apply(claimed(made.instance.next_attempt))
    event = last_event(made.end(2, made.instance.attempt))
    assert event.departure is not None
    return event.departure


def departed() -> tuple[Scenario, Departure]:
    made = offloaded()
    return made, leave(made)


def arrives(departure: Departure, request_id: str = MOVE) -> e.MoveRequested:
    return request(MoveKind.UNSHELVE, request_id=request_id, arrival=departure)


def fails(made: Scenario) -> None:
    """Its host cannot build it, and it is offloaded where it has come to."""
    attempt = made.instance.attempt
    made.apply(
        e.SpawnFailed(at=219.0, attempt=attempt, host_uuid=host(2), code="sim.spawn_failed"),
        e.Destroyed(at=219.5, attempt=attempt, host_uuid=host(2), service="s1"),
        e.Released(at=220.0),
    )
    assert made.instance.state is State.OFFLOADED


def in_next_cell(*happened: e.Event) -> Scenario:
    made = Scenario(Instance(uuid=UUID), THERE)
    made.apply(*happened)
    return made


def last_event(stepped: Step) -> MoveEvent:
    event = stepped.commands[-1]
    assert isinstance(event, MoveEvent)
    return event


@pytest.mark.parametrize("late", [leaves(), request(MoveKind.STOP, request_id=ELSEWHERE), deleted()])
def test_what_still_comes_to_the_former_cell_is_answered_with_the_departure_and_changes_nothing(late: e.Event) -> None:
    made, departure = departed()
    before = made.instance
    stepped = made.apply(late)
    left, event = stepped.commands[0], last_event(stepped)
    assert isinstance(left, MoveEvent) and left.request_id == MOVE
    assert replace(made.instance, ended=before.ended) == before
    assert (left.departure, left.sequence, left.terminal) == (departure, departure.sequence, False)
    if isinstance(late, e.MoveRequested) and late.request.request_id == ELSEWHERE:
        assert (event.state, event.code, event.terminal) == (MoveState.REFUSED, "instance.departed", True)
        assert (event.departure, event.sequence < left.sequence) == (None, True)
        made.apply(unbegun(late))  # a request has one end, however often it is asked for
        assert last_event(Step(made.instance, tuple(made.commands))) == replace(event, at=300.0)
    else:
        assert not event.terminal


def back_again() -> Departure:
    """It has been here, and comes back from the cell that it had left for."""
    there = in_next_cell(arrives(departed()[1]))
    fails(there)
    return leave(there, "c1", BACK)


@pytest.mark.parametrize(("stay", "is_forgotten"), [(0, False), (1, False), (2, True)])
def test_a_delete_of_a_later_stay_than_the_record_has_left_by_is_carried_out(stay: int, is_forgotten: bool) -> None:
    """Its answer was the departure, which is late by the map, and the delete had no end."""
    here, departure = departed()
    stepped = here.apply(replace(deleted(), begun=True, stay=stay))
    if not is_forgotten:
        assert (here.instance.state, last_event(stepped).departure) == (State.DEPARTED, departure)
        return
    (again,) = stepped.commands
    assert isinstance(again, CellDelete) and again.unrecorded
    tombstone = here.instance
    assert tombstone.state is State.TOMBSTONE
    here.apply(replace(deleted(), stay=stay, unrecorded=True, found=()))
    release = question_of(here.instance)
    assert isinstance(release, Release) and (release.attempt or 0) > departure.newest
    here.instance = tombstone
    here.apply(arrives(back_again(), request_id=BACK))
    assert here.instance.phase == (State.RELEASING, State.DELETED), "the claim of one that comes after it is released"
