"""The way back of a move, commands that are repeated, and changes in place: a row for each condition that decides."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.contracts.actions import MACHINE_ABSENT, ActionKind, ActionState
from bus.contracts.operations import EvacuationPolicy, FenceState
from bus.contracts.placement import Release
from cell_conductor.engine import MAX_ROUNDS
from cell_conductor.placement_client import PendingRequest
from cell_conductor.state import events as e
from cell_conductor.state.events import SourceQuery
from cell_conductor.state.instance import EndedAction, Instance, Power, State
from cell_conductor.state.step import StepContext
from cell_conductor.transition import step
from tests.unit.cell_conductor.move_scenario import ACTION, OTHER, SERVICE_DOWN, request, seen
from tests.unit.cell_conductor.records import (
    BY_REVERT,
    GONE,
    ON_1,
    ON_2,
    ON_3,
    SOURCE_GONE,
    Case,
    after,
    answer,
    case,
    changing,
    fenced,
    in_place,
    moving,
    outcome,
    record,
    restarting,
    unshelving,
)
from tests.unit.cell_conductor.scenario import PATIENCE, SPEC, UUID, host
from tests.unit.cell_conductor.world import opened

K, S = ActionKind, State
BY_FENCE: dict[str, Any] = {"rollback_code": "host.fenced"}
BY_CONFIRM: dict[str, Any] = {"ending_request_id": OTHER, "ending_kind": K.CONFIRM, "answered": True}
LATE = e.TimedOut(at=220.0)
RELEASED = e.Released(at=220.0)
UNSEEN = e.SourceAnswered(at=211.0, query=ANY, code="action.source_lost")
FENCED = e.HostFenced(at=220.0, host_uuid=host(2))


def wants(kind: ActionKind) -> e.ActionRequested:
    return request(kind, request_id=OTHER)


def restarts() -> Instance:
    """On a fenced destination, with a policy that does not wait for a person."""
    waits = moving(S.RESIZED, action=BY_FENCE)
    return replace(waits, spec=replace(SPEC, on_host_failure=EvacuationPolicy.RESTART))


def lifting(n: int) -> StepContext:
    """Hosts 1 and 2 were fenced, and this one's fence is being lifted."""
    context = fenced(1, 2)
    taken_back = replace(context.fences[host(n)], state=FenceState.UNFENCING)
    return replace(context, fences={**context.fences, host(n): taken_back})


CONFIRMED = "destroying/active", "destroy 1@1", "migrate: confirmed"


def reverted(attempt: int) -> e.Reverted:
    return e.Reverted(at=221.0, attempt=attempt)


def given_up(kind: ActionKind) -> Instance:
    """Nothing is left of it but its claim."""
    return unshelving(S.RELEASING, S.OFFLOADED, {"rollback_code": "x", "kind": kind})


