"""The instance state machine: compute services that are down."""

from __future__ import annotations

import pytest

from bus.contracts.build import BuildState
from bus.contracts.placement import Claim
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import State
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import question_of
from tests.unit.conductor.scenario import (
    DELETE,
    RELEASED,
    TIMED_OUT,
    announced,
    claimed,
    destroys,
    failed,
    host,
    on,
    orders,
    run,
    spawned,
    spawns,
)

LOST = e.ServiceLost(at=112.0, service="s1", code="service.silent", reason="no heartbeat")


def options(stepped: Step) -> list[str]:
    claim = question_of(stepped.instance)
    assert isinstance(claim, Claim)
    return [next(iter(option.allocations)) for option in claim.options]


def test_a_build_leaves_a_silent_service_for_the_first_host_of_another() -> None:
    building = run(on("s1", "s1", "s2")).instance
    stepped = run(LOST, down="s1", start=building)
    assert stepped.instance.phase == (State.CLAIMING, State.BUILDING) and options(stepped) == [host(3)]
    assert orders(stepped) == [("s1", host(1), 1)], "what may run there is fenced, for when the service is back"
    assert [(r.host, r.outcome, r.code) for r in stepped.instance.history] == [
        ("host-1", "failed", "service.silent"),
        ("host-2", "not_tried", "service.silent"),
    ]
    moved = run(claimed(), down="s1", start=stepped.instance)
    assert spawns(moved) == [(2, host(3))]


def test_the_late_active_of_the_lost_attempt_loses_and_its_machine_is_destroyed() -> None:
    building = run(on("s1", "s2")).instance
    moved = run(LOST, claimed(), down="s1", start=building).instance
    for start in (moved, run(spawned(2), start=moved).instance):
        late = run(spawned(1), start=start)
        assert destroys(late) == [(1, host(1))] and late.instance is start and not announced(late)


@pytest.mark.parametrize("services", [("s1",), ("s1", "s1"), ("s1", "s2")])
def test_a_build_without_a_living_alternate_waits_for_its_deadline(services: tuple[str, ...]) -> None:
    building = run(on(*services)).instance
    down = "s1 s2"
    assert run(LOST, down=down, start=building) == Step(building)
    up = run(spawned(), down=down, start=building)
    assert up.instance.state is State.ACTIVE, "it came back in time"
    over = run(TIMED_OUT, TIMED_OUT, RELEASED, down=down, start=building)
    assert over.instance.state is State.FAILED and over.instance.code == "max_retries_exceeded"
    assert f"1 of {len(services)} hosts tried" in over.instance.reason, "no other host of a service that is down"


def test_a_build_elsewhere_is_left_alone() -> None:
    building = run(on("s2", "s1")).instance
    assert run(LOST, down="s1", start=building) == Step(building)


@pytest.mark.parametrize("then", [(spawned(),), (failed(),), (failed(), DELETE), (DELETE,), (spawned(), DELETE)])
def test_nothing_but_a_build_under_way_is_moved(then: tuple[e.Event, ...]) -> None:
    """An active instance of a silent service may run, and a delete waits until its host has confirmed it."""
    before = run(on("s1", "s1", "s2"), *then).instance
    assert run(LOST, down="s1", start=before) == Step(before)


def test_alternates_are_not_tried_where_the_service_is_down() -> None:
    stepped = run(on("s1", "s2", "s3"), failed(), down="s2")
    assert options(stepped) == [host(3)]
    none = run(on("s1", "s2"), failed(), RELEASED, down="s2")
    (event,) = announced(none)
    assert (event.state, event.terminal, event.code) == (BuildState.FAILED, True, "max_retries_exceeded")
    assert "host-2: not_tried (service.silent)" in event.reason and "1 of 2 hosts tried" in event.reason


def test_a_question_of_stays_the_same_when_a_service_comes_back_or_goes() -> None:
    asking = run(on("s1", "s2", "s3"), failed(), down="s2").instance
    question = question_of(asking)
    for down in ("", "s2", "s3"):
        assert question_of(run(LOST, e.TimedOut(at=130.0), down=down, start=asking).instance) == question


def test_a_build_that_comes_for_a_service_that_is_down_begins_elsewhere() -> None:
    stepped = run(on("s1", "s1", "s2"), down="s1")
    assert stepped.instance.phase == (State.CLAIMING, State.BUILDING) and options(stepped) == [host(3)]
    assert stepped.commands == (), "nothing was begun there: nothing is to be destroyed, or announced"
    moved = run(claimed(), down="s1", start=stepped.instance)
    assert spawns(moved) == [(2, host(3))] and [event.state for event in announced(moved)] == [BuildState.BUILDING]
    alone = run(on("s1", "s1"), down="s1")
    assert spawns(alone) == [(1, host(1))], "there is nowhere else: its order waits for the service"


def test_a_machine_on_the_host_that_a_build_passed_over_is_another_records_and_kept() -> None:
    """Seed 13006: the cell was set back to before the build; handed in again it passed over the host that ran it."""
    passed = run(on("s1", "s2"), down="s1").instance
    moved = run(claimed(), start=passed).instance
    up = run(spawned(2), start=moved).instance
    for record in (passed, moved, up):
        for late in (spawned(1), e.HostRuns(at=120.0, attempt=1, host_uuid=host(1), service="s1")):
            assert run(late, start=record) == Step(record)
    leaving = run(DELETE, start=up).instance
    assert destroys(run(spawned(1), start=leaving)) == [(1, host(1))], "a client's delete is for whatever attempt"
