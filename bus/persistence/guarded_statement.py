"""A whole transaction as one SQL statement: one round trip that writes everything or nothing. On `PreconditionFailed`
the caller runs the same work in a transaction with locks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import asyncpg

# A setting of the implicit transaction: read at its commit, gone after it.
ASYNCHRONOUS_COMMIT = "set_config('synchronous_commit', 'off', true) AS asynchronous_commit"

# Locks the rows that were read, in the order of their keys, if they still have the version that was read.
_HELD = """
SELECT t.{key} FROM {table} t JOIN unnest({{}}::uuid[], {{}}::xid[]) AS v (key, version) ON t.{key} = v.key
WHERE t.xmin = v.version ORDER BY t.{key} FOR UPDATE OF t
"""


class Conflict(Exception):
    """Another process has written one of the rows first; nothing was written. The work is repeated with locks, where
    this cannot happen.
    """


class PreconditionFailed(Conflict):
    """A guarded statement has touched another number of rows than required, and was rolled back."""


class GuardedStatement:
    """Collects the parts of one statement, in the order in which they take their locks."""

    # A transaction with locks costs BEGIN, SELECT FOR UPDATE, one to three writes and COMMIT, each a round trip, and
    # most transactions find the rows as expected. So each part is sent with the number of rows that it must touch, and
    # runs only if all before it have touched theirs. The statement thus usually ends without a write when a row is not
    # as expected; only after a write of an earlier part it rolls itself back with an error.

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._values: list[Any] = []
        self._met = "true"
        self._written: list[str] = []
        self._columns: list[str] = []

    def expect(self, condition: str, *values: object) -> None:
        """Add a condition with `{}` for each value, which is read before what is added later and takes no lock.

        It is a part of its own, which stands on the one before, so that the server evaluates each condition once.
        """
        name = f"met_{len(self._parts)}"
        self._part(name, f"SELECT WHERE {{met}} AND {condition}", *values)
        self._met = f"EXISTS (SELECT FROM {name})"

    def add(self, name: str, statement: str, *values: object, rows: int | None = None) -> None:
        """Add a write with `{}` for each value, `{met}` as a condition of its rows and a RETURNING clause. rows: how
        many it must return.
        """
        self._part(name, statement, *values)
        self._written.append(f"(SELECT count(*) FROM {name})")
        if rows is not None:
            self.expect(f"(SELECT count(*) FROM {name}) = {{}}::bigint", rows)

    def hold(self, table: str, key: str, versions: Mapping[str, int], *, updates: int) -> str:
        """Compare rows that were read with their versions (xmin); returns a condition for the update of some of them.

        They are locked in the order of their keys. One row alone needs no order: its update compares it.
        """
        if len(versions) == updates == 1:
            (version,) = versions.values()
            return f"{table}.xmin = {self._value(version)}::xid"
        if versions:
            # Not joined with the updated rows: planned by key, two lists of values are compared pair by pair.
            held = sorted(versions)
            self._part("held", _HELD.format(table=table, key=key), held, [versions[one] for one in held])
            self.expect("(SELECT count(*) FROM held) = {}::bigint", len(held))
        return "true"

    def column(self, expression: str) -> None:
        """Add a column to the result."""
        self._columns.append(expression)

    async def execute(self, connection: asyncpg.Connection, *, durable: bool = True) -> asyncpg.Record:
        """Run it on a connection outside of any transaction. Raises PreconditionFailed."""
        is_whole = f"({self._met} OR {' + '.join(self._written) or '0'} = 0)"
        not_in_part = f"CASE WHEN {is_whole} THEN 1 ELSE rolled_back() END AS not_in_part"
        columns = [f"{self._met} AS met", not_in_part, *self._columns]
        if not durable:
            columns.append(ASYNCHRONOUS_COMMIT)
        try:
            row = await connection.fetchrow(f"WITH {', '.join(self._parts)} SELECT {', '.join(columns)}", *self._values)
        except asyncpg.SerializationError as error:
            raise PreconditionFailed from error
        if not row["met"]:
            raise PreconditionFailed
        return row

    def _part(self, name: str, statement: str, *values: object) -> None:
        self._parts.append(f"{name} AS ({statement.format(*map(self._value, values), met=self._met)})")

    def _value(self, value: object) -> str:
        self._values.append(value)
        return f"${len(self._values)}"
