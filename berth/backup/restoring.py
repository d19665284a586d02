"""Put a backup into a database that holds nothing of berth yet: all of it in one transaction, or nothing."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import asyncpg
from sqlalchemy.ext.asyncio import AsyncConnection

from berth.backup.copying import columns_of_tables, connect, names_of_sequences
from berth.backup.manifest import READ_BYTES, BadBackup, Manifest, SchemaCopy, TableCopy, file_of, read_manifest
from berth.config.schemas import SchemaState, assess, find_schemas, package_of, quoted
from bus.persistence import migrations
from bus.persistence.address import CONNECTION_LOST
from bus.persistence.database import IS_THERE
from bus.persistence.database_faults import raise_fault
from bus.persistence.revision import Revisions, migrating
from bus.persistence.rights import act_as_owner

# PostgreSQL's error when a table of the backup is not one of the revision that the manifest names.
MISMATCHES = (
    asyncpg.UndefinedTableError,
    asyncpg.UndefinedColumnError,
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
)


async def restore(url: str, directory: Path, *, dry_run: bool = False) -> Manifest:
    """Check the backup whole, then the target, then write. dry_run: end before the first write.

    A schema of an older revision is restored as it was and then upgraded. Raises BadBackup: a damaged or newer backup,
    or a target that is not empty; the database is as it was.
    """
    manifest = read_manifest(directory)
    for schema in manifest.schemas:
        _require_known(schema)
    opening = partial(connect, url, name="berth restore")
    try:  # a worker that starts meanwhile waits, and finds its schema
        async with migrating(opening, *(schema.schema for schema in manifest.schemas)) as (connection, driver):
            await _require_empty(driver)
            if not dry_run:
                for schema in manifest.schemas:
                    await _restore_schema(connection, driver, schema, directory)
    except CONNECTION_LOST as error:
        raise_fault(error, closed=isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError))
    return manifest


def _require_known(schema: SchemaCopy) -> None:
    if package_of(schema.schema) is None:
        raise BadBackup(f"the backup holds a schema {schema.schema} that berth has none of", code="backup.invalid")
    assessed = assess(schema.schema, Revisions(schema.revision), is_empty=False)
    if assessed.state is SchemaState.NEWER:
        raise BadBackup(
            f"schema {schema.schema} is from a newer berth (revision {schema.revision}; this one knows "
            f"{assessed.head}): restore with that version",
            code="backup.newer_schema",
        )
    if assessed.state not in (SchemaState.CURRENT, SchemaState.BEHIND):
        raise BadBackup(
            f"schema {schema.schema} is at revision {schema.revision!r}, which this berth does not know",
            code="backup.unknown_schema",
        )


async def _require_empty(driver: asyncpg.Connection) -> None:
    there = [each.schema for each in await find_schemas(driver) if each.state is not SchemaState.ABSENT]
    if there:
        raise BadBackup(
            f"the database already holds {', '.join(there)}: stop the workers, and name an empty database or "
            "drop these schemas first",
            code="backup.target_not_empty",
        )


async def _restore_schema(
    connection: AsyncConnection, driver: asyncpg.Connection, schema: SchemaCopy, directory: Path
) -> None:
    package = package_of(schema.schema)
    assert package is not None
    if not await driver.fetchval(IS_THERE, quoted(schema.schema)):  # IF NOT EXISTS needs the right to make schemas, too
        await driver.execute(f"CREATE SCHEMA {quoted(schema.schema)}")
    await act_as_owner(driver, schema.schema)
    await driver.execute(f"SET LOCAL search_path = {quoted(schema.schema)}")
    await connection.run_sync(migrations.upgrade, package, schema.schema, schema.revision)
    await _require_complete(driver, schema)
    try:
        if schema.tables:  # migrations leave rows behind: identities, heads
            await driver.execute(f"TRUNCATE {', '.join(quoted(table.table) for table in schema.tables)}")
        for table in schema.tables:
            await _restore_table(driver, schema.schema, table, directory)
        for sequence in schema.sequences:
            name = f"{quoted(schema.schema)}.{quoted(sequence.sequence)}"
            await driver.execute("SELECT setval($1::text::regclass, $2, $3)", name, sequence.value, sequence.is_called)
    except MISMATCHES as error:
        raise BadBackup(f"schema {schema.schema} does not take the backup: {error}", code="backup.mismatch") from error
    await connection.run_sync(migrations.upgrade, package, schema.schema)
    await driver.execute("ANALYZE " + ", ".join(quoted(table.table) for table in schema.tables))
    await driver.execute("SET LOCAL search_path = DEFAULT; SET LOCAL ROLE NONE")


async def _require_complete(driver: asyncpg.Connection, schema: SchemaCopy) -> None:
    """Raises BadBackup when the backup lacks a table, a column or a sequence of its revision: what was in it would be
    lost without a sentence.
    """
    copied = {table.table: table.columns for table in schema.tables}
    missing = [
        *(
            f"{table}.{column}" if table in copied else table
            for table, columns in (await columns_of_tables(driver, schema.schema)).items()
            for column in (columns if table in copied else columns[:1])
            if column not in copied.get(table, ())
        ),
        *(set(await names_of_sequences(driver, schema.schema)) - {one.sequence for one in schema.sequences}),
    ]
    if missing:
        raise BadBackup(
            f"schema {schema.schema} of the backup lacks {', '.join(sorted(missing))}, which revision "
            f"{schema.revision} has",
            code="backup.mismatch",
        )


async def _restore_table(driver: asyncpg.Connection, schema: str, table: TableCopy, directory: Path) -> None:
    path = directory / file_of(schema, table.table)
    status = await driver.copy_to_table(
        table.table, schema_name=schema, columns=table.columns, source=_blocks(path, table.text_bytes), format="text"
    )
    if (rows := int(status.split()[-1])) != table.rows:
        raise BadBackup(f"{path.name} holds {rows} rows and not {table.rows}", code="backup.damaged")


async def _blocks(path: Path, text_bytes: int) -> AsyncIterator[bytes]:
    """The decompressed content, which must have the length that the manifest states."""
    total = 0
    for block in _decompressed(path):
        total += len(block)
        if total > text_bytes:
            break
        yield block
    if total != text_bytes:
        raise BadBackup(f"{path.name} has not the length that the manifest states", code="backup.damaged")


def _decompressed(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") as file:
            while block := file.read(READ_BYTES):
                yield block
    except (OSError, EOFError, zlib.error) as error:
        raise BadBackup(f"{path.name} cannot be decompressed: {error}", code="backup.damaged") from error
