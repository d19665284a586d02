"""At which revision a schema is, without Alembic: a process that has nothing to migrate does not import it.

Alembic takes a sixth of a worker's start, and of the processes of a system only the first finds something to migrate.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

VERSION_TABLE = "alembic_version"


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


async def is_at_head(connection: AsyncConnection, package: str, schema: str) -> bool:
    """Whether a schema is at the package's newest revision, and at no other."""
    table = f'"{schema}".{VERSION_TABLE}'
    if not await connection.scalar(text("SELECT to_regclass(:table)"), {"table": table}):
        return False
    found = await connection.scalars(text(f"SELECT version_num FROM {table}"))
    return found.all() == [head(package)]
