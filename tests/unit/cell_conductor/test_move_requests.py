"""Requests of moves: their refusals, queries and announcements, what a record is when one has begun, and a delete."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionEvent, ActionKind, ActionState, Condition
from bus.contracts.base import Refusal
from bus.contracts.cell import Origin, Spawn
from bus.contracts.placement import ServerGroup
from cell_conductor.state import events as e
from cell_conductor.state.instance import EndedAction, Instance, Phase, Power, State
from cell_conductor.state.step import StepContext
from cell_conductor.transition import step
from tests.unit.cell_conductor.move_scenario import ACTION, OTHER, SERVICE_DOWN, request, unbegun
from tests.unit.cell_conductor.records import (
    BY_REVERT,
    ON_1,
    ON_2,
    ON_3,
    Case,
    answer,
    at_source,
    case,
    changing,
    fenced,
    in_place,
    moving,
    outcome,
    record,
    unshelving,
)
from tests.unit.cell_conductor.scenario import DELETE, PATIENCE, SPEC, UUID, host

K, S, C = ActionKind, State, Condition
DONE_STOP = (EndedAction(OTHER, K.STOP, ActionState.DONE),)
LEFT_BY = (EndedAction(OTHER, K.STOP, ActionState.SCHEDULED),)
LATE = e.TimedOut(at=220.0)


def rests(power: Power = Power.RUNNING, state: State = S.ACTIVE, **other: Any) -> Instance:
    return record(state, power=power, **{"queried": False, **other})


def wants(kind: ActionKind, *hosts: int, **fields: Any) -> e.ActionRequested:
    return request(kind, *hosts, request_id=OTHER, **fields)


def given_up(kind: ActionKind, request_id: str = OTHER) -> e.ActionRequested:
    return unbegun(request(kind, request_id=request_id), Refusal(code="x", reason="y"))


def query(kind: ActionKind, request_id: str = OTHER) -> e.ActionRequested:
    return unbegun(request(kind, request_id=request_id))


REFUSALS: list[Case] = [
    case(rests(), given_up(K.STOP), "active", "stop: refused x"),
    case(rests(ended=DONE_STOP), given_up(K.STOP), "active", "stop: done"),
    case(moving(S.PREPARING), given_up(K.STOP), "preparing", "stop: refused x"),
    case(moving(S.PREPARING), given_up(K.MIGRATE, ACTION), "preparing"),
    case(moving(S.RESIZED, action=BY_REVERT), given_up(K.REVERT), "resized"),
    case(Instance(uuid=UUID), given_up(K.STOP), "absent", "stop: refused instance.unknown"),
    case(Instance(uuid=UUID), wants(K.STOP), "absent", "stop: refused instance.unknown"),
    case(Instance(uuid=UUID), query(K.STOP), "absent", "stop: failed instance.unknown"),
    case(rests(), query(K.STOP), "active", "stop: failed action.lost"),
    case(rests(ended=DONE_STOP), query(K.STOP), "active", "stop: done"),
    case(moving(S.PREPARING), query(K.MIGRATE, ACTION), "preparing", "migrate: preparing"),
    case(moving(S.PREPARING), query(K.STOP), "preparing", "stop: failed action.lost"),
    case(moving(S.RESIZED, action=BY_REVERT), query(K.REVERT), "resized", "revert: changing"),
    case(rests(state=S.FAILED), wants(K.STOP), "failed", "stop: refused instance.not_active"),
    case(rests(state=S.FAILED, ended=DONE_STOP), wants(K.STOP), "failed", "stop: done"),
    case(rests(state=S.DELETED), wants(K.STOP), "deleted", "stop: refused instance.not_active"),
    case(rests(state=S.BUILDING), wants(K.STOP), "building", "stop: refused instance.not_active"),
    case(rests(state=S.BUILDING, ended=DONE_STOP), wants(K.STOP), "building", "stop: done"),
    case(moving(S.DESTROYING, S.DELETED), wants(K.STOP), "destroying/deleted", "stop: refused instance.not_active"),
    case(moving(S.FINISHING), wants(K.STOP), "finishing", "stop: refused instance.busy"),
    case(moving(S.FINISHING), request(K.MIGRATE), "finishing"),
    case(moving(S.FINISHING, ended=DONE_STOP), wants(K.STOP), "finishing", "stop: done"),
    case(moving(S.FINISHING), wants(K.ABORT), "finishing", "abort: refused action.too_late"),
    case(moving(S.FINISHING), wants(K.CONFIRM), "finishing", "confirm: refused action.too_late"),
    case(rests(ended=LEFT_BY), wants(K.STOP), "active", "stop: failed action.lost"),
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
        (moving(S.RELEASING, S.ACTIVE), e.Released(at=220.0, consumer=ACTION), (C.ACTIVE, "host-2", host(2), "")),
        (rests(Power.STOPPED), wants(K.UNRESCUE), (C.STOPPED, "host-2", host(2), "")),
        (
            rests(selections=(IN_ZONE,), selection_index=0, state=S.OFFLOADED),
            wants(K.STOP),
            (C.OFFLOADED, None, None, ""),
        ),
        (rests(selections=(), selection_index=0, state=S.DELETED), wants(K.STOP), (C.DELETED, None, None, "")),
    ],
)
def test_an_announcement_has_the_instances_condition_and_its_host_if_it_has_one(
    before: Instance, event: e.Event, shown: tuple[Condition, str | None, str | None, str]
) -> None:
    (*_, last) = [one for one in step(before, event, PATIENCE).commands if isinstance(one, ActionEvent)]
    assert (last.condition, last.host, last.host_uuid, last.zone) == shown


@pytest.mark.parametrize(("context", "has_reason"), [(PATIENCE, False), (SERVICE_DOWN, True)])
def test_a_source_that_is_waited_for_is_named_with_the_code_of_its_service(
    context: StepContext, has_reason: bool
) -> None:
    waiting = moving(S.DESTROYING, S.ACTIVE, {"ending_request_id": OTHER, "ending_kind": K.CONFIRM, "answered": True})
    (*_, last) = [one for one in step(waiting, LATE, context).commands if isinstance(one, ActionEvent)]
    assert (SERVICE_DOWN.down["s1"].code in last.reason) is has_reason


OLD, NEW = {"instances": 1}, {"instances": 2}
GROUP, NEW_GROUP = (ServerGroup(uuid=name, policy="affinity") for name in ("g1", "g2"))


@pytest.mark.parametrize(
    ("before", "event", "limits", "newest", "source_attempt"),
    [
        (rests(), wants(K.MIGRATE, 3), NEW, 4, 2),
        (rests(), wants(K.LIVE_MIGRATE, 3), NEW, 4, 2),
        (rests(), wants(K.RESIZE, 3), NEW, 4, 2),
        (rests(state=S.OFFLOADED), wants(K.UNSHELVE, 3), NEW, 4, 0),
        (rests(), wants(K.STOP), OLD, 4, 0),
        (rests(), wants(K.REBUILD), OLD, 4, 0),
    ],
)
def test_the_record_of_a_request_that_has_begun(
    before: Instance, event: e.ActionRequested, limits: dict[str, int], newest: int, source_attempt: int
) -> None:
    started = replace(event, request=replace(event.request, limits=NEW))
    after = step(replace(before, limits=OLD), started, PATIENCE).instance
    assert after.action is not None
    assert (after.limits, after.highest_attempt, after.action.source_attempt) == (limits, newest, source_attempt)


@pytest.mark.parametrize(
    ("group", "known", "expected", "next_number"),
    [(None, 10, GROUP, 21), (NEW_GROUP, 19, NEW_GROUP, 21), (None, 20, GROUP, 22), (None, 30, GROUP, 32)],
)
def test_a_request_may_have_a_group_of_its_own_and_is_announced_above_what_schedulers_have(
    group: ServerGroup | None, known: int, expected: ServerGroup, next_number: int
) -> None:
    wanted = wants(K.MIGRATE, 3, server_group=group, sequence=known)
    after = step(rests(server_group=GROUP), wanted, PATIENCE).instance
    assert (after.server_group, after.sequence) == (expected, next_number)


@pytest.mark.parametrize(
    ("before", "n", "origin"),
    [
        (unshelving(S.PREPARING), 2, Origin(migration=ACTION, image="kept", runs=True)),
        (moving(S.HANDING_OVER, action={"handed_over": True}, image="kept"), 1,
         Origin(migration=ACTION, host_uuid=host(1), runs=True)),
        (moving(S.HANDING_OVER, action={"handed_over": True, "power": Power.STOPPED}), 1,
         Origin(migration=ACTION, host_uuid=host(1), runs=False)),
        (moving(S.HANDING_OVER), 1, Origin(migration=ACTION, runs=True)),
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
        (moving(S.PREPARING), PATIENCE, LEAVING, (True, False), 4),
        (moving(S.FINISHING), PATIENCE, LEAVING, (False, False), 4),
        (moving(S.RESIZED), PATIENCE, LEAVING, (False, False), 4),
        (moving(S.DESTROYING, S.ACTIVE), PATIENCE, LEAVING, (False, False), 4),
        (moving(S.DESTROYING, S.REVERTING), PATIENCE, LEAVING, (False, False), 4),
        (moving(S.RELEASING, S.ACTIVE), PATIENCE, LEAVING, (False, True), 4),
        (changing(K.STOP), PATIENCE, LEAVING, (False, True), 4),
        (unshelving(S.PREPARING), PATIENCE, LEFT, (True, True), 4),
        (at_source(selections=(ON_1, ON_2, ON_3)), PATIENCE, (S.CLAIMING, S.PREPARING), (False, False), 4),
    ],
)  # fmt: skip
def test_a_delete_of_what_moves_waits_for_the_machines_that_may_be_there(
    before: Instance, context: StepContext, phase: Phase, gone: tuple[bool, bool], newest: int
) -> None:
    after = step(before, DELETE, context).instance
    assert after.action is not None
    assert (after.phase, (after.action.current_destroyed, after.action.source_destroyed)) == (phase, gone)
    assert after.highest_attempt == newest


# --- requests about what rests, is offloaded, has moved or is moving: a row for each condition that decides


REFUSED_ABORT = (EndedAction(OTHER, K.ABORT, ActionState.REFUSED, "x"),)
ENDED_START = (EndedAction(OTHER, K.START, ActionState.DONE),)
SMALL = replace(SPEC, flavor="small")
TIED, HOLDS = replace(SPEC, networks=("n",)), replace(SPEC, volumes=("v",))


AT_REST: list[Case] = [
    case(rests(), wants(K.CONFIRM), "active", "confirm: refused action.none"),
    case(rests(), wants(K.REVERT), "active", "revert: refused action.none"),
    case(rests(), wants(K.ABORT), "active", "abort: refused action.none"),
    case(rests(), wants(K.OFFLOAD), "active", "offload: refused instance.not_shelved"),
    case(rests(Power.STOPPED, ended=ENDED_START), wants(K.START), "active", "start: done"),
    case(rests(Power.SHELVED), wants(K.CONFIRM), "active", "confirm: refused action.none"),
    case(rests(Power.SHELVED), wants(K.OFFLOAD), "destroying/offloaded", "destroy 2@2", "offload: changing"),
    case(rests(Power.SHELVED), wants(K.UNSHELVE), "changing", "start 2@2", "unshelve: changing"),
    case(rests(Power.SHELVED), wants(K.SHELVE), "active", "shelve: done"),
    case(
        rests(Power.SHELVED), wants(K.SHELVE, offload=True), "destroying/offloaded", "destroy 2@2", "shelve: changing"
    ),
    case(
        rests(Power.SHELVED),
        wants(K.EVACUATE, 3, fenced=True),
        "destroying/offloaded",
        "destroy 2@2",
        "evacuate: changing",
        context=SERVICE_DOWN,
    ),
    case(rests(Power.SHELVED), wants(K.START), "active", "start: refused instance.shelved"),
    case(rests(Power.SHELVED), wants(K.MIGRATE, 3), "active", "migrate: refused instance.shelved"),
    case(rests(Power.RESCUED), wants(K.RESCUE), "active", "rescue: done"),
    case(rests(Power.RESCUED), wants(K.UNRESCUE), "changing", "unrescue 2@2", "unrescue: changing"),
    case(
        rests(Power.RESCUED),
        wants(K.EVACUATE, 3, fenced=True),
        "claiming/preparing",
        "evacuate: claiming",
        context=fenced(2),
    ),
    case(rests(Power.RESCUED), wants(K.STOP), "active", "stop: refused instance.rescued"),
    case(rests(Power.RESCUED), wants(K.SHELVE), "active", "shelve: refused instance.rescued"),
    case(rests(), wants(K.START), "active", "start: done"),
    case(rests(Power.STOPPED), wants(K.START), "changing", "start 2@2", "start: changing"),
    case(rests(), wants(K.STOP), "changing", "stop 2@2", "stop: changing"),
    case(rests(Power.STOPPED), wants(K.STOP), "active", "stop: done"),
    case(rests(), wants(K.REBOOT), "changing", "reboot 2@2", "reboot: changing"),
    case(rests(), wants(K.REBOOT, soft=True), "changing", "reboot-soft 2@2", "reboot: changing"),
    case(rests(Power.STOPPED), wants(K.REBOOT), "changing", "reboot 2@2", "reboot: changing"),
    case(rests(Power.STOPPED), wants(K.REBOOT, soft=True), "active", "reboot: refused instance.not_running"),
    case(rests(Power.SHELVED), wants(K.REBOOT), "active", "reboot: refused instance.shelved"),
    case(rests(Power.RESCUED), wants(K.REBOOT), "active", "reboot: refused instance.rescued"),
    case(rests(), wants(K.UNSHELVE), "active", "unshelve: refused instance.not_shelved"),
    case(rests(Power.STOPPED), wants(K.UNSHELVE), "active", "unshelve: refused instance.not_shelved"),
    case(rests(), wants(K.SHELVE), "changing", "snapshot 2@2", "shelve: changing"),
    case(rests(), wants(K.RESCUE), "changing", "rescue 2@2", "rescue: changing"),
    case(rests(), wants(K.UNRESCUE), "changing", "unrescue 2@2", "unrescue: changing"),
    case(rests(Power.STOPPED), wants(K.UNRESCUE), "active", "unrescue: refused instance.not_rescued"),
    case(rests(), wants(K.REBUILD), "changing", "rebuild 2@2", "rebuild: changing"),
    case(rests(), wants(K.MIGRATE), "active", "migrate: refused action.no_host"),
    case(rests(), wants(K.MIGRATE, 2), "active", "migrate: refused action.no_host"),
    case(rests(), wants(K.MIGRATE, 2, 3), "claiming/preparing", "migrate: claiming"),
    case(rests(), wants(K.RESIZE, 2), "claiming/preparing", "resize: claiming"),
    case(rests(), wants(K.LIVE_MIGRATE, 3), "claiming/preparing", "live-migrate: claiming"),
    case(rests(Power.STOPPED), wants(K.LIVE_MIGRATE, 3), "active", "live-migrate: refused instance.not_running"),
    case(rests(Power.STOPPED), wants(K.MIGRATE, 3), "claiming/preparing", "migrate: claiming"),
    case(rests(), wants(K.EVACUATE, 3), "active", "evacuate: refused evacuate.not_fenced"),
    case(rests(), wants(K.EVACUATE, 3), "claiming/preparing", "evacuate: claiming", context=fenced(2)),
    case(rests(), wants(K.EVACUATE, 2), "active", "evacuate: refused action.no_host", context=fenced(2)),
    case(
        rests(spec=SMALL),
        wants(K.MIGRATE, 3, expected_flavor="old"),
        "active",
        "migrate: refused instance.flavor_changed",
    ),
    case(rests(spec=SMALL), wants(K.MIGRATE, 3, expected_flavor="small"), "claiming/preparing", "migrate: claiming"),
    case(rests(spec=SMALL), wants(K.MIGRATE, 3), "claiming/preparing", "migrate: claiming"),
    case(rests(), wants(K.MIGRATE, 3, expected_flavor="old"), "claiming/preparing", "migrate: claiming"),
    case(rests(spec=SMALL), wants(K.STOP, expected_flavor="old"), "changing", "stop 2@2", "stop: changing"),
    case(
        rests(spec=SMALL),
        wants(K.REBUILD, spec=SPEC, expected_flavor="old"),
        "active",
        "rebuild: refused instance.flavor_changed",
    ),
    case(rests(spec=TIED), wants(K.MIGRATE, 3), "claiming/preparing", "migrate: claiming"),
    case(rests(spec=TIED), wants(K.MIGRATE, 3, to_cell="c2"), "active", "migrate: refused action.across_cells"),
    case(rests(spec=HOLDS), wants(K.MIGRATE, 3, to_cell="c2"), "active", "migrate: refused action.across_cells"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), AT_REST)
def test_a_request_about_what_rests(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


OFFLOADED: list[Case] = [
    case(rests(Power.SHELVED, S.OFFLOADED), wants(K.START), "offloaded", "start: refused instance.offloaded"),
    case(rests(Power.SHELVED, S.OFFLOADED), wants(K.UNSHELVE), "offloaded", "unshelve: refused action.no_host"),
    case(rests(Power.SHELVED, S.OFFLOADED), wants(K.UNSHELVE, 3), "claiming/preparing", "unshelve: claiming"),
    case(
        rests(Power.SHELVED, S.OFFLOADED),
        wants(K.UNSHELVE, 3),
        "releasing/offloaded",
        "unshelve: rolling-back",
        context=fenced(3),
    ),
    case(
        rests(Power.SHELVED, S.OFFLOADED, spec=SMALL),
        wants(K.UNSHELVE, 3, expected_flavor="old"),
        "offloaded",
        "unshelve: refused instance.flavor_changed",
    ),
    case(
        rests(Power.SHELVED, S.OFFLOADED, spec=TIED),
        wants(K.UNSHELVE, 3, to_cell="c2"),
        "offloaded",
        "unshelve: refused action.across_cells",
    ),
    case(
        rests(Power.SHELVED, S.OFFLOADED, spec=TIED), wants(K.UNSHELVE, 3), "claiming/preparing", "unshelve: claiming"
    ),
    case(rests(Power.SHELVED, S.OFFLOADED, ended=ENDED_START), wants(K.START), "offloaded", "start: done"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), OFFLOADED)
def test_a_request_about_what_is_offloaded(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


RESIZED: list[Case] = [
    case(moving(S.RESIZED), wants(K.STOP), "resized", "stop: refused instance.resized"),
    case(moving(S.RESIZED), wants(K.ABORT), "resized", "abort: refused instance.resized"),
    case(moving(S.RESIZED), wants(K.CONFIRM, migration=ACTION), "destroying/active", "destroy 1@1"),
    case(moving(S.RESIZED), wants(K.CONFIRM, migration=UUID), "resized", "confirm: refused action.none"),
    case(
        moving(S.RESIZED, ended=(EndedAction(OTHER, K.CONFIRM, ActionState.REFUSED),)),
        wants(K.CONFIRM),
        "resized",
        "confirm: refused",
    ),
    case(moving(S.RESIZED, queried=False), wants(K.CONFIRM), "destroying/active", "destroy 1@1"),
    case(in_place(S.RESIZED), wants(K.CONFIRM), "releasing/active", context=SERVICE_DOWN),
    case(
        moving(S.RESIZED),
        wants(K.CONFIRM),
        "destroying/active",
        "destroy 1@1",
        "confirm: changing action.source_silent",
        context=SERVICE_DOWN,
    ),
    case(
        moving(S.RESIZED), wants(K.CONFIRM), "destroying/active", "destroy 1@1", context=fenced(1, context=SERVICE_DOWN)
    ),
    case(moving(S.RESIZED), wants(K.CONFIRM), "destroying/active", "destroy 1@1"),
    case(moving(S.RESIZED), wants(K.REVERT), "resized"),
    case(moving(S.RESIZED, action=BY_REVERT), wants(K.REVERT), "resized"),
    case(
        moving(S.RESIZED, action=BY_REVERT),
        request(K.CONFIRM, request_id=UUID),
        "resized",
        "confirm: refused instance.busy",
    ),
    case(
        moving(S.RESIZED, action={"rollback_code": "host.fenced"}), wants(K.CONFIRM), "destroying/active", "destroy 1@1"
    ),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), RESIZED)
def test_a_request_about_what_has_moved(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


UNDER_WAY: list[Case] = [
    case(at_source(), wants(K.ABORT), "claiming/preparing"),
    case(moving(S.PREPARING), wants(K.ABORT), "reverting", "migrate: rolling-back"),
    case(moving(S.HANDING_OVER), wants(K.ABORT), "reverting", "migrate: rolling-back"),
    case(moving(S.PREPARING), wants(K.STOP), "preparing", "stop: refused instance.busy"),
    case(moving(S.PREPARING), wants(K.ABORT, migration=ACTION), "reverting", "migrate: rolling-back"),
    case(moving(S.PREPARING), wants(K.ABORT, migration=UUID), "preparing", "abort: refused action.too_late"),
    case(moving(S.PREPARING, ended=REFUSED_ABORT), wants(K.ABORT), "preparing", "abort: refused x"),
    case(
        moving(S.PREPARING, action={"ending_request_id": UUID, "ending_kind": K.ABORT}),
        wants(K.ABORT),
        "preparing",
        "abort: refused action.too_late",
    ),
    case(unshelving(S.PREPARING), wants(K.ABORT), "preparing", "abort: refused action.too_late"),
    case(at_source({"delete": True}), wants(K.ABORT), "claiming/preparing", "abort: refused instance.deleted"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), UNDER_WAY)
def test_a_request_about_what_moves(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)
