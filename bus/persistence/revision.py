"""Finds the revision of a schema without Alembic, whose import takes a sixth of a worker's start. A schema has two: the
newest applied, and the oldest whose code may run on it; a migration that only adds leaves the second as it is
(docs/decisions/0024).
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
# The table with the oldest revision whose code may run on the schema.
OLDEST = "alembic_version"
REVISION_TABLES = (APPLIED, OLDEST)

NUMBERED = re.compile(r"(\d{4})_\w+")  # "0002_shapes"; revisions before 0.1.0 had other names

# The last one: whether no row can be inserted without a value for it.
COLUMNS = """
SELECT c.relname, a.attname, a.attnotnull AND NOT a.atthasdef AND a.attidentity = ''
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.relnamespace = to_regnamespace($1) AND c.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped
"""
FUNCTIONS = "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = to_regnamespace($1)"
FUNCTION = re.compile(r"CREATE (?:OR REPLACE )?FUNCTION (\w+)\(.*?\$\$(.*?)\$\$", re.DOTALL)
PRESENT = "SELECT to_regclass($1) IS NOT NULL"

LOCK = text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))")

MAX_NAMED = 5


class MigrationsMissing(LookupError):
    """The package has no `versions/` directory: it was not installed whole."""


class UnsupportedSchema(LookupError):
    """These migrations cannot bring the schema to head. `code` has the reason; the schema is left as it was."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class Revisions(NamedTuple):
    """The revisions of a schema."""

    applied: str = ""  # the newest
    oldest: str = ""  # the oldest whose code may run there. "": it has none.

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
    if not await connection.fetchval(PRESENT, applied):
        return Revisions()
    return Revisions(await _read(connection, applied), await _read(connection, oldest))


async def _read(connection: asyncpg.Connection, table: str) -> str:
    return ", ".join(row[0] for row in await connection.fetch(f"SELECT version_num FROM {table} ORDER BY 1"))


async def is_migrated(connection: asyncpg.Connection, package: str, schema: str) -> bool:
    """Whether code with these migrations can use the schema as it is: at head, or at a later revision that allows it.

    Raises UnsupportedSchema when the schema does not have the tables of its revision, or at head not the functions.
    """
    known = known_revisions(package)
    found = await read_revisions(connection, schema)
    is_at_head = found.applied == known[-1]
    if not is_at_head and not found.allow(known):
        return False
    await _check_columns(connection, package, schema, is_at_head=is_at_head)
    if is_at_head:
        await _check_functions(connection, package, schema)
    return True


async def _check_functions(connection: asyncpg.Connection, package: str, schema: str) -> None:
    """Compare the functions of a schema with the last ones in the package's files of SQL, as columns are. Raises
    UnsupportedSchema.
    """
    found = dict(await connection.fetch(FUNCTIONS, f'"{schema}"'))
    texts = [path.read_text(encoding="utf-8") for path in sorted(versions_of(package).glob("*.sql"))]
    expected = dict(FUNCTION.findall("".join(texts)))
    if differing := sorted(name for name, body in expected.items() if found.get(name) != body):
        named = f"these functions differ: {', '.join(differing[:MAX_NAMED])}"
        raise _made_by_another(schema, f"is at revision {known_revisions(package)[-1]}", named)


async def _check_columns(connection: asyncpg.Connection, package: str, schema: str, *, is_at_head: bool) -> None:
    """Compare the tables of a schema with those that head has. Raises UnsupportedSchema. Of a later revision, columns
    are accepted that an insert without them leaves empty or fills.
    """
    # Before a release a revision is changed in place, so a schema of an earlier state may have the name of head.
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
            named = f"of {table.name} these columns differ: {', '.join(differing[:MAX_NAMED])}"
            raise _made_by_another(schema, at, named)


def _made_by_another(schema: str, at: str, differing: str) -> UnsupportedSchema:
    return UnsupportedSchema(
        f"schema {schema} {at} and is not as it ({differing}): another state of berth made it. It is left as it was; "
        "name an empty database or schema, or run the version that made it",
        code="database.other_schema",
    )


def tables_of(package: str) -> MetaData:
    """The tables that a package of migrations leads to."""
    metadata = import_module(package).METADATA
    assert isinstance(metadata, MetaData)
    return metadata
