"""Runs Alembic for all workers: a package with `versions/`, one schema, and the tables of its revisions in that schema.
A migration that only adds states `compatible_from`, the oldest revision whose code may run on what it leaves; without
that, older code is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
from alembic import command, op
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from bus.persistence.revision import (
    OLDEST,
    REVISION_TABLES,
    Revisions,
    UnsupportedSchema,
    known_revisions,
    read_revisions,
    versions_of,
)

T = TypeVar("T")

# Tables, views and sequences of a schema; indexes and types come with them.
RELATIONS = "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace(:schema) AND relkind <> 'i' ORDER BY 1"


def config(package: str, connection: Connection | None = None, schema: str = "") -> Config:
    """Alembic's configuration for one package, in memory; the folder `alembic` is the environment of all of them."""
    versions = versions_of(package)
    made = Config()
    made.set_main_option("script_location", _literal(Path(__file__).parent / "alembic"))
    made.set_main_option("path_separator", "newline")
    made.set_main_option("version_locations", _literal(versions))
    made.attributes["connection"] = connection
    made.attributes["schema"] = schema
    return made


def upgrade(connection: Connection, package: str, schema: str, revision: str = "head") -> None:
    """Bring the schema to a revision of the package, inside the connection's transaction. Raises UnsupportedSchema."""
    made = config(package, connection, schema)
    found = _by_driver(connection, lambda driver: read_revisions(driver, schema))
    _check(connection, known_revisions(package), found, schema)
    command.upgrade(made, revision)
    _write_oldest(connection, schema, oldest_for(package, revision))


def oldest_for(package: str, revision: str = "head") -> str:
    """The oldest revision whose code may run on a schema at this one: all migrations up to it allow that."""
    scripts = ScriptDirectory.from_config(config(package)).iterate_revisions(revision, "base")
    return max(getattr(script.module, "compatible_from", script.revision) for script in scripts)


def apply_sql(package: str, name: str) -> None:
    """Execute a file of SQL statements that lies in the package; for a migration's `upgrade`."""
    statements = files(package).joinpath(name).read_text(encoding="utf-8")
    # The driver's own `execute` takes many statements at once; SQLAlchemy prepares each, and so takes one.
    _by_driver(op.get_bind(), lambda driver: driver.execute(statements))


def _by_driver(connection: Connection, call: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
    adapted: Any = connection.connection.dbapi_connection
    result: T = adapted.run_async(call)
    return result


def _write_oldest(connection: Connection, schema: str, revision: str) -> None:
    """Keep it in a table that is as Alembic makes its own."""
    place = f'"{schema}".{OLDEST}'
    primary_key = f"CONSTRAINT {OLDEST}_pkc PRIMARY KEY (version_num)"
    connection.execute(text(f"CREATE TABLE IF NOT EXISTS {place} (version_num varchar(32) NOT NULL, {primary_key})"))
    connection.execute(text(f"DELETE FROM {place}"))
    connection.execute(text(f"INSERT INTO {place} VALUES (:revision)"), {"revision": revision})


def _check(connection: Connection, known: Sequence[str], found: Revisions, schema: str) -> None:
    """Raise UnsupportedSchema unless the schema is empty or at a revision of these migrations."""
    if found.applied and found.applied not in known:
        raise _unknown_revision(schema, found, known)
    if not found.applied and (relations := _relations(connection, schema)):
        raise UnsupportedSchema(
            f"schema {schema} has tables ({', '.join(relations[:3])}) and no revision: berth did not make them; "
            "name another schema or database",
            code="database.foreign_schema",
        )


def _unknown_revision(schema: str, found: Revisions, known: Sequence[str]) -> UnsupportedSchema:
    if found.are_later(known):
        return UnsupportedSchema(
            f"schema {schema} was made by a newer berth (revision {found.applied}, for versions from {found.oldest} "
            f"on; this one knows {known[-1]}); run that version, or restore a backup",
            code="database.newer_schema",
        )
    return UnsupportedSchema(
        f"schema {schema} is at revision {found.applied}, which no version of berth has; it is left as it was. Name an "
        "empty database or schema, or run the state of berth that made it",
        code="database.other_schema",
    )


def _relations(connection: Connection, schema: str) -> list[str]:
    found = connection.execute(text(RELATIONS), {"schema": f'"{schema}"'}).scalars()
    return [name for name in found if name not in REVISION_TABLES]


def _literal(path: Path) -> str:
    return str(path).replace("%", "%%")
