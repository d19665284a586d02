"""The ends of the instances of a drain, and of the drain: going and failing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.base import MAX_REASON, Message, Refusal
from bus.contracts.book import ServiceHostsPage, ServiceHostsQuery, TreeHolder
from bus.contracts.build import BuildState
from bus.contracts.cell import ComputeHosts, HostReport, ServiceDown, ServicesDigest
from bus.contracts.drains import (
    DrainAction,
    DrainCommand,
    DrainMoveState,
    DrainQuery,
    DrainRecord,
    DrainState,
    DrainTarget,
)
from bus.contracts.moves import Condition, MoveKind, MoveRequest, MoveState
from bus.contracts.objects import HostDecision
from bus.contracts.operations import AdminState
from bus.faults import Fault, RequestRefused, RequestTimeout
from scheduler_worker.domain.builds import RecordedBuild, SinceBuild
from scheduler_worker.domain.drains import (
    LOOK_S,
    DrainedHost,
    DrainMove,
    DrainStep,
    HeldInstance,
    Look,
    OpenDrain,
    commanded,
    drained,
    end_of,
    held_on,
    is_migration,
    looked,
    retried,
    step,
)
from scheduler_worker.domain.hosts import HostTable
from scheduler_worker.domain.placement import PlacementUnavailable
from scheduler_worker.domain.recorded_moves import MoveContext, RecordedMove
from scheduler_worker.domain.selector import Selector
from scheduler_worker.drain_plan import DrainHolders, DrainPlanner, MadePlan
from scheduler_worker.fleet import Warmup
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.unit.scheduler.hosts import PLENTY, Hosts
from tests.unit.scheduler.test_placing import cluster
from tests.unit.scheduler.test_without_an_answer import Site, site

__all__ = ["cluster", "site"]  # fixtures

A, DRAIN, HOST, H2, H9 = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ad129")
S = DrainMoveState
ROW = DrainMove(drain=DRAIN, instance_uuid=A, position=0, source_uuid=HOST, kind=MoveKind.LIVE_MIGRATE)
UP = {HOST: DrainedHost(HOST, "h1")}
DOWN = {HOST: DrainedHost(HOST, "h1", "service.down")}
RECORD = DrainRecord(name="rack", target=DrainTarget.AGGREGATE, kind=MoveKind.LIVE_MIGRATE, by="ann")
NOW = 1000.0
NOT_LOOKED, EMPTY = Look(DRAIN), Look(DRAIN, (HOST,))  # EMPTY: the host holds nothing


def known(
    host: str | None = HOST, ended: MoveState | None = None, *, under_way: str | None = None, **more: Any
) -> MoveContext:
    """The instance on a host; ended: how its request has."""
    build = RecordedBuild(
        instance_uuid=A, project_id="p", state=more.pop("state", BuildState.ACTIVE), sequence=1, terminal=True,
        cell="c", host="h", host_uuid=host, instance=SinceBuild(under_way=under_way),
    )  # fmt: skip
    move = None
    if ended is not None:
        move = RecordedMove(
            request_id="r", project_id="p", kind=MoveKind.LIVE_MIGRATE, digest=b"", state=ended,
            sequence=9, created_at=1.0, **{"instance_uuid": A, "terminal": True, "host_uuid": H2, **more},
        )  # fmt: skip
    return MoveContext(move=move, build=build)


def passed(
    row: DrainMove,
    context: MoveContext,
    record: DrainRecord = RECORD,
    hosts: dict[str, DrainedHost] | None = None,
    look: Look = NOT_LOOKED,
) -> tuple[DrainMove, tuple[MoveRequest, ...]]:
    """The row after one pass, and what was requested."""
    found = OpenDrain(record=record, open=(row,), counts=Counter({row.state: 1}), last_begun_at=0.0)
    done = step(found, {A: context}, UP if hosts is None else hosts, look, NOW)
    return (done.changed or (row,))[0], done.requests


def test_a_cold_move_is_confirmed_at_once() -> None:
    _, (request,) = passed(replace(ROW, kind=MoveKind.MIGRATE), known())
    assert (request.kind, request.auto_confirm_s) == (MoveKind.MIGRATE, 0.0)


def test_what_waits_is_requested_once_under_an_id_of_its_try() -> None:
    after, (request,) = passed(ROW, known())
    assert (after.state, after.tries, after.request_id) == (S.UNDER_WAY, 1, request.request_id)
    assert (request.kind, request.host, request.user_id) == (MoveKind.LIVE_MIGRATE, None, "drain")
    assert (request.auto_confirm_s, request.project_id, request.instance_uuid) == (None, "p", A)
    assert passed(after, known()) == (after, ())  # not on record yet
    as_it_is = OpenDrain(record=RECORD, open=(after,), counts={S.UNDER_WAY: 1}, last_begun_at=NOW)
    assert step(as_it_is, {A: known()}, UP, NOT_LOOKED, NOW).changed == (), "a row that stays is not written"
    again, repeated = passed(replace(after, begun_at=NOW - 61.0), known())
    assert repeated == (request,) and again.begun_at == NOW
    assert replace(after, state=S.WAITING).request_id != after.request_id == ROW.request_id


@pytest.mark.parametrize("target", DrainTarget)
def test_its_requests_can_be_read(target: DrainTarget) -> None:
    """The user of those of a cell was no word: each was refused as unreadable, and sent again."""
    _, (request,) = passed(ROW, known(), replace(RECORD, target=target))
    assert msgspec.json.decode(msgspec.json.encode(request), type=MoveRequest) == request


def test_what_a_drain_has_left_without_a_host_has_failed() -> None:
    """It ended as done over an instance that no host has."""
    under_way = known(None, ended=MoveState.FAILED, code="image.broken")
    assert under_way.build is not None
    down = replace(under_way, build=replace(under_way.build, instance=SinceBuild(condition=Condition.OFFLOADED)))
    after, requests = passed(replace(TRIED, failures=0), down)
    assert (after.state, after.code, requests) == (S.FAILED, "image.broken", ())


# Fields that each decision has to set, or to leave: none as in a new row.
WAITS = replace(ROW, code="x", reason="y", failures=1, due_at=NOW, tries=1, begun_at=1.0)
TRIED = replace(WAITS, state=S.UNDER_WAY, begun_at=NOW)
READY = {"code": "", "reason": "", "due_at": 0.0}
BEGUN = READY | {"state": S.UNDER_WAY, "tries": 2, "begun_at": NOW}
LEFT, MOVED = {"state": S.LEFT}, {"state": S.MOVED, "code": "", "reason": ""}
WAITS_FOR_OTHER = {
    "due_at": NOW + 4.0,
    "code": "instance.busy",
    "reason": "another request about it is under way",
}
DONE = known(H2, MoveState.DONE, code="told", reason="why")
LOST = known(ended=MoveState.FAILED, code="told", reason="w" * (MAX_REASON + 1))
ENDS = known(state=BuildState.DELETING)
NOT_LIVE = known(ended=MoveState.FAILED, code="instance.not_running")
TOLD = {"failures": 2, "due_at": NOW + 4.0, "code": "told", "reason": "w" * MAX_REASON}


@pytest.mark.parametrize(
    ("row", "context", "hosts", "after", "requests"),
    [
        (WAITS, known(), None, BEGUN, 1),
        (replace(WAITS, due_at=NOW + 0.1), known(), None, {}, 0),
        (replace(WAITS, code="instance.building"), known(), None, BEGUN | {"failures": 0}, 1),
        (WAITS, MoveContext(), None, LEFT | {"code": "instance.deleted"}, 0),
        (WAITS, ENDS, None, LEFT | {"code": "instance.deleted"}, 0),
        (WAITS, known(H9), None, LEFT | {"code": "instance.elsewhere"}, 0),
        (WAITS, known(None), None, LEFT | {"code": "instance.elsewhere"}, 0),
        (WAITS, known(), {}, LEFT | {"code": "host.left_drain"}, 0),
        (replace(WAITS, host_uuid=H9), known(H9), {}, MOVED, 0),
        (replace(WAITS, host_uuid=H9), known(), None, BEGUN, 1),
        (WAITS, known(under_way="x"), None, WAITS_FOR_OTHER, 0),
        (replace(WAITS, failures=3), known(under_way="x"), None, WAITS_FOR_OTHER, 0),
        (replace(WAITS, tries=9), known(under_way="x"), None, WAITS_FOR_OTHER | {"due_at": NOW + 60.0}, 0),
        (WAITS, known(), DOWN, {"failures": 2, "due_at": NOW + 4.0, "code": "service.down"}, 0),
        (replace(ROW, failures=2), known(), DOWN, {"failures": 3, "due_at": NOW + 8.0, "code": "service.down"}, 0),
        (replace(ROW, failures=3), known(), DOWN, {"state": S.FAILED, "failures": 4, "code": "service.down"}, 0),
        (TRIED, MoveContext(), None, LEFT | {"code": "instance.deleted"}, 0),
        (replace(TRIED, begun_at=NOW - 59.9), known(), None, {}, 0),
        (replace(TRIED, begun_at=NOW - 60.0), known(), None, {"begun_at": NOW}, 1),
        (TRIED, known(ended=MoveState.MIGRATING, terminal=False), None, {}, 0),
        (TRIED, DONE, None, MOVED | {"host_uuid": H2, "failures": 0, "due_at": 0.0}, 0),
        (TRIED, LOST, None, {"state": S.WAITING} | TOLD, 0),
        (replace(TRIED, failures=3), known(ended=MoveState.REFUSED, code="instance.busy", reason="why"), None,
         WAITS_FOR_OTHER | {"state": S.WAITING, "reason": "why"}, 0),
        (TRIED, known(ended=MoveState.DONE, instance_uuid=H9), None,
         {"state": S.WAITING, "failures": 2, "due_at": NOW + 4.0, "code": "request.duplicate"}, 0),
        (replace(TRIED, failures=3), LOST, None, {"state": S.FAILED} | TOLD | {"failures": 4, "due_at": NOW + 16.0}, 0),
        (TRIED, replace(LOST, build=ENDS.build), None, LEFT | {"code": "instance.deleted"}, 0),
        (TRIED, NOT_LIVE, None, {"state": S.WAITING, "kind": MoveKind.MIGRATE}, 0),
        (
            replace(TRIED, kind=MoveKind.MIGRATE), NOT_LIVE, None,
            {"state": S.WAITING, "failures": 2, "due_at": NOW + 4.0, "code": "instance.not_running"}, 0,
        ),
    ],
)  # fmt: skip
def test_what_becomes_of_an_instance(
    row: DrainMove, context: MoveContext, hosts: Any, after: dict[str, Any], requests: int
) -> None:
    """The look has found that its host holds nothing of it: by the record alone it is active there."""
    found, made = passed(row, context, hosts=hosts, look=EMPTY)
    same = {"reason"} if "reason" not in after and found.failures > row.failures else set()
    same |= {"due_at"} if found.state is S.FAILED and "due_at" not in after else set()
    assert found == replace(row, **after, **{name: getattr(found, name) for name in same})
    assert len(made) == requests


@pytest.mark.parametrize("row", [WAITS, replace(WAITS, code="instance.building"), replace(WAITS, host_uuid=H9)])
@pytest.mark.parametrize("context", [MoveContext(), ENDS, known(H9), known(None), known(H9, under_way="x")])
def test_what_is_not_active_on_its_host_is_looked_for_there_before_anything_is_decided(
    row: DrainMove, context: MoveContext
) -> None:
    found = OpenDrain(record=RECORD, open=(row,), counts={}, last_begun_at=0.0)
    assert step(found, {A: context}, UP, NOT_LOOKED, NOW) == DrainStep(unclear=frozenset({HOST}))
    (after,) = step(found, {A: context}, {}, NOT_LOOKED, NOW).changed
    assert after.state in (S.LEFT, S.MOVED), "its host has left the drain"
    for state in (DrainState.PAUSED, DrainState.STOPPING):
        stays = replace(found, record=replace(RECORD, state=state))
        assert step(stays, {A: context}, UP, NOT_LOOKED, NOW) == DrainStep()


@pytest.mark.parametrize(
    ("fields", "last_begun_at", "under_way", "begun"),
    [
        ({"at_once": 20}, 0.0, 0, 20),
        ({"at_once": 3}, NOW - 1.0, 2, 1),
        ({"at_once": 3}, NOW - 1.0, 3, 0),
        ({"at_once": 3}, NOW - 1.0, 4, 0),
        ({"at_once": 20, "per_minute": 600}, 0.0, 0, 1),
        ({"at_once": 20, "per_minute": 600}, NOW - 3600.0, 0, 10),
        ({"at_once": 2, "per_minute": 600}, NOW - 3600.0, 0, 2),
        ({"at_once": 20, "per_minute": 240}, NOW - 0.5, 0, 2),
        ({"at_once": 20, "per_minute": 10}, NOW - 3600.0, 0, 1),
        ({"at_once": 20, "per_minute": 10}, NOW - 6.0, 0, 1),
        ({"at_once": 20, "per_minute": 10}, NOW - 5.9, 0, 0),
        ({"at_once": 20, "deadline_at": NOW + 0.1}, 0.0, 0, 20),
        ({"at_once": 20, "deadline_at": NOW}, 0.0, 0, 0),
        ({"at_once": 20, "state": DrainState.PAUSED}, 0.0, 0, 0),
        ({"at_once": 20, "state": DrainState.STOPPING}, 0.0, 0, 0),
    ],
)
def test_how_many_moves_begin_at_once(fields: dict[str, Any], last_begun_at: float, under_way: int, begun: int) -> None:
    """With a rate also after a pause, and after moves that took long. A move that has just ended leaves its place."""
    rows = [replace(ROW, instance_uuid=f"{at:08d}{A[8:]}", position=at) for at in range(30)]
    rows += [
        replace(row, instance_uuid=f"1{row.instance_uuid[1:]}", state=S.UNDER_WAY) for row in rows[: under_way + 1]
    ]
    contexts = dict.fromkeys((row.instance_uuid for row in rows), known())
    if under_way:
        rows[30:] = [replace(row, begun_at=NOW) for row in rows[30:]]
        contexts[rows[-1].instance_uuid] = known(H2, MoveState.DONE, instance_uuid=rows[-1].instance_uuid)
    else:
        del rows[30:]
    found = OpenDrain(
        record=replace(RECORD, **fields), open=(*rows[30:], *rows[:30]), counts={}, last_begun_at=last_begun_at
    )
    done = step(found, contexts, UP, NOT_LOOKED, NOW)
    assert [one.instance_uuid for one in done.requests] == [row.instance_uuid for row in rows[:begun]]
    states = [S.MOVED] * bool(under_way) + [S.UNDER_WAY] * begun
    assert [row.state for row in done.changed] == states, "the others are as they were"


def test_what_cannot_move_is_judged_though_no_move_may_begin() -> None:
    rows = (replace(ROW, state=S.UNDER_WAY, instance_uuid=H2, begun_at=NOW), ROW)
    found = OpenDrain(record=replace(RECORD, at_once=1), open=rows, counts={}, last_begun_at=0.0)
    (after,) = step(found, {H2: known(), A: known(H9)}, UP, EMPTY, NOW).changed
    assert (after.instance_uuid, after.state) == (A, S.LEFT)


def test_when_a_drain_is_over() -> None:
    late = replace(RECORD, deadline_at=NOW)
    cases: list[tuple[DrainRecord, dict[DrainMoveState, int], str | None]] = [
        (RECORD, {S.MOVED: 2}, "drain.done"),
        (RECORD, {S.MOVED: 2, S.FAILED: 1}, "drain.left"),
        (RECORD, {S.WAITING: 1}, None),
        (RECORD, {S.UNDER_WAY: 1}, None),
        (late, {S.WAITING: 1}, "drain.deadline"),
        (replace(late, deadline_at=NOW + 0.1), {S.WAITING: 1}, None),
        (late, {S.MOVED: 1}, "drain.done"),
        (replace(late, state=DrainState.ENDED), {S.WAITING: 1}, None),
        (replace(RECORD, state=DrainState.STOPPING), {S.UNDER_WAY: 1}, None),
        (late, {S.WAITING: 1, S.UNDER_WAY: 1}, None),
        (replace(late, state=DrainState.PAUSED), {S.WAITING: 1}, "drain.deadline"),
        (replace(RECORD, state=DrainState.PAUSED), {}, None),
        (replace(RECORD, state=DrainState.STOPPING), {S.WAITING: 1}, "drain.stopped"),
        (replace(RECORD, state=DrainState.ENDED), {}, None),
    ]
    for record, counts, code in cases:
        found = OpenDrain(record=record, open=(), counts=counts, last_begun_at=0.0)
        assert end_of(found, NOW) == code, (record, counts)


@pytest.mark.parametrize("state", list(S))
def test_what_has_failed_is_tried_again_by_a_drain_that_is_resumed(state: DrainMoveState) -> None:
    row = replace(WAITS, state=state)
    anew = replace(row, state=S.WAITING, failures=0, due_at=0.0, code="", reason="")
    assert retried(row) == (anew if state is S.FAILED else row)


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
    assert after(RECORD, DrainAction.PAUSE) == replace(RECORD, state=DrainState.PAUSED)
    for deadline_at in (NOW - 1, NOW, NOW + 1):
        kept = deadline_at if deadline_at > NOW else None
        paused = replace(RECORD, state=DrainState.PAUSED, deadline_at=deadline_at)
        assert after(paused, DrainAction.RESUME) == replace(RECORD, deadline_at=kept)
        assert after(paused, DrainAction.RESUME, deadline_s=9.0) == replace(RECORD, deadline_at=NOW + 9.0)
    assert drained(None, DRAIN, "h1", "rack") == HostDecision(
        host="h1", state=AdminState.DISABLED, reason="rack", drain=DRAIN
    )
    for before in (AdminState.ENABLED, AdminState.DISABLED, AdminState.MAINTENANCE):
        decision = HostDecision(host="h1", state=before, reason="fan")
        taken = drained(decision, DRAIN, "h1", "rack")
        assert taken.drain == DRAIN and taken.state is not AdminState.ENABLED
        assert before is AdminState.ENABLED or replace(taken, drain=None) == decision
        assert drained(taken, "another", "h1", "again") == replace(taken, drain="another")


class Refusing:
    """Placement refuses, or does not answer, every query."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    async def refresh(self, *, timeout_s: float) -> bool:
        return True

    async def request_all(self, messages: Sequence[object], *_: object, **__: object) -> list[Fault]:
        return [self._fault for _ in messages]


