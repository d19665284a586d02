"""Deletes, and builds that come again: a row for each condition that decides."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionEvent, ActionKind, ActionState
from bus.contracts.base import MAX_ATTEMPT, Refusal
from bus.contracts.build import AttemptRecord, BuildEvent
from bus.contracts.cell import InstanceSpec
from bus.contracts.placement import Claim, Release
from cell_conductor.awaited_request import awaited_request_of
from cell_conductor.state import events as e
from cell_conductor.state.instance import BlockedReason, EndedAction, Instance, State
from cell_conductor.state.ownership_proof import is_provably_ended
from cell_conductor.state.step import StepContext
from cell_conductor.transition import step
from tests.unit.cell_conductor.move_scenario import ACTION, request
from tests.unit.cell_conductor.records import (
    BY_REVERT,
    GONE,
    SOURCE_GONE,
    Case,
    after,
    at_source,
    case,
    changing,
    fenced,
    moving,
    outcome,
    record,
    unshelving,
)
from tests.unit.cell_conductor.scenario import (
    PATIENCE,
    RELEASED,
    SPEC,
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

K, S = ActionKind, State
ABSENT = Instance(uuid=UUID)
TOMB = Instance(uuid=UUID, state=S.TOMBSTONE)
DELETING = record(S.DESTROYING, S.DELETED)
HELD = replace(DELETING, code="destroy.busy", reason="r")
ABSENT_HOST = BlockedReason.HOST_ABSENT.value
UNDESTROYED = e.SpawnFailed(at=220.0, attempt=2, host_uuid=host(2), code="destroy.busy", reason="r")


def deletes(**other: Any) -> e.DeleteRequested:
    return replace(e.DeleteRequested(at=120.0, project_id="p"), **other)


def blocked(state: State, next_state: State | None = None) -> Instance:
    return record(state, next_state, blocked_reason=ABSENT_HOST)


def build(**other: Any) -> e.BuildRequested:
    return replace(on("s1"), **other)


def gives_up(*, query: bool = False) -> e.BuildRequested:
    return build(dead_letter_reason=Refusal(code="x", reason="y"), is_query=query)


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
    case(ABSENT, deletes(may_have_started=True), "releasing/deleted", "build: deleting"),
    case(TOMB, deletes(may_have_started=True, attempt=3), "releasing/deleted", "build: deleting"),
    *(  # a host has a machine of it that no record explains: a tombstone would explain it, and end it
        case(
            ABSENT,
            deletes(may_have_started=has_started),
            "releasing/deleted",
            "build: deleting",
            context=replace(PATIENCE, quarantined=frozenset({UUID})),
        )
        for has_started in (False, True)
    ),
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
        moving(S.RESIZED, action={"answered": True}),
        deletes(),
        "destroying/deleted",
        "destroy 2@2",
        "destroy 1@1",
        "build: deleting",
    ),
    case(
        moving(S.RESIZED, action={"answered": True, **BY_REVERT}),
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
    case(moving(S.DESTROYING, S.DELETED, {"source_destroyed": True}), GONE, "releasing/deleted"),
    case(moving(S.DESTROYING, S.DELETED, {"current_destroyed": True}), SOURCE_GONE, "releasing/deleted"),
    case(moving(S.DESTROYING, S.DELETED, {"current_destroyed": True}), GONE, "destroying/deleted"),
    case(moving(S.DESTROYING, S.DELETED, {"source_destroyed": True}), SOURCE_GONE, "destroying/deleted"),
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
    query = awaited_request_of(instance)
    assert isinstance(query, Claim)
    return query


def begun_anew(before: Instance, event: e.BuildRequested) -> list[Instance]:
    """Its record, when it is claimed, commanded and up."""
    claiming = step(before, event, PATIENCE).instance
    number = claims_of(claiming).attempt
    building = step(claiming, claimed(number), PATIENCE).instance
    return [claiming, building, step(building, spawned(number, 1), PATIENCE).instance]


def test_a_build_that_is_decided_twice_is_claimed_anew() -> None:
    """A scheduler that was restored decided it by the claim that it had: that was released here meanwhile, and a
    machine was built for which nothing was held.
    """
    over = run(on("s1", "s1"), failed(final=True))
    release = awaited_request_of(over.instance)
    ended = run(RELEASED, start=over.instance).instance
    again = run(renewed(selections=on("s1", "s1").selections), start=ended)
    claim = claims_of(again.instance)
    assert (ended.state, spawns(again)) == (S.FAILED, [])
    assert isinstance(release, Release) and claim.attempt > (release.attempt or 0), "the release ends older ones"
    assert [tuple(one.allocations) for one in claim.options] == [(host(1),), (host(2),)]
    assert (claim.release_first, claim.consumer_generation) == (True, 7), "what it may hold after all is given back"
    assert spawns(run(claimed(claim.attempt), start=again.instance)) == [(claim.attempt, host(1))]


@pytest.mark.parametrize("last", [3, 9])
def test_a_build_that_begins_anew_gives_out_no_number_of_the_one_before_again(last: int) -> None:
    """Nor one that its request was claimed under."""
    claiming, building, up = begun_anew(record(S.FAILED, highest_attempt=last), renewed(attempt=6 if last < 6 else 1))
    assert claims_of(claiming).attempt == building.attempt == (7 if last < 6 else 11)
    assert all(
        is_provably_ended(known, *left) for left in ((3, host(3)), (1, host(1))) for known in (claiming, building, up)
    )


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
    assert is_provably_ended(left.instance, number, host(2))


def test_a_build_that_begins_anew_and_is_given_up_releases_what_it_may_hold() -> None:
    ended = step(record(S.FAILED), replace(gives_up(), requested_at=51.0), PATIENCE).instance
    release = awaited_request_of(ended)
    assert isinstance(release, Release) and (release.attempt or 0) > record(S.FAILED).next_attempt


@pytest.mark.parametrize("kept", [{"code": "build.machine_exists", "proves_from": 2}, {"proves_from": 1000}], ids=str)
def test_a_build_that_begins_anew_proves_no_more_about_machines_than_the_one_before(kept: dict[str, Any]) -> None:
    """There is another project's; or it is from before a recovery, which has left a machine of it in quarantine."""
    before = record(S.FAILED, **kept)
    assert not any(is_provably_ended(known, 1, host(1)) for known in (before, *begun_anew(before, renewed(attempt=5))))


