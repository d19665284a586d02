"""The instance state machine: what a host's own report of its machines changes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.build import BuildState
from bus.contracts.cell import UNKNOWN_ATTEMPT, Destroy
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Instance, ScanId, State
from cell_conductor.domain.proof import rescan_id
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import step
from tests.unit.conductor.scenario import (
    DELETE,
    DEPLOYMENT,
    PATIENCE,
    RELEASED,
    UUID,
    announced,
    claimed,
    destroys,
    failed,
    host,
    orders,
    queried,
    reported,
    run,
    spawned,
)


def test_report_finds_a_lost_success() -> None:
    runs = e.HostRuns(at=112.0, attempt=1, host_uuid=host(1), service="s1", seen_at=112.0)
    assert run(queried(), runs).instance.state is State.ACTIVE


def test_report_of_a_vanished_instance_fails_it_without_a_second_terminal_event() -> None:
    up = run(queried(), spawned(at=110.0))
    young = e.HostMissing(at=141.0, host_uuid=host(1), seen_at=139.9, service="s1")
    assert run(young, start=up.instance).instance.state is State.ACTIVE
    lost = run(replace(young, seen_at=140.1), start=up.instance)
    assert lost.instance.phase == (State.RELEASING, State.FAILED) and destroys(lost) == [(1, host(1))]
    (event,) = announced(run(RELEASED, start=lost.instance))
    assert (event.state, event.terminal, event.code) == (BuildState.FAILED, False, "instance.lost")


def test_an_unasked_destroyed_of_an_active_instance_waits_for_a_report() -> None:
    """One result made it lost and released its allocation, past the breaker, though its machine might still run."""
    up = run(queried(), spawned(at=110.0)).instance
    for attempt in (1, 2):
        reported_gone = run(e.Destroyed(at=150.0, attempt=attempt, host_uuid=host(1)), start=up)
        assert reported_gone.instance == up and not reported_gone.commands
    lost = run(e.HostMissing(at=151.0, host_uuid=host(1), seen_at=151.0, service="s1"), start=up).instance
    assert lost.phase == (State.RELEASING, State.FAILED)
    leaving = run(DELETE, e.Destroyed(at=152.0, attempt=1, host_uuid=host(1)), start=up).instance
    assert leaving.phase == (State.RELEASING, State.DELETED), "the answer to a destroy of ours is accepted as before"


@pytest.mark.parametrize("ahead_s", [240.0, -240.0])
def test_a_host_whose_clock_is_minutes_off_neither_kills_a_young_instance_nor_hides_a_lost_one(ahead_s: float) -> None:
    """Its report's time was compared with ours: ahead it killed what it had not seen yet, behind it hid a loss."""
    up = run(queried(), replace(spawned(at=110.0), service="s1", ended_at=110.0 + ahead_s))
    looked = e.HostMissing(at=111.0, host_uuid=host(1), seen_at=109.0 + ahead_s, service=up.instance.here.service)
    assert run(looked, start=up.instance).instance.state is State.ACTIVE
    lost = run(replace(looked, seen_at=111.0 + ahead_s), start=up.instance)
    assert lost.instance.phase == (State.RELEASING, State.FAILED)


def test_another_service_whose_clock_is_ahead_ends_no_healthy_instance() -> None:
    """Seed 61245 at d0562af: a node's former service had looked before the build, and by its clock long after it."""
    up = run(queried(), replace(spawned(at=110.0), scan=ScanId(5, 3))).instance
    unordered = e.HostMissing(at=111.0, host_uuid=host(1), seen_at=999.0, service="heir", scan=ScanId(7, 9))
    older = rescan_id(replace(up, since=up.since - 1.0))
    for one in (
        unordered,
        replace(unordered, rescans=(older,)),
        replace(unordered, rescans=(rescan_id(replace(up, attempt=2)),)),
    ):
        assert run(one, start=up) == Step(up)
    assert run(replace(unordered, rescans=(rescan_id(up),)), start=up).instance.phase == (State.RELEASING, State.FAILED)
    resized = replace(up, state=State.RESIZED)
    assert run(unordered, start=resized) == Step(resized)


@pytest.mark.parametrize("set_by_s", [240.0, -240.0])
@pytest.mark.parametrize("after", [ScanId(5, 4), ScanId(6, 1)])
def test_a_host_whose_clock_is_set_neither_kills_a_young_instance_nor_hides_a_lost_one(
    set_by_s: float, after: ScanId
) -> None:
    """Set back after a look and before the build ended, its clock made the look the later, and the machine lost."""
    up = run(queried(), replace(spawned(at=110.0), ended_at=110.0 + set_by_s, scan=ScanId(5, 3)))
    before = e.HostMissing(at=111.0, host_uuid=host(1), seen_at=109.0, service="s1", scan=ScanId(5, 3))
    for earlier in (before, replace(before, scan=ScanId(4, 9))):
        assert run(earlier, start=up.instance).instance.state is State.ACTIVE
    gone = replace(before, seen_at=111.0, scan=after)
    assert run(gone, start=up.instance).instance.phase == (State.RELEASING, State.FAILED)