async def planned(fault: Fault) -> MadePlan | Refusal:
    """A host in use is to be drained."""
    (uuid,), selector = (hosts := Hosts([{"VCPU": 4}])).uuids, hosts.selector
    hosts.book.assume("held", {uuid: {"VCPU": 1}})
    placement, clock = cast("Any", Refusing(fault)), SystemClock()
    store = MemoryBuilds(MemoryBuildTable(clock).session())
    warmup = Warmup(selector, clock=clock)
    holders = DrainHolders(store, selector, placement, placement, warmup=warmup, clock=clock)
    planner = DrainPlanner(store, selector, cast("Any", None), holders, clock=clock)
    return await planner.plan(DrainQuery(host=uuid, target=DrainTarget.HOST))


async def test_a_query_that_placement_refuses_for_good_refuses_the_plan() -> None:
    """It was taken for an answer that did not come, and requested again until it was given up."""
    with pytest.raises(RequestRefused, match="too long"):
        await planned(RequestRefused("too long", code="message.invalid"))
    with pytest.raises(PlacementUnavailable):
        await planned(RequestTimeout("no answer"))


# --- instances that a drained host still holds something of: which of them wait, fail, are moved, or are done with


B, R = (f"{n}0000000-0000-4000-8000-000000000000" for n in "be")
DRAINED = DrainedHost(HOST, "h1")
HELD = HeldInstance(instance_uuid=A, project_id="p", source=DRAINED, code="instance.building", reason="its build")
ACTIVE = replace(HELD, code="", reason="", known=known())
UNCONFIRMED = replace(HELD, code="instance.unconfirmed")
UNRELEASED = replace(HELD, code="instance.unreleased")
PARKED = replace(ROW, code="instance.building", due_at=NOW)