SOURCES: list[Case] = [
    case(moving(S.RESIZED, action=BY_REVERT), seen(), "reverting", "migrate: rolling-back"),
    case(
        moving(S.RESIZED, action={**BY_REVERT, "finishing": True}),
        seen(),
        "destroying/reverting",
        "destroy 2@2",
        "migrate: rolling-back",
    ),
    case(moving(S.RESIZED, action=BY_REVERT), seen(SourceQuery(host(1), "s1", 4, 1)), "resized"),
    case(moving(S.RESIZED), seen(), "resized"),
    case(moving(S.RESIZED), seen(), "resized"),
    case(moving(S.RESIZED, action=BY_REVERT), UNSEEN, "resized", "revert: refused action.source_lost"),
    case(
        moving(S.RESIZED, action=BY_REVERT),
        seen(),
        "resized",
        "revert: refused action.source_fenced",
        context=fenced(1),
    ),
    case(moving(S.RESIZED, action=BY_REVERT), seen(), "reverting", "migrate: rolling-back", context=fenced(2)),
    case(moving(S.RESIZED, action=BY_FENCE), seen(), "reverting", "migrate: rolling-back", context=fenced(2)),
    case(moving(S.RESIZED, action=BY_FENCE), seen(), "resized", context=fenced(1, 2)),
    case(moving(S.RESIZED, action=BY_FENCE), seen(), "resized"),
    case(moving(S.RESIZED, action=BY_FENCE), UNSEEN, "resized", context=fenced(2)),
    case(restarts(), UNSEEN, "resized", context=fenced(2)),
    case(restarts(), UNSEEN, "resized"),
    case(restarts(), replace(UNSEEN, code="action.source_silent"), "resized", context=fenced(2)),
    case(restarts(), replace(UNSEEN, code="action.source_unreported"), "resized", context=fenced(2)),
    case(restarts(), seen(), *CONFIRMED, context=fenced(1, 2)),
    case(restarts(), LATE, *CONFIRMED, context=fenced(1, 2)),
    case(restarts(), LATE, "resized", context=lifting(1)),
    case(restarts(), seen(), "resized", context=lifting(1)),
    case(restarts(), LATE, "resized", context=lifting(2)),
    case(restarts(), seen(), "resized", context=lifting(2)),
    case(restarts(), LATE, "resized", context=fenced(2)),
    case(restarts(), seen(), "reverting", "migrate: rolling-back", context=fenced(2)),
    case(moving(S.RESIZED, action=BY_FENCE), UNSEEN, "resized"),
    case(in_place(S.RESIZED, action=BY_REVERT), seen(), "destroying/reverting", "resize 1@1", "resize: rolling-back"),
    case(moving(S.RESIZED), wants(K.REVERT), "resized"),
    case(moving(S.RESIZED), wants(K.REVERT), "resized", "revert: refused action.source_fenced", context=fenced(1)),
    case(moving(S.RESIZED), wants(K.REVERT), "resized", context=fenced(2)),
    case(moving(S.RESIZED), FENCED, "resized", context=fenced(2)),
    case(moving(S.RESIZED, action=BY_REVERT), FENCED, "resized", context=fenced(2)),
    case(moving(S.RESIZED, action=BY_FENCE), LATE, "resized", context=fenced(2)),
    case(moving(S.RESIZED, action=BY_FENCE), LATE, "resized"),
    case(moving(S.RESIZED, action=BY_FENCE), wants(K.CONFIRM), "destroying/active", "destroy 1@1", context=fenced(2)),
    case(moving(S.RESIZED, action=BY_FENCE), wants(K.REVERT), "resized", context=fenced(2)),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), SOURCES)
