"""Finds the revision of a schema without Alembic, so that a process without a migration need not import Alembic.

Alembic takes a sixth of a worker's start, and of the processes of a system only the first finds something to migrate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

VERSION_TABLE = "alembic_version"
SCHEMA = "schema.sql"  # beside a package of migrations: the whole schema at head

TABLE = re.compile(r"^CREATE (?:UNLOGGED )?TABLE (\w+) \((.*?)^\)", re.MULTILINE | re.DOTALL)
COLUMN = re.compile(r"^    ([a-z_]\w*) ", re.MULTILINE)  # constraints begin with a capital
COLUMNS = """
SELECT c.relname, a.attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.relnamespace = to_regnamespace(:schema) AND c.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped
"""


MAX_NAMED = 5
MAX_READ = 16  # schemas whose columns are kept in memory


class MigrationsMissing(LookupError):
    """The package has no `versions/` directory: it was not installed whole."""


class UnsupportedSchema(LookupError):
    """These migrations cannot bring the schema to head. `code` has the reason; the schema is left as it was."""

    def __init__(self, sentence: str, *, code: str) -> None:
        super().__init__(sentence)
        self.code = code


def versions_of(package: str) -> Path:
    """The directory of a package's migrations. Raises MigrationsMissing."""
    versions = Path(str(files(package))) / "versions"
    if not versions.is_dir():
        raise MigrationsMissing(f"{package} has no versions/ directory")
    return versions


def head(package: str) -> str:
    """The newest revision of a package: a migration's file has its name, and the numbers ascend."""
    return max(path.stem for path in versions_of(package).glob("[0-9]*.py"))


async def check_columns(connection: AsyncConnection, package: str, schema: str) -> None:
    """Compare the tables of a schema that is at head with those that head has. Raises UnsupportedSchema.

    Before a release a revision is changed in place, so a schema that an earlier state made has the same name.
    """
    above = package.rpartition(".")[0]
    if not above or not (written := files(above).joinpath(SCHEMA)).is_file():
        return  # migrations alone: nothing to compare with
    expected = columns_of(written.read_text(encoding="utf-8"))
    found: dict[str, set[str]] = {}
    for table, column in await connection.execute(text(COLUMNS), {"schema": f'"{schema}"'}):
        found.setdefault(table, set()).add(column)
    for table, columns in expected.items():
        if differing := sorted(columns ^ found.get(table, set())):
            raise UnsupportedSchema(
                f"schema {schema} is at revision {head(package)} and does not have its tables (of {table} these "
                f"columns differ: {', '.join(differing[:MAX_NAMED])}): an earlier state of berth made it. It is left "
                "as it was; name an empty database or schema, or run the version that made it",
                code="database.other_schema",
            )


@lru_cache(maxsize=MAX_READ)
def columns_of(statements: str) -> Mapping[str, frozenset[str]]:
    """{table: its columns} of a file of SQL statements, as this project writes them."""
    return {name: frozenset(COLUMN.findall(body)) for name, body in TABLE.findall(statements)}


async def is_at_head(connection: AsyncConnection, package: str, schema: str) -> bool:
    """Whether a schema is at the package's newest revision, and at no other."""
    table = f'"{schema}".{VERSION_TABLE}'
    if not await connection.scalar(text("SELECT to_regclass(:table)"), {"table": table}):
        return False
    found = await connection.scalars(text(f"SELECT version_num FROM {table}"))
    return found.all() == [head(package)]
