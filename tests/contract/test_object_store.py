"""One suite for both stores of operators' objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bus.contracts.build import BuildRequest
from bus.contracts.objects import ChangedObject, ObjectKind, ObjectLogQuery, StoredObject
from bus.persistence.database import Database
from scheduler_worker.domain.builds import Author
from scheduler_worker.domain.pending import PendingBuild, new_build
from scheduler_worker.store import objects as store_module
from scheduler_worker.store.objects import MemoryObjects, ObjectStore, PostgresObjects
from scheduler_worker.store.postgres import PostgresBuilds

F, Q = ObjectKind.FLAVOR, ObjectKind.QUOTA
SMALL, LARGE = ChangedObject(kind=F, name="small", after={"vcpus": 1}), ChangedObject(kind=F, name="large", after={})
BUILD = "a0000000-0000-4000-8000-000000000000"


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[ObjectStore]:
    if request.param == "memory":
        yield MemoryObjects({"small": 1})
        return
    database = Database(request.getfixturevalue("postgres_url"), "scheduler")
    builds = PostgresBuilds(database)
    await builds.open()
    asked = BuildRequest(instance_uuid=BUILD, flavor="small", project_id="p")
    pending = PendingBuild(position=0, request=asked, digest=b"", asked_at=1.0, taken_at=1.0)
    async with builds._locking(durable=True) as unit:
        await unit.insert([new_build(pending, Author("test", 1.0))], 1.0)
    yield PostgresObjects(database)
    await builds.close()


async def write(store: ObjectStore, *changed: ChangedObject, who: str = "me", at: float = 1.0) -> int:
    async with store.changing() as unit:
        return await unit.write(changed, who=who, why="because", at=at)


async def test_an_empty_system_has_revision_0_and_nothing(store: ObjectStore) -> None:
    found = await store.read()
    assert found is not None
    assert (found.revision, found.objects) == (0, {})
    assert await store.read(unless=0) is None


async def test_what_is_written_is_there_with_its_version(store: ObjectStore) -> None:
    assert await write(store, SMALL, LARGE) == 1
    bigger = ChangedObject(kind=F, name="small", before={"vcpus": 1}, after={"vcpus": 2})
    assert await write(store, bigger, who="you", at=2.0) == 2
    gone = ChangedObject(kind=F, name="large", before={}, after=None)
    assert await write(store, gone, at=3.0) == 3
    found = await store.read(unless=2)
    assert found is not None
    assert found.revision == 3
    kept = StoredObject(kind=F, name="small", body={"vcpus": 2}, version=2, changed_at=2.0, changed_by="you")
    assert found.objects == {(F, "small"): kept}


async def test_a_unit_that_ends_with_an_exception_has_written_nothing(store: ObjectStore) -> None:
    with pytest.raises(RuntimeError, match="on the way"):
        async with store.changing() as unit:
            await unit.write([SMALL], who="me", why="", at=1.0)
            raise RuntimeError("on the way")
    found = await store.read()
    assert found is not None
    assert (found.revision, found.objects) == (0, {})
    assert await store.log(ObjectLogQuery()) == []


async def test_changes_wait_for_each_other(store: ObjectStore) -> None:
    """Each reads the revision that the one before it has written: none is lost, none is written twice."""

    async def add(number: int) -> int:
        async with store.changing() as unit:
            assert len(unit.present.objects) == unit.present.revision
            return await unit.write([ChangedObject(kind=Q, name=f"p{number}", after={})], who="me", why="", at=1.0)

    assert sorted(await asyncio.gather(*map(add, range(8)))) == list(range(1, 9))
    found = await store.read()
    assert found is not None and len(found.objects) == 8


async def test_the_log_tells_who_why_before_and_after_newest_first(store: ObjectStore) -> None:
    await write(store, SMALL, LARGE)
    await write(store, ChangedObject(kind=F, name="small", before={"vcpus": 1}, after=None), who="yo\x00u", at=2.0)
    newest, *others = await store.log(ObjectLogQuery())
    assert (newest.revision, newest.name, newest.who, newest.why) == (2, "small", "you", "because")
    assert (newest.before, newest.after) == ({"vcpus": 1}, None)
    assert [(one.revision, one.name, one.who) for one in others] == [(1, "large", "me"), (1, "small", "me")]
    assert [one.revision for one in await store.log(ObjectLogQuery(name="small"))] == [2, 1]
    assert [one.name for one in await store.log(ObjectLogQuery(before=2, limit=1))] == ["large"]
    assert await store.log(ObjectLogQuery(kind=Q)) == []


async def test_the_log_is_bounded(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_LOG_ENTRIES", 2)
    for number in range(4):
        await write(store, ChangedObject(kind=Q, name=f"p{number}", after={}))
    assert [one.name for one in await store.log(ObjectLogQuery())] == ["p3", "p2"]


async def test_builds_of_a_flavor_are_counted_up_to_a_limit(store: ObjectStore) -> None:
    assert await store.builds_of("small", 10) == 1
    assert await store.builds_of("small", 0) == 0
    assert await store.builds_of("large", 10) == 0