def context(
    state: BuildState = BuildState.ACTIVE,
    host: str | None = "h1",
    condition: Condition = Condition.ACTIVE,
    under_way: str | None = None,
    host_uuid: str | None = None,
) -> MoveContext:
    uuid = host_uuid or {"h1": HOST, "h2": H2}.get(host or "")
    build = RecordedBuild(instance_uuid=A, project_id="p", state=state, sequence=1, cell="c", host=host, host_uuid=uuid)
    return MoveContext(build=replace(build, instance=SinceBuild(condition=condition, under_way=under_way)))


def request(**more: Any) -> RecordedMove:
    fields = {
        "kind": MoveKind.MIGRATE,
        "state": MoveState.DONE,
        "terminal": True,
        "cell": "c",
        "host": "h1",
        "host_uuid": HOST,
        **more,
    }
    return RecordedMove(request_id=R, instance_uuid=A, project_id="p", digest=b"", sequence=9, **fields)


def reviewed(rows: Sequence[DrainMove], held: Sequence[HeldInstance], *uuids: str) -> list[DrainMove]:
    """The rows that change after a look at hosts. No move may begin; what no host holds is on record elsewhere."""
    counts = Counter(row.state for row in rows)
    found = OpenDrain(record=replace(RECORD, at_once=0), open=tuple(rows), counts=counts, last_begun_at=0.0)
    there = UP | {H2: DrainedHost(H2, "h2")} | {one.source.uuid: one.source for one in held}
    contexts = {row.instance_uuid: known(H9) for row in rows} | {one.instance_uuid: one.known for one in held}
    return list(step(found, contexts, there, looked(DRAIN, uuids or (HOST,), held), NOW).changed)


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
    found = held_on(DRAINED, known)
    assert found is not None and (found.instance_uuid, found.code, found.source) == (A, code, DRAINED)


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
    held = held_on(DRAINED, known or MoveContext(), move, holder)
    assert held is not None and (held.instance_uuid, held.code) == found


