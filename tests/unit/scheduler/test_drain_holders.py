"""Instances that a drained host still holds something of: which of them wait, fail, are moved, or are done with."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.book import TreeHolder
from bus.contracts.build import BuildState
from bus.contracts.drains import DrainMoveState
from bus.contracts.moves import Condition, MoveKind, MoveState
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.drains import (
    LOOK_S,
    DrainedHost,
    DrainMove,
    HeldInstance,
    LookedAt,
    held_by_unknown,
    held_on,
    is_migration,
    reviewed,
)
from scheduler_worker.domain.recorded_moves import InstanceRecord, MoveContext, RecordedMove

A, B, DRAIN, H1, H2, R = (f"{n}0000000-0000-4000-8000-000000000000" for n in "abd12e")
HOST = DrainedHost(H1, "h1")
S = DrainMoveState
NOW = 1000.0
HELD = HeldInstance(instance_uuid=A, project_id="p", source=HOST, code="instance.building", reason="its build")
UNCONFIRMED = replace(HELD, code="instance.unconfirmed")
UNRELEASED = replace(HELD, code="instance.unreleased")
ROW = DrainMove(drain=DRAIN, instance_uuid=A, position=0, source_uuid=H1, kind=MoveKind.LIVE_MIGRATE)
PARKED = replace(ROW, code="instance.building", due_at=NOW)


def context(
    state: BuildState = BuildState.ACTIVE,
    host: str | None = "h1",
    condition: Condition = Condition.ACTIVE,
    under_way: str | None = None,
    host_uuid: str | None = None,
) -> MoveContext:
    uuid = host_uuid or {"h1": H1, "h2": H2}.get(host or "")
    build = RecordedBuild(instance_uuid=A, project_id="p", state=state, sequence=1, cell="c", host=host, host_uuid=uuid)
    return MoveContext(build=build, instance=InstanceRecord(instance_uuid=A, condition=condition, under_way=under_way))


def request(**more: Any) -> RecordedMove:
    fields = {
        "kind": MoveKind.MIGRATE,
        "state": MoveState.DONE,
        "terminal": True,
        "cell": "c",
        "host": "h1",
        "host_uuid": H1,
        **more,
    }
    return RecordedMove(request_id=R, instance_uuid=A, project_id="p", digest=b"", sequence=9, **fields)


def look(*uuids: str) -> LookedAt:
    return LookedAt(drain=DRAIN, kind=MoveKind.LIVE_MIGRATE, uuids=uuids or (H1,), at=NOW)


def down(held: HeldInstance) -> HeldInstance:
    """The compute service of its host is down."""
    return replace(held, source=replace(held.source, code="service.down"))


@pytest.mark.parametrize(
    ("known", "code"),
    [
        pytest.param(context(), "", id="it is active there"),
        pytest.param(context(BuildState.ACCEPTED, None), "instance.building", id="it has been claimed"),
        pytest.param(context(BuildState.SCHEDULED), "instance.building", id="its build is dispatched"),
        pytest.param(context(BuildState.BUILDING), "instance.building", id="its build is in progress"),
        pytest.param(context(BuildState.DELETING), "instance.releasing", id="it is being deleted"),
        pytest.param(context(BuildState.FAILED), "instance.unreleased", id="its build has failed"),
        pytest.param(context(BuildState.DELETED), "instance.unreleased", id="it has been deleted"),
        pytest.param(context(host="h2", under_way=R), "instance.arriving", id="a move brings it"),
        pytest.param(context(host="h2"), "instance.misplaced", id="the record has it elsewhere"),
        pytest.param(context(host_uuid=H2), "instance.misplaced", id="the record has it on a namesake"),
    ],
)
def test_why_an_instance_whose_allocation_is_there_cannot_be_moved(known: MoveContext, code: str) -> None:
    found = held_on(HOST, known)
    assert found is not None and (found.instance_uuid, found.code, found.source) == (A, code, HOST)


@pytest.mark.parametrize(
    ("move", "known", "found"),
    [
        (request(), context(host="h2", condition=Condition.RESIZED), (A, "instance.unconfirmed")),
        (request(), context(host="h2"), (A, "instance.unreleased")),
        (request(), context(host="h2", condition=Condition.RESIZED, under_way=B), (A, "instance.arriving")),
        (request(), context(BuildState.DELETED, "h2"), (A, "instance.unreleased")),
        (request(), context(BuildState.DELETING, "h2"), (A, "instance.releasing")),
        (request(), context(under_way=R), (A, "")),
        (request(), MoveContext(), (A, "instance.unconfirmed")),
        (None, None, (R, "instance.unconfirmed")),
    ],
)
def test_an_instance_whose_source_a_migration_keeps_is_named(
    move: RecordedMove | None, known: MoveContext | None, found: tuple[str, str]
) -> None:
    holder = TreeHolder(consumer=R, project_id="p", user_id="u", consumer_type="MIGRATION", attempt=1)
    assert is_migration(holder)
    held = None if known is None else held_on(HOST, known, move)
    held = held or held_by_unknown(HOST, holder, move)
    assert (held.instance_uuid, held.code) == found


@pytest.mark.parametrize(("consumer_type", "attempt"), [("MIGRATION", 0), ("INSTANCE", 2), ("INSTANCE", 0)])
def test_what_a_client_of_placements_api_wrote_is_no_migration_of_berth(consumer_type: str, attempt: int) -> None:
    holder = TreeHolder(consumer=R, project_id="p", user_id="u", consumer_type=consumer_type, attempt=attempt)
    assert not is_migration(holder)


def test_a_request_under_way_brings_an_instance_to_the_host_unless_it_is_there() -> None:
    going = request(state=MoveState.SCHEDULED, terminal=False)
    found = held_on(HOST, context(host="h2"), going)
    assert found is not None and (found.code, found.instance_uuid) == ("instance.arriving", A)
    there = held_on(HOST, context(), going)
    assert there is not None and there.code == ""  # it is being stopped
    assert held_on(HOST, MoveContext(), going) is None


def test_an_instance_that_was_done_with_and_is_held_again_is_waited_for() -> None:
    moved = replace(ROW, state=S.MOVED, host_uuid=H2)
    (row,) = reviewed(look(), [moved], [replace(HELD, code="instance.releasing")])
    assert (row.state, row.code, row.host_uuid) == (S.WAITING, "instance.releasing", H2)
    other = DrainedHost(H2, "h2")
    (row,) = reviewed(
        look(H2), [replace(ROW, state=S.LEFT, code="instance.elsewhere")], [replace(HELD, source=other, code="")]
    )
    assert (row.state, row.source_uuid, row.due_at) == (S.WAITING, H2, 0.0)
    for state in (S.UNDER_WAY, S.FAILED, S.WAITING):
        assert reviewed(look(), [replace(ROW, state=state)], [replace(HELD, code="")]) == []
    assert len(reviewed(look(), [], [UNCONFIRMED, replace(HELD, code="")])) == 1


COUNTED = replace(PARKED, failures=2, host_uuid=H2)
FREE = {"code": "", "reason": ""}


@pytest.mark.parametrize(
    ("row", "held", "after"),
    [
        (COUNTED, HELD, {"reason": "its build", "due_at": NOW + LOOK_S}),
        (COUNTED, replace(HELD, code=""), FREE | {"reason": "its build", "failures": 0, "due_at": 0.0}),
        (COUNTED, down(replace(HELD, code="")), FREE | {"reason": "its build", "failures": 0, "due_at": 0.0}),
        (COUNTED, UNCONFIRMED, {"code": UNCONFIRMED.code, "reason": "its build", "failures": 1, "due_at": NOW + 2.0}),
        (
            COUNTED, down(HELD),
            {"reason": "its build; h1: service.down", "failures": 3, "due_at": NOW + 8.0},
        ),
        (
            replace(COUNTED, code=UNRELEASED.code, failures=3), UNRELEASED,
            {"reason": "its build", "failures": 4, "due_at": NOW + 16.0},
        ),
        (
            replace(COUNTED, code=UNRELEASED.code, failures=3), down(UNRELEASED),
            {"reason": "its build; h1: service.down", "failures": 4, "due_at": NOW + 16.0, "state": S.FAILED},
        ),
        (
            replace(COUNTED, code=UNCONFIRMED.code, failures=3), UNCONFIRMED,
            {"reason": "its build", "failures": 4, "due_at": NOW + 16.0, "state": S.FAILED},
        ),
        (replace(COUNTED, due_at=NOW + 0.1), HELD, None),
        (replace(COUNTED, state=S.LEFT, due_at=NOW + 9), HELD, {"reason": "its build", "due_at": NOW + LOOK_S}),
        (
            replace(COUNTED, state=S.LEFT, source_uuid=H2), HELD,
            {"reason": "its build", "due_at": NOW + LOOK_S, "source_uuid": H1, "host_uuid": None},
        ),
        (
            replace(COUNTED, state=S.MOVED, code=""), replace(HELD, code=""),
            {"reason": "its build", "failures": 0, "due_at": 0.0},
        ),
        (COUNTED, None, FREE | {"failures": 0, "due_at": 0.0}),
        (replace(COUNTED, due_at=NOW + 0.1), None, None),
        (replace(COUNTED, code="instance.busy"), None, None),
        (replace(COUNTED, state=S.FAILED), None, None),
        (replace(COUNTED, source_uuid=H2), None, None),
    ],
)  # fmt: skip
def test_each_row_after_one_look(row: DrainMove, held: HeldInstance | None, after: dict[str, Any] | None) -> None:
    found = reviewed(look(), [row], [] if held is None else [held])
    assert found == ([] if after is None else [replace(row, **{"state": S.WAITING, **after})])


def test_of_two_hosts_that_hold_an_instance_the_one_where_it_is_active_counts() -> None:
    there, elsewhere = replace(HELD, code=""), replace(UNCONFIRMED, source=DrainedHost(H2, "h2"))
    for held in ([there, elsewhere], [elsewhere, there], [there, there]):
        (row,) = reviewed(look(), [], held)
        assert (row.code, row.source_uuid) == ("", H1)
    first = reviewed(look(), [], [HELD, elsewhere])
    assert [one.source_uuid for one in first] == [H1]


def test_new_rows_follow_those_that_the_drain_has() -> None:
    others = [replace(HELD, instance_uuid=uuid) for uuid in (B, H2)]
    found = reviewed(look(), [PARKED], [HELD, *others])
    assert [(row.instance_uuid, row.position) for row in found] == [(A, 0), (B, 2), (H2, 3)]
    assert found[1] == replace(
        ROW, instance_uuid=B, position=2, code="instance.building", reason="its build", due_at=NOW + LOOK_S
    )
