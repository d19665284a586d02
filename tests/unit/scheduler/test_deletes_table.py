"""Deletes, a row for each condition: the outcome, the record and the messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from bus.bus import API
from bus.consuming.outcome import Done, Outcome, Received, Refuse, Retry
from bus.contracts.base import Meta, Refusal
from bus.contracts.book import HeldAllocation
from bus.contracts.build import BuildAccepted, BuildEvent, BuildState, DeleteRequest
from bus.contracts.cell import CellDelete
from bus.contracts.placement import ReleaseRun
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.domain.builds import Author, ProjectsBuild, RecordedBuild
from scheduler_worker.domain.deletes import PendingDelete, answer_unknown, pending_delete, plan_deletes, tombstones
from scheduler_worker.domain.requests import OVERTAKES, RequestDelivery
from scheduler_worker.domain.unanswered import open_build

UUID, OTHER, HOST = (f"{n}0000000-0000-4000-8000-000000000001" for n in "abc")
AUTHOR = Author("me", 7.0)
ACCEPTED, SCHEDULED, ACTIVE = BuildState.ACCEPTED, BuildState.SCHEDULED, BuildState.ACTIVE
FAILED, REFUSED, DELETING, DELETED = BuildState.FAILED, BuildState.REFUSED, BuildState.DELETING, BuildState.DELETED
UNKNOWN, STRANDED = "instance.unknown", "claim.stranded"
RECORD = RecordedBuild(
    instance_uuid=UUID, project_id="p", state=ACTIVE, sequence=9, attempt=2, code="x", reason="why", run="mine"
)
EARLY, LATE = RequestDelivery(attempt=OVERTAKES - 1), RequestDelivery(attempt=OVERTAKES)
STARTING = replace(LATE, awaits_hosts=True)
OVER = replace(LATE, is_late=lambda: True)
GONE = replace(OVER, has_requester=True)


def deleted(position: int = 4, delivery: RequestDelivery = LATE, **more: str) -> PendingDelete:
    request = DeleteRequest(**{"instance_uuid": UUID, "project_id": "p", **more})
    return pending_delete(Received(request, Meta(id="m"), "api", "q"), delivery, position)


def record(state: BuildState, cell: str | None = None, **more: Any) -> RecordedBuild:
    return replace(RECORD, state=state, cell=cell, **more)


def held(cell: str | None, project: str = "p") -> dict[ProjectsBuild, HeldAllocation]:
    one = HeldAllocation(
        consumer=UUID, project_id=project, attempt=1, consumer_generation=1, holding={}, hosts=(), cell=cell
    )
    return {(UUID, project): one}


def word(outcome: Outcome | None) -> str:
    match outcome:
        case None:
            return "none"
        case Done(reply=BuildAccepted(instance_uuid=uuid)):
            assert uuid == UUID
            return "accepted"
        case Done(reply=Refusal(code=code)):
            return f"answered {code}"
        case Done(reply=None):
            return "done"
        case Retry(code=code):
            return f"again {code}"
        case Refuse(code=code):
            return f"refused {code}"
    raise AssertionError(outcome)


def words(messages: Iterable[OutboxMessage]) -> list[str]:
    """Of each, its state and number, or that it is a delete for a cell, or a release."""
    found = []
    for one in messages:
        match one.message:
            case BuildEvent(instance_uuid=uuid, project_id="p", state=state, sequence=number, code=code):
                assert (one.bus, uuid) == (API, UUID)
                found.append(f"{state.value} {number} {code}".strip())
            case CellDelete(instance_uuid=uuid, project_id="p", begun=begun):
                assert uuid == UUID
                found.append(f"{one.bus} deletes" + (" what was begun" if begun else ""))
            case ReleaseRun(by="mine"):
                found.append("release")
            case other:
                raise AssertionError(other)
    return found


# --- of what is on record

Row = tuple[RecordedBuild, dict[ProjectsBuild, HeldAllocation], str, RecordedBuild | None, list[str]]
C1, NOWHERE = held("c1"), held(None)
TAKEN = ["c1 deletes what was begun"]
ROWS: list[Row] = [
    (record(SCHEDULED, "c1"), {}, "accepted", record(DELETING, "c1"), ["c1 deletes"]),
    (record(ACTIVE, "c1"), {}, "accepted", record(DELETING, "c1"), TAKEN),
    (record(ACTIVE, "c1"), held("c2"), "accepted", record(DELETING, "c1"), TAKEN),
    (record(ACTIVE, "c1"), NOWHERE, "accepted", record(DELETING, "c1"), TAKEN),
    (record(DELETING, "c1"), {}, "accepted", None, []),
    (record(DELETED), {}, "accepted", None, []),
    (record(DELETED), C1, "accepted", None, []),
    (record(ACCEPTED), C1, "accepted", record(DELETING, "c1"), TAKEN),
    (record(FAILED), C1, "accepted", record(DELETING, "c1"), TAKEN),
    (record(ACCEPTED), held("c1", "q"), "accepted", record(DELETED, sequence=4, terminal=True, attempt=1),
     ["deleted 4", "release"]),
    (record(ACCEPTED, attempt=0), {}, "accepted", record(DELETED, sequence=4, terminal=True, attempt=1),
     ["deleted 4", "release"]),
    (record(FAILED), {}, "accepted", record(DELETED, sequence=4, terminal=True), ["deleted 4"]),
    (record(REFUSED, attempt=0), {}, "accepted", record(DELETED, sequence=4, terminal=True, attempt=0), ["deleted 4"]),
    (record(FAILED, code=STRANDED), {}, "accepted", record(DELETED, sequence=4, terminal=True, code=STRANDED),
     ["deleted 4", "release"]),
    (record(FAILED), NOWHERE, f"answered {STRANDED}", record(FAILED), [f"refused 0 {STRANDED}"]),
    (record(ACCEPTED, attempt=0), NOWHERE, f"answered {STRANDED}",
     record(FAILED, sequence=3, terminal=True, attempt=1, code=STRANDED),
     [f"refused 0 {STRANDED}", f"failed 3 {STRANDED}"]),
]  # fmt: skip


@pytest.mark.parametrize(("build", "kept", "outcome", "after", "sent"), ROWS)
def test_a_delete_by_its_record_and_by_what_its_instance_holds(
    build: RecordedBuild,
    kept: dict[ProjectsBuild, HeldAllocation],
    outcome: str,
    after: RecordedBuild | None,
    sent: list[str],
) -> None:
    planned = plan_deletes([deleted(4), deleted(5)], {UUID: build}, AUTHOR, kept)
    assert {at: word(one) for at, one in planned.outcomes.items()} == {4: outcome, 5: outcome}
    assert (planned.accepted, planned.unbuilt, planned.unknown) == ({UUID}, [], [])
    assert [one.build for one in planned.updates] == (
        [] if after is None else [replace(after, reason=planned.updates[0].build.reason)]
    )
    assert [(line.at, line.who) for one in planned.updates for line in one.timeline] == [(7.0, "me")] * (
        after is not None
    )
    assert words(planned.messages) == sent
    unasked = plan_deletes([deleted(4), deleted(5)], {UUID: build}, AUTHOR)
    if build.cell is None and build.state is not DELETED:
        assert [one.position for one in unasked.unbuilt] == [4, 5]
        assert (unasked.outcomes, unasked.updates, unasked.messages, unasked.accepted) == ({}, [], [], set())
    else:
        assert (unasked.unbuilt, unasked.updates, unasked.messages) == ([], planned.updates, planned.messages)


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (record(ACTIVE, "c1"), "delete_requested"),
        (record(ACCEPTED), "deleted"),
        (record(FAILED), "deleted"),
        (record(FAILED, code=STRANDED), "delete_refused"),
        (record(ACCEPTED, code=STRANDED), "failed"),
    ],
)
def test_a_delete_has_its_line_in_the_timeline(build: RecordedBuild, line: str) -> None:
    kept = NOWHERE if build.code == STRANDED else {}
    (update,) = plan_deletes([deleted()], {UUID: build}, AUTHOR, kept).updates
    assert [one.what for one in update.timeline] == [line]


# --- of what is not on record, or of a project's own that is not


@pytest.mark.parametrize("build", [None, record(DELETED, code=UNKNOWN), record(ACTIVE, "c1", project_id="q")])
@pytest.mark.parametrize(
    ("delivery", "kept", "outcome", "left"),
    [
        (EARLY, {}, f"again {UNKNOWN}", ""),
        (EARLY, None, f"again {UNKNOWN}", ""),
        (LATE, None, f"again {UNKNOWN}", "unbuilt"),
        (LATE, {}, f"again {UNKNOWN}", "unknown"),
        (LATE, C1, f"again {UNKNOWN}", "unknown"),
        (LATE, held(None, "q"), f"again {UNKNOWN}", "unknown"),
        (LATE, NOWHERE, f"answered {STRANDED}", ""),
        (STARTING, NOWHERE, "again hosts.unknown", ""),
        (STARTING, C1, f"again {UNKNOWN}", "unknown"),
        (STARTING, held(None, "q"), f"again {UNKNOWN}", "unknown"),
        (STARTING, None, f"again {UNKNOWN}", "unbuilt"),
    ],
)
def test_a_delete_without_a_record(
    build: RecordedBuild | None,
    delivery: RequestDelivery,
    kept: dict[ProjectsBuild, HeldAllocation] | None,
    outcome: str,
    left: str,
) -> None:
    pending = deleted(delivery=delivery)
    planned = plan_deletes([pending], {} if build is None else {UUID: build}, AUTHOR, kept)
    assert word(planned.outcomes[4]) == outcome
    assert (planned.unbuilt, planned.unknown) == ([pending] * (left == "unbuilt"), [pending] * (left == "unknown"))
    assert (planned.accepted, planned.updates) == (set(), [])
    assert words(planned.messages) == ([f"refused 0 {STRANDED}"] if STRANDED in outcome else [])


@pytest.mark.parametrize("build", [record(FAILED), record(ACTIVE, "c1"), None])
def test_a_delete_waits_for_hosts_while_no_cell_is_known_of_what_is_held(build: RecordedBuild | None) -> None:
    builds = {} if build is None else {UUID: build}
    planned = plan_deletes([deleted(delivery=STARTING)], builds, AUTHOR, NOWHERE)
    assert word(planned.outcomes[4]) == "again hosts.unknown" and planned.updates == []


@pytest.mark.parametrize(
    ("build", "delivery", "sent"),
    [
        (None, OVER, ["refused 0 broker.expired"]),
        (record(ACTIVE, "c1"), OVER, ["refused 0 broker.expired"]),
        (record(ACTIVE, "c1"), GONE, []),
        (record(ACTIVE, "c1", project_id="q"), OVER, []),
        (record(ACTIVE, "c1", project_id="q", code=UNKNOWN), OVER, ["refused 0 broker.expired"]),
        (record(DELETING, "c1"), OVER, []),
        (record(DELETED), OVER, []),
    ],
)
def test_a_delete_whose_time_is_over_ends(
    build: RecordedBuild | None, delivery: RequestDelivery, sent: list[str]
) -> None:
    planned = plan_deletes([deleted(delivery=delivery)], {} if build is None else {UUID: build}, AUTHOR, C1)
    assert (word(planned.outcomes[4]), words(planned.messages)) == ("done", sent)
    assert (planned.accepted, planned.updates, planned.unknown, planned.unbuilt) == (set(), [], [], [])


# --- tombstones


def test_a_tombstone_is_the_record_of_a_build_that_was_deleted_before_it_came() -> None:
    first, other = deleted(), deleted(5, instance_uuid=OTHER)
    (grave,) = tombstones([first, first, other], [OTHER], AUTHOR)
    assert (grave.request.instance_uuid, grave.request.project_id, grave.digest) == (UUID, "p", b"")
    assert grave.build == RecordedBuild(
        instance_uuid=UUID, project_id="p", state=DELETED, sequence=4, terminal=True, code=UNKNOWN,
        reason=grave.build.reason,
    )  # fmt: skip
    assert [(line.at, line.what) for line in grave.timeline] == [(7.0, "refused")]


@pytest.mark.parametrize(
    ("build", "kept", "outcome", "sent"),
    [
        (record(DELETED, code=UNKNOWN), {}, f"answered {UNKNOWN}", [f"refused 4 {UNKNOWN}"]),
        (record(DELETED, code=UNKNOWN), C1, "accepted", TAKEN),
        (record(DELETED, code=UNKNOWN), held("c1", "q"), f"answered {UNKNOWN}", [f"refused 4 {UNKNOWN}"]),
        (record(DELETED, code=UNKNOWN), NOWHERE, f"answered {UNKNOWN}", [f"refused 4 {UNKNOWN}"]),
        (record(DELETED, project_id="q", code=UNKNOWN), C1, "accepted", TAKEN),
        (record(ACTIVE, project_id="q"), {}, f"refused {UNKNOWN}", []),
        (record(ACTIVE, project_id="q"), C1, f"refused {UNKNOWN}", TAKEN),
        (None, C1, "none", []),
    ],
)
def test_a_delete_of_an_unknown_instance_is_refused_unless_it_holds_something_which_its_cell_deletes(
    build: RecordedBuild | None, kept: dict[ProjectsBuild, HeldAllocation], outcome: str, sent: list[str]
) -> None:
    """Nothing watched the delete of what an instance without a record holds: lost by its cell, it had no end."""
    answered = answer_unknown([deleted()], {} if build is None else {UUID: build}, AUTHOR, kept)
    assert (word(answered.outcomes.get(4)), words(answered.messages)) == (outcome, sent)
    assert {update.build.project_id for update in answered.updates} <= {"p"}
    awaited = [one for update in answered.updates if (one := open_build(update.build)) is not None]
    assert [(one.kind, one.cell) for one in awaited] == ([("delete", "c1")] if outcome == "accepted" else [])
    assert (UUID in answered.accepted) == (outcome == "accepted")