@pytest.mark.parametrize(("consumer_type", "attempt"), [("MIGRATION", 0), ("INSTANCE", 2), ("INSTANCE", 0)])
def test_what_a_client_of_placements_api_wrote_is_no_migration_of_berth(consumer_type: str, attempt: int) -> None:
    holder = TreeHolder(consumer=R, project_id="p", user_id="u", consumer_type=consumer_type, attempt=attempt)
    assert not is_migration(holder)


def test_a_request_under_way_brings_an_instance_to_the_host_unless_it_is_there() -> None:
    going = request(state=MoveState.SCHEDULED, terminal=False)
    found = held_on(DRAINED, context(host="h2"), going)
    assert found is not None and (found.code, found.instance_uuid) == ("instance.arriving", A)
    there = held_on(DRAINED, context(), going)
    assert there is not None and there.code == ""  # it is being stopped
    assert held_on(DRAINED, MoveContext(), going) is None


def test_an_instance_that_was_done_with_and_is_held_again_is_waited_for() -> None:
    moved = replace(ROW, state=S.MOVED, host_uuid=H2)
    (row,) = reviewed([moved], [replace(HELD, code="instance.releasing")])
    assert (row.state, row.code, row.host_uuid) == (S.WAITING, "instance.releasing", H2)
    other = DrainedHost(H2, "h2")
    (row,) = reviewed(
        [replace(ROW, state=S.LEFT, code="instance.elsewhere")], [replace(ACTIVE, source=other, known=known(H2))], H2
    )
    assert (row.state, row.source_uuid, row.due_at) == (S.WAITING, H2, 0.0)
    for state in (S.UNDER_WAY, S.FAILED, S.WAITING):
        assert reviewed([replace(ROW, state=state, begun_at=NOW)], [ACTIVE]) == []
    assert len(reviewed([], [UNCONFIRMED, ACTIVE])) == 1


