"""An instance without a host leaves one cell for another: never in both, never in neither, whatever comes late."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import CellDelete
from bus.contracts.moves import CellAsks, CellCheck, Condition, Departure, MoveEvent, MoveKind, MoveState
from bus.contracts.placement import Release
from cell_conductor.domain import events as e
from cell_conductor.domain.desires import DELETE_REQUESTED, DESIRES, desire_of, in_text
from cell_conductor.domain.instance import Instance, Move, Phase, State
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import question_of, step
from tests.unit.conductor.move_scenario import MOVE, OTHER, Scenario, active, claimed, refused, request, unbegun
from tests.unit.conductor.scenario import PATIENCE, SPEC, UUID, host, spawned

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


def test_it_leaves_with_all_that_its_next_cell_goes_on_from() -> None:
    made, departure = departed()
    assert not made.instance.doubted, "where it has gone to is certain"
    before = offloaded().instance
    assert (made.instance.state, made.instance.deadline, question_of(made.instance)) == (State.DEPARTED, None, None)
    assert (departure.cell, departure.image, departure.spec) == ("c2", "snapshot-1", before.spec)
    assert departure.newest > before.next_attempt and departure.sequence > before.sequence
    assert [one.host_uuid for one in departure.selections] == [host(2)]
    event = made.commands[-1]
    assert isinstance(event, MoveEvent)
    assert (event.state, event.terminal, event.condition) == (MoveState.MIGRATING, False, Condition.MOVING)
    (check,) = [one.message for one in made.commands if isinstance(one, CellAsks)]
    assert isinstance(check, CellCheck)
    assert check.change is not None and (check.cell, check.change.image) == ("c2", "snapshot-1")


@pytest.mark.parametrize("how", ["full", "unreadable"])
def test_one_that_the_other_cell_cannot_take_stays_offloaded_in_its_own(how: str) -> None:
    made = offloaded()
    made.apply(leaves())
    if how == "full":
        made.apply(refused(made.instance.next_attempt))
    else:
        made.apply(claimed(made.instance.next_attempt))
        made.end(2, made.instance.attempt, done=False, code="image.unreadable")
    made.apply(e.Released(at=220.0))
    assert (made.instance.state, made.instance.image) == (State.OFFLOADED, "snapshot-1")
    assert made.terminals[-1] == (MoveKind.UNSHELVE, MoveState.FAILED, "max_retries_exceeded")


def test_its_next_cell_builds_it_where_it_was_checked() -> None:
    former, departure = departed()
    there = in_next_cell(arrives(departure))
    (spawn,) = there.spawns
    assert (there.instance.state, question_of(there.instance)) == (State.FINISHING, None)
    assert spawn.origin is not None and (spawn.origin.image, spawn.attempt) == ("snapshot-1", departure.newest)
    there.apply(spawned(n=2, attempt=departure.newest, at=210.0))
    assert there.instance.state is State.ACTIVE
    assert there.terminals == [(MoveKind.UNSHELVE, MoveState.DONE, "")]
    sequences = [one.sequence for one in (*former.commands, *there.commands) if isinstance(one, MoveEvent)]
    assert sequences == sorted(set(sequences))


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


def test_a_query_of_the_former_cell_ends_an_unknown_request_and_states_where_it_is() -> None:
    made, departure = departed()
    query = unbegun(request(MoveKind.STOP, request_id=ELSEWHERE))
    left, event = made.apply(query).commands
    assert isinstance(left, MoveEvent) and isinstance(event, MoveEvent)
    assert (event.state, event.code, left.departure) == (MoveState.FAILED, "move.lost", departure)


def test_a_late_copy_does_not_bring_it_back_to_a_cell_that_it_has_left_again() -> None:
    _, first = departed()
    there = in_next_cell(arrives(first))
    fails(there)
    leave(there, "c1", BACK)
    left = there.instance
    assert left.state is State.DEPARTED
    there.apply(arrives(first))
    assert there.instance == left


def test_it_comes_back_to_a_cell_that_it_has_left() -> None:
    former, first = departed()
    there = in_next_cell(arrives(first))
    fails(there)
    second = leave(there, "c1", BACK)
    former.apply(arrives(second, request_id=BACK))
    assert (former.instance.state, former.instance.attempt > first.newest) == (State.FINISHING, True)
    former.apply(leaves())  # a late copy of the first one: it has been carried out
    assert former.instance.state is State.FINISHING


@pytest.mark.parametrize("is_query", [False, True])
def test_a_request_that_it_has_left_by_ends_for_schedulers_that_were_set_back_to_before(is_query: bool) -> None:
    """Seed 33008 of `transfers-restored`: the cell announced `scheduled` again and again."""
    former, first = departed()
    there = in_next_cell(arrives(first))
    fails(there)
    second = leave(there, "c1", BACK)
    former.apply(unbegun(arrives(second, request_id=BACK)), e.Released(at=230.0))
    assert former.instance.state is State.OFFLOADED
    former.commands = []
    former.apply(unbegun(leaves()) if is_query else leaves())
    assert former.instance.state is State.OFFLOADED
    assert former.terminals == [(MoveKind.UNSHELVE, MoveState.FAILED, "move.lost")]


@pytest.mark.parametrize("how", ["query", "given_up"])
def test_it_is_on_record_in_its_next_cell_though_its_request_is_not_carried_out(how: str) -> None:
    _, departure = departed()
    arrival = arrives(departure)
    why = None if how == "query" else Refusal(code="delivery.exhausted", reason="")
    there = in_next_cell(unbegun(arrival, why))
    release = question_of(there.instance)
    assert isinstance(release, Release) and (release.attempt or 0) > departure.newest
    there.apply(e.Released(at=230.0))
    assert (there.instance.state, there.instance.image) == (State.OFFLOADED, "snapshot-1")
    ((_, state, code),) = there.terminals
    assert (state, code) == (MoveState.FAILED, "move.lost" if how == "query" else "delivery.exhausted")


def test_a_delete_that_was_there_first_ends_it() -> None:
    _, departure = departed()
    there = in_next_cell(deleted(), arrives(departure))
    assert there.instance.phase == (State.RELEASING, State.DELETED)
    assert question_of(there.instance) == Release(consumer=UUID, attempt=there.instance.next_attempt)
    there.apply(e.Released(at=230.0))
    announced = [one for one in there.commands if isinstance(one, BuildEvent)]
    assert [(one.state, one.terminal) for one in announced] == [(BuildState.DELETED, True)]
    assert there.terminals == [(MoveKind.UNSHELVE, MoveState.REFUSED, "instance.deleted")]


def test_a_cell_that_does_not_have_it_gives_nothing_up() -> None:
    stepped = step(Instance(uuid=UUID), leaves(), PATIENCE)
    assert (last_event(stepped).code, stepped.instance.state) == ("instance.unknown", State.ABSENT)
    running = Scenario(active())
    running.apply(leaves())
    assert (running.instance.state, running.terminals[0][2]) == (State.ACTIVE, "instance.not_shelved")


def back_again() -> Departure:
    """It has been here, and comes back from the cell that it had left for."""
    there = in_next_cell(arrives(departed()[1]))
    fails(there)
    return leave(there, "c1", BACK)


SET_BACK = replace(active(), sequence=1_000_000)  # numbered on above all that its forgotten history had


@pytest.mark.parametrize("phase", DESIRES, ids=in_text)
def test_a_later_stay_begins_whatever_the_record_of_an_earlier_one_says(phase: Phase) -> None:
    """The arrival was answered as lost by a record from before the first departure, and the image had no place."""
    state, then = phase
    move = Move(request_id=OTHER, kind=MoveKind.MIGRATE, spec=SPEC, to_cell="c2")
    here = Scenario(replace(SET_BACK, state=state, then=then, move=move))
    second = back_again()
    here.apply(arrives(second, request_id=BACK))
    if desire_of(here.instance).condition is Condition.DELETED:
        waits = phase == (State.DESTROYING, State.DELETED)  # for its host
        assert here.instance.phase == (phase if waits else (State.RELEASING, State.DELETED))
        assert phase in DELETE_REQUESTED
    else:
        assert (here.instance.state, here.instance.attempt) == (State.FINISHING, second.newest)
        assert (here.spawns[-1].host_uuid, here.instance.image) == (host(2), "snapshot-1")
    begun = here.instance
    here.apply(arrives(second, request_id=BACK), arrives(departed()[1]))
    assert replace(here.instance, ended=begun.ended, sequence=begun.sequence) == begun, "it is begun once, and no other"


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
