"""From one revision of a schema to the next: its rows, and the versions that may run on the result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import asyncpg
import pytest

from berth.backup import restoring
from berth.backup.copying import save
from berth.backup.restoring import restore
from berth.config import schemas
from bus.faults import DatabaseForbidden
from bus.persistence.database import Database
from bus.persistence.migrations import oldest_for
from bus.persistence.revision import APPLIED, OLDEST, known_revisions, migrating
from tests.kit import servers
from tests.kit.releases import Migration, not_additive, release, structure

pytestmark = pytest.mark.postgres

WORKERS = ("placement_worker", "scheduler_worker", "cell_conductor", "ironic_sync")
THINGS = "CREATE TABLE things (\n    id integer PRIMARY KEY,\n    name text NOT NULL\n);"
FIRST = Migration("0001_initial", THINGS, {"things": ["id", "name"]})
WIDER = {"things": ["id", "name", "size"]}
SIZES = Migration("0002_sizes", "ALTER TABLE things ADD COLUMN size integer", WIDER, "0001_initial")
GONE = Migration("0003_gone", "ALTER TABLE things DROP COLUMN name", {"things": ["id", "size"]})
LATER = Migration("0004_later", "CREATE TABLE later (id integer)", GONE.tables | {"later": ["id"]}, "0001_initial")
INSERT = "INSERT INTO things (id, name) VALUES (1, 'one') ON CONFLICT DO NOTHING"

Release = Callable[..., str]


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """Write a version with these migrations."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = iter(range(100))
    return lambda *migrations: release(tmp_path, f"kit_release_{tmp_path.name}_{next(made)}", migrations)


async def opened(url: str, package: str | None, schema: str = "s") -> Database:
    database = Database(url, schema, pool_size=1)
    await database.open(package)
    return database


async def start(url: str, package: str) -> str:
    """Start a worker of this version, and stop it: the code of its refusal, "" when it runs there."""
    try:
        await (await opened(url, package)).close()
    except DatabaseForbidden as fault:
        return fault.code
    return ""


async def revisions(url: str, schema: str = "s") -> tuple[str, str]:
    connection = await asyncpg.connect(url)
    found = [await connection.fetchval(f'SELECT version_num FROM "{schema}".{table}') for table in (APPLIED, OLDEST)]
    await connection.close()
    return found[0], found[1]


async def test_an_older_version_runs_on_a_schema_that_was_only_added_to(empty_database: str, released: Release) -> None:
    former, newer = released(FIRST), released(FIRST, SIZES)
    running = await opened(empty_database, former)
    await (await opened(empty_database, newer)).close()
    async with running.raw() as connection:  # it was started before the migration ...
        await connection.execute(INSERT)
    await running.close()
    assert await start(empty_database, former) == ""  # ... is started again ...
    assert await start(empty_database, newer) == "" and await start(empty_database, former) == ""  # ... and again
    assert await revisions(empty_database) == ("0002_sizes", "0001_initial")


async def test_a_migration_that_states_nothing_shuts_older_versions_out(empty_database: str, released: Release) -> None:
    former = released(FIRST)
    await (await opened(empty_database, released(FIRST, Migration("0002_sizes", SIZES.sql, WIDER)))).close()
    again = Database(empty_database, "s")
    with pytest.raises(DatabaseForbidden, match=r"newer berth .* for versions from 0002_sizes on") as caught:
        await again.open(former)
    assert caught.value.code == "database.newer_schema"
    assert await revisions(empty_database) == ("0002_sizes", "0002_sizes")


async def test_all_migrations_have_to_allow_an_older_version(empty_database: str, released: Release) -> None:
    """The last one allows every version, and the one before it only those that know it."""
    versions = [released(*(FIRST, SIZES, GONE, LATER)[:count]) for count in (1, 2, 3, 4)]
    await (await opened(empty_database, versions[0])).close()
    await (await opened(empty_database, versions[3])).close()
    assert await revisions(empty_database) == ("0004_later", "0003_gone")
    assert [await start(empty_database, each) for each in versions] == [*["database.newer_schema"] * 2, "", ""]
    assert [oldest_for(versions[3], one) for one in known_revisions(versions[3])] == [
        "0001_initial",
        "0001_initial",
        "0003_gone",
        "0003_gone",
    ]


@pytest.mark.parametrize(
    ("sql", "tables"),
    [
        ("ALTER TABLE things ADD COLUMN size integer NOT NULL", WIDER),
        ("ALTER TABLE things RENAME COLUMN name TO title", {"things": ["id", "title"]}),
        ("ALTER TABLE things RENAME TO objects", {"objects": ["id", "name"]}),
    ],
)
async def test_a_migration_that_claims_too_much_is_found_by_the_older_version(
    empty_database: str, released: Release, sql: str, tables: dict[str, list[str]]
) -> None:
    """A worker is refused at its start; it does not fail at its first statement."""
    former, newer = released(FIRST), released(FIRST, Migration("0002_x", sql, tables, "0001_initial"))
    await (await opened(empty_database, newer)).close()
    assert await start(empty_database, former) == "database.other_schema"
    assert await start(empty_database, newer) == ""


