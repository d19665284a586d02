"""Writers of several builds lock them by uuid, whatever plan the database makes: none waits in a circle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from bus.contracts.build import BuildRequest, BuildState
from bus.persistence.database import Database
from scheduler_worker.domain.builds import BuildDecision, NewBuild, RecordedBuild
from scheduler_worker.store.port import BuildUnit
from scheduler_worker.store.postgres import PostgresBuilds, PostgresBuildUnit
from tests.contract.rig import until
from tests.contract.test_build_store import Sent

pytestmark = pytest.mark.postgres

FIRST, LAST = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab")
# The plan of a large batch: rows as they come in the table, each looked for among the values.
BY_TABLE = "SET LOCAL enable_nestloop = off; SET LOCAL enable_mergejoin = off; SET LOCAL enable_indexscan = off"
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%build_requests%'"
LOCK = "SELECT FROM build_requests WHERE instance_uuid = $1 FOR UPDATE"


def new(uuid: str) -> NewBuild:
    request = BuildRequest(instance_uuid=uuid, flavor="f", project_id="p", name="n")
    build = RecordedBuild(instance_uuid=uuid, project_id="p", state=BuildState.ACCEPTED, sequence=1)
    return NewBuild(request=request, digest=b"1", build=build)


def placed(uuid: str) -> BuildDecision:
    build = RecordedBuild(
        instance_uuid=uuid, project_id="p", state=BuildState.SCHEDULED, sequence=2, cell="c1", host="h"
    )
    return BuildDecision(build=build)


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    made = Database(postgres_url, "scheduler")
    yield made
    await made.close()


@pytest.fixture
async def store(database: Database) -> PostgresBuilds:
    """The later uuid comes first in the table."""
    made = PostgresBuilds(database)
    made.publish_through(Sent())  # type: ignore[arg-type]
    await made.open()
    for uuid in (LAST, FIRST):
        async with made.unit() as unit:
            await unit.insert([new(uuid)], 1.0)
    return made


async def decide(unit: BuildUnit) -> set[str]:
    return await unit.write_decisions([placed(LAST), placed(FIRST)], 2.0)


@pytest.mark.parametrize("optimistic", [False, True])
async def test_decisions_lock_in_the_order_of_their_uuids(
    store: PostgresBuilds, database: Database, *, optimistic: bool
) -> None:
    """While one waits for the first row it must not hold the second: who has the first may want that next."""

    async def decided() -> set[str]:
        async with store.unit(optimistic=optimistic) as unit:
            if isinstance(unit, PostgresBuildUnit):
                await unit._connection.execute(BY_TABLE)
            return await decide(unit)

    async def waits() -> bool:
        return bool(await elsewhere(WAITING))

    async def elsewhere(statement: str) -> int:
        async with database.raw() as connection:
            count: int = await connection.fetchval(statement)
            return count

    async with database.raw() as connection:
        await connection.execute(LOCK, FIRST)
        deciding = asyncio.create_task(decided())
        await until(waits)
        try:
            await connection.execute(LOCK + " NOWAIT", LAST)
        except asyncpg.LockNotAvailableError:
            pytest.fail("the second row was locked before the first")
    assert await deciding == {FIRST, LAST}