def test_a_build_that_begins_anew_keeps_what_tells_late_messages_from_new_ones() -> None:
    """A copy of a request from before its failure was carried out on the new machine."""
    stopped = EndedAction(ACTION, K.STOP, ActionState.DONE)
    anew = begun_anew(record(S.FAILED, change_number=7, ended=(stopped,)), renewed())
    assert {known.change_number for known in anew} == {7}
    copy = step(anew[-1], request(K.STOP), PATIENCE)
    (told,) = copy.commands
    assert isinstance(told, ActionEvent) and (told.state, copy.instance.state) == (ActionState.DONE, S.ACTIVE)


NUMBERED = {"sequence": 21, "build_sequence": 20}
BEGUN = {
    "spec": InstanceSpec(instance_uuid=UUID, project_id="p"), "since": 120.0, "sequence": 11,
    "build_sequence": 10, "next_state": S.DELETED, "state": S.RELEASING, "deadline": 135.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("before", "event", "changes"),
    [
        (ABSENT, deletes(cause="c"), {"state": S.TOMBSTONE, "since": 120.0, "cause": "c"}),
        (replace(ABSENT, cause="old"), deletes(may_have_started=True, attempt=3, cause="c"), {**BEGUN,
         "highest_attempt": 3, "cause": "c"}),
        (replace(TOMB, cause="old"), deletes(cause="c"), {}),
        (replace(TOMB, cause="old"), build(),
         {"state": S.RELEASING, "next_state": S.DELETED, "since": 100.0, "deadline": 115.0, "spec": SPEC, "attempt": 1,
          "selections": (selection(1),), "consumer_generation": 7, "build_timeout_s": 60.0}),
        (record(S.ACTIVE), deletes(cause="c"),
         {**NUMBERED, "state": S.DESTROYING, "next_state": S.DELETED, "since": 120.0, "deadline": 150.0, "cause": "c"}),
        (record(S.ACTIVE), deletes(),
         {**NUMBERED, "state": S.DESTROYING, "next_state": S.DELETED, "since": 120.0, "deadline": 150.0}),
        (record(S.CLAIMING, S.BUILDING), deletes(cause="c"), {**NUMBERED, "next_state": S.DELETED, "cause": "c"}),
        (record(S.CLAIMING, S.BUILDING), deletes(), {**NUMBERED, "next_state": S.DELETED}),
        (record(S.OFFLOADED), deletes(cause="c"),
         {**NUMBERED, "state": S.RELEASING, "next_state": S.DELETED, "since": 120.0, "deadline": 135.0, "cause": "c"}),
        (record(S.OFFLOADED), deletes(),
         {**NUMBERED, "state": S.RELEASING, "next_state": S.DELETED, "since": 120.0, "deadline": 135.0}),
        (at_source({"answered": True}), deletes(), {**NUMBERED, "move_delete": True}),
        (at_source({"answered": True}), deletes(cause="c"), {**NUMBERED, "move_delete": True, "cause": "c"}),
        (record(S.FAILED), deletes(cause="c"),
         {**NUMBERED, "state": S.DELETED, "since": 120.0, "cause": "c", "deadline": None}),
        (record(S.FAILED), deletes(), {**NUMBERED, "state": S.DELETED, "since": 120.0, "deadline": None}),
        (DELETING, UNDESTROYED, {**NUMBERED, "code": "destroy.busy", "reason": "r"}),
        (DELETING, GONE, {"state": S.RELEASING, "since": 310.0, "deadline": 325.0}),
        (moving(S.DESTROYING, S.DELETED), GONE, {"move_current_destroyed": True}),
        (moving(S.DESTROYING, S.ACTIVE), GONE, {}),
        (moving(S.DESTROYING, S.DELETED), SOURCE_GONE, {"move_source_destroyed": True}),
        (record(S.BUILDING), build(is_query=True, sequence=19), NUMBERED),
        (record(S.BUILDING), build(is_query=True, sequence=20), {"sequence": 22, "build_sequence": 21}),
        (record(S.DELETED), build(is_query=True, sequence=19), NUMBERED),
        (record(S.DELETED), build(is_query=True, sequence=18), {}),
        (record(S.DELETED, build_sequence=15), build(is_query=True, sequence=15), NUMBERED),
        (record(S.DELETED, build_sequence=15), build(is_query=True, sequence=14), {}),
        (record(S.DELETED), build(sequence=30), {}),
        (DELETING, deletes(), NUMBERED),
        (blocked(S.ACTIVE), deletes(cause="c"),
         {**NUMBERED, "state": S.DESTROYING, "next_state": S.DELETED, "deadline": 120.0, "highest_attempt": 4,
          "cause": "c"}),
        (blocked(S.ACTIVE), deletes(attempt=9),
         {**NUMBERED, "state": S.DESTROYING, "next_state": S.DELETED, "deadline": 120.0, "highest_attempt": 9}),
        (replace(blocked(S.FAILED), selections=(), selection_index=0), deletes(),  # no host could be commanded
         {**NUMBERED, "state": S.RELEASING, "next_state": S.DELETED, "deadline": 120.0}),
        (at_source(blocked_reason=ABSENT_HOST), deletes(), {**NUMBERED, "move_delete": True, "deadline": 120.0}),
        (blocked(S.DESTROYING, S.DELETED), deletes(attempt=9), {**NUMBERED, "highest_attempt": 9}),
    ],
)  # fmt: skip
def test_a_delete_or_a_build_that_comes_again_changes_this_of_its_record(
    before: Instance, event: e.Event, changes: dict[str, Any]
) -> None:
    assert step(before, event, PATIENCE).instance == after(before, changes)


@pytest.mark.parametrize("attempt", [1_000_000, MAX_ATTEMPT])
def test_what_follows_from_the_attempt_that_a_delete_names_is_what_placement_reads(attempt: int) -> None:
    """A delete of an instance that the database has forgotten asked for a release which was refused each time."""
    deleted = step(ABSENT, deletes(may_have_started=True, attempt=attempt), PATIENCE).instance
    asked = msgspec.json.decode(msgspec.json.encode(awaited_request_of(deleted)), type=Release)
    assert asked.attempt == min(attempt + 1, MAX_ATTEMPT)


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
