"""Deletes, and builds that come again: a row for each condition that decides."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.build import AttemptRecord, BuildEvent
from bus.contracts.cell import FoundMachine
from bus.contracts.moves import MoveEvent, MoveKind, MoveState
from bus.contracts.placement import Claim, Release
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import EndedMove, Instance, State
from cell_conductor.domain.report import is_over
from cell_conductor.domain.steps import StepContext
from cell_conductor.domain.table import question_of, step
from tests.unit.conductor.move_scenario import MOVE, request
from tests.unit.conductor.records import (
    BY_REVERT,
    GONE,
    SOURCE_GONE,
    Case,
    at_source,
    case,
    changing,
    fenced,
    moving,
    outcome,
    record,
    unshelving,
)
from tests.unit.conductor.scenario import (
    PATIENCE,
    RELEASED,
    UUID,
    claimed,
    failed,
    host,
    missed,
    on,
    run,
    selection,
    spawned,
    spawns,
)

K, S = MoveKind, State
ABSENT = Instance(uuid=UUID)
TOMB = Instance(uuid=UUID, state=S.TOMBSTONE)
MACHINE = FoundMachine(
    instance_uuid=UUID, host_uuid=host(3), host="host-3", service="s1", attempt=5, project_id="p", built=True
)
ON_HOST_2 = replace(MACHINE, attempt=6, host_uuid=host(2))
ON_HOST_1 = replace(MACHINE, attempt=4, host_uuid=host(1))
DELETING = record(S.DESTROYING, S.DELETED)
HELD = replace(DELETING, code="destroy.busy", reason="r")
UNDESTROYED = e.SpawnFailed(at=220.0, attempt=2, host_uuid=host(2), code="destroy.busy", reason="r")


def deletes(**other: Any) -> e.DeleteRequested:
    return replace(e.DeleteRequested(at=120.0, project_id="p"), **other)


def build(**other: Any) -> e.BuildRequested:
    return replace(on("s1"), **other)


def gives_up(code: str = "x", *, query: bool = False) -> e.BuildRequested:
    return build(given_up=Refusal(code=code, reason="y"), is_query=query)


def renewed(**other: Any) -> e.BuildRequested:
    """It was requested after the one on record."""
    return build(requested_at=51.0, **other)


UNKNOWN: list[Case] = [
    case(ABSENT, deletes(), "tombstone"),
    case(TOMB, deletes(), "tombstone"),
    case(TOMB, build(), "releasing/deleted"),
    case(TOMB, build(is_query=True), "tombstone"),
    case(TOMB, gives_up(), "releasing/deleted"),
    case(TOMB, gives_up(query=True), "tombstone"),
    case(ABSENT, deletes(begun=True), "releasing/deleted", "build: deleting"),
    case(TOMB, deletes(begun=True, attempt=3), "releasing/deleted", "build: deleting"),
    case(
        ABSENT,
        deletes(begun=True),
        "destroying/deleted",
        "build: deleting",
        context=replace(PATIENCE, unexplained=frozenset({UUID})),
    ),
    case(TOMB, gives_up("build.machine_exists"), "releasing/deleted"),
    case(TOMB, gives_up("build.machine_exists", query=True), "tombstone"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), UNKNOWN)
def test_a_delete_or_a_build_of_what_is_not_on_record(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


DELETES: list[Case] = [
    case(record(S.ACTIVE), deletes(), "destroying/deleted", "destroy 2@2", "build: deleting"),
    case(record(S.ACTIVE), replace(deletes(), project_id="q"), "active"),
    case(record(S.ACTIVE), replace(deletes(), project_id=""), "destroying/deleted", "destroy 2@2", "build: deleting"),
    case(record(S.BUILDING), deletes(), "destroying/deleted", "destroy 2@2", "build: deleting"),
    case(record(S.CLAIMING, S.BUILDING), deletes(), "claiming/deleted", "build: deleting"),
    case(record(S.CLAIMING, S.DELETED), deletes(), "claiming/deleted", "build: deleting"),
    case(record(S.RELEASING, S.FAILED), deletes(), "releasing/deleted", "build: deleting"),
    case(moving(S.RELEASING, S.FAILED), deletes(), "releasing/deleted", "build: deleting"),
    case(DELETING, deletes(), "destroying/deleted", "build: deleting"),
    case(HELD, deletes(), "destroying/deleted", "build: deleting destroy.busy"),
    case(record(S.FAILED), deletes(), "deleted", "build: deleted"),
    case(record(S.DELETED), deletes(), "deleted", "build: deleted"),
    case(Instance(uuid=UUID, state=S.DELETED), deletes(), "deleted"),
    case(record(S.OFFLOADED), deletes(), "releasing/deleted", "build: deleting"),
    case(at_source(), deletes(), "claiming/preparing", "migrate: failed instance.deleted", "build: deleting"),
    case(at_source({"delete": True}), deletes(), "claiming/preparing", "build: deleting"),
    case(
        moving(S.PREPARING),
        deletes(),
        "destroying/deleted",
        "destroy 1@1",
        "migrate: failed instance.deleted",
        "build: deleting",
    ),
    case(
        moving(S.RESIZED),
        deletes(),
        "destroying/deleted",
        "destroy 2@2",
        "destroy 1@1",
        "migrate: failed instance.deleted",
        "build: deleting",
    ),
    case(
        moving(S.RESIZED, move={"answered": True}),
        deletes(),
        "destroying/deleted",
        "destroy 2@2",
        "destroy 1@1",
        "build: deleting",
    ),
    case(
        moving(S.RESIZED, move={"answered": True, **BY_REVERT}),
        deletes(),
        "destroying/deleted",
        "destroy 2@2",
        "destroy 1@1",
        "revert: failed instance.deleted",
        "build: deleting",
    ),
    case(
        changing(K.STOP),
        deletes(),
        "destroying/deleted",
        "destroy 2@2",
        "stop: failed instance.deleted",
        "build: deleting",
    ),
    case(
        moving(S.DESTROYING, S.OFFLOADED, {"source": None}),
        deletes(),
        "destroying/deleted",
        "destroy 2@2",
        "migrate: failed instance.deleted",
        "build: deleting",
    ),
    case(DELETING, UNDESTROYED, "destroying/deleted", "build: deleting destroy.busy"),
    case(DELETING, replace(UNDESTROYED, attempt=3), "destroying/deleted"),
    case(DELETING, replace(UNDESTROYED, code="spawn.x"), "destroying/deleted", "destroy 2@2"),
    case(HELD, UNDESTROYED, "destroying/deleted"),
    case(HELD, replace(UNDESTROYED, reason="other"), "destroying/deleted", "build: deleting destroy.busy"),
    case(HELD, replace(UNDESTROYED, code="destroy.other"), "destroying/deleted", "build: deleting destroy.other"),
    case(moving(S.DESTROYING, S.REVERTING), UNDESTROYED, "destroying/reverting"),
    case(DELETING, GONE, "releasing/deleted"),
    case(DELETING, replace(GONE, attempt=1), "destroying/deleted"),
    case(DELETING, missed(DELETING, 2), "releasing/deleted"),
    case(moving(S.DESTROYING, S.DELETED), GONE, "destroying/deleted"),
    case(moving(S.DESTROYING, S.DELETED), SOURCE_GONE, "destroying/deleted"),
    case(moving(S.DESTROYING, S.DELETED, {"source_gone": True}), GONE, "releasing/deleted"),
    case(moving(S.DESTROYING, S.DELETED, {"here_gone": True}), SOURCE_GONE, "releasing/deleted"),
    case(moving(S.DESTROYING, S.DELETED, {"here_gone": True}), GONE, "destroying/deleted"),
    case(moving(S.DESTROYING, S.DELETED, {"source_gone": True}), SOURCE_GONE, "destroying/deleted"),
    case(moving(S.DESTROYING, S.ACTIVE), SOURCE_GONE, "releasing/active"),
    case(moving(S.DESTROYING, S.ACTIVE), GONE, "destroying/active"),
    case(unshelving(S.DESTROYING, S.OFFLOADED), GONE, "releasing/offloaded"),
    case(unshelving(S.DESTROYING, S.DELETED), GONE, "releasing/deleted"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), DELETES)
def test_a_delete_of_what_is_on_record(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


AGAIN: list[Case] = [
    case(record(S.BUILDING), build(), "building"),
    case(record(S.BUILDING), build(is_query=True), "building", "build: building"),
    case(record(S.BUILDING), build(is_query=True, sequence=30), "building", "build: building"),
    case(record(S.CLAIMING, S.BUILDING), build(is_query=True), "claiming/building", "build: building"),
    case(at_source(), build(is_query=True), "claiming/preparing", "build: active"),
    case(record(S.RELEASING, S.FAILED), build(is_query=True), "releasing/failed", "build: building"),
    case(record(S.RELEASING, S.FAILED), build(), "releasing/failed"),
    case(record(S.ACTIVE), build(), "active", "build: active"),
    case(record(S.ACTIVE), build(is_query=True), "active", "build: active"),
    case(moving(S.PREPARING), build(is_query=True), "preparing", "build: active"),
    case(record(S.OFFLOADED), build(), "offloaded", "build: active"),
    case(DELETING, build(), "destroying/deleted"),
    case(DELETING, build(is_query=True), "destroying/deleted", "build: deleting"),
    case(HELD, build(is_query=True), "destroying/deleted", "build: deleting destroy.busy"),
    case(record(S.DELETED), build(), "deleted", "build: deleted"),
    case(record(S.DELETED), build(is_query=True, sequence=30), "deleted", "build: deleted"),
    case(Instance(uuid=UUID, state=S.DELETED), build(), "deleted"),
    case(record(S.FAILED), build(requested_at=50.0), "failed", "build: failed old"),
    # What it was decided by is the claim of the build before, or is claimed anew.
    case(record(S.FAILED), renewed(), "claiming/building"),
    case(record(S.FAILED), renewed(is_query=True), "failed", "build: failed old"),
    case(record(S.FAILED), renewed(attempt=2), "failed", "build: failed old"),
    case(record(S.FAILED), renewed(attempt=4), "failed", "build: failed old"),
    case(record(S.FAILED), renewed(attempt=5), "claiming/building"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), AGAIN)
def test_a_build_that_comes_again(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


def claims_of(instance: Instance) -> Claim:
    question = question_of(instance)
    assert isinstance(question, Claim)
    return question


def begun_anew(before: Instance, event: e.BuildRequested) -> list[Instance]:
    """Its record, when it is claimed, commanded and up."""
    claiming = step(before, event, PATIENCE).instance
    number = claims_of(claiming).attempt
    building = step(claiming, claimed(number), PATIENCE).instance
    return [claiming, building, step(building, spawned(number, 1), PATIENCE).instance]


def test_a_build_that_is_decided_twice_is_claimed_anew() -> None:
    """A scheduler that was set back decided it by the claim that it had: that was released here meanwhile, and a
    machine was built for which nothing was held.
    """
    over = run(on("s1", "s1"), failed(final=True))
    release = question_of(over.instance)
    ended = run(RELEASED, start=over.instance).instance
    again = run(renewed(selections=on("s1", "s1").selections), start=ended)
    claim = claims_of(again.instance)
    assert (ended.state, spawns(again)) == (S.FAILED, [])
    assert isinstance(release, Release) and claim.attempt > (release.attempt or 0), "the release fences it"
    assert [tuple(one.allocations) for one in claim.options] == [(host(1),), (host(2),)]
    assert (claim.release_first, claim.consumer_generation) == (True, 7), "what it may hold after all is given back"
    assert spawns(run(claimed(claim.attempt), start=again.instance)) == [(claim.attempt, host(1))]


@pytest.mark.parametrize("last", [3, 9])
def test_a_build_that_begins_anew_gives_out_no_number_of_the_one_before_again(last: int) -> None:
    """Nor one that its request was claimed under."""
    claiming, building, up = begun_anew(record(S.FAILED, newest=last), renewed(attempt=6 if last < 6 else 1))
    assert claims_of(claiming).attempt == building.attempt == (7 if last < 6 else 11)
    assert all(is_over(known, *left) for left in ((3, host(3)), (1, host(1))) for known in (claiming, building, up))


def test_a_build_that_begins_anew_and_passes_a_closed_host_ends_what_it_leaves() -> None:
    """The first number that it gives out after that host is no attempt that it has not commanded."""
    closed = fenced(1)
    event = renewed(selections=on("s1", "s1").selections)
    claiming = step(record(S.FAILED), event, closed).instance
    passing = step(claiming, claimed(claims_of(claiming).attempt), closed).instance
    number = claims_of(passing).attempt
    building = step(passing, claimed(number), closed).instance
    assert (building.phase, building.host_uuid) == ((S.BUILDING, None), host(2))
    left = step(building, failed(number, 2), closed)
    assert (left.instance.code, left.instance.reason.split(",")[0]) == ("max_retries_exceeded", "1 of 2 hosts tried")
    assert is_over(left.instance, number, host(2))


def test_a_build_that_begins_anew_and_is_given_up_releases_what_it_may_hold() -> None:
    ended = step(record(S.FAILED), replace(gives_up(), requested_at=51.0), PATIENCE).instance
    release = question_of(ended)
    assert isinstance(release, Release) and (release.attempt or 0) > record(S.FAILED).next_attempt


@pytest.mark.parametrize(
    "kept",
    [{"code": "build.machine_exists"}],
)
def test_a_build_that_begins_anew_keeps_what_the_one_before_has_not_commanded(kept: dict[str, Any]) -> None:
    """There is another project's."""
    before = record(S.FAILED, **kept)
    assert not any(is_over(known, 1, host(1)) for known in (before, *begun_anew(before, renewed(attempt=5))))


