"""`berth backup` and `berth restore` on a real PostgreSQL: what comes back, and what is refused."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import make_url

from berth.backup.copying import parents_first, save
from berth.backup.manifest import MANIFEST, MANIFEST_SUM, BadBackup, read_manifest
from berth.backup.restoring import restore
from berth.config.schemas import SchemaState, assess, find_schemas, in_order, package_of
from berth.config.settings import CellSettings, Settings
from berth.database_rights import BACKUP, RESTORE, rights, statements
from bus.faults import DatabaseRightsMissing
from bus.persistence.database import Database
from bus.persistence.revision import APPLIED, REVISION_TABLES, Revisions
from bus.persistence.rights import check_rights
from tests.kit import servers
from tests.kit.cases import case
from tests.kit.catalog import described

pytestmark = pytest.mark.postgres

SCHEMAS = ("cell_c1", "ironic_sync", "scheduler", "placement")
HOSTILE = "a\tb\\n\n\\.\n'\"\u202e"


@pytest.fixture
async def filled(postgres_url: str) -> str:
    """A database with every schema, and rows that COPY must quote."""
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(
        "INSERT INTO placement.resource_classes (name) SELECT 'CUSTOM_' || n FROM generate_series(1, 500) n"
    )
    await connection.execute("INSERT INTO placement.traits (name) VALUES ($1)", HOSTILE)
    await connection.execute(
        "INSERT INTO placement.providers (id, uuid, name, parent_id, root_id)"
        " VALUES (1, gen_random_uuid(), 'child', 2, 2), (2, gen_random_uuid(), $1, NULL, 2)",
        HOSTILE,
    )
    await connection.execute("SELECT nextval('placement.spec_generations') FROM generate_series(1, 77)")
    await connection.close()
    return postgres_url


@pytest.fixture
async def backup(filled: str, tmp_path: Path) -> Path:
    directory = tmp_path / "backup"
    await save(filled, directory)
    return directory


async def content(url: str) -> dict[str, list[str]]:
    """Every row of every table of berth's schemas, and where its sequences stand."""
    connection = await asyncpg.connect(url)
    found: dict[str, list[str]] = {}
    for schema in await find_schemas(connection):
        tables = await connection.fetch(
            "SELECT relname, relkind FROM pg_class"
            " WHERE relnamespace = $1::text::regnamespace AND relkind IN ('r', 'S')",
            schema.schema,
        )
        for table in tables:
            place = f"{schema.schema}.{table['relname']}"
            columns = "last_value, is_called" if table["relkind"] == b"S" else "*"
            rows = await connection.fetch(f"SELECT {columns} FROM {place}")
            found[place] = sorted(map(str, rows))
    await connection.close()
    return found


async def test_every_row_and_sequence_comes_back_in_a_schema_that_is_whole(
    filled: str, backup: Path, postgres_server: str
) -> None:
    with servers.fresh_database(postgres_server) as target:
        manifest = await restore(target, backup)
        assert [schema.schema for schema in manifest.schemas] == list(SCHEMAS)
        assert await content(target) == await content(filled)
        for name in SCHEMAS:
            there, here = Database(target, name, pool_size=1), Database(filled, name, pool_size=1)
            await there.open(package_of(name))  # a worker finds nothing to do
            async with there.raw() as left, here.raw() as right:
                assert await described(left, name) == await described(right, name)
            await there.close()
            await here.close()


async def test_a_restore_gives_each_schema_to_the_owner_that_it_is_made_for(backup: Path, postgres_server: str) -> None:
    """The printed SQL runs before the restore, which runs as a member of the owners that is no superuser."""
    settings = Settings(cells={"c1": CellSettings()})
    with servers.fresh_database(postgres_server) as target:
        admin = await asyncpg.connect(target)
        await admin.execute("\n".join(statements(settings)))
        await admin.execute(f"ALTER ROLE \"{RESTORE}\" PASSWORD 'secret'")
        url = make_url(target).set(username=RESTORE, password="secret").render_as_string(hide_password=False)
        await restore(url, backup)
        owners = {one.schema: one.owner for one in rights(settings)}
        found = await admin.fetch(
            "SELECT nspname, array_agg(DISTINCT relowner::regrole::text) AS owners FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = ANY ($1) GROUP BY 1",
            list(owners),
        )
        assert {row["nspname"]: row["owners"] for row in found} == {one: [f'"{owners[one]}"'] for one in owners}
        for schema, owner in owners.items():
            await admin.execute(f'SET ROLE "{owner}"')
            await check_rights(admin, schema)
            for other in owners.keys() - {schema}:
                with pytest.raises(DatabaseRightsMissing):
                    await check_rights(admin, other)
        await admin.execute(f'SET ROLE "{BACKUP}"')
        await admin.fetch("SELECT * FROM placement.allocations")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await admin.execute("DELETE FROM placement.allocations")
        await admin.close()


