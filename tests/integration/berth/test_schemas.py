"""Schemas and databases as commands and pages see them."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest
from alembic.script import ScriptDirectory

from berth.config.settings import Settings
from berth.up import in_one_process as up
from berth.up.embedded.postgres import Postgres
from berth.up.local_workers import WorkerEnded
from bus.faults import DatabaseForbidden as DirDatabaseForbidden
from bus.persistence import address
from bus.persistence import database as module
from bus.persistence.address import parse_database_url
from bus.persistence.database import Database, DatabaseForbidden
from bus.persistence.migrations import config
from bus.persistence.revision import APPLIED, is_migrated, known_revisions, migrating, tables_of
from bus.persistence.tables import create_tables
from tests.kit.catalog import described
from tests.kit.documents import blocks_of_all_pages

pytestmark = pytest.mark.postgres


# --- each worker's `store/tables.py` against PostgreSQL: a migrated database has these tables, and any other is refused


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
    connect = partial(asyncpg.connect, empty_database, server_settings={"search_path": '"written-out"'})
    async with migrating(connect) as (connection, _):
        await connection.run_sync(create_tables, tables_of(package))
    of_migrations = [line for line in await description(migrated) if not line.startswith("function ")]
    assert of_migrations == await description(written)
    await migrated.close()
    await written.close()


@pytest.mark.parametrize("worker", WORKERS)
async def test_a_schema_at_head_is_known_without_alembic(empty_database: str, worker: str) -> None:
    package = f"{worker}.store.migrations"
    database = await opened(empty_database, "migrated")
    async with database.raw() as connection:
        assert not await is_migrated(connection, package, "migrated"), "it is empty"
    await database.open(package)
    async with database.raw() as connection:
        assert await is_migrated(connection, package, "migrated")
        await connection.execute(f"UPDATE {APPLIED} SET version_num = '0000_older'")
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
        "ALTER SEQUENCE spec_generations INCREMENT 2",
        "ALTER FUNCTION append_changes RESET enable_seqscan",
        "CREATE OR REPLACE FUNCTION origin_of(relation regclass) RETURNS text LANGUAGE sql AS 'SELECT 1::text'",
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


async def refused_and_left(
    database: Database, url: str, worker: str, why: str, code: str = "database.other_schema"
) -> None:
    """A worker does not open this schema, and changes nothing there."""
    before = await description(database)
    again = Database(url, database.schema)
    with pytest.raises(DatabaseForbidden, match=why) as caught:
        await again.open(f"{worker}.store.migrations")
    assert caught.value.code == code
    assert await description(database) == before
    await again.close()
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
        await connection.execute(f"UPDATE {APPLIED} SET version_num = $1", revision)
        await connection.execute("CREATE TABLE of_yesterday (n integer)")
    await refused_and_left(database, empty_database, worker, revision)


EARLIER_TABLES = (
    "ALTER TABLE identity ADD COLUMN of_yesterday text NOT NULL DEFAULT ''",
    "ALTER TABLE identity RENAME COLUMN database_id TO of_yesterday",
    "DROP TABLE outbox",
)
EARLIER_FUNCTIONS = (
    "DROP FUNCTION append_changes(bigint[], bigint[], bytea[])",
    "CREATE OR REPLACE FUNCTION of_kind(kind text, kinds text[], written text[]) RETURNS json LANGUAGE sql AS "
    "'SELECT NULL::json'",
)


@pytest.mark.parametrize(
    ("worker", "change"),
    [
        *((worker, change) for worker in WORKERS for change in EARLIER_TABLES),
        *(("placement_worker", change) for change in EARLIER_FUNCTIONS),
    ],
)
async def test_a_schema_of_an_earlier_state_of_one_revision_is_refused_in_a_sentence_and_left_as_it_was(
    empty_database: str, worker: str, change: str
) -> None:
    """A worker started, and ended with an error of PostgreSQL at its first statement."""
    if "outbox" in change and worker in ("placement_worker", "ironic_sync"):
        change = "DROP TABLE identity"
    database = await opened(empty_database, "old", f"{worker}.store.migrations")
    async with database.raw() as connection:
        await connection.execute(change)
    await refused_and_left(database, empty_database, worker, "schema old is at revision")


@pytest.mark.parametrize("worker", WORKERS)
async def test_a_schema_that_berth_did_not_make_is_refused_and_left_as_it_was(empty_database: str, worker: str) -> None:
    database = await opened(empty_database, "foreign")
    async with database.raw() as connection:
        await connection.execute("CREATE TABLE customers (n integer)")
    await refused_and_left(database, empty_database, worker, "berth did not make them", code="database.foreign_schema")


# --- which of several PostgreSQL servers a worker uses: the first that answers in time and takes writes


PATIENCE_S = 60.0


async def test_a_server_that_never_answers_does_not_hide_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as deaf, Postgres(tcp=True) as server:
        url = server.tcp_url().replace("127.0.0.1", f"127.0.0.1:{deaf.getsockname()[1]},127.0.0.1")
        database = Database(url, "deaf")
        async with asyncio.timeout(PATIENCE_S):
            await database.open()
        try:
            async with database.raw() as connection:
                assert await connection.fetchval("SELECT inet_server_port()") == server.port
        finally:
            await database.close()


# --- a connection's look-ups of types in the catalogue


ARRAYS = "SELECT $1::bigint[], $2::text[], $3::uuid[], $4::bytea[], $5::timestamptz[]"
GIVEN = ([1, 2], ["a", None], [UUID(int=7)], [b"\x00\xff"], [])


@asynccontextmanager
async def connected(url: str, queries: list[str]) -> AsyncIterator[asyncpg.Connection]:
    """A connection as workers have it; the queries that it makes are appended."""
    connection = await parse_database_url(url).connect(timeout_s=60, command_timeout_s=60, settings={})
    connection.add_query_logger(lambda record: queries.append(record.query))
    try:
        yield connection
    finally:
        await connection.close()


async def test_arrays_are_looked_up_once_in_a_process(postgres_url: str) -> None:
    for first in (True, False):
        queries: list[str] = []
        async with connected(postgres_url, queries) as connection:
            assert tuple(await connection.fetchrow(ARRAYS, *GIVEN)) == GIVEN
            assert tuple(await connection.fetchrow(ARRAYS + ", 1", *GIVEN)) == (*GIVEN, 1)
        assert first or queries == [ARRAYS, ARRAYS + ", 1"]


async def test_an_array_is_of_what_the_connection_makes_of_its_elements(postgres_url: str) -> None:
    for decoder in (str, len):
        async with connected(postgres_url, []) as connection:
            await connection.set_type_codec("uuid", schema="pg_catalog", encoder=UUID, decoder=decoder, format="text")
            value = str(UUID(int=7))
            assert await connection.fetchval("SELECT $1::text[]::uuid[]", [value]) == [decoder(value)]


async def test_a_type_of_the_database_itself_is_looked_up_by_each_connection(empty_database: str) -> None:
    """Another database, or the same one after a restore, has another type under its number."""
    for values in (("small", "large"), ("red", "green")):
        async with connected(empty_database, []) as connection:
            await connection.execute(f"DROP TYPE IF EXISTS kind; CREATE TYPE kind AS ENUM {values}")
            assert await connection.fetchval("SELECT enum_range(NULL::kind)") == list(values)
    assert [number for number in address._known if number >= address.FIRST_ASSIGNED] == []


# --- postgreSQL takes the statements that the documents show


ROLE = """
DO $$ BEGIN
    CREATE ROLE berth;
