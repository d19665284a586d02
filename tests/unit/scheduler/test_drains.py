"""The ends of the instances of a drain, and of the drain: going and failing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.build import BuildState
from bus.contracts.drains import DrainAction, DrainCommand, DrainMoveState, DrainRecord, DrainState, DrainTarget
from bus.contracts.moves import MoveKind, MoveRequest, MoveState
from bus.contracts.objects import HostDecision
from bus.contracts.operations import AdminState
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.drains import (
    MAX_FAILURES,
    MAX_LOOKS,
    DrainedHost,
    DrainMove,
    OpenDrain,
    commanded,
    drained,
    end_of,
    step,
)
from scheduler_worker.domain.recorded_moves import InstanceRecord, MoveContext, RecordedMove

A, DRAIN, HOST, H2, H9 = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ad129")
S = DrainMoveState
ROW = DrainMove(drain=DRAIN, instance_uuid=A, position=0, source_uuid=HOST, kind=MoveKind.LIVE_MIGRATE)
UP = {HOST: DrainedHost(HOST, "h1")}
DOWN = {HOST: DrainedHost(HOST, "h1", "service.down")}
RECORD = DrainRecord(name="rack", target=DrainTarget.AGGREGATE, kind=MoveKind.LIVE_MIGRATE, by="ann")
NOW = 1000.0


def known(
    host: str = HOST, ended: MoveState | None = None, *, under_way: str | None = None, **more: Any
) -> MoveContext:
    """The instance on a host; ended: how its request has."""
    build = RecordedBuild(
        instance_uuid=A, project_id="p", state=more.pop("state", BuildState.ACTIVE), sequence=1, terminal=True,
        cell="c", host="h", host_uuid=host,
    )  # fmt: skip
    move = None
    if ended is not None:
        move = RecordedMove(
            request_id="r", instance_uuid=A, project_id="p", kind=MoveKind.LIVE_MIGRATE, digest=b"", state=ended,
            sequence=9, terminal=True, created_at=1.0, **{"host_uuid": H2, **more},
        )  # fmt: skip
    return MoveContext(move=move, build=build, instance=InstanceRecord(instance_uuid=A, under_way=under_way))


def passed(
    row: DrainMove,
    context: MoveContext,
    record: DrainRecord = RECORD,
    hosts: dict[str, DrainedHost] | None = None,
) -> tuple[DrainMove, tuple[MoveRequest, ...]]:
    """The row after one pass, and what was requested."""
    found = OpenDrain(record=record, open=(row,), counts=Counter({row.state: 1}), last_begun_at=0.0)
    done = step(found, {A: context}, UP if hosts is None else hosts, NOW)
    return (done.changed or (row,))[0], done.requests


def test_a_cold_move_is_confirmed_at_once() -> None:
    _, (request,) = passed(replace(ROW, kind=MoveKind.MIGRATE), known())
    assert (request.kind, request.auto_confirm_s) == (MoveKind.MIGRATE, 0.0)


def test_what_waits_is_requested_once_under_an_id_of_its_try() -> None:
    after, (request,) = passed(ROW, known())
    assert (after.state, after.tries, after.request_id) == (S.UNDER_WAY, 1, request.request_id)
    assert (request.kind, request.host, request.user_id) == (MoveKind.LIVE_MIGRATE, None, "drain")
    assert request.auto_confirm_s is None
    assert passed(after, known()) == (after, ())  # not on record yet
    as_it_is = OpenDrain(record=RECORD, open=(after,), counts={S.UNDER_WAY: 1}, last_begun_at=NOW)
    assert step(as_it_is, {A: known()}, UP, NOW).changed == (), "a row that stays is not written"
    again, repeated = passed(replace(after, begun_at=NOW - 61.0), known())
    assert repeated == (request,) and again.begun_at == NOW
    assert replace(after, state=S.WAITING).request_id != after.request_id == ROW.request_id


@pytest.mark.parametrize(
    ("row", "context", "hosts", "state"),
    [
        (ROW, known(H9), None, S.LEFT),
        (ROW, known(state=BuildState.DELETED), None, S.LEFT),
        (ROW, MoveContext(), None, S.LEFT),
        (ROW, known(), {}, S.LEFT),
        (ROW, known(), DOWN, S.WAITING),
        (ROW, known(under_way="x"), None, S.WAITING),
        (replace(ROW, code="instance.building"), known(H9), None, S.WAITING),
        (replace(ROW, host_uuid=H9), known(H9), None, S.MOVED),
        (replace(ROW, state=S.UNDER_WAY, tries=1), known(H2, MoveState.DONE), None, S.MOVED),
        (replace(ROW, state=S.UNDER_WAY, tries=1), known(ended=MoveState.FAILED, code="x"), None, S.WAITING),
        (replace(ROW, state=S.UNDER_WAY, failures=MAX_FAILURES - 1), known(ended=MoveState.FAILED), None, S.FAILED),
    ],
)
def test_what_becomes_of_an_instance(
    row: DrainMove, context: MoveContext, hosts: dict[str, DrainedHost] | None, state: DrainMoveState
) -> None:
    after, requests = passed(row, context, hosts=hosts)
    assert (after.state, requests) == (state, ())
    if after.failures > row.failures and state is S.WAITING:
        assert after.due_at > NOW


@pytest.mark.parametrize(
    ("hosts", "code", "end"),
    [
        (DOWN, "service.down", (S.FAILED, MAX_FAILURES)),
        ({}, "host.left_drain", (S.LEFT, 1)),
    ],
)
def test_an_instance_is_not_held_for_ever_by_a_host_that_no_service_announces(
    hosts: dict[str, DrainedHost], code: str, end: tuple[DrainMoveState, int]
) -> None:
    """An operator finds its code in the drain. end: its state then, and the looks until then."""
    after, requests, looked = ROW, list[MoveRequest](), 0
    while after.state is ROW.state and looked <= MAX_LOOKS:
        after, requested = passed(replace(after, due_at=0.0), known(), hosts=hosts)
        looked, requests = looked + 1, [*requests, *requested]
    assert (after.code, requests, (after.state, looked)) == (code, [], end)


@pytest.mark.parametrize("last_begun_at", [0.0, NOW - 3600.0, NOW - 6.0])
@pytest.mark.parametrize(("per_minute", "begun"), [(10, 1), (600, 10), (None, 20)])
def test_a_rate_holds_after_a_pause_and_after_moves_that_took_long(
    last_begun_at: float, per_minute: int | None, begun: int
) -> None:
    record = replace(RECORD, at_once=20, per_minute=per_minute)
    rows = tuple(replace(ROW, instance_uuid=f"{at:08d}{A[8:]}", position=at) for at in range(30))
    found = OpenDrain(record=record, open=rows, counts={S.WAITING: 30}, last_begun_at=last_begun_at)
    contexts = dict.fromkeys((row.instance_uuid for row in rows), known())
    done = step(found, contexts, UP, NOW)
    assert len(done.requests) == (begun if last_begun_at or per_minute is None else 1)
    assert [row.state for row in done.changed] == [S.UNDER_WAY] * len(done.requests), "the others are as they were"


def test_when_a_drain_is_over() -> None:
    late = replace(RECORD, deadline_at=NOW)
    cases: list[tuple[DrainRecord, dict[DrainMoveState, int], str | None]] = [
        (RECORD, {S.MOVED: 2}, "drain.done"),
        (RECORD, {S.MOVED: 2, S.FAILED: 1}, "drain.left"),
        (RECORD, {S.WAITING: 1}, None),
        (RECORD, {S.UNDER_WAY: 1}, None),
        (late, {S.WAITING: 1}, "drain.deadline"),
        (late, {S.WAITING: 1, S.UNDER_WAY: 1}, None),
        (replace(late, state=DrainState.PAUSED), {S.WAITING: 1}, "drain.deadline"),
        (replace(RECORD, state=DrainState.PAUSED), {}, None),
        (replace(RECORD, state=DrainState.STOPPING), {S.WAITING: 1}, "drain.stopped"),
        (replace(RECORD, state=DrainState.ENDED), {}, None),
    ]
    for record, counts, code in cases:
        found = OpenDrain(record=record, open=(), counts=counts, last_begun_at=0.0)
        assert end_of(found, NOW) == code, (record, counts)


def test_commands_and_what_a_host_is_in_a_drain() -> None:
    def after(record: DrainRecord, action: DrainAction, **more: Any) -> DrainRecord | Refusal:
        return commanded(record, DrainCommand(drain=DRAIN, action=action, by="bob", **more), NOW)

    ended = replace(RECORD, state=DrainState.ENDED, code="drain.left", deadline_at=NOW - 1)
    assert after(ended, DrainAction.RESUME) == RECORD
    assert after(ended, DrainAction.RESUME, deadline_s=5.0) == replace(RECORD, deadline_at=NOW + 5.0)
    stopping = after(RECORD, DrainAction.STOP)
    assert stopping == replace(RECORD, state=DrainState.STOPPING) and after(stopping, DrainAction.RESUME) == RECORD
    for record, code in ((ended, "drain.ended"), (stopping, "drain.stopping")):
        refused = after(record, DrainAction.PAUSE)
        assert isinstance(refused, Refusal) and refused.code == code
    assert after(ended, DrainAction.STOP) == ended
    for before in (AdminState.ENABLED, AdminState.DISABLED, AdminState.MAINTENANCE):
        decision = HostDecision(host="h1", state=before, reason="fan")
        taken = drained(decision, DRAIN, "h1", "rack")
        assert taken.drain == DRAIN and taken.state is not AdminState.ENABLED
        assert before is AdminState.ENABLED or replace(taken, drain=None) == decision
        assert drained(taken, "another", "h1", "again") == replace(taken, drain="another")
