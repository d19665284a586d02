"""Each worker's `store/tables.py` against PostgreSQL: a migrated database has these tables, and any other is refused.

How schemas go from one revision to the next, and who may run on them: test_migrations.py.
"""

from __future__ import annotations

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import text

from bus.persistence.database import Database, DatabaseForbidden
from bus.persistence.migrations import config
from bus.persistence.revision import APPLIED, is_migrated, known_revisions, tables_of
from bus.persistence.tables import create_tables
from tests.kit.catalog import described

pytestmark = pytest.mark.postgres

WORKERS = ("placement_worker", "scheduler_worker", "cell_conductor", "ironic_sync")


async def opened(url: str, schema: str, migrations: str | None = None) -> Database:
    database = Database(url, schema, pool_size=1)
    await database.open(migrations)
    return database


async def description(database: Database) -> list[str]:
    async with database.raw() as connection:
        return await described(connection, database.schema)


@pytest.mark.parametrize("worker", WORKERS)
async def test_a_migrated_database_has_exactly_the_tables(empty_database: str, worker: str) -> None:
    """Columns, types, constraints, indexes, options, first rows: all but the functions, which migrations alone have."""
    package = f"{worker}.store.migrations"
    migrated = await opened(empty_database, "migrated", package)
    written = await opened(empty_database, "written-out")
    async with written.transaction() as connection:
        await connection.run_sync(create_tables, tables_of(package))
    of_migrations = [line for line in await description(migrated) if not line.startswith("function ")]
    assert of_migrations == await description(written)
    await migrated.close()
    await written.close()


@pytest.mark.parametrize("worker", WORKERS)
async def test_a_schema_at_head_is_known_without_alembic(empty_database: str, worker: str) -> None:
    package = f"{worker}.store.migrations"
    database = await opened(empty_database, "migrated")
    async with database.transaction() as connection:
        assert not await is_migrated(connection, package, "migrated"), "it is empty"
    await database.open(package)
    async with database.transaction() as connection:
        assert await is_migrated(connection, package, "migrated")
        await connection.execute(text(f"UPDATE {APPLIED} SET version_num = '0000_older'"))
        assert not await is_migrated(connection, package, "migrated")
    await database.close()
    assert known_revisions(package)[-1] == ScriptDirectory.from_config(config(package)).get_current_head()


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TABLE more ()",
        "ALTER TABLE feed_head ADD COLUMN more text",
        "ALTER TABLE feed_head ALTER COLUMN origin SET DEFAULT 'x'",
        "ALTER TABLE feed_head ALTER COLUMN origin DROP NOT NULL",
        "ALTER TABLE feed_head ALTER COLUMN number TYPE integer",
        "ALTER TABLE changes ALTER COLUMN body SET STORAGE EXTENDED",
        "ALTER TABLE changes DROP CONSTRAINT changes_check",
        "ALTER TABLE providers SET (fillfactor = 90)",
        "ALTER TABLE providers ALTER CONSTRAINT providers_parent_id_fkey DEFERRABLE",
        "DROP INDEX consumers_released; CREATE INDEX consumers_released ON consumers (released_at)",
        "ALTER SEQUENCE shapes INCREMENT 2",
        "ALTER FUNCTION append_changes RESET enable_seqscan",
        "CREATE OR REPLACE FUNCTION feed_origin() RETURNS text LANGUAGE plpgsql AS 'BEGIN RETURN 1; END'",
        "CREATE TRIGGER more BEFORE UPDATE ON traits EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "CREATE TYPE more AS ENUM ('a')",
        "CREATE VIEW more AS SELECT 1 AS one",
        "DELETE FROM feed_head",
    ],
)
async def test_the_comparison_sees_each_kind_of_change(empty_database: str, change: str) -> None:
    database = await opened(empty_database, "placement", "placement_worker.store.migrations")
    before = await description(database)
    async with database.raw() as connection:
        await connection.execute(change)
    assert await description(database) != before
    await database.close()


@pytest.mark.parametrize(
    ("worker", "revision"),
    [
        ("placement_worker", "p0014"),
        ("scheduler_worker", "0001"),
        ("cell_conductor", "c0005"),
        ("ironic_sync", "ironic_sync_0001"),
    ],
)
async def test_a_revision_that_no_version_has_is_refused_and_left_as_it_was(
    empty_database: str, worker: str, revision: str
) -> None:
    database = await opened(empty_database, "old", f"{worker}.store.migrations")
    async with database.raw() as connection:
        await connection.execute(f"DROP TABLE {APPLIED}")  # they kept it in the other one
        await connection.execute("UPDATE alembic_version SET version_num = $1", revision)
        await connection.execute("CREATE TABLE of_yesterday (n integer)")
    before = await description(database)
    again = Database(empty_database, "old")
    with pytest.raises(DatabaseForbidden, match=revision) as caught:
        await again.open(f"{worker}.store.migrations")
    assert caught.value.code == "database.other_schema"
    assert await description(database) == before
    await again.close()
    await database.close()


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE identity ADD COLUMN of_yesterday text NOT NULL DEFAULT ''",
        "ALTER TABLE identity RENAME COLUMN deployment TO of_yesterday",
        "DROP TABLE outbox",
    ],
)
@pytest.mark.parametrize("worker", WORKERS)
async def test_a_schema_of_an_earlier_state_of_one_revision_is_refused_in_a_sentence_and_left_as_it_was(
    empty_database: str, worker: str, change: str
) -> None:
    """A worker started, and ended with an error of PostgreSQL at its first statement."""
    if "outbox" in change and worker in ("placement_worker", "ironic_sync"):
        change = "DROP TABLE identity"
    database = await opened(empty_database, "old", f"{worker}.store.migrations")
    async with database.raw() as connection:
        await connection.execute(change)
    before = await description(database)
    again = Database(empty_database, "old")
    with pytest.raises(DatabaseForbidden, match=r"schema old is at revision .* does not have its tables") as caught:
        await again.open(f"{worker}.store.migrations")
    assert caught.value.code == "database.other_schema"
    assert await description(database) == before
    await again.close()
    await database.close()


@pytest.mark.parametrize("worker", WORKERS)
async def test_a_schema_that_berth_did_not_make_is_refused_and_left_as_it_was(empty_database: str, worker: str) -> None:
    database = await opened(empty_database, "foreign")
    async with database.raw() as connection:
        await connection.execute("CREATE TABLE customers (n integer)")
    before = await description(database)
    again = Database(empty_database, "foreign")
    with pytest.raises(DatabaseForbidden, match="berth did not make them") as caught:
        await again.open(f"{worker}.store.migrations")
    assert caught.value.code == "database.foreign_schema"
    assert await description(database) == before
    await again.close()
    await database.close()