@pytest.mark.parametrize("due", [ROW, replace(ROW, code="instance.busy", failures=2), PARKED])
def test_a_look_counts_no_failure_of_what_it_cannot_begin_to_move(due: DrainMove) -> None:
    """So many are due that this pass has no record of it but the look's, which is older."""
    found = OpenDrain(record=RECORD, open=(due,), counts=Counter({S.WAITING: 1}), last_begun_at=0.0)
    for held in (replace(ACTIVE, known=known(under_way="x")), down(ACTIVE), ACTIVE):
        hosts = {HOST: held.source}
        assert step(found, {}, hosts, looked(DRAIN, (HOST,), [held]), NOW) == DrainStep()
        assert step(found, {A: held.known}, hosts, looked(DRAIN, (HOST,), [held]), NOW).changed != ()
    (waits,) = step(found, {}, UP, looked(DRAIN, (HOST,), [UNRELEASED]), NOW).changed
    assert (waits.code, waits.failures) == (UNRELEASED.code, 1), "what is looked at is counted by looks"


COUNTED = replace(PARKED, failures=2, host_uuid=H2)


@pytest.mark.parametrize(
    ("row", "held", "after"),
    [
        (COUNTED, HELD, {"reason": "its build", "due_at": NOW + LOOK_S}),
        (COUNTED, ACTIVE, READY | {"failures": 0}),
        (
            COUNTED, down(ACTIVE),
            {"code": "service.down", "reason": DOWN[HOST].reason, "failures": 1, "due_at": NOW + 2.0},
        ),
        (replace(COUNTED, code="no_valid_host"), ACTIVE, READY),
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
            {"reason": "its build", "due_at": NOW + LOOK_S, "source_uuid": HOST, "host_uuid": None},
        ),
        (
            replace(COUNTED, state=S.MOVED, code=""), ACTIVE,
            {"failures": 0, "due_at": 0.0},
        ),
        (COUNTED, None, {"state": S.LEFT, "code": "instance.elsewhere"}),
        (replace(COUNTED, host_uuid=H9), None, MOVED),
        (replace(COUNTED, due_at=NOW + 0.1), None, None),
        (replace(COUNTED, code="instance.busy"), None, {"state": S.LEFT, "code": "instance.elsewhere"}),
        (replace(COUNTED, code="instance.busy"), UNRELEASED, {
            "code": UNRELEASED.code, "reason": "its build", "failures": 1, "due_at": NOW + 2.0,
        }),
        (replace(COUNTED, state=S.FAILED), None, None),
        (replace(COUNTED, source_uuid=H2), None, None),
    ],
)  # fmt: skip
def test_each_row_after_one_look(row: DrainMove, held: HeldInstance | None, after: dict[str, Any] | None) -> None:
    found = reviewed([row], [] if held is None else [held])
    assert found == ([] if after is None else [replace(row, **{"state": S.WAITING, **after})])


