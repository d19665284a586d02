"""What the tables of several workers share, and what SQLAlchemy does not say of a table. A worker's `tables` module is
its schema: migrations, statements that are not hot, and the check of columns at start use it. A table names no schema:
the connection's search_path is it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import asyncpg
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.asyncpg import dialect
from sqlalchemy.schema import DDL

UUID = sa.Uuid(as_uuid=False)  # canonical text, as the driver returns it (bus.persistence.database)
MOMENT = sa.TIMESTAMP(timezone=True)
ZERO = sa.text("0")
DIALECT = dialect()  # type: ignore[no-untyped-call]
FIRST_ROW = "first_row"  # in the `info` of a table: the values of the row that it is made with


def create_tables(connection: sa.Connection, metadata: sa.MetaData) -> None:
    """Create all tables, and the rows that they are made with."""
    metadata.create_all(connection, checkfirst=False)
    for statement in first_rows(metadata):
        connection.exec_driver_sql(statement)


def first_rows(metadata: sa.MetaData) -> list[str]:
    """The statements that insert the rows that tables are made with."""
    made = [
        sa.insert(table).values(row)
        for table in metadata.sorted_tables
        if (row := table.info.get(FIRST_ROW)) is not None
    ]
    return [str(row.compile(dialect=DIALECT, compile_kwargs={"literal_binds": True})) for row in made]


async def fetch(connection: asyncpg.Connection, statement: sa.Executable, **values: object) -> Sequence[asyncpg.Record]:
    """Run a statement of SQLAlchemy Core on a connection of `Database.raw`, as a part of its transaction. values: of
    its parameters.
    """
    compiled = _compiled(statement)
    parameters = compiled.construct_params(values)
    found: Sequence[asyncpg.Record] = await connection.fetch(
        str(compiled), *(parameters[name] for name in compiled.positiontup)
    )
    return found


def in_list(states: Iterable[str]) -> str:
    """States as the list of an SQL condition, in their order."""
    return ", ".join(f"'{state}'" for state in states)


@lru_cache(maxsize=256)
def _compiled(statement: Any) -> Any:
    return statement.compile(dialect=DIALECT)


def needed(name: str, kind: Any, *more: Any, default: Any = None) -> sa.Column[Any]:
    """A column that is not null."""
    return sa.Column(name, kind, *more, nullable=False, server_default=default)


def only_row() -> sa.Column[Any]:
    """The primary key of a table with one row."""
    return sa.Column("one", sa.Boolean, sa.CheckConstraint("one"), primary_key=True, server_default=sa.true())


def store_as_it_is(table: sa.Table, column: str) -> None:
    """Compress no bytes of this column: a row is large and soon gone, and that would be most of what it costs."""
    statement = DDL(f"ALTER TABLE {table.name} ALTER COLUMN {column} SET STORAGE EXTERNAL")  # type: ignore[no-untyped-call]
    sa.event.listen(table, "after_create", statement)


def identity_table(metadata: sa.MetaData, *more: sa.Column[Any]) -> sa.Table:
    """The identity of a database, made with the schema: whose the buses are that its workers enter. A backup takes it
    along.
    """
    database_id = needed("database_id", UUID, default=sa.func.gen_random_uuid())
    return sa.Table("identity", metadata, database_id, only_row(), *more, info={FIRST_ROW: {}})


def outbox_tables(metadata: sa.MetaData) -> None:
    """The outbox, messages that commit with the state that caused them (bus.persistence.outbox); and `handled`, the
    messages that a handler has taken, where its own tables do not show it.
    """
    outbox = sa.Table(
        "outbox",
        metadata,
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        needed("created_at", MOMENT, default=sa.func.now()),
        needed("taken_at", MOMENT, default=sa.func.now()),
        needed("bus", sa.Text),
        needed("body", sa.LargeBinary),
        # By it a sweep reads no more rows than it takes, however many wait. Without the id: a plan of an empty table
        # would find rows by id in it.
        sa.Index("outbox_of_bus", "bus", "taken_at"),
        # A short-lived heap: it is vacuumed by count and not by share.
        postgresql_with={"autovacuum_vacuum_scale_factor": 0, "autovacuum_vacuum_threshold": 5000},
    )
    store_as_it_is(outbox, "body")
    sa.Table(
        "handled",
        metadata,
        sa.Column("handler", sa.Text, primary_key=True),
        sa.Column("message_id", sa.Text, primary_key=True),
        needed("at", MOMENT, default=sa.func.now()),
        sa.Index("handled_at", "at"),
    )
