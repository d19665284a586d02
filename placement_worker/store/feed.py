"""The change feed's rows: numbered in commit order, read in order, published in order, trimmed by a bound.

A sequence would not do: numbers drawn by transactions that commit in another order leave holes that fill later. Here
every writing transaction locks one counter row last and commits, so that number order is commit order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import asyncpg
import msgspec

from bus.contracts.base import encode
from bus.contracts.placement import Change

MAX_CHANGES_PER_ROW = 500

NEXT_NUMBERS = "UPDATE feed_head SET number = number + $1 RETURNING number"
INSERT = "INSERT INTO changes (first, last, body) SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bytea[])"
READ = "SELECT first, last, body FROM changes WHERE last > $1 ORDER BY last LIMIT $2"
HEAD = "SELECT number FROM feed_head"
OLDEST = "SELECT first FROM changes ORDER BY last LIMIT 1"
LOCK_POSITION = "SELECT number FROM feed_position FOR UPDATE"
MOVE_POSITION = "UPDATE feed_position SET number = $1"
TRIM = """
DELETE FROM changes WHERE last <= LEAST((SELECT number FROM feed_head) - $1, (SELECT number FROM feed_position))
"""

_decode = msgspec.json.Decoder(list[Change]).decode


async def append(connection: asyncpg.Connection, changes: Sequence[Change]) -> int:
    """Number the changes and write them, as the last act of a transaction. Returns the last number, 0 for none."""
    if not changes:
        return 0
    slices = [changes[at : at + MAX_CHANGES_PER_ROW] for at in range(0, len(changes), MAX_CHANGES_PER_ROW)]
    bodies = [encode(part) for part in slices]  # before the counter is locked: the lock is the narrow place
    last: int = await connection.fetchval(NEXT_NUMBERS, len(changes))
    firsts, lasts = [], []
    number = last - len(changes)
    for part in slices:
        firsts.append(number + 1)
        number += len(part)
        lasts.append(number)
    await connection.execute(INSERT, firsts, lasts, bodies)
    return last


async def read(connection: asyncpg.Connection, after: int, limit: int) -> list[Change]:
    """Changes numbered above `after`, in order, at most `limit`."""
    changes: list[Change] = []
    while len(changes) < limit:
        # A row holds at least one change: this many rows are enough, and never more than a few too many.
        rows = await connection.fetch(READ, after, min(limit - len(changes), 64))
        if not rows:
            break
        for first, last, body in rows:
            changes.extend(_numbered(first, body, after))
            after = last
    return changes[:limit]


def _numbered(first: int, body: bytes, after: int) -> list[Change]:
    return [
        Change(
            sequence=number,
            provider=change.provider,
            generation=change.generation,
            state=change.state,
            used=change.used,
            removed=change.removed,
        )
        for number, change in enumerate(_decode(body), first)
        if number > after
    ]


async def head(connection: asyncpg.Connection) -> int:
    """The newest committed number."""
    number: int = await connection.fetchval(HEAD)
    return number


async def too_old(connection: asyncpg.Connection, after: int, newest: int) -> bool:
    """Whether the change after this number has been trimmed already."""
    oldest: int | None = await connection.fetchval(OLDEST)
    return after < newest if oldest is None else after < oldest - 1


async def publish(
    connection: asyncpg.Connection, send: Callable[[Sequence[Change]], Awaitable[None]], limit: int
) -> int:
    """Send what follows the published position and move it, inside the caller's transaction.

    The position's row lock makes one publisher at a time; a publisher that dies frees it with its connection, and
    the next one repeats what was sent but not written down: changes may repeat, never skip.
    """
    position: int = await connection.fetchval(LOCK_POSITION)
    changes = await read(connection, position, limit)
    if not changes:
        return 0
    await send(changes)
    # Losing this write in a crash of the database means a repetition, no more: not worth a disk flush.
    await connection.execute("SET LOCAL synchronous_commit = off")
    await connection.execute(MOVE_POSITION, changes[-1].sequence)
    return len(changes)
