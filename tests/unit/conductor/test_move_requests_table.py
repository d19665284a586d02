"""Requests about what rests, is offloaded, has moved or is moving: a row for each condition that decides."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.moves import MoveKind, MoveState
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import EndedMove, Instance, Power, State
from cell_conductor.domain.steps import StepContext
from tests.unit.conductor.move_scenario import MOVE, OTHER, SERVICE_DOWN, request
from tests.unit.conductor.records import (
    BY_REVERT,
    IN_DOUBT,
    Case,
    at_source,
    case,
    fenced,
    in_place,
    moving,
    outcome,
    record,
    unshelving,
)
from tests.unit.conductor.scenario import SPEC, UUID

K, S = MoveKind, State
REFUSED_ABORT = (EndedMove(OTHER, K.ABORT, MoveState.REFUSED, "x"),)
ENDED_START = (EndedMove(OTHER, K.START, MoveState.DONE),)
SMALL = replace(SPEC, flavor="small")
TIED, HOLDS = replace(SPEC, networks=("n",)), replace(SPEC, volumes=("v",))


def rests(power: Power = Power.RUNNING, state: State = S.ACTIVE, **other: Any) -> Instance:
    return record(state, power=power, **{"queried": False, **other})


def wants(kind: MoveKind, *hosts: int, **fields: Any) -> e.MoveRequested:
    return request(kind, *hosts, request_id=OTHER, **fields)


AT_REST: list[Case] = [
    case(rests(), wants(K.CONFIRM), "active", "confirm: refused move.none"),
    case(rests(), wants(K.REVERT), "active", "revert: refused move.none"),
    case(rests(), wants(K.ABORT), "active", "abort: refused move.none"),
    case(rests(), wants(K.OFFLOAD), "active", "offload: refused instance.not_shelved"),
    case(rests(Power.STOPPED, ended=ENDED_START), wants(K.START), "active", "start: done"),
    case(rests(Power.SHELVED), wants(K.CONFIRM), "active", "confirm: refused move.none"),
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
    case(rests(), wants(K.UNSHELVE), "active", "unshelve: refused instance.not_shelved"),
    case(rests(Power.STOPPED), wants(K.UNSHELVE), "active", "unshelve: refused instance.not_shelved"),
    case(rests(), wants(K.SHELVE), "changing", "snapshot 2@2", "shelve: changing"),
    case(rests(), wants(K.RESCUE), "changing", "rescue 2@2", "rescue: changing"),
    case(rests(), wants(K.UNRESCUE), "changing", "unrescue 2@2", "unrescue: changing"),
    case(rests(Power.STOPPED), wants(K.UNRESCUE), "active", "unrescue: refused instance.not_rescued"),
    case(rests(), wants(K.REBUILD), "changing", "rebuild 2@2", "rebuild: changing"),
    case(rests(), wants(K.MIGRATE), "active", "migrate: refused move.no_host"),
    case(rests(), wants(K.MIGRATE, 2), "active", "migrate: refused move.no_host"),
    case(rests(), wants(K.MIGRATE, 2, 3), "claiming/preparing", "migrate: claiming"),
    case(rests(), wants(K.RESIZE, 2), "claiming/preparing", "resize: claiming"),
    case(rests(), wants(K.LIVE_MIGRATE, 3), "claiming/preparing", "live-migrate: claiming"),
    case(rests(Power.STOPPED), wants(K.LIVE_MIGRATE, 3), "active", "live-migrate: refused instance.not_running"),
    case(rests(Power.STOPPED), wants(K.MIGRATE, 3), "claiming/preparing", "migrate: claiming"),
    case(rests(), wants(K.EVACUATE, 3), "active", "evacuate: refused evacuate.not_fenced"),
    case(rests(), wants(K.EVACUATE, 3), "claiming/preparing", "evacuate: claiming", context=fenced(2)),
    case(rests(), wants(K.EVACUATE, 2), "active", "evacuate: refused move.no_host", context=fenced(2)),
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
    case(rests(spec=TIED), wants(K.MIGRATE, 3, to_cell="c2"), "active", "migrate: refused move.across_cells"),
    case(rests(spec=HOLDS), wants(K.MIGRATE, 3, to_cell="c2"), "active", "migrate: refused move.across_cells"),
    case(rests(), wants(K.MIGRATE, 3, to_cell="c2"), "claiming/preparing", "migrate: claiming"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), AT_REST)
def test_a_request_about_what_rests(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


OFFLOADED: list[Case] = [
    case(rests(Power.SHELVED, S.OFFLOADED), wants(K.START), "offloaded", "start: refused instance.offloaded"),
    case(rests(Power.SHELVED, S.OFFLOADED), wants(K.UNSHELVE), "offloaded", "unshelve: refused move.no_host"),
    case(rests(Power.SHELVED, S.OFFLOADED), wants(K.UNSHELVE, 3), "claiming/preparing", "unshelve: claiming"),
    case(
        rests(Power.SHELVED, S.OFFLOADED),
        wants(K.UNSHELVE, 3),
        "releasing/offloaded",
        "unshelve: undoing",
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
        "unshelve: refused move.across_cells",
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
    case(moving(S.RESIZED), wants(K.CONFIRM, migration=MOVE), "destroying/active", "destroy 1@1"),
    case(moving(S.RESIZED), wants(K.CONFIRM, migration=UUID), "resized", "confirm: refused move.none"),
    case(
        moving(S.RESIZED, ended=(EndedMove(OTHER, K.CONFIRM, MoveState.REFUSED),)),
        wants(K.CONFIRM),
        "resized",
        "confirm: refused",
    ),
    case(moving(S.RESIZED, doubted=True, queried=False), wants(K.CONFIRM), "destroying/active", "destroy 1@1"),
    case(
        moving(S.RESIZED, doubted=True, queried=False),
        wants(K.CONFIRM),
        "resized",
        "end 2@2",
        "end 1@1",
        "confirm: refused move.in_doubt",
        context=IN_DOUBT,
    ),
    case(moving(S.RESIZED, queried=False), wants(K.CONFIRM), "destroying/active", "destroy 1@1", context=IN_DOUBT),
    case(in_place(S.RESIZED, doubted=True), wants(K.CONFIRM), "releasing/active", context=IN_DOUBT),
    case(in_place(S.RESIZED), wants(K.CONFIRM), "releasing/active", context=SERVICE_DOWN),
    case(
        moving(S.RESIZED),
        wants(K.CONFIRM),
        "destroying/active",
        "destroy 1@1",
        "confirm: changing move.source_silent",
        context=SERVICE_DOWN,
    ),
    case(
        moving(S.RESIZED), wants(K.CONFIRM), "destroying/active", "destroy 1@1", context=fenced(1, context=SERVICE_DOWN)
    ),
    case(moving(S.RESIZED), wants(K.CONFIRM, room={"VCPU": -5}), "destroying/active", "destroy 1@1"),
    case(moving(S.RESIZED), wants(K.REVERT, room={"VCPU": -1}), "resized"),
    case(moving(S.RESIZED), wants(K.REVERT, room={"VCPU": -2}), "resized", "revert: refused quota.exceeded"),
    case(moving(S.RESIZED, move=BY_REVERT), wants(K.REVERT), "resized"),
    case(
        moving(S.RESIZED, move=BY_REVERT),
        request(K.CONFIRM, request_id=UUID),
        "resized",
        "confirm: refused instance.busy",
    ),
    case(moving(S.RESIZED, move={"lost_code": "host.fenced"}), wants(K.CONFIRM), "destroying/active", "destroy 1@1"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), RESIZED)
def test_a_request_about_what_has_moved(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


UNDER_WAY: list[Case] = [
    case(at_source(), wants(K.ABORT), "claiming/preparing"),
    case(moving(S.PREPARING), wants(K.ABORT), "reverting", "migrate: undoing"),
    case(moving(S.HANDING_OVER), wants(K.ABORT), "reverting", "migrate: undoing"),
    case(moving(S.PREPARING), wants(K.STOP), "preparing", "stop: refused instance.busy"),
    case(moving(S.PREPARING), wants(K.ABORT, migration=MOVE), "reverting", "migrate: undoing"),
    case(moving(S.PREPARING), wants(K.ABORT, migration=UUID), "preparing", "abort: refused move.too_late"),
    case(moving(S.PREPARING, ended=REFUSED_ABORT), wants(K.ABORT), "preparing", "abort: refused x"),
    case(
        moving(S.PREPARING, move={"by": UUID, "by_kind": K.ABORT}),
        wants(K.ABORT),
        "preparing",
        "abort: refused move.too_late",
    ),
    case(unshelving(S.PREPARING), wants(K.ABORT), "preparing", "abort: refused move.too_late"),
    case(at_source({"delete": True}), wants(K.ABORT), "claiming/preparing", "abort: refused instance.deleted"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), UNDER_WAY)
def test_a_request_about_what_moves(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)