def test_the_answer_about_a_source(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


UNDONE: list[Case] = [
    case(*answer(in_place(S.DESTROYING, S.REVERTING), 1), "reverting"),
    case(
        in_place(S.DESTROYING, S.REVERTING),
        replace(answer(in_place(S.DESTROYING), 1)[1], change_number=4),
        "destroying/reverting",
    ),
    case(*answer(in_place(S.DESTROYING, S.REVERTING), 1, done=False, code="x"), "destroying/reverting"),
    case(*answer(in_place(S.DESTROYING, S.REVERTING), 1, done=False, code=MACHINE_ABSENT), "reverting"),
    case(*answer(moving(S.DESTROYING, S.REVERTING), 2), "destroying/reverting"),
    case(moving(S.DESTROYING, S.REVERTING), GONE, "reverting"),
    case(moving(S.DESTROYING, S.REVERTING), SOURCE_GONE, "destroying/reverting"),
    case(in_place(S.DESTROYING, S.REVERTING), replace(GONE, attempt=1, host_uuid=host(1)), "destroying/reverting"),
    case(unshelving(S.DESTROYING, S.REVERTING), GONE, "releasing/offloaded"),
    case(moving(S.REVERTING), reverted(4), "reverting"),
    case(moving(S.REVERTING), reverted(5), "active", "migrate: failed"),
    case(
        moving(S.REVERTING, action={"handed_over": True}),
        reverted(5),
        "restarting",
        "start 1@1",
        "migrate: rolling-back",
    ),
    case(
        moving(S.REVERTING, action={"handed_over": True, "power": Power.STOPPED}),
        reverted(5),
        "active",
        "migrate: failed",
    ),
    case(*answer(restarting(), 1, runs=True), "active", "migrate: failed x"),
    case(restarting(change_number=5), replace(answer(restarting(), 1)[1], change_number=4), "restarting"),
    case(*answer(restarting(), 1, done=False, code="x"), "restarting"),
    case(*answer(restarting(), 1, done=False, runs=True, code="x"), "active", "migrate: failed x"),
    case(*answer(restarting(), 1, done=False, runs=False, code="x"), "active", "migrate: failed x"),
    case(*answer(restarting(), 1, done=False, runs=False, code=MACHINE_ABSENT), "active", "migrate: failed x"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), UNDONE)
def test_a_step_of_the_way_back(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


AGAIN: list[Case] = [
    case(
        moving(S.DESTROYING, S.ACTIVE, BY_CONFIRM),
        LATE,
        "destroying/active",
        "destroy 1@1",
        "confirm: changing action.source_silent",
    ),
    case(moving(S.DESTROYING, S.ACTIVE), LATE, "destroying/active", "destroy 1@1"),
    case(
        moving(S.DESTROYING, S.ACTIVE, BY_CONFIRM),
        LATE,
        "destroying/active",
        "destroy 1@1",
        "confirm: changing action.source_silent",
        context=SERVICE_DOWN,
    ),
    case(
        moving(S.DESTROYING, S.REVERTING, {**BY_REVERT, "answered": True}, queried=False),
        LATE,
        "destroying/reverting",
        "destroy 2@2",
        "revert: rolling-back action.destination_silent",
    ),
    case(
        moving(
            S.DESTROYING,
            S.REVERTING,
            {**BY_REVERT, "rollback_code": "action.aborted", "ending_kind": K.ABORT},
            queried=False,
        ),
        LATE,
        "destroying/reverting",
        "destroy 2@2",
        "migrate: failed action.aborted",
        "abort: rolling-back action.destination_silent",
    ),
    case(
        moving(S.DESTROYING, S.REVERTING, queried=False), LATE, "destroying/reverting", "destroy 2@2", "migrate: failed"
    ),
    case(moving(S.DESTROYING, S.REVERTING), LATE, "destroying/reverting", "destroy 2@2", "migrate: failed"),
    case(
        moving(S.DESTROYING, S.REVERTING, {"answered": True}, queried=False),
        LATE,
        "destroying/reverting",
        "destroy 2@2",
    ),
    case(in_place(S.DESTROYING, S.REVERTING), LATE, "destroying/reverting", "resize 1@1", "resize: failed"),
    case(unshelving(S.DESTROYING, S.REVERTING), LATE, "destroying/reverting", "destroy 2@2", "unshelve: failed"),
    case(record(S.DESTROYING, S.DELETED), LATE, "destroying/deleted", "destroy 2@2"),
    case(moving(S.DESTROYING, S.DELETED, {"source": None}), LATE, "destroying/deleted", "destroy 2@2"),
    case(moving(S.DESTROYING, S.DELETED), LATE, "destroying/deleted", "destroy 2@2", "destroy 1@1"),
    case(moving(S.DESTROYING, S.DELETED, {"source_destroyed": True}), LATE, "destroying/deleted", "destroy 2@2"),
    case(moving(S.DESTROYING, S.DELETED, {"current_destroyed": True}), LATE, "destroying/deleted", "destroy 1@1"),
    case(changing(K.STOP), LATE, "changing", "stop 2@2", "stop: failed change.timeout"),
    case(changing(K.STOP, answered=True), LATE, "changing", "stop 2@2"),
    case(restarting(), LATE, "restarting", "start 1@1", "migrate: failed x"),
    case(
        restarting(answered=True, ending_request_id=OTHER, ending_kind=K.REVERT),
        LATE,
        "restarting",
        "start 1@1",
        "revert: rolling-back action.source_silent",
    ),
    case(
        restarting(ending_request_id=OTHER, ending_kind=K.ABORT),
        LATE,
        "restarting",
        "start 1@1",
        "migrate: failed x",
        "abort: rolling-back action.source_silent",
    ),
    case(moving(S.FINISHING, queried=False), LATE, "finishing", "end 2@2"),
    case(unshelving(S.DESTROYING, S.OFFLOADED), LATE, "destroying/offloaded", "destroy 2@2"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), AGAIN)
def test_what_is_not_answered_in_time(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


CHANGES: list[Case] = [
    case(*answer(changing(K.STOP), 2), "active", "stop: done"),
    case(changing(K.STOP, change_number=5), replace(answer(changing(K.STOP), 2)[1], change_number=4), "changing"),
    case(*answer(changing(K.STOP), 2, done=False), "changing", "stop: failed change.failed"),
    case(*answer(changing(K.STOP), 2, done=False, runs=True), "active", "stop: failed change.failed"),
    case(*answer(changing(K.STOP), 2, done=False, runs=True, code="x"), "active", "stop: failed x"),
    case(*answer(changing(K.SHELVE), 2, image="new"), "active", "shelve: done"),
    case(
        *answer(changing(K.SHELVE, offload=True), 2, image="new"),
        "destroying/offloaded",
        "destroy 2@2",
        "shelve: changing",
    ),
    case(*answer(changing(K.SHELVE, offload=True, answered=True), 2, image="new"), "active", "shelve: changing"),
    case(given_up(K.SHELVE), replace(RELEASED, consumer=UUID), "offloaded", "shelve: done"),
    case(given_up(K.SHELVE), RELEASED, "offloaded", "shelve: done"),
    case(given_up(K.SHELVE), replace(RELEASED, consumer=ACTION), "releasing/offloaded"),
    case(given_up(K.UNSHELVE), RELEASED, "offloaded", "unshelve: failed x"),
    case(given_up(K.MIGRATE), RELEASED, "offloaded", "migrate: failed x"),
    case(given_up(K.RESIZE), RELEASED, "offloaded", "resize: failed x"),
    case(given_up(K.EVACUATE), RELEASED, "offloaded", "evacuate: done"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), CHANGES)
def test_the_end_of_a_change(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


SLOW = replace(PATIENCE, answer_timeout_s=50.0, destroy_retry_s=40.0)
REFUSED = (EndedAction(OTHER, K.REVERT, ActionState.REFUSED, "action.source_lost"),)
RESTED = {
    "sequence": 21,
    "ended": REFUSED,
    "move_rollback_code": "",
    "move_ending_request_id": "",
    "move_ending_kind": None,
}


@pytest.mark.parametrize(
    ("before", "event", "context", "changes"),
    [
        (
            moving(S.RESIZED),
            wants(K.REVERT),
            SLOW,
            {
                "deadline": 350.0,
                "cause": OTHER,
                "change_number": 200000,
                "move_change_number": 200000,
                **{f"move_{name}": value for name, value in BY_REVERT.items()},
            },
        ),
        (moving(S.RESIZED, action=BY_REVERT), UNSEEN, PATIENCE, {**RESTED, "deadline": None}),
        (
            moving(S.RESIZED, action={**BY_REVERT, "auto_confirm_s": 5.0}),
            UNSEEN,
            PATIENCE,
            {**RESTED, "deadline": 95.0},
        ),
        (moving(S.RESIZED, action=BY_FENCE), UNSEEN, fenced(2), {"deadline": 241.0}),
        (moving(S.RESIZED, action=BY_FENCE), UNSEEN, PATIENCE, {"deadline": None, "move_rollback_code": ""}),
        (
            moving(S.RESIZED, action=BY_FENCE),
            LATE,
            fenced(2),
            {"deadline": 250.0, "change_number": 220000, "move_change_number": 220000},
        ),
        (
            moving(S.RESIZED, action=BY_REVERT),
            seen(service="s2"),
            PATIENCE,
            {
                "state": S.REVERTING,
                "since": 211.0,
                "deadline": 226.0,
                "sequence": 21,
                "queried": False,
                "move_source": replace(ON_1, service="s2"),
            },
        ),
        (
            in_place(S.RESIZED, action=BY_REVERT),
            seen(service="s2"),
            PATIENCE,
            {
                "state": S.DESTROYING,
                "next_state": S.REVERTING,
                "since": 211.0,
                "deadline": 241.0,
                "sequence": 21,
                "queried": False,
                "change_number": 211000,
                "move_change_number": 211000,
                "move_source": replace(ON_1, service="s2"),
                "selections": (ON_1, replace(ON_1, service="s2"), ON_3),
            },
        ),
        (moving(S.RESIZED), seen(), PATIENCE, {}),
        (
            moving(S.RESIZED),
            FENCED,
            fenced(2),
            {
                "deadline": 250.0,
                "change_number": 220000,
                "move_change_number": 220000,
                "move_rollback_code": "host.fenced",
                "move_rollback_reason": "host host-2 was fenced",
            },
        ),
        (moving(S.RESIZED, action=BY_REVERT), FENCED, fenced(2), {}),
        (
            changing(K.SHELVE, answered=True),
            LATE,
            PATIENCE,
            {"deadline": 820.0, "move_step_timeout_s": 600.0, "change_number": 220000, "move_change_number": 220000},
        ),
        (
            changing(K.SHELVE, answered=True, step_timeout_s=86_000.0),
            LATE,
            PATIENCE,
            {
                "deadline": 86_620.0,
                "move_step_timeout_s": 86_400.0,
                "change_number": 220000,
                "move_change_number": 220000,
            },
        ),
        (
            restarting(answered=True),
            LATE,
            PATIENCE,
            {"deadline": 820.0, "move_step_timeout_s": 600.0, "change_number": 220000, "move_change_number": 220000},
        ),
        (*answer(replace(restarting(), deadline=9e4), 1, done=False), PATIENCE, {"deadline": 314.0}),
        (*answer(replace(restarting(), deadline=230.0), 1, done=False), PATIENCE, {}),
        (*answer(replace(changing(K.STOP, answered=True), deadline=9e4), 2, done=False), PATIENCE, {"deadline": 314.0}),
        (
            *answer(restarting(), 1, done=False, runs=True, code="no"),
            PATIENCE,
            {
                "state": S.ACTIVE,
                "since": 202.0,
                "deadline": None,
                "queried": False,
                "sequence": 21,
                "action": None,
                "image": "",
                "ended_attempts": (4,),
                "ended": (
                    EndedAction(
                        ACTION, K.MIGRATE, ActionState.FAILED, "x", "why; and it could not be started again: no"
                    ),
                ),
            },
        ),
        (
            *answer(changing(K.START), 2, done=False, runs=False, code="x"),
            PATIENCE,
            {
                "state": S.ACTIVE,
                "since": 202.0,
                "deadline": None,
                "queried": False,
                "sequence": 21,
                "action": None,
                "selections": (ON_2,),
                "selection_index": 0,
                "ended": (EndedAction(ACTION, K.START, ActionState.FAILED, "x"),),
                "ended_attempts": (4,),
            },
        ),
        (
            *answer(replace(changing(K.STOP), power=Power.RUNNING), 2, done=False, runs=False, code="x"),
            PATIENCE,
            {
                "state": S.ACTIVE,
                "since": 202.0,
                "deadline": None,
                "queried": False,
                "sequence": 21,
                "action": None,
                "selections": (ON_2,),
                "selection_index": 0,
                "power": Power.STOPPED,
                "ended": (EndedAction(ACTION, K.STOP, ActionState.FAILED, "x"),),
                "ended_attempts": (4,),
            },
        ),
    ],
)
def test_a_step_of_the_way_back_changes_this_of_its_record(
    before: Instance, event: e.Event, context: StepContext, changes: dict[str, Any]
) -> None:
    assert step(before, event, context).instance == after(before, changes)


QUERY = PendingRequest(moving(S.RESIZED, action=BY_REVERT), SourceQuery(host(1), "s1", 1, 5))
RELEASE = PendingRequest(moving(S.RESIZED, action=BY_REVERT), Release(consumer=UUID))


@pytest.mark.parametrize(
    ("following", "looked_up", "errors"),
    [([], [], 0), ([QUERY], [UUID], 0), ([RELEASE], [], 1), ([RELEASE, QUERY], [UUID], 1)],
)
async def test_what_follows_the_last_round_of_answers_is_not_lost(
    following: list[PendingRequest], looked_up: list[str], errors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    conductor, rounds = await opened(), [[RELEASE]] * (MAX_ROUNDS - 1) + [following]
    engine: Any = conductor.engine

    async def answer(requests: list[PendingRequest]) -> list[PendingRequest]:
        return requests

    async def apply(_: object) -> list[PendingRequest]:
        return rounds.pop(0)

    monkeypatch.setattr(engine._placement, "send", answer)
    monkeypatch.setattr(engine, "_apply", apply)
    with capture_logs() as logged:
        await engine._request_placement([RELEASE])
    assert not rounds and len([one for one in logged if one["event"] == "instance.unresolved"]) == errors
    assert sorted(engine._lookups._sources) == looked_up
