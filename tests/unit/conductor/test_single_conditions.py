"""Decisions with several conditions: a row for each condition that alone makes the difference."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.build import AttemptRecord
from bus.contracts.cell import MAX_RESERVED_AT_ONCE, ComputeHosts, FoundMachine, HostReport, Running
from bus.contracts.moves import MoveEvent, MoveKind, MoveState
from cell_conductor.domain import breaker, leases, way_back
from cell_conductor.domain import events as e
from cell_conductor.domain.adopt_rules import why_not_its_machine
from cell_conductor.domain.breaker import pages
from cell_conductor.domain.evacuations import is_evacuated_from
from cell_conductor.domain.fence_steps import FenceSteps
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import NOT_TRIED, Instance, Phase, State, summary_of
from cell_conductor.domain.leases import DEFAULT_BEAT_S, LISTEN_BEATS, LeaseTable
from cell_conductor.domain.move_events import DONE, MoveEnd, close
from cell_conductor.domain.orders import numbered
from cell_conductor.domain.report import NEWER, Unexplained, UnexplainedKind, is_ordered
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import step
from tests.unit.conductor.move_scenario import (
    Scenario,
    begun,
    claimed,
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

ACTIVE = Instance(
    uuid=UUID, state=State.ACTIVE, spec=SPEC, selections=(selection(1),), attempt=1, consumer_generation=7
)


def gone(n: int, attempt: int, service: str = "s1") -> e.Destroyed:
    return e.Destroyed(at=310.0, attempt=attempt, host_uuid=host(n), service=service)


def fenced(n: int) -> e.HostFenced:
    return e.HostFenced(at=300.0, host_uuid=host(n))


# --- builds


@pytest.mark.parametrize(
    ("known", "attempt", "project", "its_own"),
    [
        (ACTIVE, 2, "p", True),
        (ACTIVE, 2, None, True),
        (ACTIVE, 2, "q", False),
        (replace(ACTIVE, spec=None), 2, "p", False),
        (ACTIVE, 0, "p", False),
    ],
)
def test_a_machine_that_an_operator_calls_the_instances(
    known: Instance, attempt: int, project: str | None, its_own: bool
) -> None:
    kept = Unexplained(UUID, attempt, host(1), UnexplainedKind.QUARANTINED, NEWER)
    found = FoundMachine(
        instance_uuid=UUID, host_uuid=host(1), host="host-1", service="s1", attempt=attempt, project_id=project
    )
    assert (why_not_its_machine(known, kept, [found]) == "") is its_own


# --- moves


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


def test_an_undone_resize_in_place_on_a_fenced_host_waits_for_placement_alone() -> None:
    made = in_place(arrived=False)
    made.end(1, 1, done=False, code="change.failed")
    made.apply(e.TimedOut(at=400.0))
    assert made.apply(fenced(1)).instance.phase == (State.REVERTING, None)


@pytest.mark.parametrize(("n", "state"), [(1, State.ACTIVE), (2, State.CHANGING)])
def test_a_change_is_ended_by_the_fence_of_its_own_host(n: int, state: State) -> None:
    assert begun(MoveKind.STOP).apply(fenced(n)).instance.state is state


@pytest.mark.parametrize(
    ("phase", "evacuated"), [((State.RESIZED, None), True), ((State.DESTROYING, State.ACTIVE), False)]
)
def test_a_fence_stays_until_the_source_of_an_evacuation_is_given_up(phase: Phase, evacuated: bool) -> None:
    resized = to_resized().instance
    assert resized.move is not None
    state, then = phase
    known = replace(resized, state=state, then=then, move=replace(resized.move, kind=MoveKind.EVACUATE))
    assert is_evacuated_from(known, host(1)) is evacuated and not is_evacuated_from(known, host(2))


def test_a_source_that_is_gone_ends_only_what_waits_for_it() -> None:
    resized = replace(to_resized().instance, deadline=400.0)
    assert way_back.end_without_source(resized, 300.0, PATIENCE) == Step(resized)


@pytest.mark.parametrize(("attempt", "hosts"), [(1, 1), (2, 2)])
def test_a_host_that_was_passed_over_is_counted_once(attempt: int, hosts: int) -> None:
    """The first is among those that are left; a later one was taken from them."""
    passed = AttemptRecord(attempt=attempt, host="host-1", outcome=NOT_TRIED)
    known = Instance(uuid=UUID, spec=SPEC, selections=(selection(1),), history=(passed,))
    assert summary_of(known).startswith(f"0 of {hosts} hosts")


def test_a_build_is_announced_with_the_host_that_it_has() -> None:
    (*_, last) = announced(run(queried(hosts=1), spawned()))
    assert (last.host, last.host_uuid) == ("host-1", host(1))
    (deleted,) = announced(step(Instance(uuid=UUID, spec=SPEC, state=State.FAILED), DELETE, PATIENCE))[:1]
    assert (deleted.host, deleted.host_uuid) == (None, None)


def test_changes_are_numbered_one_by_one_where_the_clock_is_behind() -> None:
    moving = begun(MoveKind.STOP).instance
    far = 2**52
    assert numbered(replace(moving, order=far), 0.0).order == far + 1


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


@pytest.mark.parametrize(
    ("first", "second", "up", "contested"),
    [
        ((0, 0), (0, 0), ("s1", "s2"), True),
        ((1, 1), (1, 2), ("s1", "s2"), False),
        ((0, 0), (1, 2), ("s1", "s2"), True),
        ((1, 1), (0, 0), ("s1", "s2"), True),
        ((0, 0), (0, 0), ("s1",), False),
    ],
)
def test_two_services_contest_a_host_unless_they_share_by_a_ring(
    first: tuple[int, int], second: tuple[int, int], up: tuple[str, ...], contested: bool
) -> None:
    known = breaker.Listings()
    known.note(page("s2", host(1), ring=second))
    known.note(page("s1", host(1), ring=first))
    assert known.contested(page("s1", host(1), ring=first), up) == ({host(1): "s2"} if contested else {})


def test_what_a_service_had_before_it_began_anew_is_its_no_more() -> None:
    known = breaker.Listings()
    known.note(page("s1", host(1)))
    known.note(replace(page("s1", host(2)), epoch=2))
    assert (known.listers(host(1)), known.listers(host(2))) == ((), ("s1",))
    assert known.hosts_of(["s1", "nothing"]) == {host(2)}


def test_services_beyond_the_bound_are_not_kept_and_no_number_is_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_SERVICES", 1)
    known = LeaseTable(3)
    told = [("s1", 0, 0), ("s2", 1, 0), ("s1", 0, -1), ("s1", -1, 0), ("s1", 1, 0)]
    assert [known.renew(name, epoch, number, at=1.0) for name, epoch, number in told] == [
        True, False, False, False, True,
    ]  # fmt: skip


def test_an_epoch_is_a_time_and_a_service_with_an_earlier_one_is_sent_it() -> None:
    known = LeaseTable(3)
    known.note_outdated("s1", 1_790_000_000_000)
    known.note_outdated("s2", leases.FARTHEST_EPOCH + 1)
    assert known.outdated() == {"s1": 1_790_000_000_000}


@pytest.mark.parametrize(
    ("attempt", "of_move", "ordered"), [(1, False, True), (1, True, True), (2, False, False), (2, True, False)]
)
def test_a_record_has_ordered_the_end_of_what_it_or_its_move_has_left(
    attempt: int, of_move: bool, ordered: bool
) -> None:
    left = (AttemptRecord(attempt=1, host="host-1", outcome="timed_out"),)
    moved = to_resized().instance
    assert moved.move is not None
    known = replace(moved, attempt=5, newest=5, move=replace(moved.move, source=None, history=left if of_move else ()))
    known = replace(known, history=() if of_move else left)
    listed = e.HostRuns(at=125.0, attempt=attempt, host_uuid=host(9), service="s1")
    assert is_ordered(known, listed) is ordered


def test_hosts_beyond_the_bound_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "MAX_HOSTS", 1)
    known = breaker.Listings()
    known.note(page("s1", host(1), host(2)))
    known.note(page("s2", host(1)))
    assert [known.listers(host(n)) for n in (1, 2)] == [("s1", "s2"), ()]


def test_it_is_known_who_is_up_when_each_may_have_been_heard() -> None:
    known = LeaseTable(3)
    whole = LISTEN_BEATS * DEFAULT_BEAT_S
    known.advance_clock(1000.0)
    for second in range(1, int(whole)):
        known.advance_clock(1000.0 + second)
    assert known.up is None
    known.advance_clock(1000.0 + whole)
    assert known.up == ()


def test_reservations_fill_a_message_to_its_bound() -> None:
    machine = Running(instance_uuid=UUID, attempt=1)
    half = [machine] * (MAX_RESERVED_AT_ONCE // 2)
    assert pages({host(1): half, host(2): half}) == [[host(1), host(2)]]
    assert pages({host(1): half, host(2): [*half, machine]}) == [[host(1)], [host(2)]]
