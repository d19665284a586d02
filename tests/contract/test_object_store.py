"""One suite for both stores of the scheduler: operators' objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Refuse
from bus.consuming.stall_watch import StallWatch
from bus.contracts.base import Refusal
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.groups import GroupPolicy, ServerGroup
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
from bus.persistence.database import Database
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.changes import RefusedCommands
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.builds import Author, BuildUpdate
from scheduler_worker.domain.objects import ChangeAuthor, RecordedObjects
from scheduler_worker.domain.pending import PendingBuild, new_build
from scheduler_worker.objects import ObjectRegistry
from scheduler_worker.store import objects as store_module
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_table import MemoryBuildTable
from scheduler_worker.store.port import OperationUnit, SchedulerStore
from scheduler_worker.store.postgres import PostgresBuilds
from tests.kit.sent import Sent
from tests.unit.scheduler.hosts import Hosts

F, Q = ObjectKind.FLAVOR, ObjectKind.QUOTA
SMALL, LARGE = ChangedObject(kind=F, name="small", after={"vcpus": 1}), ChangedObject(kind=F, name="large", after={})
GROUP = "b0000000-0000-4000-8000-000000000000"
BUILD = "a0000000-0000-4000-8000-000000000000"


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
async def store(request: pytest.FixtureRequest, sent: Sent) -> AsyncIterator[SchedulerStore]:
    made: SchedulerStore
    if request.param == "memory":
        made = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    else:
        made = PostgresBuilds(Database(request.getfixturevalue("postgres_url"), "scheduler"))
    made.publish_through(sent)  # type: ignore[arg-type]
    await made.open()
    group = ServerGroup(uuid=GROUP, policy=GroupPolicy.AFFINITY)
    build = BuildRequest(instance_uuid=BUILD, flavor="small", project_id="p", server_group=group)
    pending = PendingBuild(position=0, request=build, digest=b"", requested_at=1.0, taken_at=1.0)
    async with made.unit() as unit:
        await unit.insert([new_build(pending, Author("test", 1.0))], 1.0)
    yield made
    await made.close()


async def write(store: SchedulerStore, *changed: ChangedObject, who: str = "me", at: float = 1.0) -> int:
    async with store.operation() as unit:
        await unit.lock_objects()
        return await unit.write_objects(changed, ChangeAuthor(who, "because", at))


async def test_an_empty_system_has_revision_0_and_nothing(store: SchedulerStore) -> None:
    found = await store.objects()
    assert found is not None
    assert (found.revision, found.objects) == (0, {})
    assert await store.objects(unless=0) is None


async def test_what_is_written_is_there_with_its_version(store: SchedulerStore) -> None:
    assert await write(store, SMALL, LARGE) == 1
    bigger = ChangedObject(kind=F, name="small", before={"vcpus": 1}, after={"vcpus": 2})
    assert await write(store, bigger, who="you", at=2.0) == 2
    gone = ChangedObject(kind=F, name="large", before={}, after=None)
    assert await write(store, gone, at=3.0) == 3
    found = await store.objects(unless=2)
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
            await unit.write_objects([SMALL], ChangeAuthor("me", "", 1.0))
            unit.emit(OutboxMessage("api", ObjectsRevision(revision=1)))
            raise RuntimeError("on the way")
    found = await store.objects()
    assert found is not None
    assert (found.revision, found.objects) == (0, {})
    assert await store.object_log(ObjectLogQuery()) == []
    assert sent.rows == []


async def test_a_change_is_announced_with_its_commit(store: SchedulerStore, sent: Sent) -> None:
    announcement = OutboxMessage("api", ObjectsRevision(revision=1))
    async with store.operation() as unit:
        await unit.lock_objects()
        await unit.write_objects([SMALL], ChangeAuthor("me", "", 1.0))
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
            return await unit.write_objects([changed], ChangeAuthor("me", "", 1.0))

    assert sorted(await asyncio.gather(*map(add, range(8)))) == list(range(1, 9))
    found = await store.objects()
    assert found is not None and len(found.objects) == 8


async def test_the_log_has_author_reason_before_and_after_newest_first(store: SchedulerStore) -> None:
    await write(store, SMALL, LARGE)
    await write(store, ChangedObject(kind=F, name="small", before={"vcpus": 1}, after=None), who="yo\x00u", at=2.0)
    newest, *others = await store.object_log(ObjectLogQuery())
    assert (newest.revision, newest.name, newest.who, newest.why) == (2, "small", "you", "because")
    assert (newest.before, newest.after) == ({"vcpus": 1}, None)
    assert [(one.revision, one.name, one.who) for one in others] == [(1, "large", "me"), (1, "small", "me")]
    assert [one.revision for one in await store.object_log(ObjectLogQuery(name="small"))] == [2, 1]
    assert [one.name for one in await store.object_log(ObjectLogQuery(before=2, limit=1))] == ["large"]
    assert await store.object_log(ObjectLogQuery(kind=Q)) == []


async def test_a_query_of_the_log_may_name_what_no_database_stores(store: SchedulerStore) -> None:
    await write(store, SMALL)
    await store.object_log(ObjectLogQuery(name="sm\x00all"))
    assert await store.object_log(ObjectLogQuery(before=1, before_object=("zz\x00", "\x00"))) == []


async def test_a_redelivered_change_that_was_refused_is_refused_again(store: SchedulerStore) -> None:
    """The scheduler may have died between its refusal and the acknowledgement."""
    registry = ObjectRegistry(
        store, Hosts([]).selector, SchedulerConfig(), clock=SystemClock(), stall_watch=StallWatch()
    )
    await registry.reload()
    for _ in range(2):
        wrong = ObjectsChange(who="me", changes=(ObjectChange(kind=F, name="gone"),))
        answer = await registry.change(wrong, "refused")
        assert isinstance(answer, Refusal) and answer.code == "object.unknown"
        dry = ObjectsChange(who="me", changes=(ObjectChange(kind=F, name="new", body={"vcpus": 1}),), dry_run=True)
        answer = await registry.change(dry, "dry")
        assert isinstance(answer, ObjectsChanged) and [one.name for one in answer.changed] == ["new"]
    made = replace(dry, dry_run=False)
    assert await registry.change(made, "made") == ObjectsChanged(revision=2, changed=answer.changed)
    assert await registry.change(made, "made") == ObjectsChanged(revision=2)


async def test_a_refusal_is_kept_and_a_change_that_was_made_is_none(store: SchedulerStore) -> None:
    registry = ObjectRegistry(
        store, Hosts([]).selector, SchedulerConfig(), clock=SystemClock(), stall_watch=StallWatch()
    )
    refused = RefusedCommands(store)
    await registry.reload()
    refusal = Refuse("host.unknown", "there is no host h1")
    assert await refused.find("refused") is None
    for _ in range(2):
        await refused.add("refused", refusal)
    made = ObjectsChange(who="me", changes=(ObjectChange(kind=F, name="new", body={"vcpus": 1}),))
    assert isinstance(await registry.change(made, "made"), ObjectsChanged)
    assert [await refused.find(one) for one in ("refused", "made", "other")] == [refusal, None, None]
    elsewhere = await RefusedCommands(store).find("refused")
    assert elsewhere is not None and elsewhere.code == "request.refused_before"


async def test_a_special_change_that_is_refused_was_not_handled(store: SchedulerStore) -> None:
    registry = ObjectRegistry(
        store, Hosts([]).selector, SchedulerConfig(), clock=SystemClock(), stall_watch=StallWatch()
    )
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


async def test_builds_of_a_flavor_are_counted_up_to_a_limit(store: SchedulerStore) -> None:
    assert await store.builds_of("small", 10) == 1
    assert await store.builds_of("small", 0) == 0
    assert await store.builds_of("large", 10) == 0


async def test_builds_in_a_cell_are_counted_up_to_a_limit(store: SchedulerStore) -> None:
    async def move_to(state: BuildState) -> None:
        async with store.operation() as unit:
            build = (await unit.known({BUILD: BUILD}, lock=True))[BUILD].build
            assert build is not None
            await unit.update([BuildUpdate(build=replace(build, state=state, cell="c1"))], 1.0)

    assert await store.builds_in_cell("c1", 10) == 0
    await move_to(BuildState.SCHEDULED)
    assert await store.builds_in_cell("c1", 10) == 1
    assert await store.builds_in_cell("c1", 0) == 0
    assert await store.builds_in_cell("c2", 10) == 0
    await move_to(BuildState.DELETED)
    assert await store.builds_in_cell("c1", 10) == 0


async def test_builds_of_a_projects_group_are_counted_up_to_a_limit(store: SchedulerStore) -> None:
    assert await store.builds_of_group("p", GROUP, 10) == 1
    assert await store.builds_of_group("p", GROUP, 0) == 0
    assert await store.builds_of_group("other", GROUP, 10) == 0
    assert await store.builds_of_group("p", BUILD, 10) == 0
