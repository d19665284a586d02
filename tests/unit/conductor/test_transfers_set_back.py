"""A cell's database is set back in the middle of a move to another cell: no machine is doubled, none is destroyed that
may be the only one, and what is in doubt is held until a host, a client or an operator has decided it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.clock import SystemClock
from bus.contracts.cell import Destroy, FoundMachine
from bus.contracts.moves import Departure, MoveEvent, MoveKind, MoveState
from bus.contracts.placement import Release, Revert, RevertResult
from cell_conductor.domain import events as e
from cell_conductor.domain.arrival_doubts import is_searched_for, services_of, unexpected
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import SET_BACK_GAP, Instance, Power, State
from cell_conductor.domain.move_doubts import IN_DOUBT
from cell_conductor.domain.rules import numbered_on
from cell_conductor.domain.table import question_of
from cell_conductor.placement_requests import PendingQuestion, PlacementRequests
from cell_conductor.search import LOGGED_MOVES
from tests.unit.conductor.move_scenario import OTHER, Scenario, active, claimed, refused, request
from tests.unit.conductor.scenario import PATIENCE, UUID, host, missed, spawned
from tests.unit.conductor.test_leaving import (
    THERE,
    active_there,
    arrives,
    departure_of,
    ended_check,
    gone,
    in_next_cell,
    kept,
    leaving,
    released_in,
    starts,
)
from tests.unit.conductor.world import Conductor, Services

SET_BACK_AT = 1_000.0
AFTER = replace(THERE, set_back_at=SET_BACK_AT)
AFTER_HERE = replace(PATIENCE, set_back_at=SET_BACK_AT)
LATER = "d0000000-0000-4000-8000-000000000003"


def set_back(made: Scenario, context: object = AFTER) -> Scenario:
    """The record, in a database that was set back since."""
    made.instance = replace(numbered_on(made.instance), doubted=True)
    made.context, made.commands = context, []
    return made


def at_state(state: State) -> tuple[Scenario, Departure]:
    """The record of the next cell, which has host 2 as its destination, then host 3."""
    _, departure = kept()
    there = in_next_cell(arrives(departure, 2, 3))
    attempt = there.instance.next_attempt
    if state is not State.CLAIMING:
        there.apply(claimed(attempt))
    if state in (State.FINISHING, State.RESIZED):
        there.apply(replace(ended_check(in_next_cell(arrives(departure, 2, 3)), claimed(attempt)), attempt=attempt))
    if state is State.RESIZED:
        there.apply(spawned(n=2, attempt=attempt, at=210.0))
    assert there.instance.state is state
    return set_back(there), departure


def machine(attempt: int, n: int = 3, **fields: object) -> FoundMachine:
    made = FoundMachine(
        instance_uuid=UUID, host_uuid=host(n), host=f"host-{n}", service="s1", attempt=attempt, project_id="p"
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def found(*machines: FoundMachine) -> e.MachineFound:
    return e.MachineFound(at=1_600.0, machines=machines)


def departures(made: Scenario) -> list[Departure]:
    return [one.departure for one in made.commands if isinstance(one, MoveEvent) and one.departure is not None]


def orders(made: Scenario) -> list[Destroy]:
    return [one for one in made.commands if isinstance(one, Destroy)]


# --- the next cell was set back to its first destination, while its second one runs the instance


@pytest.mark.parametrize("state", [State.CLAIMING, State.PREPARING, State.FINISHING])
def test_what_may_run_on_a_later_destination_is_searched_before_it_is_given_back(state: State) -> None:
    there, _ = at_state(state)
    if state is State.CLAIMING:
        assert is_searched_for(there.instance), "nor is anything claimed before"
        there.apply(refused(there.instance.next_attempt))
    for at in (1_500.0, 1_600.0):
        if there.instance.state in (State.PREPARING, State.FINISHING, State.DESTROYING):
            there.apply(e.TimedOut(at=at))
            assert all(one.unless_built for one in orders(there))
    if there.instance.phase != (State.RELEASING, State.OFFLOADED):
        there.apply(gone(there.instance, 2))
    if there.instance.phase == (State.DESTROYING, State.REVERTING):
        there.apply(gone(there.instance, 2))
    assert there.instance.phase == (State.RELEASING, State.OFFLOADED) and is_searched_for(there.instance)
    assert departures(there) == []
    last = there.instance.last_attempt + 1
    there.apply(found(machine(last)))
    assert (there.instance.phase, there.instance.host_uuid) == ((State.DESTROYING, State.REVERTING), host(3))
    assert (orders(there)[-1].host_uuid, orders(there)[-1].unless_built) == (host(3), True)
    there.apply(e.Spawned(at=1_601.0, attempt=last, host_uuid=host(3), service="s1"))
    assert (there.instance.state, there.instance.attempt, there.instance.host_uuid) == (State.RESIZED, last, host(3))
    assert departures(there) == [] and question_of(there.instance) is None


def test_no_other_destination_is_tried_by_a_record_in_doubt() -> None:
    for ending in (e.SpawnFailed(at=1_500.0, attempt=0, host_uuid=host(2), code="x"), None):
        there, _ = at_state(State.FINISHING)
        attempt = there.instance.attempt
        there.apply(gone(there.instance, 2) if ending is None else replace(ending, attempt=attempt))
        assert there.instance.phase == (State.DESTROYING, State.REVERTING) and there.instance.last_attempt == attempt


def test_one_that_is_not_complete_there_is_ended_and_searched_for_again() -> None:
    there, _ = at_state(State.CLAIMING)
    there.apply(found(machine(9, built=False)), e.Destroyed(at=1_602.0, attempt=9, host_uuid=host(3), service="s1"))
    assert there.instance.phase == (State.RELEASING, State.OFFLOADED) and is_searched_for(there.instance)
    question = question_of(there.instance)
    assert isinstance(question, Release) and question.attempt is not None and question.attempt > 9


@pytest.mark.parametrize("why", [{"project_id": "theirs"}, {"attempt": 0}, {"attempt": 2}])
def test_a_machine_that_is_not_proved_to_be_its_projects_or_is_from_before_the_departure_holds_it(
    why: dict[str, object],
) -> None:
    there, _ = at_state(State.CLAIMING)
    before = there.instance
    stepped = there.apply(found(replace(machine(9), **why)))  # type: ignore[arg-type]
    assert (there.instance, stepped.commands) == (before, ())


def test_a_delete_destroys_what_is_found_and_is_given_back_as_deleted() -> None:
    there, _ = at_state(State.FINISHING)
    there.apply(e.DeleteRequested(at=1_500.0), gone(there.instance, 2))
    assert there.instance.phase == (State.RELEASING, State.OFFLOADED)
    there.apply(found(machine(9)))
    assert (orders(there)[-1].host_uuid, orders(there)[-1].unless_built) == (host(3), False)
    there.apply(e.HostRuns(at=1_601.0, attempt=9, host_uuid=host(3), service="s1"))
    assert there.instance.phase == (State.DESTROYING, State.REVERTING)
    there.apply(e.Destroyed(at=1_602.0, attempt=9, host_uuid=host(3), service="s1"), e.Released(at=1_603.0))
    (back,) = departures(there)
    assert back.given_back is not None and back.given_back.is_deleted


def test_every_service_is_queried_and_fenced_hosts_of_the_record_need_not_answer() -> None:
    there, _ = at_state(State.CLAIMING)
    selections = tuple(replace(one, service=f"s{n}") for n, one in enumerate(there.instance.selections))
    instance = replace(there.instance, selections=selections)
    assert services_of(instance, ()) == {"s1", "s2"}, "the first is the host of its former cell"
    assert services_of(instance, {selections[1].host_uuid}) == {"s2"}
    assert services_of(replace(instance, state=State.REVERTING), ()) == {"s0", "s1", "s2"}
    assert unexpected(instance, (machine(9),)) == (machine(9),)


@pytest.mark.parametrize(
    "how", ["nothing", "found", "silent", "down", "unknown", "a destination unseen", "a host unseen", "fenced", "older"]
)
async def test_placement_is_requested_once_all_services_have_answered_that_they_have_none(how: str) -> None:
    there, _ = at_state(State.CLAIMING)
    services = Services(s1=(), s2=(machine(9),) if how == "found" else ())
    services.silent = {"s2"} if how == "silent" else set()
    conductor = Conductor(services, None if how == "unknown" else ("s1", "s2"))
    await conductor.store.open()
    down = {"s3": object()} if how == "down" else {}
    # Another process of one of the names has answered, for hosts of its own.
    if how == "older":
        services.hosts = None
    elif how in ("a destination unseen", "fenced"):
        services.hosts = (host(1), host(2))
    elif how == "a host unseen":
        conductor.listed = {host(1), host(11)}
    fenced = {"fenced": {host(3)}, "older": {host(2), host(3)}}.get(how, set())
    machines, held = await conductor.search.find_moved({UUID: there.instance}, down, fenced)
    assert held == (set() if how in ("nothing", "fenced") else {UUID})
    assert bool(machines) is (how == "found")


@pytest.mark.parametrize("how", ["query", "command"])
def test_a_cell_whose_schema_was_made_anew_searches_for_what_came_before(how: str) -> None:
    """Its machine runs there, with the mark of the former schema."""
    _, departure = kept()
    assert departure.kept is not None
    arrival = replace(arrives(departure, 2), is_query=how == "query")
    later = replace(THERE, made_at=departure.kept.at - 1.0)
    sure = Scenario(Instance(uuid=UUID), later)
    sure.apply(arrival)
    assert sure.instance.state is (State.DEPARTED if how == "query" else State.CLAIMING)
    anew = Scenario(Instance(uuid=UUID), replace(THERE, made_at=departure.kept.at + 1.0))
    anew.apply(arrival)
    assert (
        anew.instance.phase == (State.RELEASING, State.OFFLOADED)
        and is_searched_for(anew.instance)
        and departures(anew) == []
    )
    before = anew.instance
    anew.apply(found(machine(9, foreign=True)))
    assert (anew.instance, anew.commands) == (before, anew.commands), "it is not this schema's to end"
    attempt, here = departure.kept.attempt, departure.kept.here
    assert here is not None
    kept_there = replace(machine(attempt, 1, foreign=True), host_uuid=here.host_uuid)
    assert unexpected(before, (kept_there, machine(9, foreign=True))) == (machine(9, foreign=True),)
    anew.apply(e.Released(at=1_700.0))
    assert len(departures(anew)) == 1


# --- the next cell was set back to before the confirm


def test_a_revert_by_a_record_in_doubt_is_refused_unless_an_operator_forces_it() -> None:
    """Its former cell may have destroyed what it kept since."""
    there, _ = at_state(State.RESIZED)
    attempt = there.instance.attempt
    for number in (5, 6):  # also once its host has answered: that proves nothing of the former cell
        there.apply(request(MoveKind.REVERT, request_id=f"{OTHER[:-1]}{number}"))
        assert there.terminals[-1] == (MoveKind.REVERT, MoveState.REFUSED, IN_DOUBT)
        there.apply(spawned(n=2, attempt=attempt, at=1_501.0))
    assert there.instance.state is State.RESIZED and all(one.unless_built for one in orders(there))
    there.apply(request(MoveKind.REVERT, request_id=LATER, force=True))
    assert (there.instance.phase, orders(there)[-1].unless_built) == ((State.DESTROYING, State.REVERTING), False)
    there.apply(gone(there.instance, 2), e.Released(at=1_510.0))
    assert departures(there)[-1].given_back is not None


def test_a_confirm_by_a_record_in_doubt_waits_for_its_machine() -> None:
    there, _ = at_state(State.RESIZED)
    attempt = there.instance.attempt
    there.apply(request(MoveKind.CONFIRM, request_id=OTHER))
    assert there.terminals[-1] == (MoveKind.CONFIRM, MoveState.REFUSED, IN_DOUBT)
    there.apply(spawned(n=2, attempt=attempt, at=1_501.0), request(MoveKind.CONFIRM, request_id=LATER))
    assert there.terminals[-1] == (MoveKind.CONFIRM, MoveState.DONE, "")
    assert (there.instance.state, there.instance.doubted) == (State.ACTIVE, False)


def test_its_time_to_be_confirmed_begins_anew_when_its_host_has_answered() -> None:
    _, departure = kept()
    there = set_back(active_there(departure, auto_confirm_s=5.0))
    attempt = there.instance.attempt
    there.apply(e.TimedOut(at=1_500.0))
    assert there.instance.state is State.RESIZED and orders(there)[-1].unless_built
    there.apply(spawned(n=2, attempt=attempt, at=1_501.0))
    assert (there.instance.state, there.instance.deadline) == (State.RESIZED, 1_506.0)
    there.apply(spawned(n=2, attempt=attempt, at=1_503.0))
    assert there.instance.deadline == 1_506.0
    there.apply(e.TimedOut(at=1_506.0))
    assert (there.instance.state, there.destroys[1:]) == (State.ACTIVE, [])


@pytest.mark.parametrize("state", [State.FINISHING, State.RESIZED])
def test_a_fence_of_its_destination_gives_nothing_up_by_a_record_in_doubt(state: State) -> None:
    """Its host would destroy the only machine when it is back."""
    there, _ = at_state(state)
    there.context = replace(AFTER, fences={host(2): Fence(host_uuid=host(2), host="h2", version=1)})
    before = there.instance
    stepped = there.apply(e.HostFenced(at=1_500.0, host_uuid=host(2)))
    assert (there.instance, stepped.commands) == (before, ())
    there.apply(request(MoveKind.REVERT, request_id=LATER, force=True), e.HostFenced(at=1_501.0, host_uuid=host(2)))
    assert there.instance.phase == (State.RELEASING, State.OFFLOADED) and not is_searched_for(there.instance)
    there.apply(e.Released(at=1_502.0))
    assert departures(there)[-1].given_back is not None


@pytest.mark.parametrize("state", [State.CLAIMING, State.FINISHING, State.RELEASING])
def test_an_operator_has_what_is_held_given_back(state: State) -> None:
    there, _ = at_state(State.CLAIMING if state is State.RELEASING else state)
    if state is State.RELEASING:
        there.apply(refused(there.instance.next_attempt))
    assert there.instance.state is state
    there.apply(request(MoveKind.REVERT, request_id=LATER, force=True, migration=OTHER))
    assert there.instance.state is state, "of another move"
    there.apply(request(MoveKind.REVERT, request_id=f"{LATER[:-1]}7", force=True))
    assert there.terminals[-1] == (MoveKind.REVERT, MoveState.DONE, "")
    if state is State.FINISHING:
        there.apply(gone(there.instance, 2))
    assert there.instance.phase == (State.RELEASING, State.OFFLOADED) and not is_searched_for(there.instance)
    there.apply(e.Released(at=1_510.0))
    (back,) = departures(there)
    assert back.given_back is not None and (back.given_back.code, back.given_back.by) == ("move.forced", None)


def test_a_machine_that_is_lost_is_searched_for_before_it_is_given_back() -> None:
    there, _ = at_state(State.RESIZED)
    there.apply(missed(there.instance, 2), gone(there.instance, 2))
    assert there.instance.phase == (State.RELEASING, State.OFFLOADED) and is_searched_for(there.instance)


# --- the former cell was set back


def given_back(departure: Departure) -> Departure:
    """It could not be built in its next cell."""
    there = in_next_cell(arrives(departure, 2))
    there.apply(refused(there.instance.next_attempt), e.Released(at=213.0))
    return departure_of(there)


def started_again(made: Scenario) -> None:
    question = question_of(made.instance)
    assert isinstance(question, Revert)
    made.apply(e.Reverted(at=1_700.0, attempt=question.attempt, consumer_generation=9))
    made.end(1, 1)
    assert (made.instance.state, made.instance.host_uuid, made.instance.attempt) == (State.ACTIVE, host(1), 1)


@pytest.mark.parametrize("state", ["active", "stopped", "elsewhere", "leaving", "none"])
def test_a_record_from_before_the_departure_takes_the_instance_back_as_the_departure_states_it(state: str) -> None:
    former, departure = kept()
    old = {
        "active": active(),
        "stopped": replace(active(), power=Power.STOPPED),
        "elsewhere": replace(active(), selections=(replace(active().here, host_uuid=host(7)),)),
        "leaving": replace(numbered_on(leaving().instance), doubted=True),
        "none": Instance(uuid=UUID),
    }[state]
    made = Scenario(old, AFTER_HERE)
    made.apply(request(MoveKind.MIGRATE, arrival=given_back(departure)))
    assert made.instance.state is State.REVERTING and is_searched_for(made.instance)
    assert unexpected(made.instance, (machine(1, 1),)) == ()
    assert unexpected(made.instance, (machine(1, 1), machine(6))) == (machine(6),)
    question = question_of(made.instance)
    assert isinstance(question, Revert) and question.source_attempt == former.instance.move.book_attempt  # type: ignore[union-attr]
    assert made.instance.sequence > SET_BACK_GAP
    started_again(made)
    (start,) = starts(made)
    (snapshot,) = [one for one in leaving().commands if hasattr(one, "order")]
    assert start.order > snapshot.order


def test_a_record_from_before_the_departure_destroys_what_was_kept_when_it_is_elsewhere_for_good() -> None:
    _, departure = kept()
    made = Scenario(active(), AFTER_HERE)
    made.apply(request(MoveKind.MIGRATE, active_in="c2", arrival=departure))
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.DEPARTED), [(1, host(1))])


def test_a_record_that_is_newer_than_the_departure_is_not_touched() -> None:
    """It has come back since, or has been deleted."""
    _, departure = kept()
    assert departure.kept is not None
    deleted = Scenario(active(), AFTER_HERE)
    deleted.apply(e.DeleteRequested(at=1_500.0))
    for newer in (replace(active(), sequence=departure.kept.number + 1), deleted.instance):
        for more in ({"active_in": "c2", "arrival": departure}, {"arrival": given_back(departure)}):
            made = Scenario(newer, AFTER_HERE)
            made.apply(request(MoveKind.MIGRATE, **more))
            assert made.instance.state is newer.state and made.destroys == []


def test_a_record_that_keeps_what_was_given_back_before_is_given_it_back_again() -> None:
    made, departure = kept()
    made.context = AFTER_HERE
    made.apply(request(MoveKind.MIGRATE, arrival=given_back(departure)))
    assert is_searched_for(made.instance), "it may have moved on in this cell"
    started_again(made)


class Foreign:
    """A book that has the instance with a newer attempt than any of this cell."""

    async def request_all(self, messages: Sequence[Any], *_: Any, **__: Any) -> list[RevertResult]:
        return [RevertResult(outcome="consumer_changed", consumer_generation=3) for _ in messages]


async def reverted(instance: Instance) -> list[e.InstanceEvent]:
    question = question_of(instance)
    assert isinstance(question, Revert)
    requests = PlacementRequests(Foreign(), SystemClock(), 1.0)  # type: ignore[arg-type]
    return await requests.ask([PendingQuestion(instance, question)])


async def test_what_was_kept_is_not_started_while_the_book_has_the_instance_elsewhere() -> None:
    """It was: beside the machine that runs in the cell that gave it back by a record that had forgotten it."""
    made, departure = kept()
    made.apply(request(MoveKind.MIGRATE, arrival=given_back(departure)))
    assert made.instance.state is State.REVERTING
    assert await reverted(made.instance) == []
    at = made.instance.since + 15.0
    pauses = []
    for _ in range(3):
        made.apply(e.TimedOut(at=at))
        assert made.instance.deadline is not None
        pauses.append(made.instance.deadline - at)
        at = made.instance.deadline
    assert pauses == [15.0, 30.0, 60.0]
    # An instance that has never left belongs to this cell, also where another client has the consumer.
    stays = leaving()
    stays.end(1, 1, image="snapshot-1", runs=False)
    stays.apply(replace(refused(stays.instance.next_attempt), consumer_changed=True))
    assert stays.instance.state is State.REVERTING
    (one,) = await reverted(stays.instance)
    assert isinstance(one.event, e.Reverted)


@pytest.mark.parametrize("by", ["", OTHER])
def test_an_operator_has_what_is_held_in_its_former_cell_started(by: str) -> None:
    made, departure = kept()
    back = given_back(departure)
    assert back.given_back is not None
    back = replace(back, given_back=replace(back.given_back, by=by or None))
    made.apply(request(MoveKind.MIGRATE, arrival=back))
    for force in (False, True):
        made.apply(request(MoveKind.REVERT, request_id=LATER if force else f"{LATER[:-1]}9", force=force))
        assert made.instance.state is (State.RESTARTING if force else State.REVERTING)
    made.end(1, 1)
    assert (made.instance.state, len(starts(made))) == (State.ACTIVE, 1)
    done = [(kind, state) for kind, state, _ in made.terminals if state is MoveState.DONE]
    assert done == [(MoveKind.REVERT, MoveState.DONE)] * (2 if by else 1)


def test_what_was_kept_by_a_database_that_was_not_set_back_is_started_without_a_search() -> None:
    made, departure = kept()
    made.apply(request(MoveKind.MIGRATE, arrival=given_back(departure)))
    assert not is_searched_for(made.instance) and made.instance.sequence < SET_BACK_GAP
    started_again(made)


def test_the_changes_of_one_that_is_back_are_numbered_above_what_its_host_has_had() -> None:
    _, departure = kept()
    made = Scenario(active(), AFTER_HERE)
    made.apply(request(MoveKind.STOP, request_id=OTHER, order=given_back(departure).order))
    assert made.instance.order > departure.order


@pytest.mark.parametrize("kind", [MoveKind.MIGRATE, MoveKind.UNSHELVE])
def test_a_departure_of_a_record_with_old_numbers_is_announced_above_what_the_schedulers_have_had(
    kind: MoveKind,
) -> None:
    """Seed 11 of `transfers-restored`: they ignored it, and the instance was in no cell."""
    state = State.ACTIVE if kind is MoveKind.MIGRATE else State.OFFLOADED
    made = Scenario(replace(active(), state=state, power=Power.RUNNING if kind is MoveKind.MIGRATE else Power.SHELVED))
    made.apply(request(kind, to_cell="c2", sequence=500))
    if kind is MoveKind.MIGRATE:
        made.end(1, 1, image="snapshot-1", runs=False)
        made.apply(claimed(made.instance.next_attempt, e.REASSIGNED))
    assert departure_of(made).sequence > 500
    sequence = made.instance.sequence
    made.apply(request(MoveKind.STOP, request_id=LATER, sequence=900))
    assert made.instance.sequence == sequence, "it has left: the other cell numbers it"


def test_a_record_that_keeps_what_has_come_to_this_cell_since_gives_the_machine_up_and_takes_the_arrival() -> None:
    """Seed 85 of `transfers-restored`: the next cell's departure was answered with the older one, for ever."""
    made, departure = kept()
    anew = replace(departure, cell=PATIENCE.cell, sequence=departure.sequence + 9)
    assert anew.kept is not None
    anew = replace(anew, kept=replace(anew.kept, cell="c2", migration=OTHER))
    comes = request(MoveKind.MIGRATE, 3, request_id=OTHER, arrival=anew)
    earlier = replace(comes, request=replace(comes.request, arrival=replace(anew, sequence=departure.sequence)))
    made.apply(comes)
    assert made.instance.state is State.KEPT, "its database was not set back: the numbers prove nothing"
    made.context = AFTER_HERE
    made.apply(earlier)
    assert made.instance.state is State.KEPT and made.destroys == []
    made.apply(comes)
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.DEPARTED), [(1, host(1))])
    made.apply(gone(made.instance, 1), e.Released(at=230.0, consumer=departure.kept.migration))  # type: ignore[union-attr]
    made.apply(comes)
    assert made.instance.phase == (State.RELEASING, State.OFFLOADED) and is_searched_for(made.instance)