async def test_a_restored_database_is_seen_to_be_set_back(backup: Path, postgres_server: str) -> None:
    with servers.fresh_database(postgres_server) as target:
        await restore(target, backup)
        connection = await asyncpg.connect(target)
        await connection.execute("SET search_path = cell_c1")
        assert await connection.fetchval("SELECT origin <> origin_of('instances') FROM identity")
        await connection.execute("SET search_path = placement")
        assert await connection.fetchval("SELECT origin <> origin_of('feed_head') FROM feed_head")
        await connection.close()


async def test_what_is_written_during_a_backup_is_in_all_schemas_or_in_none(filled: str, tmp_path: Path) -> None:
    """A writer that commits to the first and the last schema together, as fast as it can."""
    stop = asyncio.Event()

    async def write() -> int:
        connection, count = await asyncpg.connect(filled), 0
        while not stop.is_set():
            async with connection.transaction():
                await connection.execute("INSERT INTO ironic_sync.pairs VALUES ($1)", count)
                await connection.execute("INSERT INTO placement.pairs VALUES ($1)", count)
            count += 1
        await connection.close()
        return count

    connection = await asyncpg.connect(filled)
    for schema in ("ironic_sync", "placement"):
        await connection.execute(f"CREATE TABLE {schema}.pairs (n integer)")
    writer = asyncio.create_task(write())
    try:
        for number in range(5):
            before = await connection.fetchval("SELECT count(*) FROM placement.pairs")
            manifest = await save(filled, tmp_path / str(number))
            rows = {s.schema: t.rows for s in manifest.schemas for t in s.tables if t.table == "pairs"}
            assert rows["ironic_sync"] == rows["placement"] >= before
    finally:
        stop.set()
        assert await writer
        await connection.close()


