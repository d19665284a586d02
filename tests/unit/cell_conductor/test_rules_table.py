"""Builds: a row for each condition that decides what one comes to."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.build import AttemptRecord, BuildEvent, BuildState
from bus.contracts.stages import StageTimes
from cell_conductor.state import events as e
from cell_conductor.state.fence import Fence
from cell_conductor.state.instance import Instance, State, summary_of_attempts
from cell_conductor.state.lease import Lease, LeaseState
from cell_conductor.state.step import StepContext
from cell_conductor.transition import step
from tests.unit.cell_conductor.move_scenario import ACTION
from tests.unit.cell_conductor.records import (
    BY_REVERT,
    GONE,
    ON_1,
    ON_2,
    ON_3,
    Case,
    after,
    at_source,
    case,
    fenced,
    moving,
    outcome,
    record,
)
from tests.unit.cell_conductor.scenario import (
    PATIENCE,
    RELEASED,
    SPEC,
    UUID,
    answering,
    claimed,
    failed,
    host,
    listed,
    missed,
    on,
    refused,
    selection,
    spawned,
)

S = State
ABSENT = Instance(uuid=UUID)
DOWN_1, DOWN_2 = (
    replace(PATIENCE, down={name: Lease(service=name, epoch=1, state=LeaseState.SILENT)}) for name in ("s1", "s2")
)
KEPT_3 = replace(PATIENCE, protected={(host(3), UUID): 1})
FENCED_3 = replace(PATIENCE, fences={host(3): Fence(host_uuid=host(3), host="host-3", version=1)})
THEN_2 = (ON_1, ON_2, ON_3, replace(selection(4), service="s2"))
OTHER_2 = (ON_1, ON_2, replace(ON_3, service="s2"))
LATE = e.TimedOut(at=170.0)
LOST = e.ServiceLost(at=220.0, service="s1", code="service.silent")
UNDESTROYED = e.SpawnFailed(at=220.0, attempt=2, host_uuid=host(2), code="destroy.busy", reason="r")


def build(*services: str, **other: Any) -> e.BuildRequested:
    return replace(on(*(services or ("s1",))), **other)


def gives_up(*, query: bool = False, **other: Any) -> e.BuildRequested:
    reason = Refusal(code="x", reason="y")
    return build(dead_letter_reason=reason, is_query=query, **other)


def runs(attempt: int, n: int | None = None, **other: Any) -> e.MachineRunning:
    return e.MachineRunning(at=220.0, attempt=attempt, host_uuid=host(n or attempt), service="s1", **other)


MET = replace(PATIENCE, quarantined=frozenset({UUID}))
STARTS: list[Case] = [
    case(ABSENT, build(), "building", "spawn 1@1", "build: building"),
    case(ABSENT, build(), "building", "spawn 1@1", "build: building", context=DOWN_1),
    case(ABSENT, build("s1", "s2"), "claiming/building", context=DOWN_1),
    case(ABSENT, build("s1", "s1"), "building", "spawn 1@1", "build: building", context=DOWN_1),
    case(ABSENT, build(), "releasing/failed", context=fenced(1)),
    case(ABSENT, build("s1", "s1"), "claiming/building", context=fenced(1)),
    case(ABSENT, build("s1", "s1"), "releasing/failed", context=fenced(1, 2)),
    case(ABSENT, build("s1", "s1", attempt=2), "claiming/building", context=fenced(1)),
    case(ABSENT, build("s1", "s2"), "releasing/failed", context=fenced(1, context=DOWN_2)),
    case(ABSENT, build("s1", "s2"), "building", "spawn 1@1", "build: building", context=fenced(2)),
    case(ABSENT, build("s1", "s2"), "building", "spawn 1@1", "build: building", context=fenced(2, context=DOWN_1)),
    case(ABSENT, build("s1", "s2", attempt=2), "claiming/building", context=DOWN_1),
    case(ABSENT, gives_up(), "releasing/failed"),
    case(ABSENT, build(), "releasing/failed", context=MET),
    case(ABSENT, gives_up(), "releasing/failed", context=MET),
    case(ABSENT, gives_up(query=True), "failed", "build: failed build.machine_exists", context=MET),
    case(ABSENT, gives_up(query=True), "releasing/failed"),
    case(ABSENT, gives_up(query=True, selections=()), "releasing/failed"),
    case(ABSENT, gives_up(attempt=2), "releasing/failed"),
    case(ABSENT, gives_up(), "releasing/failed", context=DOWN_1),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), STARTS)
def test_a_build_that_comes(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


RUNS: list[Case] = [
    case(record(S.BUILDING), spawned(2), "active", "build: active"),
    case(record(S.BUILDING), spawned(1), "building", "destroy 1@1"),
    case(record(S.BUILDING), spawned(5), "building"),
    case(record(S.BUILDING), runs(2), "active", "build: active"),
    case(record(S.BUILDING), runs(2, built=False), "building"),
    case(record(S.BUILDING), failed(2), "claiming/building", "destroy 2@2"),
    case(record(S.BUILDING), failed(2, final=True), "releasing/failed", "destroy 2@2"),
    case(record(S.BUILDING), failed(1), "building", "destroy 1@1"),
    case(record(S.BUILDING), failed(2, n=3), "building"),
    case(record(S.BUILDING, selections=(ON_1, ON_2)), failed(2), "releasing/failed", "destroy 2@2"),
    case(record(S.BUILDING), failed(2), "releasing/failed", "destroy 2@2", context=fenced(3)),
    case(record(S.FAILED), failed(2), "failed", "destroy 2@2"),
    case(record(S.FAILED), UNDESTROYED, "failed"),
    case(record(S.FAILED), spawned(2), "failed", "destroy 2@2"),
    case(record(S.FAILED), spawned(5), "failed"),
    case(record(S.FAILED), runs(2), "failed"),
    case(record(S.FAILED), listed(record(S.FAILED), 2, 2), "failed", "destroy 2@2"),
    case(record(S.DELETED), runs(2), "deleted", "destroy 2@2"),
    case(record(S.CLAIMING, S.BUILDING), spawned(2), "claiming/building", "destroy 2@2"),
    case(at_source(), spawned(1), "claiming/preparing"),
    case(moving(S.PREPARING), spawned(1), "preparing"),
    case(record(S.RELEASING, S.FAILED), spawned(2), "releasing/failed", "destroy 2@2"),
    case(record(S.RELEASING, S.FAILED), runs(2), "releasing/failed"),
    case(record(S.ACTIVE), spawned(2), "active"),
    case(record(S.ACTIVE), spawned(1), "active", "destroy 1@1"),
    case(record(S.ACTIVE), replace(runs(2), service="s2"), "active"),
    case(moving(S.RELEASING, S.ACTIVE), spawned(1), "releasing/active", "destroy 1@1"),
    case(moving(S.RELEASING, S.ACTIVE), replace(runs(2), service="s2"), "releasing/active"),
    case(moving(S.DESTROYING, S.ACTIVE), replace(runs(1), service="s2"), "destroying/active", "destroy 1@1"),
    case(moving(S.RESIZED, queried=False), replace(runs(1), service="s2"), "resized"),
    case(moving(S.RESIZED, queried=False), spawned(3), "resized", "destroy 3@3"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), RUNS)
def test_what_a_host_reports_of_a_build(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


LATE_OR_LOST: list[Case] = [
    case(record(S.BUILDING, queried=False), LATE, "building", "end 2@2"),
    case(record(S.BUILDING), e.TimedOut(at=9000.0), "claiming/building", "destroy 2@2"),
    case(record(S.BUILDING), LATE, "claiming/building", "destroy 2@2"),
    case(record(S.BUILDING), LOST, "claiming/building", "destroy 2@2"),
    case(record(S.BUILDING), LOST, "building", context=DOWN_1),
    case(record(S.BUILDING, selections=OTHER_2), LOST, "claiming/building", "destroy 2@2", context=DOWN_1),
    case(record(S.BUILDING, selections=OTHER_2), replace(LOST, service="s2"), "building", context=DOWN_1),
    case(record(S.BUILDING), GONE, "claiming/building"),
    case(record(S.BUILDING, queried=False), GONE, "claiming/building"),
    case(record(S.BUILDING), replace(GONE, attempt=3), "building"),
    case(record(S.BUILDING), replace(GONE, attempt=1), "building"),
    case(record(S.BUILDING), replace(GONE, host_uuid=host(1)), "building"),
    case(record(S.BUILDING), replace(GONE, service="s2"), "building"),
    case(record(S.BUILDING, selections=(ON_1, ON_2)), GONE, "releasing/failed"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), LATE_OR_LOST)
def test_what_does_not_answer_or_is_gone(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


CLAIMS: list[Case] = [
    case(record(S.CLAIMING, S.BUILDING), claimed(5), "building", "spawn 5@3", "build: building"),
    case(record(S.CLAIMING, S.BUILDING), claimed(4), "claiming/building"),
    case(record(S.CLAIMING, S.BUILDING, selections=THEN_2), claimed(5), "claiming/building", context=DOWN_1),
    case(record(S.CLAIMING, S.BUILDING), claimed(5), "building", "spawn 5@3", "build: building", context=DOWN_1),
    case(record(S.CLAIMING, S.BUILDING), claimed(5), "releasing/failed", "build: building", context=KEPT_3),
    case(record(S.CLAIMING, S.BUILDING), claimed(5), "releasing/failed", context=FENCED_3),
    case(
        record(S.CLAIMING, S.BUILDING, selections=(ON_1, ON_2, ON_3, ON_1)),
        claimed(5, option=1),
        "building",
        "spawn 5@1",
        "build: building",
    ),
    case(record(S.CLAIMING, S.DELETED), claimed(5), "releasing/deleted"),
    case(record(S.CLAIMING, S.DELETED), claimed(4), "claiming/deleted"),
    case(record(S.CLAIMING, S.BUILDING), refused(5), "releasing/failed"),
    case(record(S.CLAIMING, S.BUILDING), refused(4), "claiming/building"),
    case(
        record(S.CLAIMING, S.BUILDING), refused(5, changed=True), "failed", "build: failed placement.consumer_conflict"
    ),
    case(record(S.CLAIMING, S.DELETED), refused(5), "releasing/deleted"),
    case(record(S.CLAIMING, S.DELETED), refused(4), "claiming/deleted"),
    case(record(S.CLAIMING, S.DELETED), refused(5, changed=True), "deleted", "build: deleted"),
    case(record(S.ACTIVE), missed(record(S.ACTIVE), 2), "releasing/failed", "destroy 2@2"),
    case(record(S.ACTIVE), missed(record(S.ACTIVE), 1), "active"),
    case(record(S.ACTIVE), e.MachineMissing(at=900.0, host_uuid=host(2), service="s1"), "active"),
    case(record(S.ACTIVE), GONE, "releasing/failed", "destroy 2@2"),
    case(record(S.ACTIVE), replace(GONE, attempt=1), "active"),
    case(record(S.ACTIVE), replace(GONE, host_uuid=host(1)), "active"),
    case(record(S.ACTIVE), replace(GONE, service="s2"), "active"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), CLAIMS)
def test_what_placement_answers_and_a_report_lacks(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


RELEASES: list[Case] = [
    case(record(S.RELEASING, S.FAILED), RELEASED, "failed", "build: failed old"),
    case(record(S.RELEASING, S.FAILED), replace(RELEASED, consumer=UUID), "failed", "build: failed old"),
    case(record(S.RELEASING, S.FAILED), replace(RELEASED, consumer=ACTION), "releasing/failed"),
    case(moving(S.RELEASING, S.FAILED), RELEASED, "releasing/failed"),
    case(moving(S.RELEASING, S.FAILED), replace(RELEASED, consumer=ACTION), "releasing/failed"),
    case(
        moving(S.RELEASING, S.FAILED, {"source": None}), RELEASED, "failed", "migrate: failed old", "build: failed old"
    ),
    case(moving(S.RELEASING, S.FAILED, {"source": None, "claimed": True}), RELEASED, "releasing/failed"),
    case(moving(S.RELEASING, S.FAILED, {"instance_released": True}), RELEASED, "releasing/failed"),
    case(
        moving(S.RELEASING, S.FAILED, {"instance_released": True}),
        replace(RELEASED, consumer=ACTION),
        "failed",
        "migrate: failed old",
        "build: failed old",
    ),
    case(moving(S.RELEASING, S.DELETED), RELEASED, "releasing/deleted"),
    case(
        moving(S.RELEASING, S.DELETED, {"instance_released": True}),
        replace(RELEASED, consumer=ACTION),
        "deleted",
        "migrate: failed instance.deleted",
        "build: deleted",
    ),
    case(
        moving(S.RELEASING, S.DELETED, {"instance_released": True, "answered": True, **BY_REVERT}),
        replace(RELEASED, consumer=ACTION),
        "deleted",
        "revert: failed instance.deleted",
        "build: deleted",
    ),
    case(record(S.RELEASING, S.DELETED), RELEASED, "deleted", "build: deleted"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), RELEASES)
def test_what_is_released(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


def tried(n: int, outcome: str, code: str = "", reason: str = "", *, attempt: int = 2, at: float) -> AttemptRecord:
    return AttemptRecord(attempt=attempt, host=f"host-{n}", outcome=outcome, code=code, reason=reason, at=at)


NEXT = {"state": S.CLAIMING, "next_state": S.BUILDING, "since": 310.0, "deadline": 325.0}
STAMPS = StageTimes(requested=1.0)
FAILS = {"state": S.CLAIMING, "next_state": S.BUILDING, "since": 110.0, "deadline": 125.0,
         "history": (tried(2, "failed", "spawn.no_disk", "full", at=110.0),)}  # fmt: skip
PASSED = (*FAILS["history"], tried(3, "not_commanded", "host.fenced", attempt=5, at=110.0))


@pytest.mark.parametrize(
    ("before", "event", "context", "changes"),
    [
        (
            ABSENT,
            build(),
            PATIENCE,
            {
                "state": S.BUILDING,
                "spec": SPEC,
                "selections": (selection(1),),
                "attempt": 1,
                "consumer_generation": 7,
                "build_timeout_s": 60.0,
                "deadline": 160.0,
                "since": 100.0,
                "cause": "why",
                "sequence": 11,
                "build_sequence": 10,
            },
        ),
        (
            ABSENT,
            gives_up(),
            PATIENCE,
            {
                "state": S.RELEASING,
                "next_state": S.FAILED,
                "spec": SPEC,
                "selections": (selection(1),),
                "attempt": 1,
                "consumer_generation": 7,
                "build_timeout_s": 60.0,
                "deadline": 115.0,
                "since": 100.0,
                "cause": "why",
                "code": "x",
                "reason": "y",
                "history": (tried(1, "not_commanded", "x", "y", attempt=1, at=100.0),),
            },
        ),
        (
            record(S.BUILDING),
            GONE,
            PATIENCE,
            {**NEXT, "history": (tried(2, "timed_out", "spawn.timeout", "no answer within 60 s", at=310.0),)},
        ),
        *(
            (
                record(S.CLAIMING, S.BUILDING),
                replace(refused(5, changed=True), outcomes=(), reason=reason),
                PATIENCE,
                {
                    "state": S.FAILED,
                    "next_state": None,
                    "since": 111.0,
                    "deadline": None,
                    "answered": True,
                    "queried": False,
                    "sequence": 21,
                    "build_sequence": 20,
                    "code": "placement.consumer_conflict",
                    "reason": reason or "another client holds this instance's allocation",
                },
            )
            for reason in ("", "why")
        ),
        (moving(S.RELEASING, S.FAILED, {"instance_released": True}), RELEASED, PATIENCE, {}),
        (moving(S.RELEASING, S.FAILED), replace(RELEASED, consumer=ACTION), PATIENCE, {}),
        (
            moving(S.RESIZED, queried=False),
            replace(runs(1), service="s2"),
            PATIENCE,
            {"move_source": replace(ON_1, service="s2")},
        ),
        (
            record(S.ACTIVE),
            missed(record(S.ACTIVE), 2),
            PATIENCE,
            {
                "state": S.RELEASING,
                "next_state": S.FAILED,
                "since": 900.0,
                "deadline": 915.0,
                "code": "instance.lost",
                "reason": "host host-2 does not run it any more",
                "history": (tried(2, "lost", "instance.lost", "host host-2 does not run it any more", at=900.0),),
            },
        ),
        (
            record(S.CLAIMING, S.BUILDING, selections=(ON_1, ON_2, ON_3, ON_1)),
            claimed(5, option=1),
            PATIENCE,
            {
                "state": S.BUILDING,
                "next_state": None,
                "since": 111.0,
                "deadline": 171.0,
                "selection_index": 3,
                "attempt": 5,
                "consumer_generation": 9,
                "queried": False,
                "sequence": 21,
                "build_sequence": 20,
                "history": (tried(3, "not_claimed", "no_capacity", attempt=5, at=111.0),),
            },
        ),
        (
            record(S.CLAIMING, S.BUILDING, selections=THEN_2),
            claimed(5),
            DOWN_1,
            {
                "highest_attempt": 5,
                "consumer_generation": 9,
                "deadline": 126.0,
                "selections": (ON_1, ON_2, THEN_2[3]),
                "history": (tried(3, "not_commanded", "service.silent", attempt=6, at=111.0),),
            },
        ),
        (
            record(S.CLAIMING, S.BUILDING),
            replace(refused(5), reason="the quota", outcomes=()),
            PATIENCE,
            {
                "state": S.RELEASING,
                "next_state": S.FAILED,
                "since": 111.0,
                "deadline": 126.0,
                "code": "max_retries_exceeded",
                "reason": "0 of 3 hosts tried, none is left. ",
            },
        ),
        (
            record(S.BUILDING),
            failed(2),
            fenced(3),
            {
                **FAILS,
                "next_state": S.FAILED,
                "state": S.RELEASING,
                "selections": (ON_1, ON_2),
                "code": "max_retries_exceeded",
                "reason": summary_of_attempts(record(S.BUILDING, selections=(ON_1, ON_2), history=PASSED)),
                "history": PASSED,
            },
        ),
        (
            record(S.BUILDING, stage_times=STAMPS),
            failed(2),
            PATIENCE,
            {**FAILS, "stage_times": replace(STAMPS, dispatched=90.0, built=110.0)},
        ),
        (
            record(S.BUILDING, stage_times=STAMPS),
            replace(failed(2), started_at=91.0, ended_at=109.0),
            PATIENCE,
            {**FAILS, "stage_times": replace(STAMPS, dispatched=91.0, built=109.0)},
        ),
        (
            record(S.BUILDING, stage_times=replace(STAMPS, dispatched=80.0)),
            replace(failed(2), started_at=91.0),
            PATIENCE,
            {**FAILS, "stage_times": replace(STAMPS, dispatched=80.0, built=110.0)},
        ),
        (
            record(S.BUILDING, selections=OTHER_2, stage_times=STAMPS),
            replace(LOST, reason="r"),
            DOWN_1,
            {
                "state": S.CLAIMING,
                "next_state": S.BUILDING,
                "since": 220.0,
                "deadline": 235.0,
                "stage_times": replace(STAMPS, dispatched=90.0, built=220.0),
                "history": (tried(2, "failed", "service.silent", "r", at=220.0),),
            },
        ),
    ],
)
def test_a_step_of_a_build_changes_this_of_its_record(
    before: Instance, event: e.Event, context: StepContext, changes: dict[str, Any]
) -> None:
    assert step(before, event, context).instance == after(before, changes)


@pytest.mark.parametrize(
    ("before", "event", "shown"),
    [
        (ABSENT, build(), (BuildState.BUILDING, False, "")),
        (record(S.BUILDING), replace(spawned(2), warning="slow"), (BuildState.ACTIVE, True, "slow")),
        (record(S.BUILDING), runs(2), (BuildState.ACTIVE, True, "")),
        (record(S.RELEASING, S.DELETED), RELEASED, (BuildState.DELETED, True, "")),
        (record(S.ACTIVE), e.DeleteRequested(at=120.0), (BuildState.DELETING, False, "")),
    ],
)
def test_the_announcement_of_a_build(before: Instance, event: e.Event, shown: tuple[BuildState, bool, str]) -> None:
    (*_, last) = [
        one for one in step(before, answering(before, event), PATIENCE).commands if isinstance(one, BuildEvent)
    ]
    assert (last.state, last.terminal, last.reason) == shown
