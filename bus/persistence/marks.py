"""What a worker above the cells has heard of each cell's database: its mark, in a row of the worker's own schema.

A row is raised in a statement of its own, so that what is heard is recorded once a second: a mark that is up to that
much older proves no less, and compute services have theirs with each order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce

import asyncpg
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from bus.clock import Clock
from bus.contracts.base import DatabaseMark
from bus.persistence.guarded_statement import ASYNCHRONOUS_COMMIT
from bus.persistence.tables import needed

RECORD_S = 1.0

RAISE = """
INSERT INTO cells AS c (name, database_incarnation, sent_sequences) VALUES ($1, $2, $3)
ON CONFLICT (name) DO UPDATE SET
    database_incarnation = greatest(c.database_incarnation, excluded.database_incarnation),
    sent_sequences = CASE sign(c.database_incarnation - excluded.database_incarnation)
        WHEN 1 THEN c.sent_sequences
        WHEN -1 THEN excluded.sent_sequences
        ELSE ARRAY(SELECT greatest(one, other)
            FROM unnest(c.sent_sequences, excluded.sent_sequences) WITH ORDINALITY AS both_of (one, other, slot)
            ORDER BY slot)
    END
RETURNING database_incarnation
"""
READ = "SELECT database_incarnation, sent_sequences FROM cells WHERE name = $1"


def cells_table(metadata: sa.MetaData) -> sa.Table:
    """One row a cell. database_incarnation, sent_sequences: of its database, the highest that was heard."""
    return sa.Table(
        "cells",
        metadata,
        sa.Column("name", sa.Text, primary_key=True),
        needed("database_incarnation", sa.Integer),
        needed("sent_sequences", ARRAY(sa.BigInteger), default=sa.text("'{}'")),
    )


async def raise_mark(connection: asyncpg.Connection, cell: str, mark: DatabaseMark, *, alone: bool = False) -> int:
    """Record what is above the mark on record. Returns the highest incarnation. alone: outside of any transaction; it
    does not wait for the disk, as it is heard again.
    """
    statement = f"WITH raised AS ({RAISE}) SELECT *, {ASYNCHRONOUS_COMMIT} FROM raised" if alone else RAISE
    highest: int = await connection.fetchval(statement, cell, mark.database_incarnation, mark.sent_sequences)
    return highest


async def read_mark(connection: asyncpg.Connection, cell: str) -> DatabaseMark:
    """The mark on record."""
    row = await connection.fetchrow(READ, cell)
    return DatabaseMark() if row is None else DatabaseMark(row[0], tuple(row[1]))


class HeardMarks:
    """The marks of the cells' databases that one process has heard, and what of them is on record."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: dict[str, DatabaseMark] = {}
        self._recorded: dict[str, tuple[float, DatabaseMark]] = {}

    def hear(self, cell: str, marks: Iterable[DatabaseMark]) -> DatabaseMark | None:
        """Return the mark that is to be recorded now: with a higher incarnation than the one on record at once."""
        at, known = self._recorded.get(cell, (-math.inf, DatabaseMark()))
        heard = self._heard[cell] = reduce(DatabaseMark.joined, marks, self._heard.get(cell, known))
        is_due = heard.database_incarnation > known.database_incarnation or self._clock.monotonic() >= at + RECORD_S
        return heard if is_due and heard.is_above(known) else None

    def note_recorded(self, cell: str, mark: DatabaseMark | None, incarnation: int) -> None:
        """A transaction has recorded this mark, if any, and found the incarnation on record."""
        at, known = self._recorded.get(cell, (-math.inf, DatabaseMark()))
        if mark is not None:
            at, known = self._clock.monotonic(), mark
        is_found = incarnation == known.database_incarnation
        self._recorded[cell] = at, known if is_found else DatabaseMark(incarnation)