@pytest.mark.parametrize(
    "added",
    ["integer", "integer NOT NULL DEFAULT 1", "integer GENERATED ALWAYS AS IDENTITY", "integer GENERATED ALWAYS"],
)
async def test_columns_are_accepted_that_an_insert_without_them_fills(
    empty_database: str, released: Release, added: str
) -> None:
    kind = f"{added} AS (length(name)) STORED" if added.endswith("ALWAYS") else added
    former = released(FIRST)
    sql = f"ALTER TABLE things ADD COLUMN size {kind}"
    newer = released(FIRST, Migration("0002_x", sql, WIDER, "0001_initial"))
    await (await opened(empty_database, newer)).close()
    database = await opened(empty_database, former)
    async with database.raw() as connection:
        await connection.execute(INSERT)
    await database.close()


async def test_at_its_own_revision_a_version_accepts_no_other_column(empty_database: str, released: Release) -> None:
    """A state between two releases may have changed the meaning of the rest with it."""
    package = released(FIRST)
    database = await opened(empty_database, package)
    async with database.raw() as connection:
        await connection.execute(SIZES.sql)
    await database.close()
    assert await start(empty_database, package) == "database.other_schema"


async def test_workers_of_two_versions_that_start_at_once_migrate_once(empty_database: str, released: Release) -> None:
    former, newer = released(FIRST), released(FIRST, SIZES)
    assert set(await asyncio.gather(*(start(empty_database, one) for one in [former, newer] * 3))) == {""}
    assert await revisions(empty_database) == ("0002_sizes", "0001_initial")


# --- the migrations that there are


async def structures(url: str, package: str) -> dict[str, dict[str, str]]:
    """{revision: what rows the schema takes there}; one schema is taken from each revision to the next."""
    from bus.persistence import migrations  # noqa: PLC0415  (Alembic)

    found: dict[str, dict[str, str]] = {}
    database = await opened(url, None, "stepwise")
    for revision in known_revisions(package):
        connect = partial(asyncpg.connect, url, server_settings={"search_path": "stepwise"})
        async with migrating(connect, "stepwise") as (core, _):
            await core.run_sync(migrations.upgrade, package, "stepwise", revision)
        async with database.raw() as connection:
            found[revision] = dict(await structure(connection, "stepwise"))
    await database.close()
    return found


@pytest.mark.parametrize("worker", WORKERS)
async def test_a_migration_that_older_versions_may_run_on_only_adds(empty_database: str, worker: str) -> None:
    package = f"{worker}.store.migrations"
    found = await structures(empty_database, package)
    for revision, after in found.items():
        oldest = oldest_for(package, revision)
        assert oldest in known_revisions(package)
        for before in [one for one in found if oldest <= one < revision]:
            assert not_additive(found[before], after) == [], f"{revision} after {before}"


@pytest.mark.parametrize(
    ("sql", "wrong"),
    [
        ("ALTER TABLE things DROP COLUMN name", "column things.002.name was text"),
        ("ALTER TABLE things ALTER COLUMN name TYPE varchar", "column things.002.name was text"),
        ("ALTER TABLE things ADD COLUMN size integer NOT NULL", "column things.003.size is new"),
        ("ALTER TABLE things ADD CHECK (id > 7)", "constraint things.things_id_check is new"),
        ("CREATE UNIQUE INDEX one ON things (name)", "index one is new"),
        ("DROP TABLE things", "column things.001.id was integer"),
    ],
)
async def test_what_is_no_addition_is_found(empty_database: str, released: Release, sql: str, wrong: str) -> None:
    found = await structures(empty_database, released(FIRST, Migration("0002_x", sql, WIDER, "0001_initial")))
    differing = not_additive(found["0001_initial"], found["0002_x"])
    assert any(one.startswith(wrong) for one in differing), differing


@pytest.mark.parametrize(
    "sql",
    [
        "ALTER TABLE things ADD COLUMN size integer NOT NULL DEFAULT 0",
        "CREATE INDEX named ON things (name)",
        "CREATE TABLE more (id integer PRIMARY KEY, name text UNIQUE)",
    ],
)
async def test_additions_are_additions(empty_database: str, released: Release, sql: str) -> None:
    found = await structures(empty_database, released(FIRST, Migration("0002_x", sql, WIDER, "0001_initial")))
    assert not_additive(found["0001_initial"], found["0002_x"]) == []


async def test_a_backup_of_an_earlier_revision_is_restored_and_migrated(
    empty_database: str, postgres_server: str, released: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, newer = released(FIRST), released(FIRST, SIZES)
    monkeypatch.setattr(schemas, "package_of", lambda _: former)
    await (await opened(empty_database, former, "cell_c1")).close()
    assert [one.revision for one in (await save(empty_database, tmp_path / "backup")).schemas] == ["0001_initial"]
    for module in (schemas, restoring):
        monkeypatch.setattr(module, "package_of", lambda _: newer)
    with servers.fresh_database(postgres_server) as target:
        await restore(target, tmp_path / "backup")
        assert await revisions(target, "cell_c1") == ("0002_sizes", "0001_initial")
