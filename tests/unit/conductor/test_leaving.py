"""An instance with a machine moves to another cell: it never runs in both, and there is always one to go back to."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import Destroy, InstanceSpec
from bus.contracts.moves import (
    ChangeKind,
    ChangeMachine,
    Condition,
    Departure,
    MoveEvent,
    MoveKind,
    MoveState,
)
from bus.contracts.placement import Claim, Release, Revert
from cell_conductor.domain import events as e
from cell_conductor.domain.arrival_doubts import is_searched_for
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import FORGOTTEN_ATTEMPTS, SET_BACK_GAP, EndedMove, Instance, Power, State
from cell_conductor.domain.table import question_of
from tests.unit.conductor.move_scenario import MOVE, OTHER, Scenario, active, claimed, ended, refused, request
from tests.unit.conductor.scenario import PATIENCE, UUID, host, missed, spawned

LATER = "d0000000-0000-4000-8000-000000000003"
THERE = replace(PATIENCE, cell="c2")


def leaves(kind: MoveKind = MoveKind.MIGRATE, **fields: object) -> e.MoveRequested:
    return request(kind, to_cell="c2", **fields)


def reassigned(instance: Instance) -> e.Claimed:
    return claimed(instance.next_attempt, e.REASSIGNED)


def leaving(kind: MoveKind = MoveKind.MIGRATE) -> Scenario:
    """On host 1 as attempt 1, which was commanded to stop it and keep its image."""
    made = Scenario(active())
    made.apply(leaves(kind))
    return made


def kept(kind: MoveKind = MoveKind.MIGRATE) -> tuple[Scenario, Departure]:
    made = leaving(kind)
    made.end(1, 1, image="snapshot-1", runs=False)
    made.apply(reassigned(made.instance))
    return made, departure_of(made)


def departure_of(made: Scenario) -> Departure:
    found = [one.departure for one in made.commands if isinstance(one, MoveEvent) and one.departure is not None]
    assert found
    return found[-1]


def arrives(departure: Departure, *hosts: int, kind: MoveKind = MoveKind.MIGRATE, **fields: object) -> e.MoveRequested:
    return request(kind, *hosts, arrival=departure, **fields)


def in_next_cell(*happened: e.Event) -> Scenario:
    made = Scenario(Instance(uuid=UUID), THERE)
    made.apply(*happened)
    return made


def active_there(departure: Departure, kind: MoveKind = MoveKind.MIGRATE, **fields: object) -> Scenario:
    """It runs in its next cell on host 2."""
    made = in_next_cell(arrives(departure, 2, 3, kind=kind, **fields))
    build(made)
    return made


def build(made: Scenario, n: int = 2) -> None:
    attempt = made.instance.next_attempt
    made.apply(claimed(attempt, n - 2))
    made.apply(replace(ended(made.instance, n, attempt), host_uuid=host(n)))
    made.apply(spawned(n=n, attempt=attempt, at=210.0))


def starts(made: Scenario) -> list[ChangeMachine]:
    return [one for one in made.commands if isinstance(one, ChangeMachine) and one.change is ChangeKind.START]


def last_event(made: Scenario) -> MoveEvent:
    return [one for one in made.commands if isinstance(one, MoveEvent)][-1]


def gone(instance: Instance, n: int) -> e.Destroyed:
    return e.Destroyed(at=220.0, attempt=instance.attempt, host_uuid=host(n), service="s1")


def released_in(cell: str = "c2") -> e.MoveRequested:
    return request(MoveKind.MIGRATE, active_in=cell)


# --- it leaves


def test_it_is_stopped_and_its_allocation_reassigned_before_it_leaves() -> None:
    made = leaving()
    (snapshot,) = [one for one in made.commands if isinstance(one, ChangeMachine)]
    assert (snapshot.change, snapshot.attempt, made.instance.state) == (ChangeKind.SNAPSHOT, 1, State.LEAVING)
    made.end(1, 1, image="snapshot-1", runs=False)
    question = question_of(made.instance)
    assert isinstance(question, Claim) and question.migration is not None
    assert (question.options, question.release_first, question.migration.uuid) == ((), True, MOVE)
    assert not any(isinstance(one, MoveEvent) and one.departure for one in made.commands)
    made.apply(reassigned(made.instance))
    departure = departure_of(made)
    assert (made.instance.state, question_of(made.instance)) == (State.KEPT, None)
    assert departure.kept is not None and (departure.kept.cell, departure.kept.migration) == (PATIENCE.cell, MOVE)
    assert (departure.image, departure.newest > made.instance.last_attempt) == ("snapshot-1", True)
    assert (made.destroys, starts(made)) == ([], [])


@pytest.mark.parametrize("how", ["refused", "silent"])
def test_what_its_host_cannot_stop_stays_and_is_started_again(how: str) -> None:
    made = leaving()
    if how == "refused":
        made.end(1, 1, done=False, code="sim.change_failed", runs=True)
    else:
        made.apply(e.TimedOut(at=900.0))
    assert made.instance.state is State.RESTARTING
    made.end(1, 1)
    assert (made.instance.state, made.instance.power) == (State.ACTIVE, Power.RUNNING)
    ((kind, state, _),) = made.terminals
    assert (kind, state) == (MoveKind.MIGRATE, MoveState.FAILED)


def test_an_allocation_that_cannot_be_reassigned_is_reverted_and_it_stays() -> None:
    made = leaving()
    made.end(1, 1, image="snapshot-1")
    made.apply(refused(made.instance.next_attempt))
    question = question_of(made.instance)
    assert isinstance(question, Revert) and made.instance.state is State.REVERTING
    made.apply(e.Reverted(at=205.0, attempt=question.attempt, consumer_generation=7))
    made.end(1, 1)
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.FAILED, "placement.consumer_changed")]


def test_a_delete_while_the_allocation_is_reassigned_awaits_who_holds_it() -> None:
    made = leaving()
    made.end(1, 1, image="snapshot-1")
    made.apply(e.DeleteRequested(at=203.0))
    assert made.instance.phase == (State.CLAIMING, State.KEPT)
    made.apply(reassigned(made.instance), gone(made.instance, 1))
    assert isinstance(question_of(made.instance), Release)
    made.apply(e.Released(at=222.0))
    assert question_of(made.instance) == Release(consumer=MOVE, project_id="p", of_migration=True)


@pytest.mark.parametrize("late", [leaves(), request(MoveKind.STOP, request_id=LATER), e.DeleteRequested(at=300.0)])
def test_what_still_comes_to_the_former_cell_is_answered_with_the_departure(late: e.Event) -> None:
    made, departure = kept()
    stepped = made.apply(late)
    left = stepped.commands[0]
    assert isinstance(left, MoveEvent)
    assert (made.instance.state, left.departure, left.request_id) == (State.KEPT, departure, MOVE)
    assert (made.destroys, starts(made)) == ([], [])


def test_a_kept_machine_is_announced_again_and_nothing_else_happens_by_itself() -> None:
    made, departure = kept()
    before = made.instance
    made.apply(e.TimedOut(at=300.0))
    assert (last_event(made).departure, last_event(made).sequence) == (departure, departure.sequence)
    assert replace(made.instance, deadline=before.deadline) == before


def test_it_is_destroyed_only_when_it_is_active_elsewhere_by_the_request_that_it_left_by() -> None:
    made, _ = kept()
    made.apply(request(MoveKind.MIGRATE, request_id=LATER, active_in="c2"))
    assert made.destroys == []
    made.apply(released_in())
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.DEPARTED), [(1, host(1))])
    assert question_of(made.instance) is None
    made.apply(gone(made.instance, 1))
    assert question_of(made.instance) == Release(consumer=MOVE, project_id="p", of_migration=True)
    made.apply(e.Released(at=230.0, consumer=MOVE))
    assert (made.instance.state, last_event(made).state) == (State.DEPARTED, MoveState.SOURCE_GONE)


def test_the_command_to_destroy_is_not_answered_where_nothing_is_kept_any_more() -> None:
    """The schedulers answer each announcement with that command: an answer to it would go round for ever."""
    made, _ = kept()
    made.apply(released_in())
    for happened in (None, gone(made.instance, 1), e.Released(at=230.0, consumer=MOVE)):
        if happened is not None:
            made.apply(happened)
        before = made.instance
        assert (made.apply(released_in()).commands, made.instance) == ((), before)
    there = Scenario(active())
    assert (there.apply(released_in()).commands, there.instance) == ((), active())


def test_a_fence_of_its_host_is_the_answer_of_the_machine_that_was_kept() -> None:
    made, _ = kept()
    made.apply(released_in(), e.HostFenced(at=240.0, host_uuid=host(1)))
    assert made.instance.phase == (State.RELEASING, State.DEPARTED)


# --- it arrives


def test_its_next_cell_builds_it_from_its_image_above_every_attempt_of_the_former_one() -> None:
    former, departure = kept()
    there = in_next_cell(arrives(departure, 2))
    question = question_of(there.instance)
    assert isinstance(question, Claim)
    assert (question.migration, question.release_first) == (None, False)
    assert question.attempt > former.instance.next_attempt
    build(there)
    (spawn,) = there.spawns
    assert spawn.origin is not None and (spawn.origin.image, spawn.origin.runs) == ("snapshot-1", True)
    assert there.instance.state is State.RESIZED
    assert there.terminals == [(MoveKind.MIGRATE, MoveState.DONE, "")]
    assert (last_event(there).kept_in, last_event(there).condition) == (PATIENCE.cell, Condition.RESIZED)
    assert all(one.settled is None for one in there.commands if isinstance(one, MoveEvent))
    sequences = [one.sequence for one in (*former.commands, *there.commands) if isinstance(one, MoveEvent)]
    assert sequences == sorted(set(sequences))


@pytest.mark.parametrize("how", ["confirm", "time", "at once"])
def test_a_confirm_states_that_it_does_not_go_back(how: str) -> None:
    _, departure = kept()
    there = active_there(departure, auto_confirm_s={"confirm": None, "time": 5.0, "at once": 0.0}[how])
    if how == "confirm":
        there.apply(request(MoveKind.CONFIRM, request_id=OTHER))
    if how == "time":
        there.apply(e.TimedOut(at=260.0))
    assert there.instance.state is State.ACTIVE
    assert (last_event(there).kept_in, last_event(there).condition) == (None, Condition.ACTIVE)
    assert [one.settled for one in there.commands if isinstance(one, MoveEvent)][-1] == MOVE
    there.apply(replace(arrives(departure), is_query=True))
    assert last_event(there).settled == MOVE  # the answer to the schedulers that do not know
    assert [code for _, _, code in there.terminals][:-1] == [""] * (2 if how == "confirm" else 1)
    assert (there.destroys, question_of(there.instance)) == ([], None)


@pytest.mark.parametrize("how", ["closed", "awaits its confirm", "not arrived", "of another move"])
def test_a_move_that_an_older_conductor_has_closed_is_settled_when_its_cell_is_queried(how: str) -> None:
    """Versions before `settled` left it out of the record, and the former cell kept its machine for ever."""
    _, departure = kept()
    there = active_there(departure) if how != "not arrived" else in_next_cell(arrives(departure, 2))
    if how in ("closed", "of another move"):
        there.apply(request(MoveKind.CONFIRM, request_id=OTHER))
        there.instance = replace(there.instance, settled="")
    if how == "of another move":
        assert departure.kept is not None
        departure = replace(departure, kept=replace(departure.kept, migration=LATER))
    there.apply(replace(arrives(departure), is_query=True))
    assert last_event(there).settled == (MOVE if how == "closed" else None)


def test_one_that_was_stopped_stays_stopped_in_its_next_cell() -> None:
    made = Scenario(active())
    made.apply(request(MoveKind.STOP, request_id=OTHER))
    made.end(1, 1)
    made.apply(leaves())
    made.end(1, 1, image="snapshot-1")
    made.apply(reassigned(made.instance))
    there = active_there(departure_of(made))
    (spawn,) = there.spawns
    assert spawn.origin is not None and not spawn.origin.runs
    assert there.instance.power is Power.STOPPED


# --- it goes back


def back_in_former(made: Scenario, there: Scenario, kind: MoveKind = MoveKind.MIGRATE, by: str = MOVE) -> None:
    departure = departure_of(there)
    made.apply(request(kind, request_id=by, arrival=departure))


def restarted(made: Scenario) -> None:
    question = question_of(made.instance)
    assert isinstance(question, Revert)
    assert question.migration.uuid == MOVE
    made.apply(e.Reverted(at=250.0, attempt=question.attempt, consumer_generation=9))
    assert made.instance.state is State.RESTARTING
    made.end(1, 1)


def test_it_goes_back_only_when_nothing_is_left_of_it_there() -> None:
    made, departure = kept()
    there = in_next_cell(arrives(departure, 2))
    attempt = there.instance.next_attempt
    there.apply(claimed(attempt), replace(ended_check(there, claimed(attempt)), attempt=attempt))
    there.apply(e.SpawnFailed(at=211.0, attempt=attempt, host_uuid=host(2), code="sim.spawn_failed"))
    assert there.instance.phase == (State.DESTROYING, State.REVERTING) and last_event(there).departure is None
    there.apply(e.Destroyed(at=212.0, attempt=attempt, host_uuid=host(2), service="s1"))
    assert (there.instance.phase, last_event(there).departure) == ((State.RELEASING, State.OFFLOADED), None)
    there.apply(e.Released(at=213.0))
    back = departure_of(there)
    assert there.instance.state is State.DEPARTED
    assert (back.cell, back.given_back is not None, back.newest > attempt) == (PATIENCE.cell, True, True)
    back_in_former(made, there)
    question = question_of(made.instance)
    assert isinstance(question, Revert) and question.attempt > back.newest
    restarted(made)
    assert (made.instance.state, made.instance.attempt) == (State.ACTIVE, 1)
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.FAILED, "max_retries_exceeded")]
    assert "sim.spawn_failed" in last_event(made).reason
    assert not there.terminals


def test_what_comes_back_numbers_its_changes_above_those_that_it_has_had_there() -> None:
    """A host of the next cell may have the instance once more, and carries out no order below its highest."""
    made, departure = kept()
    there = in_next_cell(arrives(departure, 2))
    there.apply(refused(there.instance.next_attempt), e.Released(at=213.0))
    back = replace(departure_of(there), order=made.instance.order + 5)
    made.apply(request(MoveKind.MIGRATE, arrival=back))
    assert made.instance.order == back.order


def ended_check(there: Scenario, taken: e.Claimed) -> e.ChangeEnded:
    """The answer to the check that follows this claim."""
    probe = Scenario(there.instance, THERE)
    probe.apply(taken)
    return replace(ended(probe.instance, 2, taken.attempt), host_uuid=host(2))


def test_without_a_host_there_it_goes_back_at_once_and_other_hosts_are_tried_before() -> None:
    made, departure = kept()
    there = in_next_cell(arrives(departure, 2, 3))
    there.apply(refused(there.instance.next_attempt))
    assert there.instance.phase == (State.RELEASING, State.OFFLOADED)
    there.apply(e.Released(at=213.0))
    back_in_former(made, there)
    restarted(made)
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.FAILED, "max_retries_exceeded")]


def test_a_destination_that_is_silent_holds_it_until_it_answers_or_is_fenced() -> None:
    _, departure = kept()
    there = in_next_cell(arrives(departure, 2))
    attempt = there.instance.next_attempt
    there.apply(claimed(attempt), ended_check(there, claimed(attempt)))
    for at in (900.0, 2000.0, 5000.0):
        there.apply(e.TimedOut(at=at))
        assert there.instance.state is State.FINISHING
    assert not any(isinstance(one, MoveEvent) and one.departure for one in there.commands)
    there.context = replace(THERE, fences={host(2): Fence(host_uuid=host(2), host="h2", version=1)})
    there.apply(e.HostFenced(at=5001.0, host_uuid=host(2)), e.HostFenced(at=5002.0, host_uuid=host(2)))
    there.apply(e.Released(at=5003.0))
    assert departure_of(there).given_back is not None


def test_a_revert_goes_back_and_has_its_end_in_the_former_cell() -> None:
    made, departure = kept(MoveKind.RESIZE)
    spec = InstanceSpec(instance_uuid=UUID, project_id="p", name="n", flavor="m1.large")
    there = active_there(departure, MoveKind.RESIZE, spec=spec)
    assert last_event(there).flavor == "m1.large"
    there.apply(request(MoveKind.REVERT, request_id=OTHER, kept_seen=True))
    there.apply(gone(there.instance, 2), e.Released(at=230.0))
    assert (last_event(there).request_id, last_event(there).terminal) == (OTHER, False)
    back_in_former(made, there, MoveKind.REVERT, OTHER)
    restarted(made)
    assert made.terminals == [(MoveKind.REVERT, MoveState.DONE, "")]
    assert last_event(made).flavor == active().spec.flavor  # type: ignore[union-attr]
    made.apply(replace(request(MoveKind.RESIZE), is_query=True))  # it has the end that it had in the other cell
    assert made.terminals[1:] == [(MoveKind.RESIZE, MoveState.DONE, "")]


def test_what_another_request_gives_back_is_not_taken() -> None:
    made, departure = kept()
    there = in_next_cell(arrives(departure))
    back = departure_of(there)
    assert back.given_back is not None
    made.apply(arrives(replace(back, given_back=replace(back.given_back, migration=LATER))))
    assert (made.instance.state, question_of(made.instance)) == (State.KEPT, None)


def test_a_resized_one_that_is_lost_there_goes_back() -> None:
    made, departure = kept()
    there = active_there(departure)
    there.apply(missed(there.instance, 2), gone(there.instance, 2), e.Released(at=402.0))
    back_in_former(made, there)
    restarted(made)
    assert made.instance.state is State.ACTIVE
    assert (last_event(made).terminal, last_event(made).condition) == (False, Condition.ACTIVE)


@pytest.mark.parametrize("how", ["query", "given_up", "deleted", "no host"])
def test_what_its_next_cell_does_not_begin_goes_back_at_once(how: str) -> None:
    _, departure = kept()
    arrival = arrives(departure, 2)
    if how == "query":
        arrival = replace(arrival, is_query=True)
    if how == "given_up":
        arrival = replace(arrival, given_up=Refusal(code="delivery.exhausted", reason=""))
    if how == "no host":
        arrival = arrives(departure)
    there = in_next_cell(*([e.DeleteRequested(at=1.0)] if how == "deleted" else []), arrival)
    back = departure_of(there).given_back
    assert there.instance.state is State.DEPARTED and back is not None
    codes = {"query": "move.lost", "given_up": "delivery.exhausted", "no host": "move.no_host"}
    assert (back.code, back.is_deleted) == (codes.get(how, "instance.deleted"), how == "deleted")


def test_a_delete_ends_its_machine_there_and_then_the_kept_one() -> None:
    made, departure = kept()
    there = active_there(departure)
    there.apply(e.DeleteRequested(at=230.0))
    assert there.destroys == [(there.instance.attempt, host(2))]
    there.apply(gone(there.instance, 2), e.Released(at=232.0))
    back_in_former(made, there)
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.DELETED), [(1, host(1))])
    made.apply(gone(made.instance, 1), e.Released(at=240.0), e.Released(at=241.0, consumer=MOVE))
    ends = [one for one in (*made.commands, *there.commands) if isinstance(one, BuildEvent) and one.terminal]
    assert [(one.state, made.instance.state) for one in ends] == [(BuildState.DELETED, State.DELETED)]
    assert starts(made) == []


def test_a_delete_that_comes_to_the_former_cell_first_is_carried_out_when_it_is_back() -> None:
    made, departure = kept()
    made.apply(e.DeleteRequested(at=210.0))
    assert made.destroys == []
    there = in_next_cell(arrives(departure, 2))
    there.apply(refused(there.instance.next_attempt), e.Released(at=213.0))
    back_in_former(made, there)
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.DELETED), [(1, host(1))])


# --- what is late, and databases that are set back


def test_late_copies_of_arrivals_change_nothing() -> None:
    made, departure = kept()
    there = in_next_cell(arrives(departure, 2))
    going = there.instance
    there.apply(arrives(departure, 2), replace(arrives(departure), is_query=True))
    assert replace(there.instance, sequence=going.sequence) == going
    there.apply(refused(there.instance.next_attempt), e.Released(at=213.0))
    left = there.instance
    there.apply(arrives(departure, 2), replace(arrives(departure), is_query=True))
    assert there.instance == left
    assert last_event(there).departure is not None and last_event(there).departure == left.departure
    back_in_former(made, there)
    restarted(made)
    at_home = made.instance
    back_in_former(made, there)
    made.apply(leaves())
    assert replace(made.instance, sequence=at_home.sequence) == at_home


def test_a_record_from_before_the_departure_cannot_start_the_machine_that_is_kept() -> None:
    made, _ = kept()
    stopping = Scenario(active())
    stopping.apply(request(MoveKind.START, request_id=OTHER))  # it ran: nothing is commanded
    before = Scenario(replace(active(), power=Power.STOPPED))
    before.apply(request(MoveKind.START, request_id=OTHER), e.TimedOut(at=4_000_000_000.0))
    highest = max(one.order for one in starts(before))
    (snapshot,) = [one for one in made.commands if isinstance(one, ChangeMachine)]
    assert highest < snapshot.order


def test_a_record_in_doubt_about_leaving_goes_forward_only() -> None:
    made = leaving()
    made.instance = replace(made.instance, doubted=True)
    made.context = replace(PATIENCE, set_back_at=300.0)
    made.apply(e.TimedOut(at=900.0))
    made.end(1, 1, done=False, code="machine.absent", runs=False)
    assert made.instance.state is State.LEAVING
    made.end(1, 1, image="snapshot-2")
    made.apply(refused(made.instance.next_attempt))
    assert (made.instance.state, starts(made)) == (State.KEPT, [])


@pytest.mark.parametrize("is_query", [False, True])
def test_a_next_cell_that_was_set_back_since_searches_for_it_before_it_gives_it_back(is_query: bool) -> None:
    former, departure = kept()
    there = Scenario(Instance(uuid=UUID), replace(THERE, set_back_at=1_000.0))
    there.apply(replace(arrives(departure, 2), is_query=is_query))
    assert there.instance.phase == (State.RELEASING, State.OFFLOADED) and is_searched_for(there.instance)
    assert not any(isinstance(one, MoveEvent) and one.departure for one in there.commands)
    release = question_of(there.instance)
    assert isinstance(release, Release) and release.attempt is not None
    assert release.attempt > departure.newest + FORGOTTEN_ATTEMPTS
    there.apply(e.Released(at=1_010.0))
    back = departure_of(there)
    assert back.given_back is not None and back.given_back.code
    assert back.sequence > SET_BACK_GAP, "schedulers may have had more of it than the record"
    back_in_former(former, there)
    question = question_of(former.instance)
    assert isinstance(question, Revert) and question.attempt > release.attempt


def test_an_abort_is_too_late_once_it_leaves() -> None:
    made = leaving()
    made.apply(request(MoveKind.ABORT, request_id=OTHER))
    _, departure = kept()
    there = in_next_cell(arrives(departure, 2), request(MoveKind.ABORT, request_id=OTHER))
    assert made.terminals == there.terminals == [(MoveKind.ABORT, MoveState.REFUSED, "move.too_late")]


def test_what_has_things_of_its_cell_does_not_leave() -> None:
    before = active()
    assert before.spec is not None
    for more in ({"networks": (UUID,)}, {"volumes": (UUID,)}):
        made = Scenario(replace(before, spec=replace(before.spec, **more)))
        made.apply(leaves())
        assert made.terminals == [(MoveKind.MIGRATE, MoveState.REFUSED, "move.across_cells")]
        assert made.instance.state is State.ACTIVE


def test_an_offloaded_one_does_not_leave_by_a_migration() -> None:
    made = Scenario(replace(active(), state=State.OFFLOADED, power=Power.SHELVED))
    made.apply(leaves())
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.REFUSED, "instance.offloaded")]


def test_a_request_by_which_it_has_left_before_has_no_second_end() -> None:
    made, departure = kept()
    made.instance = replace(made.instance, ended=(EndedMove(OTHER, MoveKind.UNSHELVE, MoveState.SCHEDULED),))
    stepped = made.apply(request(MoveKind.UNSHELVE, request_id=OTHER))
    (left,) = stepped.commands
    assert isinstance(left, MoveEvent) and left.departure == departure and not left.terminal


def test_an_arrival_of_what_was_deleted_without_a_record_ends_its_request() -> None:
    _, departure = kept()
    there = in_next_cell(e.DeleteRequested(at=1.0, project_id="p", found=()), e.Released(at=2.0))
    there.apply(arrives(departure, 2))
    assert there.instance.state is State.DELETED
    assert there.terminals == [(MoveKind.MIGRATE, MoveState.FAILED, "move.lost")]


def test_an_arrival_that_comes_while_a_machine_is_still_being_destroyed_is_neither_taken_nor_refused() -> None:
    made, departure = kept()
    made.apply(released_in())
    back = replace(departure, cell=PATIENCE.cell, sequence=departure.sequence + 9)
    made.apply(arrives(back, 3, request_id=LATER))
    assert (made.instance.phase, made.terminals) == ((State.DESTROYING, State.DEPARTED), [])
    made.apply(gone(made.instance, 1), e.Released(at=230.0, consumer=MOVE), arrives(back, 3, request_id=LATER))
    assert made.instance.phase == (State.CLAIMING, State.PREPARING)


@pytest.mark.parametrize("power", [Power.SHELVED, Power.RESCUED])
def test_a_shelved_or_rescued_one_does_not_leave(power: Power) -> None:
    made = Scenario(replace(active(), power=power))
    made.apply(leaves())
    assert made.instance.state is State.ACTIVE
    ((_, state, code),) = made.terminals
    assert (state, code) == (MoveState.REFUSED, f"instance.{power.value}")


def test_a_kept_machine_follows_its_service_and_its_remains_are_destroyed() -> None:
    made, _ = kept()
    runs = e.HostRuns(at=300.0, attempt=1, host_uuid=host(1), service="s9")
    made.apply(runs)
    assert (made.instance.here.service, made.destroys) == ("s9", [])
    made.apply(released_in(), replace(runs, service="s1"))
    orders = [one for one in made.commands if isinstance(one, Destroy)]
    assert [one.service for one in orders] == ["s9", "s1"]
