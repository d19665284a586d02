"""A database that is lent again is as a new one."""

from __future__ import annotations

import asyncpg
import pytest

from bus.persistence.database import Database
from tests.kit.databases import MAX_TABLE_BYTES, SCHEMAS, LentDatabases
from tests.kit.servers import plain

pytestmark = [pytest.mark.postgres]

TABLES = """
SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = ANY($1) AND c.relkind = 'r' ORDER BY 1
"""
SEQUENCES = "SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = ANY($1) ORDER BY 1"
PROVIDER = "INSERT INTO placement.providers (uuid, name, root_id) VALUES (gen_random_uuid(), $1, 1)"
CLASS = "INSERT INTO placement.resource_classes (name) SELECT 'CUSTOM_' || n FROM generate_series(1, $1::int) AS n"


async def look(url: str) -> tuple[object, set[str]]:
    """The rows and the counters, and the identities."""
    connection = await asyncpg.connect(plain(url))
    try:
        tables = [name for (name,) in await connection.fetch(TABLES, list(SCHEMAS))]
        rows = {name: await connection.fetchval(f"SELECT count(*) FROM {name}") for name in tables}
        sequences = [tuple(row) for row in await connection.fetch(SEQUENCES, list(SCHEMAS))]
        identities = {
            await connection.fetchval(f"SELECT deployment::text FROM {schema}.identity") for schema in SCHEMAS
        }
        schemas = await connection.fetch("SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' ORDER BY 1")
        written = await connection.fetchval("SELECT sum(n_tup_upd) FROM pg_stat_user_tables")
        return (rows, sequences, [name for (name,) in schemas], written), identities
    finally:
        await connection.close()


@pytest.fixture
def lender(postgres_server: str) -> LentDatabases:
    return LentDatabases(postgres_server)


@pytest.mark.parametrize("size", [1, 20_000], ids=["few", "grown"])
async def test_nothing_of_the_test_before_is_left(lender: LentDatabases, size: int) -> None:
    with lender.lend() as url:
        before = await look(url)
        connection = await asyncpg.connect(plain(url))
        await connection.execute("UPDATE scheduler.identity SET deployment = gen_random_uuid()")
        await connection.execute("UPDATE placement.feed_head SET number = 17")
        await connection.execute(CLASS, size)
        assert size == 1 or await connection.fetchval("SELECT pg_relation_size('placement.resource_classes')") > (
            MAX_TABLE_BYTES
        )
        await connection.execute('CREATE SCHEMA "cell_else"; CREATE TABLE "cell_else".t (n int)')
        await connection.execute("BEGIN; LOCK TABLE placement.providers")  # which ends with its connection only
    with lender.lend() as again:
        after = await look(again)
        assert again == url
        assert after[0][:-1] == before[0][:-1]
        assert after[0][-1] == 0  # a new database's own counts are its migrations'
        assert not after[1] & before[1], "another deployment each time"
        database = Database(again, "placement", pool_size=1)
        await database.open("placement_worker.store.migrations")
        async with database.raw() as raw:
            assert await raw.fetchval("SELECT number FROM feed_head") == 0
        await database.close()
    connection.terminate()
    lender.close()


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE placement.traits RENAME TO gone",
        "ALTER TABLE placement.traits ADD COLUMN more int",
        "DROP INDEX scheduler.moves_newest",
        "DROP SCHEMA scheduler CASCADE",
        "CREATE TABLE public.left_behind (n int)",
        "CREATE TABLE cell_c1.left_behind (n int)",
    ],
)
async def test_a_database_that_a_test_rebuilt_is_not_lent_again(lender: LentDatabases, change: str) -> None:
    with lender.lend() as url:
        connection = await asyncpg.connect(plain(url))
        await connection.execute(change)
        await connection.close()
    with lender.lend() as again:
        assert again != url
    lender.close()