@pytest.mark.parametrize("row", [PARKED, replace(ROW, state=S.LEFT), replace(ROW, state=S.MOVED, host_uuid=H2)])
@pytest.mark.parametrize("held", [ACTIVE, HELD, UNRELEASED])
def test_what_a_look_has_found_on_a_host_that_has_left_the_drain_meanwhile_is_left(
    row: DrainMove, held: HeldInstance
) -> None:
    after, requests = passed(row, known(), hosts={}, look=looked(DRAIN, (HOST,), [held]))
    assert (after.state, after.code, requests) == (S.LEFT, "host.left_drain", ())


def test_of_what_has_moved_since_the_look_the_record_counts() -> None:
    after, requests = passed(PARKED, known(H9), look=looked(DRAIN, (HOST,), [ACTIVE]))
    assert (after.state, after.code, requests) == (S.LEFT, "instance.elsewhere", ())
    both = UP | {H2: DrainedHost(H2, "h2")}
    after, requests = passed(PARKED, known(H2), hosts=both, look=looked(DRAIN, (HOST,), [HELD]))
    assert (after.state, after.source_uuid, len(requests)) == (S.UNDER_WAY, H2, 1), "the drain moves it from there"


def test_no_move_begins_by_a_look_alone() -> None:
    for rows in ((), (replace(ROW, state=S.MOVED, host_uuid=H2),), (replace(ROW, state=S.LEFT),)):
        found = OpenDrain(record=RECORD, open=rows, counts={S.MOVED: 5}, last_begun_at=0.0)
        done = step(found, {}, UP, looked(DRAIN, (HOST,), [ACTIVE]), NOW)
        assert done.requests == ()
        assert [(row.state, row.position) for row in done.changed] == [(S.WAITING, 0 if rows else 5)]


