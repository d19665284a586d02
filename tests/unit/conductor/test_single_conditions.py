"""Single conditions of the cell's rules that no table of a decision holds."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.build import AttemptRecord
from bus.contracts.cell import MAX_RESERVED_AT_ONCE, Destroy, Running, Spawn
from bus.contracts.moves import MoveEvent, MoveKind, MoveState
from bus.contracts.placement import Claim, Revert
from cell_conductor.domain import events as e
from cell_conductor.domain import way_back
from cell_conductor.domain.breaker import pages
from cell_conductor.domain.fences import Fence, losses_of
from cell_conductor.domain.instance import NOT_TRIED, Instance, Phase, State, summary_of
from cell_conductor.domain.move_events import DONE, MoveEnd, close
from cell_conductor.domain.move_steps import is_evacuated_from
from cell_conductor.domain.report import rescan_id
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import FenceSteps, question_of, step
from tests.unit.conductor.move_scenario import (
    SERVICE_DOWN,
    Scenario,
    active,
    begun,
    claimed,
    request,
    to_resized,
)
from tests.unit.conductor.scenario import (
    DELETE,
    DEPLOYMENT,
    PATIENCE,
    RELEASED,
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
    spawns,
)
from tests.unit.conductor.scenario import (
    claimed as claimed_alternate,
)

# --- decisions with several conditions: a row for each condition that alone makes the difference


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


# --- The instance state machine: builds, their alternates, and how they end.


def test_what_failed_and_was_forgotten_above_is_built_when_it_is_requested_anew() -> None:
    """Schedulers forget a failed build a day before its cell does: the new one stayed scheduled, and held its claim."""
    over = run(queried(hosts=1), failed(), RELEASED).instance
    copy = run(queried(), start=over)
    assert (copy.instance, spawns(copy)) == (over, []), "a copy of the same request"
    anew = run(replace(queried(), requested_at=9e5, at=9e5), start=over)
    assert spawns(anew) == [(1, host(1))] and anew.instance.state is State.BUILDING
    assert not anew.instance.history and not anew.instance.answered and not anew.instance.code
    (event,) = announced(anew)
    assert event.sequence == over.sequence, "higher than all that was announced of it"


# --- The instance state machine: what a host's own report of its machines changes.


def runs(attempt: int, n: int = 1, *, built: bool = True) -> e.HostRuns:
    return e.HostRuns(at=320.0, attempt=attempt, host_uuid=host(n), service="s1", built=built)


def test_what_its_record_proves_over_is_destroyed() -> None:
    second = run(queried(), failed(), claimed_alternate(), spawned(2)).instance
    over = run(queried(hosts=1), failed(), RELEASED).instance
    gone = run(
        queried(), spawned(), DELETE, e.Destroyed(at=1.0, attempt=1, host_uuid=host(1), service="s1"), RELEASED
    ).instance
    buried = run(DELETE).instance
    for before, older in ((second, runs(1)), (over, runs(1)), (gone, runs(1)), (gone, runs(5, 3)), (buried, runs(1))):
        event = replace(older, rescans=(rescan_id(before),))
        if before.state in (State.ACTIVE, State.FAILED):
            assert step(before, older, PATIENCE) == Step(before), "it may be gone by now"
        (order,) = step(before, event, PATIENCE).commands
        assert isinstance(order, Destroy) and (order.attempt, order.host_uuid) == (event.attempt, event.host_uuid)
        assert order.deployment == DEPLOYMENT


# --- a fence of a host: what waits for the host's word ends, what is active stays, and what it may have kept is a loss


def fences_on(*numbers: int) -> dict[str, Fence]:
    return {host(n): Fence(host_uuid=host(n), host=f"host-{n}", version=1) for n in numbers}


def lost(before: Instance, after: Instance, n: int) -> list[tuple[str, int]]:
    return [(one.host_uuid, one.attempt) for one in losses_of(before, after, host(n), 300.0)]


def test_nothing_is_commanded_on_a_fenced_host() -> None:
    context = replace(PATIENCE, fences=fences_on(1, 2))
    stepped = step(Instance(uuid=UUID), queried(), context)
    claim = question_of(stepped.instance)
    assert not [one for one in stepped.commands if isinstance(one, Spawn)]
    assert isinstance(claim, Claim)
    assert [list(option.allocations) for option in claim.options] == [[host(3)]]
    alone = step(Instance(uuid=UUID), queried(hosts=2), context)
    assert (alone.instance.phase, alone.instance.code) == ((State.RELEASING, State.FAILED), "max_retries_exceeded")
    assert not alone.commands


def test_an_evacuation_on_a_clients_statement_is_undone_when_the_service_is_back() -> None:
    there = replace(selection(2), service="s2")
    made = Scenario(active(), SERVICE_DOWN)
    made.apply(request(MoveKind.EVACUATE, fenced=True, selections=(there,)), claimed())
    down = made.instance
    made.context = PATIENCE
    made.end(2, 2)
    assert made.instance.move is not None
    assert made.instance.move.lost_code == "evacuate.service_up"
    assert not made.spawns
    still = Scenario(down, SERVICE_DOWN)
    still.end(2, 2)
    assert still.instance.state is State.FINISHING


@pytest.mark.parametrize("is_last", [False, True])
def test_a_destination_that_is_fenced_is_given_up(is_last: bool) -> None:
    made = begun(MoveKind.MIGRATE, *((2,) if is_last else (2, 3)))
    made.apply(claimed())
    made.end(2, 2)
    made.end(1, 1)
    assert made.instance.state is State.FINISHING
    before = made.instance
    made.apply(fenced(2))
    follows = (State.DESTROYING, State.REVERTING) if is_last else (State.CLAIMING, State.PREPARING)
    assert (made.instance.phase, made.destroys) == (follows, [(2, host(2))])
    if is_last:
        made.apply(fenced(2))
        assert isinstance(question_of(made.instance), Revert)
    assert lost(before, made.instance, 2) == [(host(2), 2)]
