"""Which builds have no end, as both stores find them: without an index that every write of a build would pay."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.build import BuildRequest, BuildState
from bus.persistence.database import Database
from scheduler_worker.domain.builds import BuildUpdate, Gang, NewBuild, RecordedBuild
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_table import MemoryBuildTable
from scheduler_worker.store.port import FIRST_UUID, SchedulerStore
from scheduler_worker.store.postgres import PostgresBuilds
from tests.kit.sent import Sent

A, B, C, D = (f"{n}0000000-0000-4000-8000-000000000000" for n in "abcd")


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[SchedulerStore]:
    made: SchedulerStore
    if request.param == "memory":
        made = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    else:
        made = PostgresBuilds(Database(request.getfixturevalue("postgres_url"), "scheduler"))
    made.publish_through(Sent())  # type: ignore[arg-type]
    await made.open()
    yield made
    await made.close()


async def put(store: SchedulerStore, uuid: str, state: BuildState, at: float, cell: str | None = "c1") -> None:
    """A build that was requested and last changed at this time."""
    request = BuildRequest(instance_uuid=uuid, flavor="f", project_id="p")
    build = RecordedBuild(instance_uuid=uuid, project_id="p", state=BuildState.ACCEPTED, sequence=1)
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=request, digest=b"1", build=build)], at)
    async with store.unit() as unit:
        locked = (await unit.lock([uuid]))[uuid]
        await unit.update([BuildUpdate(build=replace(locked, state=state, cell=cell))], at)


async def test_open_builds_are_those_without_an_end_page_by_page(store: SchedulerStore) -> None:
    await put(store, C, BuildState.SCHEDULED, 1.0)
    await put(store, A, BuildState.ACTIVE, 2.0)
    await put(store, B, BuildState.DELETING, 2.0)
    await put(store, D, BuildState.BUILDING, 3.0)
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
    await put(store, A, BuildState.BUILDING, 1.0)
    await put(store, B, BuildState.BUILDING, 5.0)
    await put(store, C, BuildState.ACTIVE, 1.0)
    await put(store, D, BuildState.ACCEPTED, 1.0, None)
    for watched, found in (((), [A, D]), ((B, C, D), [A, B, D])):
        page = await store.open_builds(watched, (0.0, FIRST_UUID), 5.0, 10)
        assert [one.instance_uuid for one in page.builds] == found


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
    build = RecordedBuild(instance_uuid=uuid, project_id="p", state=BuildState.ACCEPTED, sequence=1, run=f"run {uuid}")
    return NewBuild(request=request, digest=b"1", build=build, gang=gang)
