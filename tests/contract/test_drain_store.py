"""One suite for both stores of the scheduler: drains and their instances."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.drains import DrainMoveState, DrainRecord, DrainTarget
from bus.contracts.moves import MoveKind
from bus.contracts.objects import ChangedObject, ObjectKind
from bus.persistence.database import Database
from scheduler_worker.domain.drains import DrainMove
from scheduler_worker.domain.objects import ChangeAuthor
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_table import MemoryBuildTable
from scheduler_worker.store.port import SchedulerStore
from scheduler_worker.store.postgres import PostgresBuilds
from tests.kit.sent import Sent

DRAIN, OTHER, HOST, UNKNOWN = (f"{n}0000000-0000-4000-8000-000000000000" for n in "abcd")
RECORD = DrainRecord(name="rack", target=DrainTarget.AGGREGATE, kind=MoveKind.MIGRATE, by="ann")
State = DrainMoveState


def row(number: int, state: DrainMoveState = State.WAITING, drain: str = DRAIN, **more: object) -> DrainMove:
    instance = f"{number:08}-0000-4000-8000-000000000000"
    fields = {"position": number, "source_uuid": HOST, "kind": MoveKind.LIVE_MIGRATE}
    return DrainMove(drain=drain, instance_uuid=instance, state=state, **{**fields, **more})  # type: ignore[arg-type]


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[SchedulerStore]:
    made: SchedulerStore
    if request.param == "memory":
        made = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    else:
        made = PostgresBuilds(Database(request.getfixturevalue("postgres_url"), "scheduler"))
    made.publish_through(Sent())  # type: ignore[arg-type]
    await made.open()
    async with made.operation() as unit:
        await unit.lock_objects()
        body = msgspec.to_builtins(RECORD)
        changed = [ChangedObject(kind=ObjectKind.DRAIN, name=one, after=body) for one in (DRAIN, OTHER)]
        await unit.write_objects(changed, ChangeAuthor("ann", "because", 1.0))
    yield made
    await made.close()


async def put(store: SchedulerStore, *rows: DrainMove) -> None:
    async with store.operation() as unit:
        await unit.put_drain_moves(rows)


async def test_a_locked_drain_has_what_is_under_way_and_the_first_that_are_due(store: SchedulerStore) -> None:
    late = row(1, due_at=9.0)
    going = row(5, State.UNDER_WAY, tries=1, begun_at=3.0, due_at=99.0)
    waits = [row(2), row(3), row(4, host_uuid=UNKNOWN)]
    await put(
        store, waits[1], going, late, waits[0], waits[2], row(6, State.MOVED, host_uuid=UNKNOWN), row(7, drain=OTHER)
    )
    async with store.operation() as unit:
        found = await unit.lock_drain(DRAIN, 5.0, 2)
        assert found is not None and found.record == RECORD
        assert (found.open, found.last_begun_at) == ((going, *waits[:2]), 3.0)
        counts = {State.WAITING: 4, State.UNDER_WAY: 1, State.MOVED: 1}
        assert dict(found.counts) == counts
        assert await unit.drain_counts([DRAIN, OTHER, UNKNOWN]) == {DRAIN: counts, OTHER: {State.WAITING: 1}}
        assert await unit.lock_drain(UNKNOWN, 5.0, 2) is None
        assert [one.position for one in await unit.drain_moves(DRAIN, 3)] == [1, 2, 3]


async def test_an_instance_is_written_over_and_dropped_with_its_drain(store: SchedulerStore) -> None:
    await put(store, row(1), row(2), row(3, drain=OTHER))
    after = replace(row(1), state=State.FAILED, code="no_valid_host", reason="why", failures=4, kind=MoveKind.MIGRATE)
    await put(store, after)
    await put(store)
    async with store.operation() as unit:
        assert await unit.drain_moves(DRAIN, 10) == [after, row(2)]
        await unit.drop_drain_moves([DRAIN])
    async with store.operation() as unit:
        assert await unit.drain_moves(DRAIN, 10) == []
        assert await unit.drain_moves(OTHER, 10) == [row(3, drain=OTHER)]


async def test_an_instance_that_has_come_to_another_host_of_its_drain_has_that_source(store: SchedulerStore) -> None:
    await put(store, row(1, State.LEFT))
    after = row(1, source_uuid=OTHER, due_at=7.0, code="instance.building")
    await put(store, after)
    async with store.operation() as unit:
        assert await unit.drain_moves(DRAIN, 10) == [after]


async def test_a_drain_is_held_by_one_transaction_at_a_time(store: SchedulerStore) -> None:
    """The second reads what the first has written."""
    held, begun, order = asyncio.Event(), asyncio.Event(), list[str]()

    async def second() -> None:
        await held.wait()
        async with store.operation() as unit:
            order.append("waits")
            begun.set()
            found = await unit.lock_drain(DRAIN, 5.0, 10)
            assert found is not None
            order.append(found.open[0].state.value)

    waiting = asyncio.create_task(second())
    await put(store, row(1))
    async with store.operation() as unit:
        await unit.lock_drain(DRAIN, 5.0, 10)
        held.set()
        await begun.wait()
        await unit.put_drain_moves([row(1, State.UNDER_WAY, tries=1)])
        order.append("writes")
    await waiting
    assert order == ["waits", "writes", "under-way"]
