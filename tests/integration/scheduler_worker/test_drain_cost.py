"""What a pass over a drain reads does not grow with the drain: a thousand hosts, twenty thousand instances moved."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bus.persistence.database import Database
from scheduler_worker.drain.drain_steps import READ_ENDS
from scheduler_worker.records.drain_record import BegunMoves
from scheduler_worker.store import object_rows as objects
from scheduler_worker.store.postgres import PostgresBuilds

pytestmark = pytest.mark.postgres

DRAIN, OTHER = (f"{n}0000000-0000-4000-8000-000000000000" for n in "de")
MOVED, INSTANCES, UNDER_WAY = 20_000, 500, 100
# The drain has moved 20,000 instances, an evacuation as many; one instance was refused 1,000 times by each of them.
FILL = f"""
INSERT INTO instance_actions (request_id, instance_uuid, kind, project_id, digest, state, sequence, terminal,
    created_at, updated_at, drain)
SELECT gen_random_uuid(), CASE WHEN n % 20 = 0 THEN '{DRAIN}'::uuid ELSE md5(n::text)::uuid END, 'migrate', 'p', '',
    CASE WHEN n <= {MOVED - UNDER_WAY} THEN 'done' ELSE 'scheduled' END, 9, n <= {MOVED - UNDER_WAY}, n, n, d::uuid
FROM generate_series(1, {MOVED}) n, (VALUES ('{DRAIN}'), ('{OTHER}'), (NULL)) drains(d)
"""


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    made = Database(postgres_url, "scheduler")
    store = PostgresBuilds(made)
    await store.open()
    async with made.raw() as connection:
        await connection.execute(FILL)
    async with made.raw() as connection:
        await connection.execute("ANALYZE instance_actions")
    yield made
    await store.close()


async def blocks_of(database: Database, statement: str, *arguments: Any) -> int:
    """The blocks that a statement touches."""
    async with database.raw() as connection:
        (plan,) = json.loads(
            await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", *arguments)
        )
    return int(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])


async def test_what_a_pass_reads_does_not_grow_with_the_drain(database: Database) -> None:
    async with database.raw() as connection:
        rows = objects.ObjectRows(connection)
        for drain in (DRAIN, OTHER):
            assert await rows.begun(drain, float(MOVED)) == BegunMoves(UNDER_WAY, float(MOVED))
        assert await rows.begun(None, float(MOVED)) == BegunMoves()
        uuids = [row[0] for row in await connection.fetch("SELECT md5(n::text)::uuid FROM generate_series(1, 500) n")]
        ended = await rows.ended([DRAIN, *uuids], READ_ENDS)
        assert len(ended[DRAIN]) == READ_ENDS and len(ended) > INSTANCES * 0.9
    assert await blocks_of(database, objects.BEGUN, DRAIN, float(MOVED)) <= 2 * UNDER_WAY
    assert await blocks_of(database, objects.EVACUATING) <= 6 * UNDER_WAY
    assert await blocks_of(database, objects.ENDED, [DRAIN, *uuids], READ_ENDS) <= 10 * INSTANCES