def _alter(path: Path, at: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(bytes(content))


def _rewrite(backup: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Change the manifest and sum it anew: what a hostile or newer writer would leave."""
    data = json.loads((backup / MANIFEST).read_text())
    change(data)
    encoded = json.dumps(data).encode()
    (backup / MANIFEST).write_bytes(encoded)
    (backup / MANIFEST_SUM).write_text(f"{hashlib.sha256(encoded).hexdigest()}  {MANIFEST}\n")


def _schema(data: dict[str, object], change: dict[str, object]) -> None:
    data["schemas"][-1].update(change)  # type: ignore[index]


def _table(data: dict[str, object], change: dict[str, object], name: str = "traits") -> None:
    tables = data["schemas"][-1]["tables"]  # type: ignore[index]
    next(table for table in tables if table["table"] == name).update(change)


def _drop(data: dict[str, object], kind: str) -> None:
    schemas = data["schemas"]
    next(schema[kind] for schema in schemas if schema[kind]).pop()  # type: ignore[attr-defined]


def _link(backup: Path) -> None:
    path = backup / "scheduler.identity.copy.gz"
    path.rename(backup / "elsewhere")
    path.symlink_to(backup / "elsewhere")


def _deepen(backup: Path) -> None:
    encoded = b'{"format":1,"x":' + b"[" * 1_000_000
    (backup / MANIFEST).write_bytes(encoded)
    (backup / MANIFEST_SUM).write_text(f"{hashlib.sha256(encoded).hexdigest()}  {MANIFEST}\n")


def _lengthen(backup: Path) -> None:
    path = backup / "placement.traits.copy.gz"
    packed = gzip.compress(b"0\n" * 1_000_000)
    path.write_bytes(packed)
    change = {"bytes": len(packed), "sha256": hashlib.sha256(packed).hexdigest()}
    _rewrite(backup, lambda data: _table(data, change))


SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a byte of a table": (lambda at: _alter(at / "placement.providers.copy.gz"), "backup.damaged"),
    "a byte that gzip minds not": (lambda at: _alter(at / "placement.providers.copy.gz", 4), "backup.damaged"),
    "a byte of the manifest": (lambda at: _alter(at / MANIFEST), "backup.damaged"),
    "a table is missing": (lambda at: (at / "scheduler.identity.copy.gz").unlink(), "backup.damaged"),
    "the checksum is missing": (lambda at: (at / MANIFEST_SUM).unlink(), "backup.missing"),
    "a table is a link": (_link, "backup.damaged"),
    "more text than the manifest names": (_lengthen, "backup.damaged"),
    "a manifest of a million levels": (_deepen, "backup.invalid"),
    "a newer format": (lambda at: _rewrite(at, lambda data: data.update(format=2, more=1)), "backup.newer_format"),
    "a newer schema": (
        lambda at: _rewrite(at, lambda data: _schema(data, {"revision": "9999_later"})),
        "backup.newer_schema",
    ),
    "a revision of no version": (
        lambda at: _rewrite(at, lambda data: _schema(data, {"revision": "p0014"})),
        "backup.unknown_schema",
    ),
    "another program's schema": (
        lambda at: _rewrite(at, lambda data: _schema(data, {"schema": "public", "tables": []})),
        "backup.invalid",
    ),
    "a path in a name": (
        lambda at: _rewrite(at, lambda data: _table(data, {"table": "../traits"})),
        "backup.invalid",
    ),
    "a column that the revision lacks": (
        lambda at: _rewrite(at, lambda data: _table(data, {"columns": ["id", "x", "created_at", "updated_at"]})),
        "backup.mismatch",
    ),
    "a column that the copy lacks": (
        lambda at: _rewrite(at, lambda data: _table(data, {"columns": ["id", "name", "created_at"]})),
        "backup.mismatch",
    ),
    "a table that the manifest lacks": (lambda at: _rewrite(at, lambda data: _drop(data, "tables")), "backup.mismatch"),
    "a sequence that the manifest lacks": (
        lambda at: _rewrite(at, lambda data: _drop(data, "sequences")),
        "backup.mismatch",
    ),
    "fewer rows than the manifest names": (
        lambda at: _rewrite(at, lambda data: _table(data, {"rows": 3})),
        "backup.damaged",
    ),
    "no backup at all": (shutil.rmtree, "backup.missing"),
}


async def test_a_spoiled_backup_is_refused_and_the_database_stays_empty(
    backup: Path, postgres_server: str, tmp_path: Path
) -> None:
    with servers.fresh_database(postgres_server) as target:
        for how, (spoil, code) in SPOILED.items():
            with case(how):
                spoiled = tmp_path / how
                shutil.copytree(backup, spoiled)
                spoil(spoiled)
                with pytest.raises(BadBackup) as caught:
                    await restore(target, spoiled)
                assert caught.value.code == code, caught.value
                assert await content(target) == {}


async def test_a_target_that_holds_something_is_refused_and_left_as_it_was(
    filled: str, backup: Path, postgres_server: str
) -> None:
    before = await content(filled)
    for dry_run in (True, False):
        with pytest.raises(BadBackup, match="already holds cell_c1, ironic_sync, scheduler, placement") as caught:
            await restore(filled, backup, dry_run=dry_run)
        assert caught.value.code == "backup.target_not_empty"
    assert await content(filled) == before
    with servers.fresh_database(postgres_server) as target:
        other = Database(target, "cell_another", pool_size=1)  # not in the backup, and of berth all the same
        await other.open(package_of("cell_another"))
        await other.close()
        with pytest.raises(BadBackup, match="cell_another"):
            await restore(target, backup)


async def test_a_dry_run_writes_nothing(backup: Path, postgres_server: str) -> None:
    with servers.fresh_database(postgres_server) as target:
        await restore(target, backup, dry_run=True)
        assert await content(target) == {}


async def test_an_interrupted_backup_leaves_nothing_that_looks_like_one(
    filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("berth.backup.copying._read_database_id", asyncpg.connect.__class__)  # ends in the middle
    with pytest.raises(TypeError):
        await save(filled, tmp_path / "backup")
    assert await asyncio.to_thread(lambda: list(tmp_path.iterdir())) == []


async def test_a_backup_is_not_written_over_another(filled: str, backup: Path) -> None:
    before = read_manifest(backup)
    with pytest.raises(BadBackup) as caught:
        await save(filled, backup)
    assert caught.value.code == "backup.exists"
    assert read_manifest(backup) == before


async def test_a_directory_that_cannot_be_looked_at_is_a_refusal(filled: str, tmp_path: Path) -> None:
    """One in a directory of another user's, or of a name that is too long, ended in a traceback."""
    with pytest.raises(BadBackup) as caught:
        await save(filled, tmp_path / ("b" * 300))
    assert caught.value.code == "backup.unwritable"


async def test_a_database_without_berth_is_no_backup(empty_database: str, tmp_path: Path) -> None:
    with pytest.raises(BadBackup) as caught:
        await save(empty_database, tmp_path / "backup")
    assert caught.value.code == "backup.nothing"


async def test_a_schema_of_a_newer_version_is_not_copied(empty_database: str, tmp_path: Path) -> None:
    database = Database(empty_database, "scheduler", pool_size=1)
    await database.open(package_of("scheduler"))
    async with database.raw() as connection:
        for table in REVISION_TABLES:
            await connection.execute(f"UPDATE {table} SET version_num = '9999_later'")
    await database.close()
    with pytest.raises(BadBackup, match="scheduler \\(revision 9999_later\\)"):
        await save(empty_database, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


async def test_a_schema_that_a_newer_version_has_added_to_is_copied_for_that_version(
    postgres_url: str, tmp_path: Path, postgres_server: str
) -> None:
    """After a way back the earlier version runs on it, perhaps for weeks."""
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("CREATE TABLE cell_c1.later AS SELECT 7 AS n")
    await connection.execute(f"UPDATE cell_c1.{APPLIED} SET version_num = '9999_later'")
    await connection.close()
    manifest = await save(postgres_url, tmp_path / "backup")
    (copied,) = [schema for schema in manifest.schemas if schema.schema == "cell_c1"]
    assert copied.revision == "9999_later"
    tables = {table.table: table.rows for table in copied.tables}
    assert tables["later"] == tables["identity"] == 1 and not tables.keys() & set(REVISION_TABLES)
    with servers.fresh_database(postgres_server) as target:
        with pytest.raises(BadBackup) as caught:
            await restore(target, tmp_path / "backup")
        assert caught.value.code == "backup.newer_schema"
        assert await content(target) == {}


def test_tables_come_after_those_that_they_refer_to() -> None:
    assert parents_first(["a", "b", "c"], [("a", "b"), ("b", "c")]) == ["c", "b", "a"]
    with pytest.raises(ValueError, match="in a circle"):
        parents_first(["a", "b"], [("a", "b"), ("b", "a")])


def test_the_book_is_copied_last() -> None:
    assert in_order(["placement", "cell_z", "scheduler", "cell_a", "ironic_sync"]) == [
        "cell_a",
        "cell_z",
        "ironic_sync",
        "scheduler",
        "placement",
    ]


@pytest.mark.parametrize(
    ("schema", "revision", "oldest", "state"),
    [
        ("placement", "0001_initial", "0001_initial", SchemaState.CURRENT),
        ("placement", "9999_later", "9999_later", SchemaState.NEWER),
        ("placement", "9999_later", "0001_initial", SchemaState.AHEAD),
        ("placement", "p0014", "p0014", SchemaState.UNKNOWN),
        ("placement", "", "", SchemaState.UNKNOWN),
        ("cell_cell1", "0001_initial", "0001_initial", SchemaState.CURRENT),
        ("cell_cell1", "0001_other", "0001_initial", SchemaState.UNKNOWN),
    ],
)
def test_how_a_schema_stands(schema: str, revision: str, oldest: str, state: SchemaState) -> None:
    assert assess(schema, Revisions(revision, oldest), is_empty=False).state is state


def test_a_schema_without_tables_is_absent() -> None:
    assert assess("placement", Revisions(), is_empty=True).state is SchemaState.ABSENT
