"""One suite for both stores of the scheduler: operators' objects, drains, and builds without an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from bus.clock import CLOCKS_APART_S, SystemClock
from bus.consuming.outcome import Refuse
from bus.contracts.actions import ActionKind, ActionState, Condition
from bus.contracts.base import DatabaseMark, Refusal
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.drains import DrainRecord, DrainTarget
from bus.contracts.objects import (
    ChangedObject,
    ObjectChange,
    ObjectKind,
    ObjectLogQuery,
    ObjectsChange,
    ObjectsChanged,
    ObjectsRevision,
    StoredObject,
)
from bus.contracts.placement import GroupPolicy, ServerGroup
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.build.pending_build import PendingBuild
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.objects.object_registry import ObjectRegistry
from scheduler_worker.objects.operator_changes import OperatorChanges
from scheduler_worker.operator_handler import RefusedCommands
from scheduler_worker.records.action_record import RecordedAction
from scheduler_worker.records.build_record import Actor, BuildUpdate, Gang, NewBuild, RecordedBuild, SinceBuild
from scheduler_worker.records.drain_record import BegunMoves, EndedRequest
from scheduler_worker.records.object_records import ChangeActor, RecordedObjects
from scheduler_worker.store import memory, postgres
from scheduler_worker.store import object_rows as store_module
from scheduler_worker.store.port import FIRST_UUID, OperationUnit, SchedulerStore, WithoutHost
from tests.kit.sent import Sent
from tests.unit.scheduler_worker.hosts import Hosts

# --- One suite for both stores of the scheduler: operators' objects.


F, Q = ObjectKind.FLAVOR, ObjectKind.QUOTA
SMALL, LARGE = ChangedObject(kind=F, name="small", after={"vcpus": 1}), ChangedObject(kind=F, name="large", after={})
GROUP = "b0000000-0000-4000-8000-000000000000"
BUILD = "a0000000-0000-4000-8000-000000000000"


@pytest.fixture
async def built(store: SchedulerStore) -> SchedulerStore:
    """A store with one build, whose group has a policy."""
    group = ServerGroup(uuid=GROUP, policy=GroupPolicy.AFFINITY)
    build = BuildRequest(instance_uuid=BUILD, flavor="small", project_id="p", server_group=group)
    pending = PendingBuild(batch_index=0, request=build, digest=b"", requested_at=1.0, taken_at=1.0)
    async with store.unit() as unit:
        await unit.insert([pending.first_record(Actor("test", 1.0))], 1.0)
    return store


async def write(store: SchedulerStore, *changed: ChangedObject, who: str = "me", at: float = 1.0) -> int:
    async with store.operation() as unit:
        before = await unit.lock_objects()
        token = await unit.write_objects(changed, ChangeActor(who, "because", at))
    found = await store.objects(unless=before.token)
    assert found is not None and found.token == token and await store.objects(unless=token) is None
    return found.revision


async def test_an_empty_system_has_revision_0_and_nothing(store: SchedulerStore) -> None:
    found = await store.objects()
    assert found is not None
    assert (found.revision, found.objects) == (0, {})
    assert await store.objects(unless=found.token) is None


async def test_what_is_written_is_there_with_its_version(store: SchedulerStore) -> None:
    assert await write(store, SMALL, LARGE) == 1
    bigger = ChangedObject(kind=F, name="small", before={"vcpus": 1}, after={"vcpus": 2})
    assert await write(store, bigger, who="you", at=2.0) == 2
    gone = ChangedObject(kind=F, name="large", before={}, after=None)
    assert await write(store, gone, at=3.0) == 3
    found = await store.objects()
    assert found is not None
    assert found.revision == 3
    kept = StoredObject(kind=F, name="small", body={"vcpus": 2}, version=2, changed_at=2.0, changed_by="you")
    assert found.objects == {(F, "small"): kept}


async def test_a_unit_that_ends_with_an_exception_has_written_and_sent_nothing(
    store: SchedulerStore, sent: Sent
) -> None:
    with pytest.raises(RuntimeError, match="on the way"):
        async with store.operation() as unit:
            await unit.lock_objects()
            await unit.write_objects([SMALL], ChangeActor("me", "", 1.0))
            unit.emit(OutboxMessage("api", ObjectsRevision(revision=1)))
            raise RuntimeError("on the way")
    found = await store.objects()
    assert found is not None
    assert (found.revision, found.objects) == (0, {})
    assert await store.object_log(ObjectLogQuery()) == []
    assert sent.rows == []


async def test_a_change_is_reported_with_its_commit(store: SchedulerStore, sent: Sent) -> None:
    announcement = OutboxMessage("api", ObjectsRevision(revision=1))
    async with store.operation() as unit:
        await unit.lock_objects()
        await unit.write_objects([SMALL], ChangeActor("me", "", 1.0))
        unit.emit(announcement)
        assert sent.rows == []
    assert [messages for _, messages in sent.rows] == [[announcement]]
    assert len(sent.rows[0][0]) == 1


async def test_changes_wait_for_each_other(store: SchedulerStore) -> None:
    """Each reads the revision that the one before it has written: none is lost, none is written twice."""

    async def add(number: int) -> int:
        async with store.operation() as unit:
            present = await unit.lock_objects()
            assert len(present.objects) == present.revision
            await asyncio.sleep(0)
            changed = ChangedObject(kind=Q, name=f"p{number}", after={})
            await unit.write_objects([changed], ChangeActor("me", "", 1.0))
            return present.revision

    assert sorted(await asyncio.gather(*map(add, range(8)))) == list(range(8))
    found = await store.objects()
    assert found is not None and len(found.objects) == 8


async def test_the_log_has_author_reason_before_and_after_newest_first(store: SchedulerStore) -> None:
    await write(store, SMALL, LARGE)
    await write(store, ChangedObject(kind=F, name="small", before={"vcpus": 1}, after=None), who="yo\x00u", at=2.0)
    newest, *others = await store.object_log(ObjectLogQuery())
    assert (newest.revision, newest.name, newest.actor, newest.reason) == (2, "small", "you", "because")
    assert (newest.before, newest.after) == ({"vcpus": 1}, None)
    assert [(one.revision, one.name, one.actor) for one in others] == [(1, "large", "me"), (1, "small", "me")]
    assert [one.revision for one in await store.object_log(ObjectLogQuery(name="small"))] == [2, 1]
    assert [one.name for one in await store.object_log(ObjectLogQuery(before=2, limit=1))] == ["large"]
    assert await store.object_log(ObjectLogQuery(kind=Q)) == []


async def test_a_query_of_the_log_may_name_what_no_database_stores(store: SchedulerStore) -> None:
    await write(store, SMALL)
    await store.object_log(ObjectLogQuery(name="sm\x00all"))
    assert await store.object_log(ObjectLogQuery(before=1, before_object=("zz\x00", "\x00"))) == []


def kept(store: SchedulerStore) -> tuple[ObjectRegistry, OperatorChanges]:
    selector, clock = Hosts([]).selector, SystemClock()
    registry = ObjectRegistry(store, selector, SchedulerConfig(), clock=clock)
    return registry, OperatorChanges(registry, store, selector, clock=clock)


async def test_a_redelivered_change_that_was_refused_is_refused_again(store: SchedulerStore) -> None:
    """The scheduler may have died between its refusal and the acknowledgement."""
    registry, changes = kept(store)
    await registry.reload()
    for _ in range(2):
        wrong = ObjectsChange(actor="me", changes=(ObjectChange(kind=F, name="gone"),))
        answer = await changes.apply(wrong, "refused")
        assert isinstance(answer, Refusal) and answer.code == "object.unknown"
        dry = ObjectsChange(actor="me", changes=(ObjectChange(kind=F, name="new", body={"vcpus": 1}),), dry_run=True)
        answer = await changes.apply(dry, "dry")
        assert isinstance(answer, ObjectsChanged) and [one.name for one in answer.changed] == ["new"]
    made = replace(dry, dry_run=False)
    assert await changes.apply(made, "made") == ObjectsChanged(revision=2, changed=answer.changed)
    assert await changes.apply(made, "made") == ObjectsChanged(revision=2)


async def test_a_refusal_is_kept_and_a_change_that_was_made_is_none(store: SchedulerStore) -> None:
    registry, changes = kept(store)
    refused = RefusedCommands(store)
    await registry.reload()
    refusal = Refuse("host.unknown", "there is no host h1")
    assert await refused.find("refused") is None
    for _ in range(2):
        await refused.add("refused", refusal)
    made = ObjectsChange(actor="me", changes=(ObjectChange(kind=F, name="new", body={"vcpus": 1}),))
    assert isinstance(await changes.apply(made, "made"), ObjectsChanged)
    assert [await refused.find(one) for one in ("refused", "made", "other")] == [refusal, None, None]
    elsewhere = await RefusedCommands(store).find("refused")
    assert elsewhere is not None and elsewhere.code == "request.refused_before"


async def test_a_special_change_that_is_refused_was_not_handled(store: SchedulerStore) -> None:
    registry, _ = kept(store)
    first: list[bool] = []

    async def make(unit: OperationUnit, _: RecordedObjects) -> Refusal:
        first.append(await unit.first_time("drains", "m"))
        return Refusal(code="drain.ended")

    for _ in range(2):
        assert await registry.write(make) == Refusal(code="drain.ended")
    assert first == [True, True]


async def test_pages_of_the_log_have_every_entry_of_a_revision_larger_than_a_page(store: SchedulerStore) -> None:
    names = ["a", "b", "c", "d", "e"]
    await write(store, ChangedObject(kind=F, name="first", after={}))
    await write(store, *(ChangedObject(kind=kind, name=name, after={}) for name in names for kind in (Q, F)))
    found: list[tuple[int, str, str]] = []
    query = ObjectLogQuery(limit=3)
    while page := await store.object_log(query):
        found += [(one.revision, one.kind.value, one.name) for one in page]
        query = replace(query, before=page[-1].revision, before_object=found[-1][1:])
    assert found == [(2, kind, name) for kind in ("flavor", "quota") for name in names] + [(1, "flavor", "first")]
    of_earlier = await store.object_log(ObjectLogQuery(before=2))
    assert [one.name for one in of_earlier] == ["first"], "without an object, the whole revision is left out"


async def test_the_log_is_bounded(store: SchedulerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_LOG_ENTRIES", 2)
    for number in range(4):
        await write(store, ChangedObject(kind=Q, name=f"p{number}", after={}))
    assert [one.name for one in await store.object_log(ObjectLogQuery())] == ["p3", "p2"]


async def test_builds_of_a_flavor_are_counted_up_to_a_limit(built: SchedulerStore) -> None:
    assert await built.machines(10, flavor="small") == 1
    assert await built.machines(0, flavor="small") == 0
    assert await built.machines(10, flavor="large") == 0


@pytest.mark.parametrize(
    ("instance", "counted"),
    [
        (SinceBuild(), {"small"}),
        (SinceBuild(new_flavor="large", old_flavor="small"), {"small", "large"}),
        (SinceBuild(flavor="large"), {"large"}),
        (SinceBuild(flavor="large", new_flavor="large", old_flavor="small"), {"small", "large"}),
    ],
)
async def test_an_instance_counts_for_each_flavor_that_it_may_have_next(
    built: SchedulerStore, instance: SinceBuild, counted: set[str]
) -> None:
    async with built.operation() as unit:
        build = (await unit.known([(BUILD, BUILD)], lock=True))[BUILD, BUILD].build
        assert build is not None
        await unit.update([BuildUpdate(build=replace(build, instance=instance))], 1.0)
    assert {name for name in ("small", "large") if await built.machines(10, flavor=name)} == counted


@pytest.mark.parametrize(
    ("state", "condition", "host", "counted"),
    [
        (BuildState.ACTIVE, Condition.OFFLOADED, None, [WithoutHost("p", Condition.OFFLOADED, "large", 1)]),
        (BuildState.ACTIVE, Condition.MOVING, None, [WithoutHost("p", Condition.MOVING, "large", 1)]),
        (BuildState.ACTIVE, Condition.MOVING, "host-1", []),
        (BuildState.ACTIVE, Condition.SHELVED, None, []),
        (BuildState.DELETED, Condition.OFFLOADED, None, []),
    ],
)
async def test_the_instances_of_projects_that_have_no_host_are_counted(
    built: SchedulerStore,
    state: BuildState,
    condition: Condition,
    host: str | None,
    counted: list[WithoutHost],
) -> None:
    async with built.operation() as unit:
        build = (await unit.known([(BUILD, BUILD)], lock=True))[BUILD, BUILD].build
        assert build is not None
        instance = SinceBuild(condition=condition, flavor="large")
        await unit.update([BuildUpdate(build=replace(build, state=state, host=host, instance=instance))], 1.0)
    assert await built.without_host(["other", "p"]) == counted
    assert await built.without_host(["other"]) == []


async def test_builds_in_a_cell_are_counted_up_to_a_limit(built: SchedulerStore) -> None:
    async def move_to(state: BuildState) -> None:
        async with built.operation() as unit:
            build = (await unit.known([(BUILD, BUILD)], lock=True))[BUILD, BUILD].build
            assert build is not None
            await unit.update([BuildUpdate(build=replace(build, state=state, cell="c1"))], 1.0)

    assert await built.machines(10, cell="c1") == 0
    await move_to(BuildState.SCHEDULED)
    assert await built.machines(10, cell="c1") == 1
    assert await built.machines(0, cell="c1") == 0
    assert await built.machines(10, cell="c2") == 0
    await move_to(BuildState.DELETED)
    assert await built.machines(10, cell="c1") == 0


async def test_builds_of_a_projects_group_are_counted_up_to_a_limit(built: SchedulerStore) -> None:
    assert await built.machines(10, group=("p", GROUP)) == 1
    assert await built.machines(0, group=("p", GROUP)) == 0
    assert await built.machines(10, group=("other", GROUP)) == 0
    assert await built.machines(10, group=("p", BUILD)) == 0


# --- One suite for both stores of the scheduler: the requests of drains.


DRAIN, OTHER, HOST, UNKNOWN = (f"{n}0000000-0000-4000-8000-000000000000" for n in "abcd")
RECORD = DrainRecord(name="rack", target=DrainTarget.AGGREGATE, kind=ActionKind.MIGRATE, by="ann")


def vm(number: int) -> str:
    return f"{number:08}-0000-4000-8000-000000000000"


def asked(at: int, number: int, state: ActionState, drain: str | None = DRAIN) -> tuple[RecordedAction, float]:
    """A request about an instance that was made at this time, and changed last some time later."""
    action = RecordedAction(
        request_id=f"f{at:07}-0000-4000-8000-000000000000", instance_uuid=vm(number), project_id="p",
        kind=ActionKind.MIGRATE, digest=b"x", state=state, sequence=3, terminal=state is not ActionState.SCHEDULED,
        code="no_valid_host" if state is ActionState.FAILED else "", reason="why", created_at=float(at), drain=drain,
    )  # fmt: skip
    return action, at + 0.5


DONE, FAILED, GOES = ActionState.DONE, ActionState.FAILED, ActionState.SCHEDULED
ASKED = [
    asked(1, 1, FAILED), asked(2, 1, DONE), asked(3, 2, DONE), asked(4, 3, FAILED), asked(5, 3, GOES),
    asked(6, 1, FAILED, None), asked(7, 4, GOES, OTHER), asked(8, 1, GOES), asked(9, 2, FAILED, OTHER),
    asked(10, 2, DONE),
]  # fmt: skip


@pytest.fixture
async def drains(store: SchedulerStore) -> SchedulerStore:
    """A store with a drain, and the requests of two."""
    async with store.operation() as unit:
        await unit.lock_objects()
        drain = ChangedObject(kind=ObjectKind.DRAIN, name=DRAIN, after=msgspec.to_builtins(RECORD))
        await unit.write_objects([drain], ChangeActor("ann", "because", 1.0))
    for action, at in ASKED:
        async with store.operation() as unit:
            assert await unit.insert_actions([action], at) == {action.request_id}
    return store


async def test_the_requests_of_drains_are_counted(drains: SchedulerStore) -> None:
    async with drains.operation() as unit:
        assert await unit.begun(DRAIN, 11.0) == BegunMoves(2, 10.0)
        assert await unit.begun(OTHER, 11.0) == BegunMoves(1, 9.0)
        assert await unit.begun(UNKNOWN, 11.0) == await unit.begun(None, 11.0) == BegunMoves(0, 0.0)
        for at, last_at in ((9.5, 8.0), (0.5, 0.0)):  # the clock was set back: until then no rate would let one begin
            assert await unit.begun(DRAIN, at - CLOCKS_APART_S) == BegunMoves(2, last_at)
        newest = [next(one for one, _ in ASKED if one.created_at == at) for at in (8, 10, 5)]
        assert await unit.newest(DRAIN, 10) == newest and await unit.newest(DRAIN, 2) == newest[:2]
        assert await unit.newest(UNKNOWN, 10) == []
        counts = {(DRAIN, False): 2, (DRAIN, True): 2, (OTHER, False): 1}
        assert dict(await unit.moved_counts([DRAIN, OTHER, UNKNOWN])) == counts
        assert dict(await unit.moved_counts([])) == {}


async def test_evacuations_under_way_are_counted_of_whatever_fence(drains: SchedulerStore) -> None:
    """Of no client, and none that has ended."""
    made = [asked(20, 5, GOES), asked(21, 6, GOES, OTHER), asked(22, 7, GOES, None), asked(23, 8, DONE)]
    async with drains.operation() as unit:
        await unit.insert_actions([replace(one, kind=ActionKind.EVACUATE) for one, _ in made], 30.0)
    async with drains.operation() as unit:
        assert await unit.begun(None, 30.0) == BegunMoves(2, 0.0)


async def test_the_requests_of_an_instance_that_have_ended_come_newest_first(drains: SchedulerStore) -> None:
    def ended(at: int) -> EndedRequest:
        action = next(one for one, _ in ASKED if one.created_at == at)
        fields = {name: getattr(action, name) for name in ("request_id", "instance_uuid", "state", "code", "reason")}
        return EndedRequest(**fields, drain=action.drain, updated_at=at + 0.5)

    async with drains.operation() as unit:
        found = await unit.ended([vm(1), vm(2), vm(4), UNKNOWN], 2)
        assert found == {vm(1): [ended(6), ended(2)], vm(2): [ended(10), ended(9)]}
        assert await unit.ended([vm(3)], 5) == {vm(3): [ended(4)]}
        assert await unit.ended([], 5) == {}


async def test_a_drain_is_held_by_one_transaction_at_a_time(drains: SchedulerStore) -> None:
    """The second counts what the first has put on record; another object's row is free."""
    held, begun, order = asyncio.Event(), asyncio.Event(), list[object]()

    async def second() -> None:
        await held.wait()
        async with drains.operation() as unit:
            assert await unit.lock_object(ObjectKind.DRAIN, UNKNOWN) is None
            assert await unit.lock_object(ObjectKind.FENCE, DRAIN) is None
            order.append("waits")
            begun.set()
            assert await unit.lock_object(ObjectKind.DRAIN, DRAIN) == msgspec.to_builtins(RECORD)
            order.append((await unit.begun(DRAIN, 30.0)).under_way)

    waiting = asyncio.create_task(second())
    async with drains.operation() as unit:
        assert await unit.lock_object(ObjectKind.DRAIN, DRAIN) is not None
        held.set()
        await begun.wait()
        await unit.insert_actions([asked(20, 5, GOES)[0]], 20.5)
        order.append("writes")
    await waiting
    assert order == ["waits", "writes", 3]