def test_a_build_that_begins_anew_keeps_what_tells_late_messages_from_new_ones() -> None:
    """A copy of a request from before its failure was carried out on the new machine."""
    stopped = EndedMove(MOVE, K.STOP, MoveState.DONE)
    anew = begun_anew(record(S.FAILED, order=7, ended=(stopped,)), renewed())
    assert {known.order for known in anew} == {7}
    copy = step(anew[-1], request(K.STOP), PATIENCE)
    (told,) = copy.commands
    assert isinstance(told, MoveEvent) and (told.state, copy.instance.state) == (MoveState.DONE, S.ACTIVE)


THERE = replace(selection(3), allocations={host(3): {}}, shapes={})
TAKES = {host(3): {"VCPU": 7}}
NUMBERED = {"sequence": 21, "build_sequence": 20}


@pytest.mark.parametrize(
    ("before", "event", "number", "terminal"),
    [
        (record(S.DELETED), build(), 19, True),
        (record(S.DELETED, build_sequence=15), build(), 15, True),
        (record(S.DELETED, build_sequence=15), build(is_query=True, sequence=15), 20, True),
        (record(S.ACTIVE, build_sequence=15), build(), 15, True),
        (record(S.FAILED), build(), 19, True),
        (record(S.FAILED, history=("active",)), build(), 19, False),
        (record(S.FAILED, history=("failed",)), build(), 19, True),
        (record(S.FAILED, history=("failed", "active")), build(is_query=True, sequence=30), 31, False),
    ],
)
def test_an_end_that_is_announced_again(before: Instance, event: e.Event, number: int, terminal: bool) -> None:
    history = tuple(AttemptRecord(attempt=1, host="host-1", outcome=str(one)) for one in before.history)
    (last,) = step(replace(before, history=history), event, PATIENCE).commands
    assert isinstance(last, BuildEvent) and (last.sequence, last.terminal) == (number, terminal)
