"""A whole transaction as one statement: one round trip that writes what is believed to fit, or nothing at all.

A transaction with locks costs BEGIN, a look, a write or three, and COMMIT, each a round trip. Most transactions find
what they expect: a new request is new, an instance stands where this process has left it. So the parts are written at
once, each with the number of rows that it must touch, and a number that is wrong undoes all of them: `Mistaken`, and
nothing has happened. Whoever believed wrong then does it again with locks.
"""

from __future__ import annotations

from typing import Any

import asyncpg


class Mistaken(Exception):
    """What was believed of the rows is not so; nothing was written."""


# The implicit transaction's own setting: read at its commit, gone after it.
IN_NO_HURRY = "set_config('synchronous_commit', 'off', true) AS hurry"


class Once:
    """Collects the parts of one statement, in the order of the locks that they take."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._values: list[Any] = []
        self._checks: list[str] = []
        self._columns: list[str] = []

    def value(self, value: object) -> str:
        """A parameter; returns its placeholder."""
        self._values.append(value)
        return f"${len(self._values)}"

    def part(self, name: str, statement: str, *values: object, rows: int | None = None) -> None:
        """A statement with `{}` for each value, RETURNING something. rows: how many it must return."""
        self._parts.append(f"{name} AS ({statement.format(*map(self.value, values))})")
        if rows is not None:
            self._checks.append(f"(SELECT count(*) FROM {name}) = {self.value(rows)}::bigint")

    def column(self, expression: str) -> None:
        """What the caller wants to know besides."""
        self._columns.append(expression)

    async def run(self, connection: asyncpg.Connection, *, durable: bool = True) -> asyncpg.Record:
        """Run it on a connection outside of any transaction. Raises Mistaken."""
        # Dividing by zero is how a plain statement undoes itself.
        columns = [f"1 / ({' AND '.join(self._checks) or 'true'})::int AS held", *self._columns]
        if not durable:
            columns.append(IN_NO_HURRY)
        try:
            return await connection.fetchrow(
                f"WITH {', '.join(self._parts)} SELECT {', '.join(columns)}", *self._values
            )
        except asyncpg.DivisionByZeroError as error:
            raise Mistaken from error
