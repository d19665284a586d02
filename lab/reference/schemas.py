"""The schema of each worker as SQL, for readers: its tables, indexes and first rows, as its migrations make them."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from bus.persistence.revision import known_revisions, tables_of, versions_of
from bus.persistence.tables import DIALECT, first_rows

# By the name of the derived file.
WORKERS = {
    "schema-cell.sql": "cell_conductor",
    "schema-ironic-sync.sql": "ironic_sync",
    "schema-placement.sql": "placement_worker",
    "schema-scheduler.sql": "scheduler_worker",
}


def _render(worker: str) -> str:
    package = f"{worker}.store.migrations"
    head = known_revisions(package)[-1]
    origin = f"-- The schema of {worker} at revision {head}, for readers: derived from {worker}/store/tables.py."
    functions = [path.name for path in sorted(versions_of(package).glob("*.sql"))]
    where = [f"-- Its functions are in {worker}/store/migrations/versions/{name}." for name in functions]
    statements = ["\n".join([origin, *where])]

    def note(statement: Any, *_: object, **__: object) -> None:
        text = str(statement.compile(dialect=DIALECT)).strip().replace("\t", "    ")
        statements.append("\n".join(line.rstrip() for line in text.splitlines()) + ";")

    def is_index(statement: str) -> bool:
        return statement.startswith(("CREATE INDEX", "CREATE UNIQUE INDEX"))

    metadata = tables_of(package)
    metadata.create_all(sa.create_mock_engine("postgresql+asyncpg://", note), checkfirst=False)
    # A table's indexes are a set.
    runs = [list(run) for _, run in groupby(statements, is_index)]
    statements = [one for run in runs for one in (sorted(run) if is_index(run[0]) else run)]
    statements += [f"{statement};" for statement in first_rows(metadata)]
    return "\n\n".join(statements) + "\n"


PAGES = {name: partial(_render, worker) for name, worker in WORKERS.items()}
