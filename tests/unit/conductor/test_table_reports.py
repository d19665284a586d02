"""The instance state machine: what a host's own report of its machines changes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.build import BuildState
from bus.contracts.cell import UNKNOWN_ATTEMPT, Destroy
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Instance, Phase, State
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
    missed,
    orders,
    phase_of,
    queried,
    reported,
    run,
    spawned,
)


def test_report_finds_a_lost_success() -> None:
    runs = e.HostRuns(at=112.0, attempt=1, host_uuid=host(1), service="s1")
    assert run(queried(), runs).instance.state is State.ACTIVE


def test_report_of_a_vanished_instance_fails_it_without_a_second_terminal_event() -> None:
    up = run(queried(), spawned(at=110.0)).instance
    lost = run(missed(up), start=up)
    assert lost.instance.phase == (State.RELEASING, State.FAILED) and destroys(lost) == [(1, host(1))]
    (event,) = announced(run(RELEASED, start=lost.instance))
    assert (event.state, event.terminal, event.code) == (BuildState.FAILED, False, "instance.lost")


def test_an_unasked_destroyed_of_an_active_instance_waits_for_a_report() -> None:
    """One result made it lost and released its allocation, past the breaker, though its machine might still run."""
    up = run(queried(), spawned(at=110.0)).instance
    for attempt in (1, 2):
        reported_gone = run(e.Destroyed(at=150.0, attempt=attempt, host_uuid=host(1), service="s1"), start=up)
        assert reported_gone.instance == up and not reported_gone.commands
    lost = run(missed(up), start=up).instance
    assert lost.phase == (State.RELEASING, State.FAILED)
    leaving = run(DELETE, e.Destroyed(at=152.0, attempt=1, host_uuid=host(1), service="s1"), start=up).instance
    assert leaving.phase == (State.RELEASING, State.DELETED), "the answer to a destroy of ours is accepted as before"


@pytest.mark.parametrize("service", ["s1", "heir"])
@pytest.mark.parametrize("at", [State.ACTIVE, State.RESIZED, (State.DESTROYING, State.DELETED)])
def test_a_scan_that_may_be_older_than_the_record_ends_nothing(service: str, at: State | Phase) -> None:
    """Seed 61245 at d0562af: a node's former service had looked before the build, and by its clock long after it.
    Seed 60191 at f11870b: a paused conductor took a report after the delete, and released what still ran. A host whose
    clock was minutes ahead killed a young instance, and one whose clock was behind hid a lost one.
    """
    state, then = phase_of(at)
    record = replace(run(queried(), spawned(at=110.0)).instance, state=state, then=then)
    none = e.HostMissing(at=999.0, host_uuid=host(1), service=service)
    earlier = replace(record, since=record.since - 1.0)
    for one in (none, *(missed(of, service=service) for of in (earlier, replace(record, attempt=2)))):
        assert run(one, start=record) == Step(record)
    if state is not State.RESIZED:
        assert run(missed(record, service=service), start=record).instance.state is not state


def test_a_young_build_is_not_killed_by_a_report() -> None:
    building = run(queried()).instance
    assert run(missed(building), start=building).instance == building


def runs(attempt: int, n: int = 1, *, built: bool = True) -> e.HostRuns:
    return e.HostRuns(at=320.0, attempt=attempt, host_uuid=host(n), service="s1", built=built)


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


def test_a_machine_that_may_still_be_building_is_not_active() -> None:
    building = run(queried()).instance
    assert step(building, runs(1, built=False), PATIENCE) == Step(building)
    assert step(building, runs(1), PATIENCE).instance.state is State.ACTIVE


def test_a_build_that_the_heir_reports_is_the_heirs() -> None:
    up = run(queried(), reported("heir"))
    assert up.instance.state is State.ACTIVE
    assert orders(run(DELETE, start=up.instance)) == [("heir", host(1), 1)]
