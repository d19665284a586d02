"""Copy every schema of berth out of a database, all as of one moment, while its workers run.

One transaction reads everything in one snapshot, so a build is never in the scheduler's schema and missing in its
cell's. Sequences know no snapshot: they are read last, and stand where they stood or further on.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import asyncpg

from berth.backup.manifest import (
    FORMAT,
    BadBackup,
    Manifest,
    SchemaCopy,
    SequenceValue,
    TableCopy,
    file_of,
    write_manifest,
)
from berth.config.schemas import SchemaRevision, SchemaState, find_schemas, quoted
from bus.distribution import version
from bus.persistence.address import CONNECTION_LOST, parse_database_url
from bus.persistence.database import CONNECT_TIMEOUT_S
from bus.persistence.database_faults import raise_fault
from bus.persistence.revision import REVISION_TABLES

LOCK_TIMEOUT_S = 30.0  # a migration under way holds its tables; a backup waits for it no longer
GZIP_LEVEL = 1  # the text shrinks to a fifth; higher levels cost several times as much and gain little

# The settings that COPY's text depends on. No time-out for statements: a large table takes longer than any statement of
# a worker.
SESSION: Mapping[str, str] = {
    "client_encoding": "UTF8",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "lock_timeout": str(int(LOCK_TIMEOUT_S * 1000)),
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}

_TABLES = "SELECT relname FROM pg_class WHERE relnamespace = $1::text::regnamespace AND relkind = 'r' ORDER BY relname"
_COLUMNS = """
SELECT attname FROM pg_attribute
WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum
"""
_REFERENCES = """
SELECT child.relname AS child, parent.relname AS parent
FROM pg_constraint c JOIN pg_class child ON child.oid = c.conrelid JOIN pg_class parent ON parent.oid = c.confrelid
WHERE c.contype = 'f' AND child.relnamespace = $1::text::regnamespace AND child.oid <> parent.oid
"""
_SEQUENCES = "SELECT relname FROM pg_class WHERE relnamespace = $1::text::regnamespace AND relkind = 'S' ORDER BY 1"


async def connect(url: str, *, name: str) -> asyncpg.Connection:
    """A connection that reads and writes as backups need it. Raises the faults of `raise_fault`."""
    try:
        return await parse_database_url(url).connect(
            timeout_s=CONNECT_TIMEOUT_S, command_timeout_s=None, settings={**SESSION, "application_name": name}
        )
    except CONNECTION_LOST as error:
        raise_fault(error, closed=isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError))


async def save(url: str, directory: Path) -> Manifest:
    """Copy all schemas into `directory`, which must not be there yet or be empty; it appears whole or not at all.

    Raises BadBackup: nothing to copy, a schema that this version did not make, a directory that cannot be made.
    """
    with _appearing(directory) as fresh:
        manifest = await _copy_all(url, fresh)
        write_manifest(fresh, manifest)
    return manifest


@contextmanager
def _appearing(directory: Path) -> Iterator[Path]:
    """A fresh directory beside it, which takes its name when all went well, and is on disk then."""
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise BadBackup(f"{directory} is there and not empty", code="backup.exists")
        directory.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise BadBackup(f"cannot write to {directory.parent}: {error.strerror}", code="backup.unwritable") from error
    try:
        yield fresh
        _to_disk(fresh)
        fresh.rename(directory)  # also over an empty directory
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


async def _copy_all(url: str, directory: Path) -> Manifest:
    connection = await connect(url, name="berth backup")
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            at = await connection.fetchval(
                """SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
            )
            found = await find_schemas(connection)
            _require_known(found)
            kept = [schema for schema in found if schema.state is not SchemaState.ABSENT]
            tables = {schema.schema: await _copy_tables(connection, schema.schema, directory) for schema in kept}
            schemas = [
                SchemaCopy(
                    schema=schema.schema,
                    revision=schema.revision,
                    database_id=await _read_database_id(connection, schema.schema, tables[schema.schema]),
                    tables=tables[schema.schema],
                    sequences=await _sequences(connection, schema.schema),
                )
                for schema in kept
            ]
            server = str(await connection.fetchval("SELECT current_setting('server_version')"))
    except CONNECTION_LOST as error:
        raise_fault(error, closed=connection.is_closed())
    finally:
        await connection.close()
    return Manifest(format=FORMAT, at=at, berth=version(), server=server, schemas=schemas)