EXCEPTION WHEN duplicate_object OR unique_violation THEN -- roles are the server's: another test has it, or makes it now
END $$
"""


@pytest.mark.parametrize("text", [pytest.param(text, id=where) for where, text in blocks_of_all_pages("sql")])
async def test_a_statement_of_the_documents_is_carried_out(text: str, postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    try:
        undone = connection.transaction()
        await undone.start()
        await connection.execute(ROLE)
        status = await connection.execute(text)
        assert status.split() == text.strip().splitlines()[-1].split()[:2], "the status names the last statement"
        await undone.rollback()
    finally:
        await connection.close()


# --- a state directory whose embedded database an earlier berth made: the sentence names the directory


MIGRATIONS = "placement_worker.store.migrations"


@pytest.fixture
def state() -> Iterator[Path]:
    """A directory that the user of root's embedded PostgreSQL may enter."""
    with tempfile.TemporaryDirectory(prefix="berth-state-", dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


async def test_a_schema_of_yesterday_names_the_state_directory(state: Path) -> None:
    """`berth up` ended with "name an empty database or schema", and its user had named neither."""
    directory = state / "postgres"
    with pytest.raises(DirDatabaseForbidden, match="set state_dir") as caught:
        async with up.database(Settings(), durable=True, directory=directory) as url:
            made = Database(url, "placement")
            await made.open(MIGRATIONS)
            async with made.raw() as connection:
                await connection.execute("ALTER TABLE identity ADD COLUMN of_yesterday text")
            await made.close()
            again = Database(url, "placement")
            try:
                await again.open(MIGRATIONS)
            except DirDatabaseForbidden as error:
                raise WorkerEnded("placement1") from error
            finally:
                await again.close()
    assert str(state) in str(caught.value) and caught.value.code == "database.other_schema"


async def test_another_fault_of_a_worker_stays_what_it_is(state: Path) -> None:
    fault = WorkerEnded("placement1")
    with pytest.raises(WorkerEnded) as caught:
        async with up.database(Settings(), durable=True, directory=state / "postgres"):
            raise fault
    assert caught.value is fault
