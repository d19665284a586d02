"""Decisions with several conditions: a row for each condition that alone makes the difference."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.build import AttemptRecord
from bus.contracts.cell import MAX_RESERVED_AT_ONCE, Running
from bus.contracts.moves import MoveEvent, MoveKind, MoveState
from cell_conductor.domain import events as e
from cell_conductor.domain import way_back
from cell_conductor.domain.breaker import pages
from cell_conductor.domain.evacuations import is_evacuated_from
from cell_conductor.domain.fence_steps import FenceSteps
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import NOT_TRIED, Instance, Phase, State, summary_of
from cell_conductor.domain.move_events import DONE, MoveEnd, close
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


def fenced(n: int) -> e.HostFenced:
    return e.HostFenced(at=300.0, host_uuid=host(n))


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


def test_reservations_fill_a_message_to_its_bound() -> None:
    machine = Running(instance_uuid=UUID, attempt=1)
    half = [machine] * (MAX_RESERVED_AT_ONCE // 2)
    assert pages({host(1): half, host(2): half}) == [[host(1), host(2)]]
    assert pages({host(1): half, host(2): [*half, machine]}) == [[host(1)], [host(2)]]
