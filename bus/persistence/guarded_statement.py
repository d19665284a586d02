"""A whole transaction as one SQL statement: one round trip that writes everything, or nothing at all.

A transaction with locks costs BEGIN, a SELECT FOR UPDATE, one to three writes and COMMIT, each a round trip. Most
transactions find the rows as expected: a new request is new, an instance is as this process has left it. So all parts
are sent at once, each with the number of rows that it must touch. A wrong number rolls the whole statement back and
raises `PreconditionFailed`; the caller then runs the same work in a transaction with locks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import asyncpg

from bus.persistence.conflict import PreconditionFailed

# A setting of the implicit transaction: read at its commit, gone after it.
ASYNCHRONOUS_COMMIT = "set_config('synchronous_commit', 'off', true) AS asynchronous_commit"

# Locks the rows that were read, in the order of their keys, if they still have the version that was read.
_HELD = """
SELECT t.{key} FROM {table} t JOIN unnest({{}}::uuid[], {{}}::xid[]) AS v (key, version) ON t.{key} = v.key
WHERE t.xmin = v.version ORDER BY t.{key} FOR UPDATE OF t
"""


class GuardedStatement:
    """Collects the parts of one statement, in the order in which they take their locks."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._values: list[Any] = []
        self._checks: list[str] = []
        self._columns: list[str] = []

    def add(self, name: str, statement: str, *values: object, rows: int | None = None) -> None:
        """Add a statement with `{}` for each value and a RETURNING clause. rows: how many it must return."""
        self._parts.append(f"{name} AS ({statement.format(*map(self._value, values))})")
        if rows is not None:
            self._checks.append(f"(SELECT count(*) FROM {name}) = {self._value(rows)}::bigint")

    def hold(self, table: str, key: str, versions: Mapping[str, int], *, updates: int) -> str:
        """Compare rows that were read with their versions (xmin); returns the guard of the update of some of them.

        They are locked in the order of their keys. One row alone needs no order: its update compares it.
        """
        if len(versions) == updates == 1:
            (version,) = versions.values()
            return f"{table}.xmin = {self._value(version)}::xid"
        if versions:
            held = sorted(versions)
            self.add("held", _HELD.format(table=table, key=key), held, [versions[one] for one in held], rows=len(held))
        # All or nothing. Not joined with the held rows: planned by key, two lists of values are compared pair by pair.
        return f"(SELECT count(*) FROM held) = {self._value(len(versions))}::bigint" if updates else "true"

    def column(self, expression: str) -> None:
        """Add a column to the result."""
        self._columns.append(expression)

    async def execute(self, connection: asyncpg.Connection, *, durable: bool = True) -> asyncpg.Record:
        """Run it on a connection outside of any transaction. Raises PreconditionFailed."""
        # A division by zero is the way for a plain statement to roll itself back.
        columns = [f"1 / ({' AND '.join(self._checks) or 'true'})::int AS checked", *self._columns]
        if not durable:
            columns.append(ASYNCHRONOUS_COMMIT)
        try:
            return await connection.fetchrow(
                f"WITH {', '.join(self._parts)} SELECT {', '.join(columns)}", *self._values
            )
        except asyncpg.DivisionByZeroError as error:
            raise PreconditionFailed from error

    def _value(self, value: object) -> str:
        self._values.append(value)
        return f"${len(self._values)}"
