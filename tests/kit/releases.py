"""Made-up versions of a worker that differ by their migrations, and the changes that are not additive."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import asyncpg
from msgspec import Struct

from tests.kit.catalog import QUERIES

_MIGRATION = '''"""{revision}."""
from alembic import op
revision = "{revision}"
down_revision = {before}
branch_labels = None
depends_on = None
{compatible}


def upgrade() -> None:
    op.execute("""{sql}""")
'''


class Migration(Struct, frozen=True):
    """One revision. tables: all that it leaves, with their columns. compatible_from: "": not stated."""

    revision: str
    sql: str
    tables: Mapping[str, Sequence[str]]
    compatible_from: str = ""


def release(directory: Path, name: str, migrations: Sequence[Migration]) -> str:
    """Write the store of a version that has these migrations; its package of migrations, once it can be imported."""
    store = directory / name / "store"
    versions = store / "migrations" / "versions"
    versions.mkdir(parents=True)
    for package in (directory / name, store, store / "migrations", versions):
        (package / "__init__.py").write_text("")
    before = "None"
    for one in migrations:
        compatible = f'compatible_from = "{one.compatible_from}"' if one.compatible_from else ""
        source = _MIGRATION.format(revision=one.revision, before=before, compatible=compatible, sql=one.sql)
        (versions / f"{one.revision}.py").write_text(source)
        before = f'"{one.revision}"'
    tables = migrations[-1].tables.items()
    made = [f"Table({table!r}, METADATA, {', '.join(f'Column({c!r})' for c in columns)})" for table, columns in tables]
    head = ["from sqlalchemy import Column, MetaData, Table", "METADATA = MetaData()"]
    (store / "migrations" / "__init__.py").write_text("\n".join([*head, *made]))
    for known in [known for known in sys.modules if known.partition(".")[0] == name]:
        del sys.modules[known]
    importlib.invalidate_caches()
    return f"{name}.store.migrations"


async def structure(connection: asyncpg.Connection, schema: str) -> Mapping[str, str]:
    """The rules for the rows of a schema: its columns, constraints and unique indexes."""
    found: dict[str, str] = {}
    for kind in ("column", "constraint", "index"):
        for what, definition in await connection.fetch(QUERIES[kind], schema):
            # Since PostgreSQL 18 NOT NULL is a constraint, too; the column has it.
            if "UNIQUE" in definition if kind == "index" else not definition.startswith("NOT NULL "):
                plain = definition.replace(f'"{schema}".', "").replace(f"{schema}.", "")
                found[f"{kind} {what.replace(f'{schema}.', '')}"] = plain
    return found


def not_additive(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The rules that changed or went, and the new ones that rows of code of the revision before do not satisfy."""
    tables = {name.split()[1].split(".")[0] for name in before if name.startswith("column ")}
    wrong = [f"{name} was {was} and is {after.get(name)}" for name, was in before.items() if after.get(name) != was]
    for name in sorted(after.keys() - before.keys()):
        kind, what = name.split()[:2]
        table = after[name].split(" ON ")[1].split()[0] if kind == "index" else what.split(".")[0]
        is_needed = kind != "column" or ("not null" in after[name] and "default" not in after[name])
        if table in tables and is_needed:
            wrong.append(f"{name} is new: {after[name]}")
    return wrong
