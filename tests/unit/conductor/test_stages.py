"""A cell's additions to the stages of a build: when the first host began, and when the last attempt ended."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.stages import Stamps
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import State
from tests.unit.conductor.scenario import (
    DELETE,
    RELEASED,
    SILENT,
    announced,
    claimed,
    failed,
    host,
    queried,
    run,
    spawned,
)

SO_FAR = Stamps(requested=90.0, queued=91.0, decided=92.0, claimed=93.0)
BEGIN = replace(queried(), stamps=SO_FAR)  # at 100


def ended(*happened: e.Event) -> BuildEvent:
    (event,) = announced(run(BEGIN, *happened))
    assert event.terminal
    return event


def test_a_host_reports_when_it_began_and_ended() -> None:
    event = ended(replace(spawned(), started_at=102.0, ended_at=109.0))
    assert event.stamps == replace(SO_FAR, dispatched=102.0, built=109.0)


def test_a_host_without_times_began_when_commanded_and_ended_when_reported() -> None:
    assert ended(spawned()).stamps == replace(SO_FAR, dispatched=100.0, built=110.0)
    seen = e.HostRuns(at=140.0, attempt=1, host_uuid=host(1), service="s1")
    assert ended(seen).stamps == replace(SO_FAR, dispatched=100.0, built=140.0)


@pytest.mark.parametrize(
    ("first", "dispatched"),
    [
        ((replace(failed(), started_at=101.0, ended_at=104.0),), 101.0),
        (SILENT, 100.0),
        ((e.Destroyed(at=105.0, attempt=1, host_uuid=host(1), service="s1"),), 100.0),
    ],
)
def test_failed_attempts_are_in_the_time_of_building(first: tuple[e.Event, ...], dispatched: float) -> None:
    event = ended(*first, claimed(), replace(spawned(2), started_at=205.0, ended_at=206.0))
    assert event.stamps == replace(SO_FAR, dispatched=dispatched, built=206.0)


def test_the_end_of_a_failure_has_them_as_well_and_a_delete_does_not() -> None:
    event = ended(replace(failed(final=True), started_at=101.0, ended_at=104.0), RELEASED)
    assert (event.state, event.stamps) == (BuildState.FAILED, replace(SO_FAR, dispatched=101.0, built=104.0))
    gone = e.Destroyed(at=150.0, attempt=1, host_uuid=host(1), service="s1")
    assert ended(DELETE, gone, RELEASED).stamps is None


def test_what_was_published_is_not_kept() -> None:
    active = run(BEGIN, spawned()).instance
    assert (active.state, active.stamps) == (State.ACTIVE, None)
    assert run(BEGIN).instance.stamps == SO_FAR
    assert run(queried(), spawned()).instance.stamps is None, "an older scheduler sends none"