def _require_known(found: list[SchemaRevision]) -> None:
    # One that is ahead is copied as it is, and restored by a version that knows its revision.
    known = {SchemaState.CURRENT, SchemaState.BEHIND, SchemaState.AHEAD, SchemaState.ABSENT}
    strange = [schema for schema in found if schema.state not in known]
    if strange:
        names = ", ".join(f"{each.schema} (revision {each.revision or 'none'})" for each in strange)
        raise BadBackup(
            f"this berth does not know the schemas {names}: use the one that made them", code="backup.newer_schema"
        )
    if all(schema.state is SchemaState.ABSENT for schema in found):
        raise BadBackup("this database holds no schema of berth", code="backup.nothing")


async def columns_of_tables(connection: asyncpg.Connection, schema: str) -> dict[str, list[str]]:
    """The tables of a schema that a backup holds, in the order of their names, each with its columns."""
    names = [row["relname"] for row in await connection.fetch(_TABLES, quoted(schema))]
    return {
        name: [row["attname"] for row in await connection.fetch(_COLUMNS, f"{quoted(schema)}.{quoted(name)}")]
        for name in names
        if name not in REVISION_TABLES
    }


async def names_of_sequences(connection: asyncpg.Connection, schema: str) -> list[str]:
    """The sequences of a schema, in the order of their names."""
    return [row["relname"] for row in await connection.fetch(_SEQUENCES, quoted(schema))]


async def _copy_tables(connection: asyncpg.Connection, schema: str, directory: Path) -> list[TableCopy]:
    tables = await columns_of_tables(connection, schema)
    edges = [(row["child"], row["parent"]) for row in await connection.fetch(_REFERENCES, quoted(schema))]
    ordered = parents_first(list(tables), edges)
    return [await _copy_table(connection, schema, table, tables[table], directory) for table in ordered]


async def _copy_table(
    connection: asyncpg.Connection, schema: str, table: str, columns: list[str], directory: Path
) -> TableCopy:
    with _Packed(directory / file_of(schema, table)) as packed:
        status = await connection.copy_from_table(
            table, schema_name=schema, columns=columns, output=packed.write, format="text"
        )
    return TableCopy(
        table=table,
        columns=columns,
        rows=int(status.split()[-1]),
        bytes=packed.size,
        text_bytes=packed.text_size,
        sha256=packed.digest.hexdigest(),
    )


async def _sequences(connection: asyncpg.Connection, schema: str) -> list[SequenceValue]:
    found = []
    for name in await names_of_sequences(connection, schema):
        stands = await connection.fetchrow(f"SELECT last_value, is_called FROM {quoted(schema)}.{quoted(name)}")
        assert stands is not None
        found.append(SequenceValue(sequence=name, value=stands["last_value"], is_called=stands["is_called"]))
    return found


async def _read_database_id(connection: asyncpg.Connection, schema: str, tables: list[TableCopy]) -> str:
    if all(table.table != "identity" for table in tables):
        return ""
    return str(await connection.fetchval(f"SELECT database_id::text FROM {quoted(schema)}.identity") or "")


def parents_first(tables: list[str], references: list[tuple[str, str]]) -> list[str]:
    """Tables in an order in which each comes after those that it refers to. references: (child, parent).

    Raises ValueError when there is none.
    """
    ordered: list[str] = []
    left = sorted(tables)
    while left:
        waiting = {child for child, parent in references if parent in left}
        ready = [table for table in left if table not in waiting]
        if not ready:
            raise ValueError(f"tables refer to each other in a circle: {', '.join(left)}")
        ordered += ready
        left = [table for table in left if table in waiting]
    return ordered


class _Packed:
    """A compressed file that counts and sums what is written to it. No time stamp: equal rows make equal files."""

    def __init__(self, path: Path) -> None:
        self.digest = hashlib.sha256()
        self.size = 0
        self.text_size = 0
        self._file = path.open("wb")
        self._gzip = gzip.GzipFile(filename="", mode="wb", compresslevel=GZIP_LEVEL, fileobj=_Sink(self), mtime=0)

    async def write(self, block: bytes) -> None:
        self.text_size += len(block)
        self._gzip.write(block)

    def keep(self, block: bytes) -> int:
        """Take a compressed block."""
        self.digest.update(block)
        self.size += len(block)
        try:
            return self._file.write(block)
        except OSError as error:  # not one of the database's
            raise BadBackup(f"cannot write {self._file.name}: {error.strerror}", code="backup.unwritable") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gzip.close()
        self._file.close()


class _Sink:
    """The methods of a file that GzipFile needs."""

    def __init__(self, packed: _Packed) -> None:
        self._packed = packed

    def write(self, block: bytes) -> int:
        return self._packed.keep(bytes(block))

    def flush(self) -> None:
        """Nothing is held back here."""


def _to_disk(directory: Path) -> None:
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
