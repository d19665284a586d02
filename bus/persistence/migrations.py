"""Alembic, once for every worker: a package of `versions/`, one schema, the version table inside that schema."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

VERSION_TABLE = "alembic_version"
MAX_NAME = 63  # PostgreSQL's limit


class MigrationsMissing(LookupError):
    """The package has no `versions/` directory: it was not installed whole."""


def config(package: str, connection: Connection | None = None, schema: str = "") -> Config:
    """Alembic's configuration for one package, in memory; the folder `alembic` is the environment of all of them."""
    versions = Path(str(files(package))) / "versions"
    if not versions.is_dir():
        raise MigrationsMissing(f"{package} has no versions/ directory")
    made = Config()
    made.set_main_option("script_location", _literal(Path(__file__).parent / "alembic"))
    made.set_main_option("path_separator", "newline")
    made.set_main_option("version_locations", _literal(versions))
    made.attributes["connection"] = connection
    made.attributes["schema"] = schema
    return made


def upgrade(connection: Connection, package: str, schema: str) -> None:
    """Bring the schema to the package's head, inside the connection's transaction."""
    command.upgrade(config(package, connection, schema), "head")


def _literal(path: Path) -> str:
    return str(path).replace("%", "%%")