def test_what_a_report_brought_up_is_missed_by_a_later_look_only() -> None:
    seen = e.HostRuns(at=112.0, attempt=1, host_uuid=host(1), service="s1", seen_at=112.0, scan=ScanId(5, 3))
    for up in (run(queried(), seen), run(queried(), spawned(at=110.0), replace(seen, service="heir"))):
        missed = e.HostMissing(
            at=1.0, host_uuid=host(1), seen_at=999.0, service=up.instance.here.service, scan=ScanId(5, 3)
        )
        assert run(missed, start=up.instance).instance.state is State.ACTIVE
        missed = replace(missed, seen_at=1.0, scan=ScanId(5, 4))
        assert run(missed, start=up.instance).instance.phase == (State.RELEASING, State.FAILED)


def test_a_host_that_names_no_scan_is_compared_by_its_clock() -> None:
    """Its service is of a release that counted none, at the report or at the build."""
    for named, seen in ((None, ScanId(5, 4)), (ScanId(5, 3), None)):
        up = run(queried(), replace(spawned(at=110.0), ended_at=110.0, scan=named))
        missed = e.HostMissing(at=111.0, host_uuid=host(1), seen_at=109.0, service="s1", scan=seen)
        assert run(missed, start=up.instance).instance.state is State.ACTIVE
        assert run(replace(missed, seen_at=111.0), start=up.instance).instance.phase == (State.RELEASING, State.FAILED)


def test_a_young_build_is_not_killed_by_a_report() -> None:
    building = run(queried()).instance
    assert (
        run(e.HostMissing(at=999.0, host_uuid=host(1), seen_at=999.0, service="s1"), start=building).instance
        == building
    )


def test_a_report_that_it_is_gone_ends_a_delete_whose_answer_was_lost() -> None:
    leaving = run(queried(), spawned(), DELETE).instance
    assert run(e.HostMissing(at=1.0, host_uuid=host(1), seen_at=150.0, service="s1"), start=leaving).instance == leaving
    assert run(e.HostMissing(at=1.0, host_uuid=host(1), seen_at=150.1, service="s1"), start=leaving).instance.phase == (
        State.RELEASING,
        State.DELETED,
    )


def test_a_report_of_before_the_build_ends_no_delete_though_its_host_is_minutes_ahead() -> None:
    """Seed 60191 at f11870b: a paused conductor took it after the delete, and released what still ran."""
    leaving = run(queried(), replace(spawned(), scan=ScanId(5, 3)), DELETE).instance
    ahead = e.HostMissing(at=130.0, host_uuid=host(1), seen_at=400.0, service="s1", scan=ScanId(5, 3))
    for earlier in (ahead, replace(ahead, scan=ScanId(4, 9))):
        assert run(earlier, start=leaving).instance == leaving
    other = replace(ahead, service="heir")
    assert run(other, start=leaving).instance == leaving, "another service's scan may be older, too"
    for later in (replace(ahead, scan=ScanId(5, 4)), replace(other, rescans=(rescan_id(leaving),))):
        assert run(later, start=leaving).instance.phase == (State.RELEASING, State.DELETED)


def runs(attempt: int, n: int = 1, *, built: bool = True) -> e.HostRuns:
    return e.HostRuns(at=320.0, attempt=attempt, host_uuid=host(n), service="s1", seen_at=320.0, built=built)


def test_without_a_record_nothing_is_destroyed() -> None:
    """An empty database destroyed every machine of its cell within seconds."""
    for event in (runs(1), runs(UNKNOWN_ATTEMPT), spawned()):
        assert run(event) == Step(Instance(uuid=UUID))


def test_what_is_newer_than_its_record_is_kept() -> None:
    """A database that was restored from a backup does not know what was commanded since."""
    failed_twice = run(queried(hosts=1), failed(), RELEASED).instance
    for before in (run(queried()).instance, run(queried(), spawned()).instance, failed_twice):
        for event in (runs(2), runs(2, 2), runs(1, 2), runs(UNKNOWN_ATTEMPT), runs(UNKNOWN_ATTEMPT, 2), spawned(2)):
            assert step(before, event, PATIENCE) == Step(before), (before.state, event)


def test_what_its_record_proves_over_is_destroyed() -> None:
    second = run(queried(), failed(), claimed(), spawned(2)).instance
    over = run(queried(hosts=1), failed(), RELEASED).instance
    gone = run(queried(), spawned(), DELETE, e.Destroyed(at=1.0, attempt=1, host_uuid=host(1)), RELEASED).instance
    buried = run(DELETE).instance
    for before, event in ((second, runs(1)), (over, runs(1)), (gone, runs(1)), (gone, runs(5, 3)), (buried, runs(1))):
        (order,) = step(before, event, PATIENCE).commands
        assert isinstance(order, Destroy) and (order.attempt, order.host_uuid) == (event.attempt, event.host_uuid)
        assert order.deployment == DEPLOYMENT


def test_a_machine_that_may_still_be_building_is_not_active() -> None:
    building = run(queried()).instance
    assert step(building, runs(1, built=False), PATIENCE) == Step(building)
    assert step(building, runs(1), PATIENCE).instance.state is State.ACTIVE


def test_a_build_that_the_heir_reports_is_the_heirs() -> None:
    up = run(queried(), reported("heir"))
    assert up.instance.state is State.ACTIVE
    assert orders(run(DELETE, start=up.instance)) == [("heir", host(1), 1)]