# --- Which builds have no end, as both stores find them: without an index that every write of a build would pay.


A, B, C, D, E, F1 = (f"{n}0000000-0000-4000-8000-000000000000" for n in "abcdef")


async def put_build(store: SchedulerStore, uuid: str, state: BuildState, at: float, cell: str | None = "c1") -> None:
    """A build that was requested and last changed at this time."""
    request = BuildRequest(instance_uuid=uuid, flavor="f", project_id="p")
    build = RecordedBuild(instance_uuid=uuid, project_id="p", state=BuildState.ACCEPTED, sequence=1)
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=request, build=build)], at)
    async with store.unit() as unit:
        locked = (await unit.lock([uuid]))[uuid]
        await unit.update([BuildUpdate(build=replace(locked, state=state, cell=cell))], at)


async def test_open_builds_are_those_without_an_end_page_by_page(store: SchedulerStore) -> None:
    await put_build(store, C, BuildState.SCHEDULED, 1.0)
    await put_build(store, A, BuildState.ACTIVE, 2.0)
    await put_build(store, B, BuildState.DELETING, 2.0)
    await put_build(store, D, BuildState.BUILDING, 3.0)
    every = await store.open_builds((), (0.0, FIRST_UUID), 10.0, 10)
    assert [(one.instance_uuid, one.state, one.cell) for one in every.builds] == [
        (B, BuildState.DELETING, "c1"),
        (C, BuildState.SCHEDULED, "c1"),
        (D, BuildState.BUILDING, "c1"),
    ]
    assert every.last is None
    pages, after = [], (0.0, FIRST_UUID)
    while True:
        page = await store.open_builds((), after, 10.0, 2)
        pages.append([one.instance_uuid for one in page.builds])
        if page.last is None:
            break
        after = page.last
    assert pages == [[C], [B, D], []]