def test_a_cell_that_has_given_an_instance_back_still_ends_the_request_that_has_ended_there() -> None:
    """Seed 92 of `transfers-restored`: schedulers that were set back repeat its command there, and had no end of it."""
    _, departure = kept()
    there = active_there(departure)
    there.apply(request(MoveKind.REVERT, request_id=OTHER, kept_seen=True))
    there.apply(gone(there.instance, 2), e.Released(at=230.0))
    assert there.instance.state is State.DEPARTED
    there.commands = []
    there.apply(arrives(departure, 2, 3))
    assert [one.given_back is not None for one in departures(there)] == [True]
    assert there.terminals == [(MoveKind.MIGRATE, MoveState.DONE, "")]


def test_a_fence_does_not_end_a_departure_in_doubt() -> None:
    made = set_back(leaving(), AFTER_HERE)
    before = made.instance
    stepped = made.apply(e.HostFenced(at=1_500.0, host_uuid=host(1)))
    assert (made.instance, stepped.commands) == (before, ())
    sure = leaving()
    sure.apply(e.HostFenced(at=1_500.0, host_uuid=host(1)))
    assert sure.instance.state is State.ACTIVE


def test_the_command_to_destroy_comes_with_the_departure_and_is_taken_as_ever() -> None:
    made, departure = kept()
    made.apply(replace(released_in(), request=replace(released_in().request, arrival=departure)))
    assert made.instance.phase == (State.DESTROYING, State.DEPARTED)


async def test_what_a_search_holds_is_logged_up_to_a_bound() -> None:
    there, _ = at_state(State.CLAIMING)
    conductor = Conductor(Services(), ("s1",))
    await conductor.store.open()
    moved = {f"{n:08x}-0000-4000-8000-000000000000": there.instance for n in range(LOGGED_MOVES + 3)}
    with capture_logs() as logged:
        _, held = await conductor.search.find_moved(moved, {"s3"}, ())
    assert held == moved.keys()
    assert [one["event"] for one in logged] == ["move.held"] * LOGGED_MOVES + ["move.held_more"]
    assert logged[-1]["moves"] == 3
