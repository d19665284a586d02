"""Builds and moves in doubt, the questions of a record, and announcements of a move: tables."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.cell import FoundMachine, Origin, Selection, Spawn
from bus.contracts.groups import ServerGroup
from bus.contracts.moves import Condition, MoveEvent, MoveKind, MoveState
from bus.contracts.placement import Claim, ClaimOption, Migration, Release, Revert
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import EndedMove, Instance, Phase, Power, State
from cell_conductor.domain.move_doubts import is_searched_for
from cell_conductor.domain.rules import ignore, tombstone
from cell_conductor.domain.steps import StepContext
from cell_conductor.domain.table import ByThen, IllegalStep, Rule, question_of, rules_of, step
from cell_conductor.domain.way_back import SourceQuery
from tests.unit.conductor.move_scenario import MOVE, OTHER, SERVICE_DOWN, refused, request, unbegun
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
from tests.unit.conductor.scenario import DELETE, PATIENCE, UUID, claimed, host, spawned

# --- moves in doubt after a set-back: what each host's answer shows, and what it decides


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
    case(held(), found(), "releasing/offloaded"),
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
    case(resized(), GONE, "resized"),
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
    case(undone(), spawned(2), "destroying/reverting"),
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
          "newest": 1004, "sequence": 21, "move_lost_code": "max_retries_exceeded"}),
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
    assert is_searched_for(unshelving(state, then, doubted=doubted)) is searched


# --- what is asked of placement or of services in each state, which claims may be granted in it, and what is illegal


GROUP = ServerGroup(uuid="g", policy="affinity")
OPTION_2, OPTION_3 = (ClaimOption(allocations=on.allocations, shapes=on.shapes) for on in (ON_2, ON_3))
CLAIM = Claim(
    consumer=UUID,
    attempt=5,
    consumer_generation=7,
    release_first=True,
    options=(OPTION_3,),
    project_id="p",
    user_id="u",
)
MIGRATION = Migration(uuid=MOVE, source=ON_1.allocations)
OF_INSTANCE = Release(consumer=UUID, attempt=5)
OF_MIGRATION = Release(consumer=MOVE, project_id="p", of_migration=True)
BOTH = (OPTION_2, OPTION_3)


@pytest.mark.parametrize(
    ("known", "question"),
    [
        (record(S.CLAIMING, S.BUILDING), CLAIM),
        (record(S.CLAIMING, S.BUILDING, server_group=GROUP, limits={"VCPU": 9}),
         replace(CLAIM, server_group=GROUP, limits={"VCPU": 9}, options=(replace(OPTION_3, host=host(3)),))),
        (record(S.CLAIMING, S.BUILDING, position=0), replace(CLAIM, options=BOTH)),
        (record(S.CLAIMING, S.DELETED), CLAIM),
        (record(S.CLAIMING, S.ACTIVE), replace(CLAIM, options=(OPTION_2,))),
        (at_source(), replace(CLAIM, release_first=False, options=BOTH, migration=MIGRATION)),
        (moving(S.CLAIMING, S.PREPARING), replace(CLAIM, migration=MIGRATION)),
        (unshelving(S.CLAIMING, S.PREPARING), CLAIM),
        (unshelving(S.CLAIMING, S.PREPARING, position=0), replace(CLAIM, release_first=False, options=BOTH)),
        (moving(S.REVERTING), Revert(consumer=UUID, migration=MIGRATION, source_attempt=4, attempt=5)),
        (record(S.RELEASING, S.FAILED), OF_INSTANCE),
        (moving(S.RELEASING, S.FAILED), OF_INSTANCE),
        (moving(S.RELEASING, S.DELETED, {"instance_released": True}), OF_MIGRATION),
        (unshelving(S.RELEASING, S.OFFLOADED), OF_INSTANCE),
        (moving(S.RELEASING, S.ACTIVE), OF_MIGRATION),
        (moving(S.RELEASING, S.DEPARTED), OF_MIGRATION),
        (moving(S.RESIZED, move=BY_REVERT), SourceQuery(host(1), "s1", 1, OTHER)),
        (in_place(S.RESIZED, move={"lost_code": "host.fenced"}), SourceQuery(host(1), "s1", 1)),
        (moving(S.RESIZED), None),
        (moving(S.REVERTING, move=BY_REVERT), Revert(consumer=UUID, migration=MIGRATION, source_attempt=4, attempt=5)),
        (moving(S.PREPARING, move={"instance_released": True}), None),
        (record(S.ACTIVE), None),
        (record(S.BUILDING), None),
        (record(S.DESTROYING, S.DELETED), None),
    ],
)  # fmt: skip
def test_the_request_that_follows_from_a_record(known: Instance, question: object) -> None:
    assert question_of(known) == question


@pytest.mark.parametrize(
    ("before", "highest"),
    [
        (record(S.CLAIMING, S.BUILDING), 5),
        (record(S.CLAIMING, S.ACTIVE), 5),
        (record(S.FAILED), 5),
        (record(S.DELETED), 5),
        (record(S.RELEASING, S.FAILED), 5),
        (moving(S.REVERTING), 5),
        (record(S.ACTIVE), 4),
        (moving(S.PREPARING), 4),
        (moving(S.FINISHING), 4),
        (record(S.BUILDING), 4),
    ],
)
def test_no_attempt_beyond_the_one_that_was_requested_is_claimed(before: Instance, highest: int) -> None:
    step(before, claimed(highest), PATIENCE)
    with pytest.raises(IllegalStep):
        step(before, claimed(highest + 1), PATIENCE)


def test_the_rules_of_a_cell_by_what_follows() -> None:
    first, second, other = Rule(ignore), Rule(tombstone), Rule(ignore, (S.FAILED,))
    cell = ByThen({S.ACTIVE: first, S.DELETED: second}, other)
    assert [cell.of(then) for then in (S.ACTIVE, S.DELETED, S.FAILED, None)] == [
        first,
        second,
        other,
        other,
    ]
    assert ByThen({S.ACTIVE: first}).of(S.FAILED) is None
    assert (rules_of(cell), rules_of(ByThen({S.ACTIVE: first}))) == ((first, second, other), (first,))
    assert (rules_of(first), rules_of(None)) == ((first,), ())


# --- requests of moves: their refusals, queries and announcements, what a record is when one has begun, and a delete


C = Condition
DONE_STOP = (EndedMove(OTHER, K.STOP, MoveState.DONE),)
LEFT_BY = (EndedMove(OTHER, K.STOP, MoveState.SCHEDULED),)
LATE = e.TimedOut(at=220.0)


def rests(power: Power = Power.RUNNING, state: State = S.ACTIVE, **other: Any) -> Instance:
    return record(state, power=power, **{"queried": False, **other})


def wants(kind: MoveKind, *hosts: int, **fields: Any) -> e.MoveRequested:
    return request(kind, *hosts, request_id=OTHER, **fields)


def given_up(kind: MoveKind, request_id: str = OTHER) -> e.MoveRequested:
    return unbegun(request(kind, request_id=request_id), Refusal(code="x", reason="y"))


def query(kind: MoveKind, request_id: str = OTHER) -> e.MoveRequested:
    return unbegun(request(kind, request_id=request_id))


REFUSALS: list[Case] = [
    case(rests(), given_up(K.STOP), "active", "stop: refused x"),
    case(rests(ended=DONE_STOP), given_up(K.STOP), "active", "stop: done"),
    case(moving(S.PREPARING), given_up(K.STOP), "preparing", "stop: refused x"),
    case(moving(S.PREPARING), given_up(K.MIGRATE, MOVE), "preparing"),
    case(moving(S.RESIZED, move=BY_REVERT), given_up(K.REVERT), "resized"),
    case(Instance(uuid=UUID), given_up(K.STOP), "absent", "stop: refused instance.unknown"),
    case(Instance(uuid=UUID), wants(K.STOP), "absent", "stop: refused instance.unknown"),
    case(Instance(uuid=UUID), query(K.STOP), "absent", "stop: failed instance.unknown"),
    case(rests(), query(K.STOP), "active", "stop: failed move.lost"),
    case(rests(ended=DONE_STOP), query(K.STOP), "active", "stop: done"),
    case(moving(S.PREPARING), query(K.MIGRATE, MOVE), "preparing", "migrate: preparing"),
    case(moving(S.PREPARING), query(K.STOP), "preparing", "stop: failed move.lost"),
    case(moving(S.RESIZED, move=BY_REVERT), query(K.REVERT), "resized", "revert: changing"),
    case(rests(state=S.FAILED), wants(K.STOP), "failed", "stop: refused instance.not_active"),
    case(rests(state=S.FAILED, ended=DONE_STOP), wants(K.STOP), "failed", "stop: done"),
    case(rests(state=S.DELETED), wants(K.STOP), "deleted", "stop: refused instance.not_active"),
    case(rests(state=S.BUILDING), wants(K.STOP), "building", "stop: refused instance.not_active"),
    case(rests(state=S.BUILDING, ended=DONE_STOP), wants(K.STOP), "building", "stop: done"),
    case(
        moving(S.DESTROYING, S.DELETED),
        wants(K.STOP),
        "destroying/deleted",
        "stop: refused instance.not_active",
    ),
    case(moving(S.FINISHING), wants(K.STOP), "finishing", "stop: refused instance.busy"),
    case(moving(S.FINISHING), request(K.MIGRATE), "finishing"),
    case(moving(S.FINISHING, ended=DONE_STOP), wants(K.STOP), "finishing", "stop: done"),
    case(moving(S.FINISHING), wants(K.ABORT), "finishing", "abort: refused move.too_late"),
    case(moving(S.FINISHING), wants(K.CONFIRM), "finishing", "confirm: refused move.too_late"),
    case(rests(ended=LEFT_BY), wants(K.STOP), "active", "stop: failed move.lost"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), REFUSALS)
def test_a_request_that_is_not_begun_is_answered(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


IN_ZONE = replace(ON_2, zone="z")


@pytest.mark.parametrize(
    ("before", "event", "shown"),
    [
        (*answer(moving(S.PREPARING, selections=(ON_1, IN_ZONE)), 2), (C.MOVING, "host-2", host(2), "z")),
        (moving(S.RESIZED, selections=(ON_1, IN_ZONE)), LATE, (C.RESIZED, "host-2", host(2), "z")),
        (
            moving(S.RELEASING, S.ACTIVE),
            e.Released(at=220.0, consumer=MOVE),
            (C.ACTIVE, "host-2", host(2), ""),
        ),
        (rests(Power.STOPPED), wants(K.UNRESCUE), (C.STOPPED, "host-2", host(2), "")),
        (
            rests(selections=(IN_ZONE,), position=0, state=S.OFFLOADED),
            wants(K.STOP),
            (C.OFFLOADED, None, None, ""),
        ),
        (rests(selections=(), position=0, state=S.DELETED), wants(K.STOP), (C.DELETED, None, None, "")),
    ],
)
def test_an_announcement_has_the_instances_condition_and_its_host_if_it_has_one(
    before: Instance, event: e.Event, shown: tuple[Condition, str | None, str | None, str]
) -> None:
    (*_, last) = [one for one in step(before, event, PATIENCE).commands if isinstance(one, MoveEvent)]
    assert (last.condition, last.host, last.host_uuid, last.zone) == shown


@pytest.mark.parametrize(("context", "has_reason"), [(PATIENCE, False), (SERVICE_DOWN, True)])
def test_a_source_that_is_waited_for_is_named_with_the_code_of_its_service(
    context: StepContext, has_reason: bool
) -> None:
    waiting = moving(S.DESTROYING, S.ACTIVE, {"by": OTHER, "by_kind": K.CONFIRM, "answered": True})
    (*_, last) = [one for one in step(waiting, LATE, context).commands if isinstance(one, MoveEvent)]
    assert (SERVICE_DOWN.down["s1"].code in last.reason) is has_reason


OLD, NEW = {"instances": 1}, {"instances": 2}
EVENTS_GROUP, NEW_GROUP = (ServerGroup(uuid=name, policy="affinity") for name in ("g1", "g2"))


@pytest.mark.parametrize(
    ("before", "event", "limits", "newest", "source_attempt"),
    [
        (rests(), wants(K.MIGRATE, 3), NEW, 4, 2),
        (rests(), wants(K.LIVE_MIGRATE, 3), NEW, 4, 2),
        (rests(), wants(K.RESIZE, 3), NEW, 4, 2),
        (rests(), wants(K.MIGRATE, 3, to_cell="c2"), NEW, 5, 2),
        (rests(state=S.OFFLOADED), wants(K.UNSHELVE, 3), NEW, 4, 0),
        (rests(state=S.OFFLOADED), wants(K.UNSHELVE, 3, to_cell="c2"), NEW, 5, 0),
        (rests(), wants(K.STOP), OLD, 4, 0),
        (rests(), wants(K.REBUILD), OLD, 4, 0),
    ],
)
def test_the_record_of_a_request_that_has_begun(
    before: Instance, event: e.MoveRequested, limits: dict[str, int], newest: int, source_attempt: int
) -> None:
    begun = replace(event, request=replace(event.request, limits=NEW))
    after = step(replace(before, limits=OLD), begun, PATIENCE).instance
    assert after.move is not None
    assert (after.limits, after.newest, after.move.source_attempt) == (limits, newest, source_attempt)


@pytest.mark.parametrize(
    ("group", "known", "expected", "next_number"),
    [
        (None, 10, EVENTS_GROUP, 21),
        (NEW_GROUP, 19, NEW_GROUP, 21),
        (None, 20, EVENTS_GROUP, 22),
        (None, 30, EVENTS_GROUP, 32),
    ],
)
def test_a_request_may_have_a_group_of_its_own_and_is_announced_above_what_schedulers_have(
    group: ServerGroup | None, known: int, expected: ServerGroup, next_number: int
) -> None:
    wanted = wants(K.MIGRATE, 3, server_group=group, sequence=known)
    after = step(rests(server_group=EVENTS_GROUP), wanted, PATIENCE).instance
    assert (after.server_group, after.sequence) == (expected, next_number)


@pytest.mark.parametrize(
    ("before", "n", "origin"),
    [
        (unshelving(S.PREPARING), 2, Origin(migration=MOVE, image="kept", runs=True)),
        (moving(S.HANDING_OVER, move={"handed_over": True}, image="kept"), 1,
         Origin(migration=MOVE, host_uuid=host(1), runs=True)),
        (moving(S.HANDING_OVER, move={"handed_over": True, "power": Power.STOPPED}), 1,
         Origin(migration=MOVE, host_uuid=host(1), runs=False)),
        (moving(S.HANDING_OVER), 1, Origin(migration=MOVE, runs=True)),
    ],
)  # fmt: skip
def test_what_a_destination_builds_from(before: Instance, n: int, origin: Origin) -> None:
    (spawn,) = [one for one in step(*answer(before, n), PATIENCE).commands if isinstance(one, Spawn)]
    assert spawn.origin == origin


LEAVING, LEFT = (S.DESTROYING, S.DELETED), (S.RELEASING, S.DELETED)


@pytest.mark.parametrize(
    ("before", "context", "phase", "gone", "newest"),
    [
        (moving(S.REVERTING), PATIENCE, LEAVING, (True, False), 5),
        (moving(S.PREPARING), PATIENCE, LEAVING, (True, False), 4),
        (moving(S.PREPARING, doubted=True), IN_DOUBT, LEAVING, (False, False), 4),
        (moving(S.PREPARING, doubted=True), PATIENCE, LEAVING, (True, False), 4),
        (moving(S.PREPARING, move={"to_cell": "c2"}, doubted=True), IN_DOUBT, LEAVING, (True, False), 4),
        (moving(S.FINISHING), PATIENCE, LEAVING, (False, False), 4),
        (moving(S.RESIZED), PATIENCE, LEAVING, (False, False), 4),
        (moving(S.DESTROYING, S.ACTIVE), PATIENCE, LEAVING, (False, False), 4),
        (moving(S.DESTROYING, S.REVERTING), PATIENCE, LEAVING, (False, False), 4),
        (moving(S.RELEASING, S.ACTIVE), PATIENCE, LEAVING, (False, True), 4),
        (moving(S.RELEASING, S.DEPARTED), PATIENCE, LEFT, (True, True), 4),
        (changing(K.STOP), PATIENCE, LEAVING, (False, True), 4),
        (unshelving(S.PREPARING), PATIENCE, LEFT, (True, True), 4),
        (at_source(selections=(ON_1, ON_2, ON_3)), PATIENCE, (S.CLAIMING, S.PREPARING), (False, False), 4),
    ],
)  # fmt: skip
def test_a_delete_of_what_moves_waits_for_the_machines_that_may_be_there(
    before: Instance, context: StepContext, phase: Phase, gone: tuple[bool, bool], newest: int
) -> None:
    after = step(before, DELETE, context).instance
    assert after.move is not None
    assert (after.phase, (after.move.here_gone, after.move.source_gone)) == (phase, gone)
    assert after.newest == newest
