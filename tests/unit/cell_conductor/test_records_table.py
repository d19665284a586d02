"""What each step of a build and of a move changes of its record, and that it changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionKind, ActionState
from bus.contracts.build import AttemptRecord
from cell_conductor.state import events as e
from cell_conductor.state.instance import EndedAction, Instance, Power, State
from cell_conductor.transition import step
from tests.unit.cell_conductor import move_scenario as moves
from tests.unit.cell_conductor.move_scenario import ACTION, OTHER, request
from tests.unit.cell_conductor.records import (
    GONE,
    LEAVES,
    ON_1,
    ON_2,
    ON_3,
    after,
    answer,
    at_source,
    changing,
    in_place,
    moving,
    record,
    restarting,
)
from tests.unit.cell_conductor.scenario import (
    DELETE,
    PATIENCE,
    RELEASED,
    TIMED_OUT,
    answering,
    claimed,
    failed,
    refused,
    spawned,
)

RESTS: dict[str, Any] = {"next_state": None, "deadline": None, "queried": False}


def tried(n: int, outcome: str, at: float, *, attempt: int = 2, code: str = "", reason: str = "") -> AttemptRecord:
    return AttemptRecord(attempt=attempt, host=f"host-{n}", outcome=outcome, code=code, reason=reason, at=at)


def numbered(of_build: bool = True) -> dict[str, Any]:
    """One announcement more."""
    return {"sequence": 21, **({"build_sequence": 20} if of_build else {})}


def waits(state: State, next_state: State | None, at: float, **other: object) -> dict[str, Any]:
    """For placement or a host, whose answer is awaited for `deadline`."""
    return {"state": state, "next_state": next_state, "since": at, **other}


def done(
    kind: ActionKind, state: ActionState = ActionState.DONE, code: str = "", reason: str = ""
) -> tuple[EndedAction, ...]:
    return (EndedAction(ACTION if kind is not ActionKind.CONFIRM else OTHER, kind, state, code, reason),)


ABORTED = {"ending_request_id": OTHER, "ending_kind": ActionKind.ABORT}
FULL = tried(3, "not_claimed", 111.0, attempt=5, code="no_capacity")
FAILED_1 = tried(2, "failed", 110.0, code="spawn.no_disk", reason="full")
NONE_LEFT = "1 of 3 hosts tried, none is left. host-3: not_claimed, no_capacity"
BUILDING, CLAIMING, RELEASING, DESTROYING = State.BUILDING, State.CLAIMING, State.RELEASING, State.DESTROYING


@pytest.mark.parametrize(
    ("before", "event", "changes"),
    [
        (record(BUILDING), failed(2), waits(CLAIMING, BUILDING, 110.0, deadline=125.0, history=(FAILED_1,))),
        (
            record(BUILDING),
            failed(2, final=True),
            waits(RELEASING, State.FAILED, 110.0, deadline=125.0, code="spawn.no_disk", reason="full",
                  history=(FAILED_1,)),
        ),
        (record(BUILDING, queried=False), TIMED_OUT, {"queried": True, "deadline": 180.0}),
        (
            record(BUILDING),
            TIMED_OUT,
            waits(CLAIMING, BUILDING, 170.0, deadline=185.0,
                  history=(tried(2, "timed_out", 170.0, code="spawn.timeout", reason="no answer within 60 s"),)),
        ),
        (
            record(BUILDING, queried=False),
            GONE,
            {**waits(CLAIMING, BUILDING, 310.0, deadline=325.0),
             "history": (tried(2, "failed", 310.0, code="spawn.destroyed"),)},
        ),
        (
            record(CLAIMING, BUILDING),
            claimed(5),
            {**waits(BUILDING, None, 111.0, deadline=171.0), **numbered(), "selection_index": 2, "attempt": 5,
             "consumer_generation": 9, "queried": False},
        ),
        (
            record(CLAIMING, State.DELETED),
            claimed(5),
            {"state": RELEASING, "since": 111.0, "deadline": 126.0, "selection_index": 2, "attempt": 5,
             "consumer_generation": 9},
        ),
        (
            record(CLAIMING, BUILDING),
            refused(5),
            waits(RELEASING, State.FAILED, 111.0, deadline=126.0, code="max_retries_exceeded", reason=NONE_LEFT,
                  history=(FULL,)),
        ),
        (
            record(CLAIMING, State.DELETED),
            refused(5, changed=True),
            {**numbered(), "state": State.DELETED, "next_state": None, "deadline": None, "since": 111.0},
        ),
        (record(CLAIMING, State.DELETED), refused(5), {"state": RELEASING, "since": 111.0, "deadline": 126.0}),
        (record(CLAIMING, BUILDING), e.TimedOut(at=170.0), {"deadline": 185.0}),
        (record(State.ACTIVE), DELETE, {**waits(DESTROYING, State.DELETED, 120.0, deadline=150.0), **numbered()}),
        (
            record(RELEASING, State.DELETED, action=replace(LEAVES, instance_released=True)),
            replace(RELEASED, consumer=ACTION),
            {"sequence": 22, "build_sequence": 21, "state": State.DELETED, "next_state": None, "deadline": None,
             "since": 130.0, "action": None, "ended_attempts": (1, 4),
             "ended": (EndedAction(ACTION, ActionKind.MIGRATE, ActionState.FAILED, "instance.deleted",
                                 "the instance was deleted"),)},
        ),
        (moving(RELEASING, State.FAILED), RELEASED, {"deadline": 145.0, "move_instance_released": True}),
    ],
)  # fmt: skip
def test_a_step_of_a_build_or_a_delete_changes_this_of_its_record(
    before: Instance, event: e.Event, changes: dict[str, Any]
) -> None:
    assert step(before, answering(before, event), PATIENCE).instance == after(before, changes)


PREPARED = {"sequence": 21, "queried": False, "consumer_generation": 9, "highest_attempt": 5, "move_claimed": True}
ORDERED = {"change_number": 201000, "move_change_number": 201000, "since": 201.0, "deadline": 501.0, "next_state": None}
BACK = {**RESTS, "sequence": 21, "state": State.ACTIVE, "action": None, "since": 202.0}
SETTLED = {**BACK, "selections": (ON_2,), "selection_index": 0}
HERE_ACTIVE = (tried(2, "active", 110.0, attempt=4),)
ARRIVED = {"sequence": 21, "selections": (ON_1, ON_2), "since": 110.0, "answered": True, "queried": False,
           "move_answered": True, "move_history": HERE_ACTIVE, "ended": done(ActionKind.MIGRATE)}  # fmt: skip


@pytest.mark.parametrize(
    ("before", "event", "changes"),
    [
        (
            record(State.ACTIVE, change_number=3),
            request(ActionKind.MIGRATE, 1, 3, auto_confirm_s=7.0, step_timeout_s=8.0),
            {**waits(CLAIMING, State.PREPARING, 200.0, deadline=215.0), "selections": (ON_2, ON_1, ON_3),
             "selection_index": 0, "sequence": 21, "queried": False, "cause": ACTION,
             "action": replace(LEAVES, source=ON_2, source_attempt=2, auto_confirm_s=7.0, step_timeout_s=8.0,
                             started_at=200.0)},
        ),
        (at_source(), moves.claimed(5), {**PREPARED, **ORDERED, "state": State.PREPARING, "selection_index": 1,
         "attempt": 5}),
        (
            at_source(),
            moves.claimed(5, option=1),
            {**PREPARED, **ORDERED, "state": State.PREPARING, "selection_index": 2, "attempt": 5},
        ),
        (
            at_source(selections=(ON_1, ON_1, ON_2)),
            moves.claimed(5),
            {**PREPARED, **ORDERED, "state": State.RESIZING, "selection_index": 1},
        ),
        (
            at_source({"delete": True}),
            moves.claimed(5),
            {**waits(DESTROYING, State.DELETED, 201.0, deadline=231.0), "selection_index": 1, "attempt": 5,
             "highest_attempt": 5,
             "consumer_generation": 9, "move_claimed": True, "move_current_destroyed": True},
        ),
        (
            at_source({"ending_request_id": OTHER, "ending_kind": ActionKind.ABORT}),
            moves.claimed(5),
            {**PREPARED, **waits(State.REVERTING, None, 201.0, deadline=216.0), "selection_index": 1, "attempt": 5,
             "move_rollback_code": "action.aborted"},
        ),
        (
            at_source(),
            moves.refused(5),
            {**waits(State.REVERTING, None, 201.0, deadline=216.0), "sequence": 21, "queried": False,
             "highest_attempt": 5,
             "move_rollback_code": "max_retries_exceeded",
             "move_rollback_reason": "no host is left. host-2: not_claimed (no_capacity)",
             "move_history": (tried(2, "not_claimed", 201.0, attempt=5, code="no_capacity"),)},
        ),
        (
            *answer(moving(State.PREPARING, action={"change_number": 5}, change_number=5), 2),
            {"state": State.HANDING_OVER, "sequence": 21, "deadline": 502.0, "since": 202.0, "queried": False,
             "change_number": 202000, "move_change_number": 202000, "move_handed_over": True},
        ),
        (
            *answer(moving(State.PREPARING), 2, done=False, code="no"),
            {**waits(CLAIMING, State.PREPARING, 202.0, deadline=217.0), "sequence": 21, "queried": False,
             "move_history": (tried(2, "failed", 202.0, attempt=4, code="no"),)},
        ),
        (
            *answer(moving(State.PREPARING, selections=(ON_1, ON_2)), 2, done=False),
            {**waits(State.REVERTING, None, 202.0, deadline=217.0), "sequence": 21, "queried": False,
             "move_rollback_code": "max_retries_exceeded", "move_rollback_reason": "no host is left. host-2: failed",
             "move_history": (tried(2, "failed", 202.0, attempt=4),)},
        ),
        (
            *answer(moving(State.HANDING_OVER, action={"handed_over": True}), 1),
            {"state": State.FINISHING, "sequence": 21, "deadline": 502.0, "since": 202.0, "queried": False,
             "move_finishing": True},
        ),
        (
            *answer(moving(State.HANDING_OVER, action={"handed_over": True}), 1, done=False, runs=True, refused=True,
                    retry_other_host=True, code="no"),
            {**waits(CLAIMING, State.PREPARING, 202.0, deadline=217.0), "sequence": 21, "queried": False,
             "move_handed_over": False, "move_history": (tried(2, "failed", 202.0, attempt=4, code="no"),)},
        ),
        (
            *answer(moving(State.HANDING_OVER, action={"handed_over": True}), 1, done=False, runs=True, refused=True,
                    code="no"),
            {"state": State.REVERTING, "deadline": 217.0, "since": 202.0, "sequence": 21, "queried": False,
             "move_handed_over": False, "move_rollback_code": "no",
             "move_history": (tried(2, "failed", 202.0, attempt=4, code="no"),)},
        ),
        (
            moving(State.FINISHING, action={"finishing": True}, image="kept"),
            spawned(2),
            {**ARRIVED, "state": State.RESIZED, "deadline": None, "image": ""},
        ),
        (
            moving(State.FINISHING, action={"auto_confirm_s": 5.0}),
            spawned(2),
            {**ARRIVED, "state": State.RESIZED, "deadline": 115.0},
        ),
        (
            moving(State.FINISHING, action={"auto_confirm_s": 0.0}),
            spawned(2),
            {**ARRIVED, **waits(DESTROYING, State.ACTIVE, 110.0, deadline=140.0)},
        ),
        (
            moving(State.FINISHING, action={"finishing": True}),
            failed(2),
            {**waits(CLAIMING, State.PREPARING, 110.0, deadline=125.0), "sequence": 21, "queried": False,
             "move_finishing": False,
             "move_history": (tried(2, "failed", 110.0, attempt=4, code="spawn.no_disk", reason="full"),)},
        ),
        (
            moving(State.FINISHING, action={"finishing": True}),
            GONE,
            {**waits(CLAIMING, State.PREPARING, 310.0, deadline=325.0), "sequence": 21, "queried": False,
             "move_finishing": False,
             "move_history": (tried(2, "timed_out", 310.0, attempt=4, code="spawn.timeout",
                                    reason="no answer in time"),)},
        ),
        (
            moving(State.FINISHING, action={"finishing": True}, queried=False),
            GONE,
            {**waits(CLAIMING, State.PREPARING, 310.0, deadline=325.0), "sequence": 21, "move_finishing": False,
             "move_history": (tried(2, "failed", 310.0, attempt=4, code="spawn.timeout", reason="no answer in time"),)},
        ),
        *(
            (at_source(action), replace(moves.refused(5), outcomes=(), **why), {
                **waits(State.REVERTING, None, 201.0, deadline=216.0), "sequence": 21, "queried": False,
                 "highest_attempt": 5,
                "move_rollback_code": code, "move_rollback_reason": reason})
            for action, why, code, reason in (
                ({}, {"consumer_conflict": True, "reason": "why"}, "placement.consumer_conflict", "why"),
                (ABORTED, {"reason": "why"}, "action.aborted", ""),
                ({}, {"reason": "why"}, "max_retries_exceeded", "why"),
                ({}, {}, "max_retries_exceeded", "no host is left. "),
            )
        ),
        *(
            (*answer(moving(State.HANDING_OVER), 1, done=False, code=code), {
                "state": State.REVERTING, "since": 202.0, "deadline": 217.0, "sequence": 21, "queried": False,
                "move_rollback_code": code or "hand-over.failed"})
            for code in ("", "no")
        ),
        (
            moving(State.RESIZED),
            request(ActionKind.CONFIRM, request_id=OTHER),
            {**waits(DESTROYING, State.ACTIVE, 200.0, deadline=230.0), "cause": OTHER,
             "move_ending_request_id": OTHER, "move_ending_kind": ActionKind.CONFIRM},
        ),
        (
            moving(State.RESIZED),
            request(ActionKind.REVERT, request_id=OTHER),
            {"deadline": 230.0, "cause": OTHER, "move_ending_request_id": OTHER, "move_ending_kind": ActionKind.REVERT,
             "move_rollback_code": "action.reverted", "change_number": 200000, "move_change_number": 200000},
        ),
        (moving(DESTROYING, State.REVERTING), GONE, waits(State.REVERTING, None, 310.0, deadline=325.0)),
        (
            moving(State.REVERTING, action={"handed_over": True, "rollback_code": "x"}),
            e.Reverted(at=221.0, attempt=5, consumer_generation=11),
            {"state": State.RESTARTING, "selections": (ON_1,), "selection_index": 0, "attempt": 1, "highest_attempt": 5,
             "consumer_generation": 11, "sequence": 21, "deadline": 521.0, "since": 221.0, "queried": False,
             "change_number": 221000, "move_change_number": 221000},
        ),
        (
            moving(State.REVERTING, action={"rollback_code": "x", "image": "kept"}),
            e.Reverted(at=221.0, attempt=5),
            {**BACK, "since": 221.0, "selections": (ON_1,), "selection_index": 0, "attempt": 1, "highest_attempt": 5,
             "image": "kept", "ended": done(ActionKind.MIGRATE, ActionState.FAILED, "x"), "ended_attempts": (5,)},
        ),
        (
            *answer(restarting(), 1, runs=True),
            {**BACK, "image": "", "ended_attempts": (4,),
             "ended": done(ActionKind.MIGRATE, ActionState.FAILED, "x", "why")},
        ),
        (
            *answer(restarting(), 1, done=False, runs=False, code="no"),
            {**BACK, "image": "", "power": Power.STOPPED, "ended_attempts": (4,),
             "ended": done(ActionKind.MIGRATE, ActionState.FAILED, "x", "why; and it could not be started again: no")},
        ),
        (
            moving(RELEASING, State.ACTIVE, {"ending_request_id": OTHER, "ending_kind": ActionKind.CONFIRM,
             "answered": True}),
            e.Released(at=202.0, consumer=ACTION),
            {**SETTLED, "sequence": 22, "ended": done(ActionKind.CONFIRM), "ended_attempts": (1, 4)},
        ),
        *(
            (
                *answer(changing(kind), 2, image="new"),
                {**SETTLED, "ended": done(kind), "ended_attempts": (4,), **becomes},
            )
            for kind, becomes in (
                (ActionKind.START, {"power": Power.RUNNING, "image": ""}),
                (ActionKind.UNSHELVE, {"power": Power.RUNNING, "image": ""}),
                (ActionKind.STOP, {"power": Power.STOPPED}),
                (ActionKind.REBOOT, {"power": Power.RUNNING, "image": ""}),
                (ActionKind.SHELVE, {"image": "new"}),
                (ActionKind.RESCUE, {"power": Power.RESCUED}),
                (ActionKind.UNRESCUE, {"power": Power.RUNNING}),
                (ActionKind.REBUILD, {}),
            )
        ),
        (
            *answer(changing(ActionKind.SHELVE, offload=True), 2, image="new"),
            {**waits(DESTROYING, State.OFFLOADED, 202.0, deadline=232.0), "image": "new", "sequence": 21},
        ),
        (
            moving(RELEASING, State.OFFLOADED, {"kind": ActionKind.SHELVE, "source": None, "source_attempt": 0}),
            RELEASED,
            {**SETTLED, "state": State.OFFLOADED, "since": 130.0, "power": Power.SHELVED, "highest_attempt": 5,
             "consumer_generation": None, "ended": done(ActionKind.SHELVE), "ended_attempts": (5,)},
        ),
        (
            *answer(in_place(State.RESIZING), 1, done=False, code="no"),
            {"deadline": 502.0, "change_number": 202000, "move_change_number": 202000, "move_restoring_size": True,
             "move_history": (tried(1, "failed", 202.0, attempt=4, code="no"),)},
        ),
        (
            *answer(in_place(State.RESIZING, action={"restoring_size": True}), 1),
            {**waits(CLAIMING, State.PREPARING, 202.0, deadline=217.0), "sequence": 21, "queried": False,
             "move_restoring_size": False},
        ),
        (
            in_place(State.RESIZING),
            e.TimedOut(at=400.0),
            {**waits(DESTROYING, State.REVERTING, 400.0, deadline=430.0), "sequence": 21, "queried": False,
             "change_number": 400000, "move_change_number": 400000, "move_rollback_code": "action.timeout",
             "move_rollback_reason": "the host did not confirm that the machine has its new size"},
        ),
    ],
)  # fmt: skip
def test_a_step_of_a_move_changes_this_of_its_record(before: Instance, event: e.Event, changes: dict[str, Any]) -> None:
    assert step(before, answering(before, event), PATIENCE).instance == after(before, changes)