async def test_of_the_builds_that_had_an_event_lately_only_the_watched_are_open(store: SchedulerStore) -> None:
    await put_build(store, A, BuildState.BUILDING, 1.0)
    await put_build(store, B, BuildState.BUILDING, 5.0)
    await put_build(store, C, BuildState.ACTIVE, 1.0)
    await put_build(store, D, BuildState.ACCEPTED, 1.0, None)
    for watched, found in (((), [A, D]), ((B, C, D), [A, B, D])):
        page = await store.open_builds(watched, (0.0, FIRST_UUID), 5.0, 10)
        assert [one.instance_uuid for one in page.builds] == found


async def test_a_cells_instances_are_those_with_a_machine_page_by_page(
    store: SchedulerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds of other cells, and those that have ended without a machine, are looked at and left out."""
    for uuid, state, cell in (
        (D, BuildState.DELETING, "c1"),
        (B, BuildState.FAILED, "c1"),
        (A, BuildState.ACTIVE, "c1"),
        (C, BuildState.SCHEDULED, "c2"),
        (E, BuildState.BUILDING, "c1"),
        (F1, BuildState.ACCEPTED, None),
    ):
        await put_build(store, uuid, state, 1.0, cell)
    for most in (100, 2, 1):
        for module in (memory, postgres):
            monkeypatch.setattr(module, "MAX_EXAMINED", most)
        for limit in (100, 2, 1):
            found, after = list[str](), ""
            while True:
                page = await store.in_cell("c1", after, limit)
                found += page.instances
                assert len(page.instances) <= limit
                assert page.last == "" or page.last > after
                if not page.last:
                    break
                after = page.last
            assert found == [A, D, E]
    assert list((await store.in_cell("nobody", "", 10)).instances) == []


async def test_of_a_cells_database_the_highest_mark_is_kept(make: Callable[[], SchedulerStore]) -> None:
    store, other = make(), make()
    await store.open()
    await other.open()
    assert await store.mark_of("c1") == DatabaseMark()
    for mark, highest in (
        (DatabaseMark(2), DatabaseMark(2)),
        (DatabaseMark(2, (0, 3)), DatabaseMark(2, (0, 3))),
        (DatabaseMark(2, (5, 1, 7)), DatabaseMark(2, (5, 3, 7))),
        (DatabaseMark(2, (6,)), DatabaseMark(2, (6, 3, 7))),
        (DatabaseMark(1, (9,)), DatabaseMark(2, (6, 3, 7))),
        (DatabaseMark(3, (1,)), DatabaseMark(3, (1,))),
    ):
        assert await store.raise_mark("c1", mark) == highest.database_incarnation
        assert await other.mark_of("c1") == highest
        store, other = other, store
    assert await store.mark_of("c2") == DatabaseMark()


async def test_the_newest_moves_of_an_instance_without_those_that_were_refused(
    store: SchedulerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = (ActionState.DONE, ActionState.REFUSED, ActionState.FAILED, ActionState.SCHEDULED, ActionState.REFUSED)
    actions = [
        RecordedAction(
            request_id=f"{n}1000000-0000-4000-8000-000000000000",
            instance_uuid=A if n < 5 else B,
            project_id="p",
            kind=ActionKind.MIGRATE,
            digest=b"",
            state=state,
            sequence=1,
            created_at=float(n),
        )
        for n, state in enumerate((*states, ActionState.DONE))
    ]
    async with store.operation() as unit:
        await unit.insert_actions(actions, 1.0)
    found = await store.actions_of([A, B, C], 2)
    assert {uuid: [one.created_at for one in theirs] for uuid, theirs in found.items()} == {A: [3.0, 2.0], B: [5.0]}
    for module in (memory, postgres):
        monkeypatch.setattr(module, "MAX_EXAMINED", 2)
    assert [one.created_at for one in (await store.actions_of([A], 2))[A]] == [3.0]


async def test_the_requests_of_builds_are_read_with_their_whole_gangs(store: SchedulerStore) -> None:
    """As they were put on record; of a gang the first member comes first."""
    gang = Gang(uuid=C, size=2, min_count=1)
    async with store.unit() as unit:
        await unit.insert([_requested(uuid, gang) for uuid in (A, C)] + [_requested(B), _requested(D)], 7.0)
    assert await store.requests_of([]) == []
    found = await store.requests_of([A, B])
    assert found == [replace(_requested(uuid, of), created_at=7.0) for uuid, of in ((B, None), (C, gang), (A, gang))]


def _requested(uuid: str, gang: Gang | None = None) -> NewBuild:
    request = BuildRequest(instance_uuid=uuid, flavor="f", project_id="p", image="i")
    build = RecordedBuild(
        instance_uuid=uuid, project_id="p", state=BuildState.ACCEPTED, sequence=1, claim_owner=f"run {uuid}"
    )
    return NewBuild(request=request, build=build, gang=gang)
