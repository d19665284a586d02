"""What two conductors record of one fence, or of one machine, at the same time, in PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
from msgspec.structs import replace

from bus.contracts.operations import FenceState
from bus.persistence.database import Database
from cell_conductor.domain.fences import Fence, Loss
from cell_conductor.domain.report import Unexplained, UnexplainedKind
from cell_conductor.store.keyed import Lock
from cell_conductor.store.postgres import PostgresInstances
from cell_conductor.store.postgres_keyed import PostgresKeyedRows
from cell_conductor.store.safety import DESTROY, FENCES, UNEXPLAINED, UnexplainedRecord
from tests.kit.waiting import until

pytestmark = pytest.mark.postgres

A, B, HOST = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab1")
LIFTING = Fence(host_uuid=HOST, host="h1", version=3, state=FenceState.LIFTING)
LIFTED = replace(LIFTING, state=FenceState.LIFTED, at=9.0)
LOSS = Loss(host_uuid=HOST, instance_uuid=A, attempt=1, service="s", at=7.0)
OURS = Unexplained(A, 3, HOST, UnexplainedKind.QUARANTINED, "no record")
WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted"


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresInstances]:
    made = PostgresInstances(Database(postgres_url, "cell_c1"))
    await made.open()
    yield made
    await made.close()


@pytest.fixture
async def other(postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
    """The connection of another conductor."""
    connection = await asyncpg.connect(postgres_url, server_settings={"search_path": "cell_c1"})
    yield connection
    await connection.close()


async def fenced(store: PostgresInstances) -> None:
    """A fence that is to be lifted is on record."""
    await store.fences.put(replace(LIFTING, version=2, state=FenceState.FENCED))
    await store.fences.put(LIFTING)


async def test_a_fence_waits_for_the_lift_that_is_being_recorded(
    store: PostgresInstances, other: asyncpg.Connection
) -> None:
    await fenced(store)
    async with other.transaction():
        rows = PostgresKeyedRows(other)
        known = await rows.find(FENCES, [HOST], Lock.UPDATE)
        await rows.put(FENCES, [LIFTED], over=known)
        again = asyncio.create_task(store.fences.put(LIFTING))
        await until(lambda: other.fetchval(WAITING))
    assert await again == LIFTED and await store.fences.fences() == []


async def test_a_fence_that_another_has_recorded_first_is_compared_with(
    store: PostgresInstances, other: asyncpg.Connection
) -> None:
    """Neither has found one."""
    async with other.transaction():
        await PostgresKeyedRows(other).put(FENCES, [replace(LIFTED, version=4)], over={})
        late = asyncio.create_task(store.fences.put(LIFTING))
        await until(lambda: other.fetchval(WAITING))
    assert await late == replace(LIFTED, version=4) and await store.fences.fences() == []


async def test_a_fence_is_not_lifted_while_a_loss_of_its_host_is_recorded(
    store: PostgresInstances, other: asyncpg.Connection
) -> None:
    await fenced(store)
    async with store.transaction() as transaction:
        assert await transaction.lose([HOST], [LOSS])
        lift = asyncio.create_task(store.fences.lift(HOST, LIFTING.version, 9.0))
        await until(lambda: other.fetchval(WAITING))
    assert not await lift and await store.fences.fences() == [LIFTING]


async def test_no_loss_is_recorded_under_a_fence_that_is_being_lifted(
    store: PostgresInstances, other: asyncpg.Connection
) -> None:
    await fenced(store)

    async def lose() -> bool:
        async with store.transaction() as transaction:
            return await transaction.lose([HOST], [LOSS])

    async with other.transaction():
        rows = PostgresKeyedRows(other)
        known = await rows.find(FENCES, [HOST], Lock.UPDATE)
        await rows.put(FENCES, [LIFTED], over=known)
        losing = asyncio.create_task(lose())
        await until(lambda: other.fetchval(WAITING))
    assert not await losing and await store.fences.losses() == []


async def test_steps_that_hold_the_same_fence_do_not_wait_for_each_other(store: PostgresInstances) -> None:
    await fenced(store)
    async with store.transaction() as one, store.transaction() as two:
        assert await one.lose([HOST], [LOSS])
        assert await two.lose([HOST], [replace(LOSS, instance_uuid=B)])


async def test_a_machine_that_another_has_recorded_first_is_not_new(
    store: PostgresInstances, other: asyncpg.Connection
) -> None:
    """The second one announced it again, and forgot what an operator had decided meanwhile."""
    first = UnexplainedRecord(machine=OURS, service="s", first_seen=1.0, last_seen=1.0, verdict=DESTROY)
    async with other.transaction():
        await PostgresKeyedRows(other).put(UNEXPLAINED, [first], over={})
        recording = asyncio.create_task(store.safety.record("t", [OURS, replace(OURS, uuid=B)], 2.0))
        await until(lambda: other.fetchval(WAITING))
    found = {one.machine.uuid: one for one in await recording}
    assert found[A] == replace(first, service="t", last_seen=2.0) and found[B].is_new
