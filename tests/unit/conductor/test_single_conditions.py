"""Decisions with several conditions: a row for each condition that alone makes the difference."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.build import AttemptRecord
from bus.contracts.cell import MAX_RESERVED_AT_ONCE, ComputeHosts, FoundMachine, HostReport, Running
from bus.contracts.moves import MoveEvent, MoveKind, MoveState
from cell_conductor.domain import events as e
from cell_conductor.domain import way_back
from cell_conductor.domain.breaker import pages
from cell_conductor.domain.evacuations import is_evacuated_from
from cell_conductor.domain.fence_steps import FenceSteps
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import NOT_TRIED, Instance, Phase, Power, State, summary_of
from cell_conductor.domain.move_events import DONE, MoveEnd, close
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import step
from tests.unit.conductor.move_scenario import (
    MOVE,
    OTHER,
    SERVICE_DOWN,
    Scenario,
    active,
    begun,
    claimed,
    refused,
    request,
    to_resized,
)
from tests.unit.conductor.scenario import (
    DELETE,
    PATIENCE,
    SPEC,
    TIMED_OUT,
    UUID,
    announced,
    failed,
    host,
    queried,
    run,
    selection,
    spawned,
)
from tests.unit.conductor.scenario import refused as build_refused
from tests.unit.conductor.test_doubted import AFTER_MOVE, at_state

ACTIVE = Instance(
    uuid=UUID, state=State.ACTIVE, spec=SPEC, selections=(selection(1),), attempt=1, consumer_generation=7
)


def gone(n: int, attempt: int, service: str = "s1") -> e.Destroyed:
    return e.Destroyed(at=310.0, attempt=attempt, host_uuid=host(n), service=service)


def fenced(n: int) -> e.HostFenced:
    return e.HostFenced(at=300.0, host_uuid=host(n))


# --- builds


def test_a_repeated_build_is_answered_under_the_number_of_its_last_announcement() -> None:
    built = active()
    for known, number in ((built, built.build_sequence), (replace(built, build_sequence=0), built.sequence - 1)):
        (again,) = announced(step(known, queried(hosts=1), PATIENCE))
        assert again.sequence == number


@pytest.mark.parametrize(
    ("was_queried", "at", "state"),
    [
        (True, 5000.0, State.RELEASING),
        (True, 1000.0 + PATIENCE.doubt_limit_s, State.RELEASING),
        (True, 999.0 + PATIENCE.doubt_limit_s, State.BUILDING),
        (False, 5000.0, State.BUILDING),
    ],
)
def test_a_doubted_build_is_given_up_when_its_host_was_queried_and_the_limit_is_over(
    was_queried: bool, at: float, state: State
) -> None:
    building = replace(run(queried(hosts=1)).instance, doubted=True, queried=was_queried, since=1000.0)
    assert step(building, e.TimedOut(at=at), PATIENCE).instance.state is state


def test_a_build_that_its_host_has_failed_is_not_in_doubt_for_the_records_sake() -> None:
    building = replace(run(queried(hosts=1)).instance, doubted=True)
    after = Scenario(building)
    after.apply(failed(final=True), gone(1, 1), e.Released(at=320.0))
    assert (after.instance.state, after.instance.doubted) == (State.FAILED, False)


def test_a_delete_of_a_forgotten_build_without_a_cause_keeps_the_records() -> None:
    machine = FoundMachine(
        instance_uuid=UUID, host_uuid=host(1), host="host-1", service="s1", attempt=1, project_id="p", built=True
    )
    wanted = e.DeleteRequested(at=120.0, project_id="p", found=(machine,))
    assert step(Instance(uuid=UUID, cause="its own"), wanted, PATIENCE).instance.cause == "its own"
    assert step(Instance(uuid=UUID), replace(wanted, cause="new"), PATIENCE).instance.cause == "new"


# --- moves


def test_an_answer_to_an_earlier_claim_of_a_destination_is_none_to_this_one() -> None:
    made = begun(MoveKind.MIGRATE, 2, 3)
    assert made.apply(refused(attempt=9)).instance is made.instance and made.instance.state is State.CLAIMING
    undone = made.apply(refused()).instance
    assert undone.state is State.REVERTING and undone.move is not None
    assert undone.move.lost_reason.startswith("no host is left") and "()" not in undone.move.lost_reason


def test_a_destination_that_does_not_answer_is_passed_over_for_the_next() -> None:
    made = begun(MoveKind.MIGRATE, 2, 3)
    made.apply(claimed(), TIMED_OUT)
    assert (made.instance.state, [one.host for one in made.instance.alternates]) == (State.CLAIMING, ["host-3"])


def test_only_the_destinations_own_host_ends_its_attempt() -> None:
    made = begun(MoveKind.MIGRATE, 2, 3)
    made.apply(claimed())
    made.end(2, 2)
    made.end(1, 1)
    assert made.instance.state is State.FINISHING
    assert made.apply(gone(1, 1)).instance.state is State.FINISHING
    assert made.apply(gone(2, 2)).instance.state is not State.FINISHING


def test_a_machine_that_is_gone_from_a_move_that_has_arrived_changes_nothing_without_doubt() -> None:
    made = to_resized()
    assert made.instance.state is State.RESIZED
    for event in (gone(2, 2), gone(1, 1)):
        assert made.apply(event).instance.state is State.RESIZED


@pytest.mark.parametrize("order", [((2, 2), (1, 1)), ((1, 1), (2, 2))], ids=["destination first", "source first"])
def test_a_delete_of_what_has_moved_waits_for_both_hosts_in_any_order(order: tuple[tuple[int, int], ...]) -> None:
    made = to_resized()
    made.apply(DELETE)
    (first, second) = order
    assert made.apply(gone(*first)).instance.state is State.DESTROYING
    assert made.apply(gone(*second)).instance.state is State.RELEASING


def test_a_delete_while_a_move_goes_back_destroys_the_machine_at_its_source() -> None:
    made = begun(MoveKind.MIGRATE, 2)
    made.apply(refused())
    assert made.instance.state is State.REVERTING
    deleted = made.apply(DELETE)
    assert made.instance.phase == (State.DESTROYING, State.DELETED) and (1, host(1)) in made.destroys, deleted


def test_a_delete_of_what_changes_in_place_goes_on_without_a_source() -> None:
    made = begun(MoveKind.STOP)
    made.apply(DELETE)
    assert made.apply(e.TimedOut(at=400.0)).instance.phase == (State.DESTROYING, State.DELETED)


@pytest.mark.parametrize(
    ("ending", "state"),
    [(DONE, MoveState.CHANGING), (MoveEnd(MoveState.FAILED, "instance.lost", "why"), MoveState.UNDOING)],
)
def test_a_move_that_is_over_after_each_request_had_its_end_is_announced_as_progress(
    ending: MoveEnd, state: MoveState
) -> None:
    (event,) = close(to_resized().instance, ending, 300.0, PATIENCE).commands
    assert isinstance(event, MoveEvent) and (event.state, event.terminal) == (state, False)


def in_place(*, arrived: bool = True) -> Scenario:
    """A resize on host 1."""
    made = begun(MoveKind.RESIZE, 1, spec=replace(SPEC, flavor="large"))
    made.apply(claimed())
    if arrived:
        made.end(1, 1)
    return made


def test_a_resize_in_place_that_has_arrived_stays_on_its_fenced_host() -> None:
    arrived, under_way = in_place(), in_place(arrived=False)
    assert arrived.instance.state is State.RESIZED and arrived.instance.is_in_place
    before = arrived.instance
    stays = arrived.apply(fenced(1))
    assert stays.instance == before and stays.commands == ()
    assert under_way.apply(fenced(1)).instance.state is not State.RESIZING


def test_an_answer_to_an_earlier_change_in_place_does_not_end_its_undoing() -> None:
    made = in_place(arrived=False)
    made.end(1, 1, done=False, code="change.failed")
    undoing = made.apply(e.TimedOut(at=400.0)).instance
    assert undoing.phase == (State.DESTROYING, State.REVERTING) and undoing.move is not None
    late = e.ChangeEnded(at=401.0, attempt=1, order=undoing.move.order - 1, host_uuid=host(1), service="s1", done=True)
    assert made.apply(late).instance.phase == undoing.phase


def test_an_undone_resize_in_place_on_a_fenced_host_waits_for_placement_alone() -> None:
    made = in_place(arrived=False)
    made.end(1, 1, done=False, code="change.failed")
    made.apply(e.TimedOut(at=400.0))
    assert made.apply(fenced(1)).instance.phase == (State.REVERTING, None)


@pytest.mark.parametrize(("request_id", "codes"), [(MOVE, []), (OTHER, ["x"])])
def test_a_request_that_was_given_up_ends_unless_it_is_under_way(request_id: str, codes: list[str]) -> None:
    made = begun(MoveKind.MIGRATE, 2)
    wanted = request(MoveKind.MIGRATE, 2, request_id=request_id).request
    stepped = made.apply(e.move_event(wanted, 200.0, "why", given_up=Refusal(code="x", reason="y")))
    assert [one.code for one in stepped.commands if isinstance(one, MoveEvent)] == codes


@pytest.mark.parametrize(("runs", "power"), [(True, Power.RUNNING), (False, Power.STOPPED)])
def test_after_a_change_that_was_not_done_its_hosts_answer_counts(runs: bool, power: Power) -> None:
    made = begun(MoveKind.STOP)
    assert made.end(1, 1, done=False, code="x", runs=runs).instance.power is power


def test_a_start_leaves_it_running_and_what_does_not_run_is_not_rescued() -> None:
    stopped = begun(MoveKind.STOP)
    stopped.end(1, 1)
    started, rescued = Scenario(stopped.instance), Scenario(stopped.instance)
    started.apply(request(MoveKind.START, request_id=OTHER))
    assert started.end(1, 1, runs=True).instance.power is Power.RUNNING
    rescued.apply(request(MoveKind.UNRESCUE, request_id=OTHER))
    assert rescued.terminals == [(MoveKind.UNRESCUE, MoveState.REFUSED, "instance.not_rescued")]
    assert rescued.instance.state is State.ACTIVE


@pytest.mark.parametrize(("n", "state"), [(1, State.ACTIVE), (2, State.CHANGING)])
def test_a_change_is_ended_by_the_fence_of_its_own_host(n: int, state: State) -> None:
    assert begun(MoveKind.STOP).apply(fenced(n)).instance.state is state


def test_a_doubted_move_that_is_being_prepared_is_undone_by_its_hosts_answer() -> None:
    made = at_state(State.PREPARING)
    made.end(2, 2)
    assert made.instance.phase == (State.DESTROYING, State.REVERTING)


def test_the_one_host_of_a_resize_in_place_answers_for_no_other() -> None:
    made = in_place()
    made.instance, made.context = replace(made.instance, doubted=True), AFTER_MOVE
    runs = e.HostRuns(at=215.0, attempt=made.instance.attempt, host_uuid=host(1), service="s1", built=True)
    before = made.instance.move
    assert made.apply(runs).instance.move == before


@pytest.mark.parametrize(
    ("phase", "evacuated"), [((State.RESIZED, None), True), ((State.DESTROYING, State.ACTIVE), False)]
)
def test_a_fence_stays_until_the_source_of_an_evacuation_is_given_up(phase: Phase, evacuated: bool) -> None:
    resized = to_resized().instance
    assert resized.move is not None
    state, then = phase
    known = replace(resized, state=state, then=then, move=replace(resized.move, kind=MoveKind.EVACUATE))
    assert is_evacuated_from(known, host(1)) is evacuated and not is_evacuated_from(known, host(2))


@pytest.mark.parametrize(
    ("is_down", "is_fenced", "codes"),
    [(False, False, []), (True, False, ["move.source_silent"]), (True, True, [])],
)
def test_a_confirm_shows_the_silent_source_that_it_waits_for(is_down: bool, is_fenced: bool, codes: list[str]) -> None:
    made = to_resized()
    fences = {host(1): Fence(host_uuid=host(1), host="host-1", version=1)} if is_fenced else {}
    made.context = replace(SERVICE_DOWN if is_down else PATIENCE, fences=fences)
    stepped = made.apply(request(MoveKind.CONFIRM, request_id=OTHER))
    assert [one.code for one in stepped.commands if isinstance(one, MoveEvent)] == codes
    assert [one.host for one in made.instance.selections] == ["host-1", "host-2"], "the source is still to be destroyed"


def test_a_source_that_is_gone_ends_only_what_waits_for_it() -> None:
    resized = replace(to_resized().instance, deadline=400.0)
    assert way_back.end_without_source(resized, 300.0, PATIENCE) == Step(resized)


def test_a_destination_that_failed_without_a_code_is_named_with_its_outcome_alone() -> None:
    made = begun(MoveKind.MIGRATE, 2, 3)
    made.apply(claimed())
    made.end(2, 2, done=False)
    undone = made.apply(refused(attempt=made.instance.next_attempt)).instance
    assert undone.move is not None
    assert "host-2: failed; " in undone.move.lost_reason


def test_a_machine_of_another_attempt_is_no_arrival() -> None:
    made = begun(MoveKind.MIGRATE, 2, 3)
    made.apply(claimed())
    made.end(2, 2)
    made.end(1, 1)
    assert made.apply(spawned(attempt=9, n=3)).instance.state is State.FINISHING
    assert made.apply(spawned(attempt=2)).instance.state is State.RESIZED


def test_a_build_that_was_given_up_releases_its_claim_unless_it_is_doubted() -> None:
    given_up = run(replace(queried(hosts=1), given_up=Refusal(code="x", reason="y"))).instance
    assert (given_up.phase, given_up.code) == ((State.RELEASING, State.FAILED), "x")


@pytest.mark.parametrize(("attempt", "hosts"), [(1, 1), (2, 2)])
def test_a_host_that_was_passed_over_is_counted_once(attempt: int, hosts: int) -> None:
    """The first is among those that are left; a later one was taken from them."""
    passed = AttemptRecord(attempt=attempt, host="host-1", outcome=NOT_TRIED)
    known = Instance(uuid=UUID, spec=SPEC, selections=(selection(1),), history=(passed,))
    assert summary_of(known).startswith(f"0 of {hosts} hosts")


@pytest.mark.parametrize("reason", ["", "of another cell"])
def test_a_build_whose_instance_holds_anothers_allocation_says_why_it_failed(reason: str) -> None:
    tried = run(queried(hosts=2), failed()).instance
    ended = step(tried, replace(build_refused(changed=True), reason=reason), PATIENCE).instance
    assert ended.code == "placement.consumer_changed" and ended.reason and reason in ended.reason


def test_a_move_whose_instance_holds_anothers_allocation_says_why_it_is_undone() -> None:
    for reason in ("", "of another cell"):
        made = begun(MoveKind.MIGRATE, 2)
        move = made.apply(replace(refused(), consumer_changed=True, reason=reason)).instance.move
        assert move is not None and move.lost_reason and reason in move.lost_reason


def test_a_build_is_announced_with_the_host_that_it_has() -> None:
    (*_, last) = announced(run(queried(hosts=1), spawned()))
    assert (last.host, last.host_uuid) == ("host-1", host(1))
    (deleted,) = announced(step(Instance(uuid=UUID, spec=SPEC, state=State.FAILED), DELETE, PATIENCE))[:1]
    assert (deleted.host, deleted.host_uuid) == (None, None)


def test_a_fence_names_the_host_whose_fence_has_changed_something() -> None:
    destroying = run(queried(hosts=1), spawned(), DELETE).instance
    for event, hosts in ((fenced(1), [host(1)]), (fenced(2), [])):
        follower = FenceSteps()
        stepped = step(destroying, event, PATIENCE)
        follower.follow(destroying, stepped, event, PATIENCE)
        assert [*follower.hosts] == hosts


def test_a_record_that_an_event_leaves_as_it_was_loses_nothing_again() -> None:
    over = run(queried(hosts=1), failed(final=True)).instance
    fences = {host(1): Fence(host_uuid=host(1), host="host-1", version=1)}
    follower = FenceSteps()
    for event, before in ((TIMED_OUT, replace(over, state=State.FAILED, then=None)),):
        follower.follow(before, Step(before), event, replace(PATIENCE, fences=fences))
    assert follower.losses == []


def test_a_fenced_source_is_gone_by_the_service_that_has_it() -> None:
    made = to_resized()
    made.apply(DELETE)
    assert made.instance.move is not None and made.instance.move.source is not None
    source = replace(made.instance.move.source, service="s2")
    other = Scenario(replace(made.instance, move=replace(made.instance.move, source=source)))
    assert other.apply(fenced(1)).instance.move.source_gone  # type: ignore[union-attr]


# --- reports, leases, quarantine


def page(service: str, *uuids: str, ring: tuple[int, int] = (0, 0)) -> ComputeHosts:
    hosts = tuple(HostReport(uuid=uuid, name=uuid[:2]) for uuid in uuids)
    return ComputeHosts(
        service=service,
        cell="c",
        epoch=1,
        sequence=1,
        hosts=hosts,
        complete=True,
        ring_term=ring[0],
        ring_number=ring[1],
    )


def test_reservations_fill_a_message_to_its_bound() -> None:
    machine = Running(instance_uuid=UUID, attempt=1)
    half = [machine] * (MAX_RESERVED_AT_ONCE // 2)
    assert pages({host(1): half, host(2): half}) == [[host(1), host(2)]]
    assert pages({host(1): half, host(2): [*half, machine]}) == [[host(1)], [host(2)]]