def test_of_two_hosts_that_hold_an_instance_the_one_where_it_is_active_counts() -> None:
    there, elsewhere = ACTIVE, replace(UNCONFIRMED, source=DrainedHost(H2, "h2"), known=known())
    for held in ([there, elsewhere], [elsewhere, there], [there, there]):
        (row,) = reviewed([], held)
        assert (row.code, row.source_uuid) == ("", HOST)
    first = reviewed([], [HELD, replace(elsewhere, known=HELD.known)])
    assert [one.source_uuid for one in first] == [HOST]


def test_new_rows_follow_those_that_the_drain_has() -> None:
    others = [replace(HELD, instance_uuid=uuid) for uuid in (B, H2)]
    found = reviewed([PARKED], [HELD, *others])
    assert [(row.instance_uuid, row.position) for row in found] == [(A, 0), (B, 1), (H2, 2)]
    assert found[1] == replace(
        ROW, instance_uuid=B, position=1, code="instance.building", reason="its build", due_at=NOW + LOOK_S
    )


# --- Which hosts a cell, or a service, has: what is announced here is not all of them.


class BookOf:
    """A bus to placement, whose book has these hosts of service s2."""

    def __init__(self, hosts: dict[str, str]) -> None:
        self._hosts = hosts

    async def request_all(self, queries: Sequence[ServiceHostsQuery], *_: object, **__: object) -> list[Message]:
        return [ServiceHostsPage(hosts=self._hosts if one.service == "s2" else {}) for one in queries]


