"""Moves in doubt after a set-back: what each host's answer shows, and what it decides."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.cell import FoundMachine, Selection
from bus.contracts.moves import MoveEvent, MoveKind, MoveState
from bus.contracts.placement import Claim
from cell_conductor.domain import events as e
from cell_conductor.domain.adopt_rules import is_searched
from cell_conductor.domain.desires import IN_DOUBT_AFTER_SET_BACK, in_text
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import EndedMove, Instance, Power, State
from cell_conductor.domain.report import is_over
from cell_conductor.domain.set_back import is_outdated
from cell_conductor.domain.steps import StepContext
from cell_conductor.domain.table import question_of, step
from tests.unit.conductor.move_scenario import MOVE, OTHER, refused, request
from tests.unit.conductor.records import (
    BY_REVERT,
    GONE,
    IN_DOUBT,
    ON_1,
    ON_2,
    ON_3,
    SOURCE_GONE,
    Case,
    after,
    answer,
    at_source,
    case,
    changing,
    in_place,
    moving,
    outcome,
    record,
    unshelving,
)
from tests.unit.conductor.scenario import PATIENCE, UUID, answering, host, missed, spawned

K, S = MoveKind, State
PARTED = replace(ON_2, allocations={host(2): {"VCPU": 2}, host(9): {"VF": 1}})
FOUND = FoundMachine(
    instance_uuid=UUID, host_uuid=host(3), host="host-3", service="s1", attempt=5, project_id="p", built=False
)
BUILT_2 = replace(FOUND, attempt=6, built=True, host_uuid=host(2))


def unsure(state: State, then: State | None = None, move: dict[str, Any] | None = None, **other: Any) -> Instance:
    return unshelving(state, then, move, doubted=True, **other)


def held(**other: Any) -> Instance:
    return unsure(S.RELEASING, S.OFFLOADED, **other)


def resized(**move: Any) -> Instance:
    return moving(S.RESIZED, move=move, doubted=True, queried=False)


def undone(then: State = S.REVERTING, **move: Any) -> Instance:
    return moving(S.DESTROYING, then, {"lost_code": "x", **move}, doubted=True)


def runs(attempt: int, n: int | None = None, *, built: bool = True) -> e.HostRuns:
    return e.HostRuns(at=220.0, attempt=attempt, host_uuid=host(n or attempt), service="s1", built=built)


def found(*machines: FoundMachine) -> e.MachineFound:
    return e.MachineFound(at=220.0, machines=machines or (FOUND,))


ANSWERS: list[Case] = [
    case(held(), found(), "destroying/reverting", "end 5@3", context=IN_DOUBT),
    case(unshelving(S.RELEASING, S.OFFLOADED), found(), "releasing/offloaded", context=IN_DOUBT),
    case(moving(S.RELEASING, S.OFFLOADED, doubted=True), found(), "releasing/offloaded", context=IN_DOUBT),
    case(held(), found(replace(FOUND, foreign=True)), "releasing/offloaded", context=IN_DOUBT),
    case(held(), found(replace(FOUND, attempt=4)), "releasing/offloaded", context=IN_DOUBT),
    case(held(), found(FOUND, replace(FOUND, attempt=4)), "releasing/offloaded", context=IN_DOUBT),
    case(held(), found(replace(FOUND, project_id="q")), "releasing/offloaded", context=IN_DOUBT),
    case(held(selections=(ON_1, PARTED)), found(), "releasing/offloaded", context=IN_DOUBT),
    case(held(), found(replace(FOUND, attempt=9), BUILT_2), "destroying/reverting", "end 6@2", context=IN_DOUBT),
    case(
        held(),
        found(FOUND, replace(FOUND, attempt=6, host_uuid=host(2))),
        "destroying/reverting",
        "end 6@2",
        context=IN_DOUBT,
    ),
    case(resized(), runs(2), "resized", context=IN_DOUBT),
    case(resized(), runs(1), "resized", context=IN_DOUBT),
    case(resized(), runs(2, built=False), "resized", context=IN_DOUBT),
    case(resized(), replace(spawned(2), service="s2"), "resized", context=IN_DOUBT),
    case(resized(), runs(1, n=3), "resized", context=IN_DOUBT),
    case(resized(), runs(3), "resized", context=IN_DOUBT),
    case(resized(here_seen=True), runs(1), "resized", context=IN_DOUBT),
    case(resized(source_seen=True), runs(2), "resized", context=IN_DOUBT),
    case(resized(source_gone=True), runs(2), "destroying/active", "destroy 1@1", context=IN_DOUBT),
    case(resized(here_seen=True), GONE, "destroying/reverting", "end 2@2", "migrate: undoing", context=IN_DOUBT),
    case(resized(here_seen=True), SOURCE_GONE, "destroying/active", "destroy 1@1", context=IN_DOUBT),
    case(resized(), SOURCE_GONE, "resized", context=IN_DOUBT),
    case(resized(), GONE, "destroying/reverting", "end 2@2", "migrate: undoing", context=IN_DOUBT),
    case(moving(S.RESIZED, queried=False), GONE, "resized"),
    case(resized(here_seen=True), replace(SOURCE_GONE, attempt=0), "resized", context=IN_DOUBT),
    case(resized(here_seen=True, auto_confirm_s=5.0), runs(1), "resized", context=IN_DOUBT),
    case(resized(here_seen=True, **BY_REVERT), runs(1), "resized", context=IN_DOUBT),
    case(
        resized(here_seen=True, **BY_REVERT),
        SOURCE_GONE,
        "destroying/active",
        "destroy 1@1",
        "revert: refused move.source_lost",
        context=IN_DOUBT,
    ),
    case(resized(here_seen=True), runs(1), "resized"),
    case(moving(S.RESIZED, queried=False), runs(1), "resized", context=IN_DOUBT),
    case(in_place(S.RESIZED, doubted=True, queried=False), runs(1), "resized", context=IN_DOUBT),
    case(undone(), spawned(2), "resized", "end 2@2", "end 1@1", "migrate: done", context=IN_DOUBT),
    case(undone(), runs(2, built=False), "destroying/reverting", context=IN_DOUBT),
    case(moving(S.DESTROYING, S.REVERTING, {"lost_code": "x"}), spawned(2), "destroying/reverting"),
    case(
        moving(S.DESTROYING, S.REVERTING, {"lost_code": "x", "answered": True}, doubted=True),
        spawned(2),
        "resized",
        "end 2@2",
        "end 1@1",
        "migrate: changing",
        context=IN_DOUBT,
    ),
    case(undone(), spawned(1), "destroying/reverting", context=IN_DOUBT),
    case(undone(), runs(3), "destroying/reverting", context=IN_DOUBT),
    case(
        in_place(S.DESTROYING, S.REVERTING, doubted=True, queried=False),
        runs(1),
        "destroying/reverting",
        context=IN_DOUBT,
    ),
    case(undone(S.ACTIVE), spawned(2), "destroying/active", context=IN_DOUBT),
    case(undone(S.DELETED), spawned(2), "destroying/deleted", context=IN_DOUBT),
    case(
        undone(**BY_REVERT),
        spawned(2),
        "resized",
        "end 2@2",
        "end 1@1",
        "revert: failed move.in_doubt",
        "migrate: done",
        context=IN_DOUBT,
    ),
    case(undone(auto_confirm_s=0.0), spawned(2), "destroying/active", "destroy 1@1", "migrate: done", context=IN_DOUBT),
    case(unsure(S.DESTROYING, S.REVERTING), spawned(2), "active", "unshelve: done", context=IN_DOUBT),
    case(at_source(doubted=True), refused(5), "reverting", "migrate: undoing", context=IN_DOUBT),
    case(
        unsure(S.CLAIMING, S.PREPARING, position=0),
        refused(5),
        "releasing/offloaded",
        "unshelve: undoing",
        context=IN_DOUBT,
    ),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), ANSWERS)
def test_an_answer_about_a_move_in_doubt_leads_to(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


CERTAIN = {"doubted": False, "queried": False, "deadline": None, "move_here_seen": False}
HERE = Selection(host_uuid=host(3), host="host-3", service="s1", allocations={host(3): {"VCPU": 2}})
DESTINATION = {
    "state": S.DESTROYING, "then": S.REVERTING, "deadline": 250.0, "since": 220.0, "selections": (ON_1, HERE),
    "attempt": 5, "newest": 5, "power": Power.RUNNING, "move_finishing": True, "reused_from": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("before", "event", "changes"),
    [
        (resized(), runs(2), {"move_here_seen": True}),
        (resized(source_seen=True), SOURCE_GONE, {"move_source_gone": True}),
        (resized(), runs(1), {"move_source_seen": True}),
        (resized(), runs(2, built=False), {}),
        (resized(), runs(3), {}),
        (resized(), replace(spawned(2), service="s2"),
         {"move_here_seen": True, "selections": (ON_1, replace(ON_2, service="s2"), ON_3)}),
        (replace(resized(here_seen=True), queried=True), runs(1), CERTAIN),
        (resized(source_seen=True), runs(2), {**CERTAIN, "move_source_seen": False}),
        (resized(here_seen=True, auto_confirm_s=5.0), runs(1), {**CERTAIN, "deadline": 225.0}),
        (resized(here_seen=True, **BY_REVERT), runs(1), {**CERTAIN, "deadline": 99.0}),
        (moving(S.RESIZED, queried=False), runs(1), {}),
        (in_place(S.RESIZED, doubted=True, queried=False), runs(1), {}),
        (undone(), replace(spawned(2), at=220.0),
         {"state": S.RESIZED, "then": None, "deadline": 250.0, "since": 220.0, "sequence": 21, "answered": True,
          "ended": (EndedMove(MOVE, K.MIGRATE, MoveState.DONE),), "move_lost_code": "", "move_finishing": True,
          "move_here_seen": True, "move_answered": True}),
        (undone(), runs(2, built=False), {}),
        (in_place(S.DESTROYING, S.REVERTING, doubted=True), runs(1), {}),
        (held(selections=(ON_1, ON_2)), found(), DESTINATION),
        (held(selections=(ON_1, ON_2), reused_from=3), found(), {**DESTINATION, "reused_from": 3}),
        (held(selections=(ON_1, ON_2), newest=2, attempt=1), found(replace(FOUND, attempt=5)), DESTINATION),
        (unsure(S.CLAIMING, S.PREPARING, position=0, reused_from=2), refused(5),
         {"state": S.RELEASING, "then": S.OFFLOADED, "since": 201.0, "deadline": 216.0, "queried": False,
          "newest": 1005, "sequence": 21, "move_lost_code": "max_retries_exceeded"}),
    ],
)  # fmt: skip
def test_an_answer_about_a_move_in_doubt_changes_this_of_its_record(
    before: Instance, event: e.Event, changes: dict[str, Any]
) -> None:
    got, wanted = step(before, event, IN_DOUBT).instance, after(before, changes)
    assert without_history(got) == without_history(wanted)


def without_history(instance: Instance) -> Instance:
    assert instance.move is not None
    return replace(instance, move=replace(instance.move, history=(), lost_reason=""))


@pytest.mark.parametrize(
    ("state", "then", "doubted", "searched"),
    [
        (S.RELEASING, S.OFFLOADED, True, True),
        (S.RELEASING, S.OFFLOADED, False, False),
        (S.RELEASING, S.FAILED, True, False),
        (S.FAILED, None, True, False),
        (S.CLAIMING, S.PREPARING, True, False),
    ],
)
def test_services_are_queried_before_the_claim_of_an_unsure_move_is_released(
    state: State, then: State | None, *, doubted: bool, searched: bool
) -> None:
    assert is_searched(unshelving(state, then, doubted=doubted)) is searched


# --- A request for an instance whose record is older than a set-back: its later machine is the instance's

LATER = replace(FOUND, built=True)
REFUSED, BEGUN = ("move.in_doubt",), ("",)


def at_rest(state: State = S.ACTIVE, **other: Any) -> Instance:
    """On host 2 since before the set-back; attempts up to 4 were given out."""
    return record(state, **{"selections": (ON_2,), "position": 0, "deadline": None, "queried": False, **other})


def offloaded(**other: Any) -> Instance:
    return at_rest(S.OFFLOADED, power=Power.SHELVED, image="kept", **other)


@pytest.mark.parametrize(
    ("before", "found", "context", "phase", "codes"),
    [
        (at_rest(), (LATER,), IN_DOUBT, "claiming/active", REFUSED),
        (offloaded(), (LATER,), IN_DOUBT, "claiming/active", REFUSED),
        (at_rest(), (), IN_DOUBT, "claiming/preparing", BEGUN),
        (offloaded(), (), IN_DOUBT, "claiming/preparing", BEGUN),
        (at_rest(), None, IN_DOUBT, "claiming/preparing", BEGUN),
        (at_rest(), (LATER,), PATIENCE, "claiming/preparing", BEGUN),
        (at_rest(since=2000.0), (LATER,), IN_DOUBT, "claiming/preparing", BEGUN),
        (at_rest(since=2000.0, doubted=True), (LATER,), IN_DOUBT, "claiming/active", REFUSED),
        (at_rest(), (replace(LATER, built=False),), IN_DOUBT, "active", REFUSED),
        (at_rest(), (replace(LATER, project_id="q"),), IN_DOUBT, "active", REFUSED),
        (at_rest(selections=(replace(PARTED, host_uuid=host(8)),)), (LATER,), IN_DOUBT, "active", REFUSED),
        (offloaded(), (replace(LATER, project_id=None),), IN_DOUBT, "offloaded", REFUSED),
        (at_rest(), (LATER, replace(LATER, attempt=6, built=False)), IN_DOUBT, "active", REFUSED),
        (at_rest(), (replace(LATER, attempt=6), replace(LATER, built=False)), IN_DOUBT, "claiming/active", REFUSED),
        (at_rest(), (replace(LATER, attempt=4),), IN_DOUBT, "claiming/preparing", BEGUN),
        (at_rest(reused_from=4), (replace(LATER, attempt=4),), IN_DOUBT, "claiming/active", REFUSED),
        (at_rest(), (replace(LATER, attempt=2, host_uuid=host(2)),), IN_DOUBT, "claiming/preparing", BEGUN),
        (at_rest(), (replace(LATER, attempt=2),), IN_DOUBT, "active", REFUSED),
        (at_rest(reused_from=1), (replace(LATER, attempt=1),), IN_DOUBT, "claiming/preparing", BEGUN),
    ],
)
def test_a_later_machine_than_the_record_has_is_taken_over_before_a_request_begins(
    before: Instance, found: tuple[FoundMachine, ...] | None, context: StepContext, phase: str, codes: tuple[str, ...]
) -> None:
    """A second machine was built beside it (never_two_running, seeds 2, 5 and 10 of `moved_since_the_backup`)."""
    kind = K.UNSHELVE if before.state is S.OFFLOADED else K.MIGRATE
    stepped = step(before, replace(request(kind, 1), found=found), context)
    told = tuple(one.code for one in stepped.commands if isinstance(one, MoveEvent))
    assert (in_text(stepped.instance.phase), told) == (phase, codes)


@pytest.mark.parametrize(
    ("before", "power", "image"),
    [
        (offloaded(), Power.RUNNING, ""),
        (at_rest(power=Power.SHELVED, image="kept"), Power.RUNNING, ""),
        (at_rest(power=Power.STOPPED, reused_from=4), Power.STOPPED, ""),
    ],
)
def test_the_instance_goes_on_with_its_later_machine(before: Instance, power: Power, image: str) -> None:
    taking = step(before, replace(request(K.UNSHELVE, 1), found=(LATER,)), IN_DOUBT).instance
    claim = question_of(taking)
    assert isinstance(claim, Claim) and (claim.attempt, claim.migration, taking.move) == (6, None, None)
    up = step(taking, e.ClaimRefused(at=221.0, attempt=6, consumer_changed=True), IN_DOUBT)
    assert (up.instance.state, up.instance.host_uuid, up.instance.attempt) == (S.ACTIVE, host(3), 5)
    assert (up.instance.power, up.instance.image, up.instance.doubted) == (power, image, False)
    assert up.instance.sequence > 1000
    assert not is_over(up.instance, before.attempt, host(2)), "the move that made the later one may have been undone"
    fenced = replace(IN_DOUBT, fences={host(2): Fence(host_uuid=host(2), host="host-2", version=1)})
    lost = step(before, replace(request(K.UNSHELVE, 1), found=(LATER,)), fenced).instance
    assert is_over(lost, before.attempt, host(2)), "its host destroys it before it is used again"
    again = step(up.instance, replace(request(K.MIGRATE, 1, request_id=OTHER), found=()), IN_DOUBT)
    assert again.instance.phase == (S.CLAIMING, S.PREPARING)


@pytest.mark.parametrize(
    ("known", "event", "phase"),
    [
        (*answer(changing(K.STOP), 2, done=False, runs=False), "active"),
        (unshelving(S.DESTROYING, S.OFFLOADED), GONE, "releasing/offloaded"),
        (unshelving(S.RELEASING, S.OFFLOADED), e.Released(at=220.0, consumer=UUID), "offloaded"),
    ],
)
def test_what_a_change_that_was_under_way_at_a_set_back_comes_to_is_searched(
    known: Instance, event: e.Event, phase: str
) -> None:
    """It may have ended, and the instance been moved since."""
    doubted = replace(known, doubted=known.phase in IN_DOUBT_AFTER_SET_BACK)
    after = step(doubted, answering(doubted, event), IN_DOUBT).instance
    assert in_text(after.phase) == phase
    assert is_searched(after) or is_outdated(replace(after, since=2000.0), IN_DOUBT.set_back)


@pytest.mark.parametrize(
    ("known", "events", "phase"),
    [
        (record(S.BUILDING, doubted=True), [spawned(2)], "active"),
        (record(S.BUILDING, doubted=True), [runs(2)], "active"),
        (
            moving(S.FINISHING, doubted=True, move={"auto_confirm_s": 0.0}),
            [spawned(2), SOURCE_GONE],
            "releasing/active",
        ),
        (resized(here_seen=True), [runs(1), e.TimedOut(at=2000.0), SOURCE_GONE], "releasing/active"),
        (resized(here_seen=True), [SOURCE_GONE, SOURCE_GONE], "releasing/active"),
        (unshelving(S.FINISHING, doubted=True), [spawned(2)], "active"),
    ],
)
def test_the_machine_on_record_is_no_proof_that_there_is_no_later_one(
    known: Instance, events: list[e.Event], phase: str
) -> None:
    """Its host had been silent, and the instance was moved, before the database was set back to this record: it came
    up, and when its host had carried out the order to destroy it the claim of the later machine was released.
    """
    now = known
    for event in events:
        now = step(now, event, IN_DOUBT).instance
    assert in_text(now.phase) == phase
    if phase == "releasing/active":
        now = step(now, e.Released(at=2100.0, consumer=MOVE), IN_DOUBT).instance
    assert now.state is S.ACTIVE and is_outdated(replace(now, since=2100.0), IN_DOUBT.set_back)
    lost = step(now, missed(now, 2), IN_DOUBT).instance
    assert in_text(lost.phase) == "releasing/failed" and is_searched(lost)


@pytest.mark.parametrize("known", [at_rest(), offloaded(), at_rest(since=2000.0, doubted=True)])
def test_an_instance_is_searched_for_once_after_a_set_back(known: Instance) -> None:
    """Every request for it queried every service, for as long as none of them changed its state."""
    refused = replace(request(K.REVERT), at=2000.0, found=())
    assert is_outdated(known, IN_DOUBT.set_back)
    assert not is_outdated(step(known, refused, IN_DOUBT).instance, IN_DOUBT.set_back)
