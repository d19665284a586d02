"""Runs Alembic for all workers: a package with `versions/`, one schema, and the version table in that schema.

A worker's `store/schema.sql` is its whole schema at the newest revision. `0001_initial` applies it.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from alembic import command, op
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from bus.persistence.revision import VERSION_TABLE, UnsupportedSchema, versions_of

MAX_NAME = 63  # PostgreSQL's limit
REVISION = re.compile(r"(\d{4})_\w+")  # "0002_shapes"; revisions before 0.1.0 had other names

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
    _check(connection, ScriptDirectory.from_config(made), schema)
    command.upgrade(made, revision)


def apply_sql(package: str, name: str) -> None:
    """Execute a file of SQL statements that lies in the package; for a migration's `upgrade`."""
    statements = files(package).joinpath(name).read_text(encoding="utf-8")
    driver = op.get_bind().connection.dbapi_connection
    assert driver is not None
    # The driver's own `execute` takes many statements at once; SQLAlchemy prepares each, and so takes one.
    driver.run_async(lambda connection: connection.execute(statements))


def _check(connection: Connection, scripts: ScriptDirectory, schema: str) -> None:
    """Raise UnsupportedSchema unless the schema is empty or at a revision of these migrations."""
    context = MigrationContext.configure(
        connection, opts={"version_table": VERSION_TABLE, "version_table_schema": schema}
    )
    revisions = context.get_current_heads()
    known = {script.revision for script in scripts.walk_revisions()}
    for revision in revisions:
        if revision not in known:
            raise _unknown_revision(schema, revision, scripts.get_current_head() or "")
    if not revisions and (found := _relations(connection, schema)):
        raise UnsupportedSchema(
            f"schema {schema} has tables ({', '.join(found[:3])}) and no revision: berth did not make them; "
            "name another schema or database",
            code="database.foreign_schema",
        )


def _unknown_revision(schema: str, revision: str, head: str) -> UnsupportedSchema:
    numbered = REVISION.fullmatch(revision)
    if numbered is not None and numbered[1] > head[:4]:
        return UnsupportedSchema(
            f"schema {schema} was made by a newer berth (revision {revision}; this one knows {head}); "
            "run that version, or restore a backup",
            code="database.newer_schema",
        )
    return UnsupportedSchema(
        f"schema {schema} is at revision {revision}, from before berth 0.1.0, and cannot be upgraded; it is left as it "
        "was. Name an empty database or schema; the berth that made it can export the book (berth placement export)",
        code="database.old_schema",
    )


def _relations(connection: Connection, schema: str) -> list[str]:
    found = connection.execute(text(RELATIONS), {"schema": f'"{schema}"'}).scalars()
    return [name for name in found if name != VERSION_TABLE]


def _literal(path: Path) -> str:
    return str(path).replace("%", "%%")
