"""A connection that looks up a type of PostgreSQL's own in the catalogue once in a process, not once a connection.

asyncpg knows the scalars, and looks every array up (`bigint[]`, `uuid[]`) when a connection first meets it: ten
milliseconds of the server's time each. A connection of a worker meets six.

It also asks each element of an array by abstract base classes whether it is an array itself, which is most of what an
array costs (a text 0.56 instead of 0.12 microseconds). Here lists and tuples are arrays, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import asyncpg
from asyncpg.protocol import protocol

protocol.IterableABC = protocol.SizedABC = (list, tuple)

# Types below are PostgreSQL's own, with one number in every database of every version (access/transam.h,
# FirstGenbkiObjectId).
FIRST_ASSIGNED = 10_000

# By the number of a type: what the catalogue has of it and of the types that it is made of.
_known: dict[int, Sequence[Any]] = {}
# asyncpg prepares its own statement again when an anonymous one took its place; none did.
_NO_STATEMENT = SimpleNamespace(name="known")


class TypedConnection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg has no types
    """A connection of asyncpg; all of a process share what the catalogue has of PostgreSQL's own types."""

    async def _introspect_types(
        self,
        typeoids: Iterable[int],
        timeout: float | None,  # noqa: ASYNC109  (asyncpg's)
    ) -> tuple[Sequence[Any], Any]:
        numbers = sorted(typeoids)
        if any(number >= FIRST_ASSIGNED for number in numbers):
            found: tuple[Sequence[Any], Any] = await super()._introspect_types(numbers, timeout)
            return found
        statement: Any = _NO_STATEMENT
        for number in numbers:
            if number not in _known:
                _known[number], statement = await super()._introspect_types([number], timeout)
        return [row for number in numbers for row in _known[number]], statement
