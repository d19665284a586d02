"""The records of requests about instances: what is announced of a decision, and what a cell's event leaves."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.build import AttemptRecord, BuildRequest, BuildState
from bus.contracts.moves import Condition, MoveEvent, MoveKind, MoveState
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.recorded_moves import (
    InstanceRecord,
    MoveContext,
    RecordedMove,
    apply_announcement,
    event_of,
)

VM, MOVE = (f"{n}0000000-0000-4000-8000-000000000001" for n in "ad")
MOVED = RecordedMove(
    request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.MIGRATE, digest=b"", state=MoveState.SCHEDULED,
    sequence=2, cell="c1",
)  # fmt: skip
BUILD = RecordedBuild(instance_uuid=VM, project_id="p", state=BuildState.ACTIVE, sequence=9, cell="c1", host="h1")
REQUEST = BuildRequest(instance_uuid=VM, project_id="p", flavor="small")
INSTANCE = InstanceRecord(instance_uuid=VM, condition=Condition.STOPPED, under_way=MOVE, sequence=11)


@pytest.mark.parametrize(
    ("project", "terminal", "shown"),
    [
        ("p", True, (Condition.STOPPED, "small")),
        ("p", False, (Condition.MOVING, "small")),
        ("q", True, (Condition.UNKNOWN, "")),
        ("q", False, (Condition.UNKNOWN, "")),
    ],
)
def test_an_event_shows_an_instance_to_its_own_project_alone(project: str, terminal: bool, shown: Any) -> None:
    known = MoveContext(build=BUILD, build_request=REQUEST, instance=INSTANCE)
    event = event_of(replace(MOVED, project_id=project, terminal=terminal), known, 1.0)
    assert (event.condition, event.flavor) == shown


def tried(host: str) -> tuple[AttemptRecord, ...]:
    return (AttemptRecord(attempt=1, host=host, outcome="failed"),)


@pytest.mark.parametrize(
    ("known", "told", "after"),
    [((), tried("h2"), tried("h2")), (tried("h2"), (), tried("h2")), (tried("h2"), tried("h3"), tried("h3"))],
)
def test_the_attempts_that_a_cell_has_told_stay_until_it_tells_others(known: Any, told: Any, after: Any) -> None:
    event = MoveEvent(
        request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.MIGRATE, state=MoveState.FINISHING,
        sequence=12, condition=Condition.MOVING, history=told,
    )  # fmt: skip
    applied = apply_announcement(event, replace(MOVED, history=known), INSTANCE, BUILD, cell="c1", now=1.0)
    assert applied.move.history == after


@pytest.mark.parametrize(
    ("known", "told", "after"), [("u1", None, "u1"), ("u1", "u2", "u2"), (None, "u2", "u2"), (None, None, None)]
)
def test_the_host_that_a_cell_has_told_stays_until_it_tells_another(known: Any, told: Any, after: Any) -> None:
    event = MoveEvent(
        request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.MIGRATE, state=MoveState.FINISHING,
        sequence=12, condition=Condition.MOVING, host=told, host_uuid=told,
    )  # fmt: skip
    applied = apply_announcement(
        event, replace(MOVED, host=known, host_uuid=known), INSTANCE, BUILD, cell="c1", now=1.0
    )
    assert (applied.move.host, applied.move.host_uuid) == (after, after)
