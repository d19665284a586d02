"""Finds the revision of a schema without Alembic, so that a process without a migration need not import Alembic.

Alembic takes a sixth of a worker's start, and of the processes of a system only the first finds something to migrate.

A schema has two revisions: the newest that was applied, and the oldest whose code may run on it. A migration that only
adds leaves the second as it is, so that workers of two versions run side by side (docs/decisions/0024).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
from sqlalchemy import MetaData, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

APPLIED = "schema_revision"  # the table with the newest revision that was applied; Alembic keeps it
# The table with the oldest revision whose code may run on the schema. Alembic kept its revision there while each schema
# had one migration, and versions of that time start only where it holds the revision that they know: they follow the
# rule, too. A schema that one of them has made has this table alone.
OLDEST = "alembic_version"
REVISION_TABLES = (APPLIED, OLDEST)

NUMBERED = re.compile(r"(\d{4})_\w+")  # "0002_shapes"; revisions before 0.1.0 had other names

# The last one: whether no row can be inserted without a value for it.
COLUMNS = """
SELECT c.relname, a.attname, a.attnotnull AND NOT a.atthasdef AND a.attidentity = ''
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.relnamespace = to_regnamespace($1) AND c.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped
"""
PRESENT = "SELECT to_regclass($1) IS NOT NULL, to_regclass($2) IS NOT NULL"

LOCK = text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))")

MAX_NAMED = 5


class MigrationsMissing(LookupError):
    """The package has no `versions/` directory: it was not installed whole."""


class UnsupportedSchema(LookupError):
    """These migrations cannot bring the schema to head. `code` has the reason; the schema is left as it was."""

    def __init__(self, sentence: str, *, code: str) -> None:
        super().__init__(sentence)
        self.code = code


class Revisions(NamedTuple):
    """The revisions of a schema. applied: the newest. oldest: the oldest whose code may run there. "": it has none."""

    applied: str = ""
    oldest: str = ""

    def are_later(self, known: Sequence[str]) -> bool:
        """Whether the schema is later than all of these, which are in ascending order."""
        numbered = NUMBERED.fullmatch(self.applied)
        return numbered is not None and numbered[1] > known[-1][:4]

    def allow(self, known: Sequence[str]) -> bool:
        """Whether the schema is later than these revisions, and code that knows them may run on it all the same."""
        return self.are_later(known) and self.oldest in known


def lock_key(schema: str) -> str:
    """The advisory lock under which this schema is made, upgraded or restored, before it is hashed."""
    return f"berth.migrations.{schema}"


@asynccontextmanager
async def migrating(
    connect: Callable[[], Awaitable[asyncpg.Connection]], *schemas: str
) -> AsyncIterator[tuple[AsyncConnection, asyncpg.Connection]]:
    """A transaction that may migrate these schemas, as SQLAlchemy has it for Alembic, and the driver's connection below
    it. It waits for others that migrate them. Raises the driver's errors.
    """
    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            for schema in schemas:
                await connection.execute(LOCK, {"key": lock_key(schema)})
            driver: Any = (await connection.get_raw_connection()).driver_connection
            yield connection, driver
    except DBAPIError as error:
        cause = error.orig.__cause__ if error.orig is not None else None
        raise cause or error from None
    finally:
        await engine.dispose()


def versions_of(package: str) -> Path:
    """The directory of a package's migrations. Raises MigrationsMissing."""
    versions = Path(str(files(package))) / "versions"
    if not versions.is_dir():
        raise MigrationsMissing(f"{package} has no versions/ directory")
    return versions


def known_revisions(package: str) -> list[str]:
    """The revisions of a package in ascending order: a migration's file has its name, and the numbers ascend."""
    return sorted(path.stem for path in versions_of(package).glob("[0-9]*.py"))


async def read_revisions(connection: asyncpg.Connection, schema: str) -> Revisions:
    """The revisions of a schema; Revisions() when it has none."""
    applied, oldest = (f'"{schema}".{table}' for table in REVISION_TABLES)
    has_applied, has_oldest = await connection.fetchrow(PRESENT, applied, oldest)
    if not has_oldest:
        return Revisions()
    found = await _read(connection, oldest)
    return Revisions(await _read(connection, applied) if has_applied else found, found)


async def _read(connection: asyncpg.Connection, table: str) -> str:
    return ", ".join(row[0] for row in await connection.fetch(f"SELECT version_num FROM {table} ORDER BY 1"))


async def is_migrated(connection: asyncpg.Connection, package: str, schema: str) -> bool:
    """Whether code with these migrations can use the schema as it is: at head, or at a later revision that allows it.

    Raises UnsupportedSchema when the schema does not have the tables of its revision.
    """
    known = known_revisions(package)
    found = await read_revisions(connection, schema)
    is_at_head = found.applied == known[-1]
    if not is_at_head and not found.allow(known):
        return False
    await _check_columns(connection, package, schema, is_at_head=is_at_head)
    return True


async def _check_columns(connection: asyncpg.Connection, package: str, schema: str, *, is_at_head: bool) -> None:
    """Compare the tables of a schema with those that head has. Raises UnsupportedSchema.

    Before a release a revision was changed in place, so a schema that an earlier state made may have the name of head.
    Of a later revision, columns are accepted that an insert without them leaves empty or fills.
    """
    found: dict[str, set[str]] = {}
    accepted: dict[str, set[str]] = {}
    for table, column, is_needed in await connection.fetch(COLUMNS, f'"{schema}"'):
        found.setdefault(table, set()).add(column)
        if not is_at_head and not is_needed:
            accepted.setdefault(table, set()).add(column)
    for table in tables_of(package).tables.values():
        expected, there = set(table.columns.keys()), found.get(table.name, set())
        if differing := sorted((expected - there) | (there - expected - accepted.get(table.name, set()))):
            at = f"is {'at' if is_at_head else 'later than'} revision {known_revisions(package)[-1]}"
            raise UnsupportedSchema(
                f"schema {schema} {at} and does not have its tables (of {table.name} these columns differ: "
                f"{', '.join(differing[:MAX_NAMED])}): another state of berth made it. It is left as it was; name an "
                "empty database or schema, or run the version that made it",
                code="database.other_schema",
            )


def tables_of(package: str) -> MetaData:
    """The tables that a package of migrations leads to."""
    metadata = import_module(package).METADATA
    assert isinstance(metadata, MetaData)
    return metadata
