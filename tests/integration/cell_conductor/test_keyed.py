"""What two conductors record of one fence, or of one machine, at the same time, in PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.contracts.operations import FenceState
from bus.persistence.database import Database
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.fence import Fence, StaleCount
from cell_conductor.state.lease import Lease, LeaseState
from cell_conductor.state.unknown_machine import UnknownMachine, UnknownMachineKind
from cell_conductor.store.keyed import KeyedTable, Lock
from cell_conductor.store.keyed_tables import (
    DESTROY,
    FENCES,
    KEYED,
    PROTECT,
    UNKNOWN_MACHINES,
    DecidedMachine,
    UnknownMachineRecord,
)
from cell_conductor.store.postgres import PostgresInstances
from cell_conductor.store.postgres_keyed import NEEDED, TOUCHING, PostgresKeyedRows
from tests.kit.databases import WAITING
from tests.kit.waiting import until

pytestmark = pytest.mark.postgres

A, B, HOST = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab1")
LIFTING = Fence(host_uuid=HOST, host="h1", version=3, state=FenceState.UNFENCING)
LIFTED = replace(LIFTING, state=FenceState.UNFENCED, at=9.0)
OURS = UnknownMachine(A, 3, HOST, UnknownMachineKind.QUARANTINED, "no record")


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
    """A fence that is to be ended is on record."""
    await store.fences.put(replace(LIFTING, version=2, state=FenceState.FENCED))
    await store.fences.put(LIFTING)


@pytest.mark.parametrize(("statement", "arguments"), [(NEEDED, (HOST,)), (TOUCHING, (HOST, A, 10))])
async def test_what_a_fence_asks_for_reads_no_whole_table(
    store: PostgresInstances, other: asyncpg.Connection, statement: str, arguments: tuple[object, ...]
) -> None:
    """Of 100,000 instances it took 100 ms and 600 ms, the first one twice a second for each fence to be ended."""
    await other.execute("SET enable_seqscan = off")
    plan = " ".join(row[0] for row in await other.fetch(f"EXPLAIN {statement}", *arguments))
    assert "instances_host" in plan and "instances_source" in plan and "Seq Scan" not in plan, plan


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


async def test_a_fence_is_not_lifted_while_a_machine_there_is_given_up(
    store: PostgresInstances, other: asyncpg.Connection
) -> None:
    await fenced(store)
    async with store.transaction() as transaction:
        assert await transaction.rely_on([HOST], {HOST: ["s"]}, 7.0)
        lift = asyncio.create_task(store.fences.unfence(HOST, LIFTING.version, 9.0))
        await until(lambda: other.fetchval(WAITING))
    assert not await lift and await store.fences.fences() == [replace(LIFTING, stale={"s": StaleCount(1, 7.0)})]


async def test_no_machine_is_given_up_under_a_fence_that_is_being_lifted(
    store: PostgresInstances, other: asyncpg.Connection
) -> None:
    await fenced(store)

    async def lose() -> bool:
        async with store.transaction() as transaction:
            return await transaction.rely_on([HOST], {HOST: ["s"]}, 7.0)

    async with other.transaction():
        rows = PostgresKeyedRows(other)
        known = await rows.find(FENCES, [HOST], Lock.UPDATE)
        await rows.put(FENCES, [LIFTED], over=known)
        losing = asyncio.create_task(lose())
        await until(lambda: other.fetchval(WAITING))
    assert not await losing and await store.fences.fences() == []


async def test_steps_that_hold_the_same_fence_do_not_wait_for_each_other(store: PostgresInstances) -> None:
    await fenced(store)
    async with store.transaction() as one, store.transaction() as two:
        assert await one.rely_on([HOST], {}, 7.0)
        assert await two.rely_on([HOST], {}, 7.0)


async def test_a_machine_that_another_has_recorded_first_is_not_new(
    store: PostgresInstances, other: asyncpg.Connection
) -> None:
    """The second one announced it again, and forgot what an operator had decided meanwhile."""
    first = UnknownMachineRecord(machine=OURS, service="s", first_seen=1.0, last_seen=1.0, decision=PROTECT)
    async with other.transaction():
        await PostgresKeyedRows(other).put(UNKNOWN_MACHINES, [first], over={})
        recording = asyncio.create_task(store.safety.record("t", [OURS, replace(OURS, uuid=B)], 2.0))
        await until(lambda: other.fetchval(WAITING))
    found = {one.machine.uuid: one for one in await recording}
    assert found[A] == replace(first, service="t", last_seen=2.0) and found[B].is_new


SPOILED = ("{}", "[]", '{"at": "soon"}', '{"version": true, "service": "s"}')


@pytest.mark.parametrize("record", SPOILED)
@pytest.mark.parametrize("table", KEYED, ids=lambda table: table.name)
async def test_a_record_that_cannot_be_read_costs_only_itself(
    store: PostgresInstances, other: asyncpg.Connection, table: KeyedTable[Any, Any], record: str
) -> None:
    """It failed the read of its whole table: every fence, breaker, lease, or machine of the cell."""
    await fenced(store)
    async with store.transaction() as transaction:
        await transaction.rely_on([HOST], {HOST: ["s"]}, 7.0)
    await store.fences.put(replace(LIFTING, host_uuid=A, state=FenceState.FENCED))
    await store.safety.record("s", [OURS, replace(OURS, uuid=B)], 2.0)
    for service in ("s", "t"):
        await store.safety.trip(Breaker(service=service, tripped_at=3.0, reset_at=4.0))
    term = await store.leases.hold_leadership("p", 60.0, None)
    assert term is not None
    down = [Lease(service=service, epoch=5, state=LeaseState.SILENT, since=6.0) for service in ("s", "t")]
    await store.leases.record(term, down)
    async with store.fences.keyed.transaction() as rows:
        before = {table.key(one): one for one in await rows.read(table)}
    spoiled = next(iter(before))
    names = [spoiled] if isinstance(spoiled, str) else spoiled
    where = " AND ".join(f"{name}::text = ${at}" for at, name in enumerate(table.columns, 2))
    await other.execute(f"UPDATE {table.name} SET record = $1::text::json WHERE {where}", record, *names)
    counts = table.unread(spoiled)
    with capture_logs() as logged:
        async with store.fences.keyed.transaction() as rows:
            after = {table.key(one): one for one in await rows.read(table)}
            assert await rows.find(table, before, Lock.UPDATE) == after
            assert after == {**before, spoiled: counts} and len(before) == 2
            await rows.put(table, [before[spoiled]], over=after)
            assert await rows.find(table, [spoiled]) == {spoiled: before[spoiled]}
    assert {(one["event"], one["table"], one["cause"]) for one in logged} == {
        ("keyed.unreadable", table.name, " ".join(names))
    }


async def test_what_cannot_be_read_proves_nothing(store: PostgresInstances, other: asyncpg.Connection) -> None:
    """Nothing is destroyed by it, no host counts as off, and no service as gone."""
    await fenced(store)
    async with store.transaction() as transaction:
        await transaction.rely_on([HOST], {HOST: ["s"]}, 7.0)
    await store.safety.record("s", [OURS], 2.0)
    await store.safety.decide([DecidedMachine(A)], DESTROY, "op", 2.0)
    await store.safety.trip(Breaker(service="s", tripped_at=3.0, reset_at=4.0))
    for table in KEYED:
        await other.execute(f"UPDATE {table.name} SET record = '{{}}'")
    breaker = await store.safety.breaker("s")
    assert breaker is not None and breaker.is_open
    assert await store.safety.reset("s", "op", 9.0), "as an operator resets any"
    (machine,) = await store.safety.record("t", [OURS], 3.0)
    assert machine.decision == PROTECT and [one.decision for one in await store.safety.records()] == [PROTECT]
    assert await store.fences.fences() == [] and await store.fences.purge_ended(9.0, 10) == 0
    newer = replace(LIFTING, state=FenceState.FENCED)
    assert await store.fences.put(newer) is newer
    unfencing = replace(LIFTING, version=4)
    await store.fences.put(unfencing)
    assert not await store.fences.unfence(HOST, 4, 9.0), "its host may have a machine to destroy"