@pytest.mark.parametrize("second", ["is up and not announced here yet", "died before this scheduler started"])
async def test_a_cell_is_not_drained_of_those_hosts_alone_that_are_announced_here(site: Site, second: str) -> None:
    """The drain of the cell began with one of its two hosts, and ended as `drain.done` while the other one was full: an
    operator switches it off. To forget a service, or a host, the book and the cell's digest are asked.
    """
    hosts, clock = Hosts([PLENTY] * 2), site.cluster.clock
    table, now_s = HostTable(), clock.monotonic()
    selector = Selector(
        hosts.book, table, hosts.config, flavors=hosts.selector.flavors, filters=hosts.selector.filters, weighings=[]
    )
    there = (HostReport(uuid=hosts.uuids[0], name="h0"),)
    table.apply(ComputeHosts(service="s1", cell="c1", epoch=1, sequence=1, hosts=there, complete=True), now_s)
    is_up = second.startswith("is up")
    down = () if is_up else (ServiceDown(service="s2", epoch=1, code="service.dead", reason="no heartbeat"),)
    table.apply(ServicesDigest(cell="c1", term=1, number=1, up=1 + is_up, down=down), now_s)
    warmup, book = Warmup(selector, clock=clock), cast("Any", BookOf({hosts.uuids[1]: "h1"}))
    holders = DrainHolders(site.store, selector, cast("Any", site.cluster), book, warmup=warmup, clock=clock)
    found = await holders.hosts_of("c1", DrainTarget.CELL, None)
    if is_up:
        assert isinstance(found, Refusal) and found.code == "host.cell_silent"
        return
    assert not isinstance(found, Refusal) and {one.uuid for one in found[1]} == set(hosts.uuids)
    of_service = await holders.hosts_of("s2", DrainTarget.SERVICE, "c1")
    assert not isinstance(of_service, Refusal) and [one.uuid for one in of_service[1]] == hosts.uuids[1:]
