"""The change feed's rows: numbered in commit order, read in order, trimmed by a bound. Published by `publishing`.

A sequence would not do: numbers drawn by transactions that commit in another order leave holes that fill later. Here
every writing transaction locks one counter row last and commits, so that number order is commit order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import asyncpg
import msgspec

from bus.contracts.base import encode
from bus.contracts.placement import Change, FeedHead
from placement_worker.store.port import NewestHead

# A row, and the most read at once: bounded in changes and in bytes, well under what one bus message may carry.
MAX_CHANGES_PER_ROW = 500
MAX_BYTES_PER_ROW = 2**20
MAX_BYTES_READ = 4 * 2**20
ROWS_AT_ONCE = 16

# A function (schema.sql): the counter is locked until the commit, and every round trip makes others wait.
APPEND = "SELECT append_changes($1::bigint[], $2::bigint[], $3::bytea[])"
READ = "SELECT first, last, body FROM changes WHERE last > $1 ORDER BY last LIMIT $2"
HEAD = "SELECT number, history FROM feed_head"
NEWEST = """
SELECT number, history, origin <> feed_origin() OR coalesce(history = $1::uuid AND number < $2, false) AS is_another,
    number > (SELECT number FROM feed_position) AS unpublished
FROM feed_head
"""
# Of writers that find it at once only the first gives it another.
RENEW = """
UPDATE feed_head SET history = gen_random_uuid(), origin = feed_origin()
WHERE origin <> feed_origin() OR (history = $1::uuid AND number < $2)
RETURNING number
"""
NEW_HISTORY = "UPDATE feed_head SET history = gen_random_uuid()"
OLDEST = "SELECT first FROM changes ORDER BY last LIMIT 1"
TRIM = """
DELETE FROM changes WHERE last IN (
    SELECT last FROM changes
    WHERE last <= LEAST((SELECT number FROM feed_head) - $1, (SELECT number FROM feed_position))
    ORDER BY last LIMIT $2)
"""

_decode = msgspec.json.Decoder(list[Change]).decode


async def append(connection: asyncpg.Connection, changes: Sequence[Change]) -> int:
    """Number the changes and write them, as the last act of a transaction. Returns the last number, 0 for none."""
    if not changes:
        return 0
    # Made before the counter is locked: the lock is the narrow place.
    last: int = await connection.fetchval(APPEND, *rows(changes))
    return last


def rows(changes: Sequence[Change]) -> tuple[list[int], list[int], list[bytes]]:
    """The arguments of the function `append_changes`: each row's first and last change, counted
    from 1, and its body.
    """
    counts, bodies = _rows(changes)
    ends = list(accumulate(counts, initial=0))
    return [end + 1 for end in ends[:-1]], ends[1:], bodies


def _rows(changes: Sequence[Change]) -> tuple[list[int], list[bytes]]:
    """(how many changes each row carries, each row's body)."""
    counts: list[int] = []
    bodies: list[bytes] = []
    parts: list[bytes] = []
    size = 0
    for change in changes:
        part = encode(change)
        if parts and (len(parts) >= MAX_CHANGES_PER_ROW or size + len(part) > MAX_BYTES_PER_ROW):
            counts.append(len(parts))
            bodies.append(b"[" + b",".join(parts) + b"]")
            parts, size = [], 0
        parts.append(part)
        size += len(part)
    return [*counts, len(parts)], [*bodies, b"[" + b",".join(parts) + b"]"]


async def read(
    connection: asyncpg.Connection, after: int, limit: int, found: Sequence[asyncpg.Record] | None = None
) -> tuple[list[Change], bool]:
    """(changes numbered above `after`, in order, whether there may be more): at most `limit`, fewer when large.

    found: the first rows, if they have been read already. Outside of a transaction rows may be trimmed between two
    looks; the returned changes have no hole, and end where they were.
    """
    changes: list[Change] = []
    size = 0
    while True:
        wanted = min(limit - len(changes), ROWS_AT_ONCE)
        if found is None:
            found = await connection.fetch(READ, after, wanted)
        for row in found:
            first, last, body = row[0], row[1], row[2]
            if first > after + 1:
                return changes, True
            changes.extend(_numbered(first, body, after))
            after = last
            size += len(body)
            if len(changes) >= limit or size >= MAX_BYTES_READ:
                return changes[:limit], True
        if len(found) < wanted:
            return changes, False
        found = None


def _numbered(first: int, body: bytes, after: int) -> list[Change]:
    return [
        Change(
            sequence=number,
            provider=change.provider,
            generation=change.generation,
            state=change.state,
            used=change.used,
            removed=change.removed,
            causes=change.causes,
        )
        for number, change in enumerate(_decode(body), first)
        if number > after
    ]


async def head(connection: asyncpg.Connection) -> FeedHead:
    """The newest committed number, and the history that it is of."""
    row = await connection.fetchrow(HEAD)
    return FeedHead(sequence=row["number"], history=row["history"])


async def newest(connection: asyncpg.Connection, seen: FeedHead | None) -> NewestHead:
    """The head; of another history id if the book is not the one that gave the last head, or is behind it."""
    last = (seen.history, seen.sequence) if seen is not None else (None, 0)
    found = await connection.fetchrow(NEWEST, *last)
    renewed = found["is_another"] and await connection.fetchval(RENEW, *last) is not None
    if found["is_another"]:
        return NewestHead(await head(connection), renewed, unpublished=True)
    return NewestHead(FeedHead(sequence=found["number"], history=found["history"]), False, found["unpublished"])


async def too_old(connection: asyncpg.Connection, after: int, newest: int) -> bool:
    """Whether the change after this number has been trimmed already."""
    oldest: int | None = await connection.fetchval(OLDEST)
    return after < newest if oldest is None else after < oldest - 1
