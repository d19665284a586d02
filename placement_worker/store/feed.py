"""The rows of the change feed: numbered and read in commit order, and trimmed by a bound.

The numbers do not come from an SQL sequence, because transactions may commit in another order than they draw numbers,
so readers would see holes that are filled later. Instead every writing transaction locks one counter row as its last
step before the commit, so that the order of numbers is the order of commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import asyncpg
import msgspec

from bus.contracts.base import encode
from bus.contracts.feed import Change, FeedHead, FeedRow, changes_in
from bus.persistence.guarded_statement import ASYNCHRONOUS_COMMIT
from placement_worker.store.port import NewestHead

# The bounds of a row and of one read, in changes and in bytes: well below the size of one bus message.
MAX_CHANGES_PER_ROW = 500
MAX_BYTES_PER_ROW = 2**20
MAX_BYTES_READ = 4 * 2**20
ROWS_AT_ONCE = 16

# One SQL function (0001_functions.sql), because the counter stays locked until the commit and other writers wait during
# each round trip.
APPEND = "SELECT append_changes($1::bigint[], $2::bigint[], $3::bytea[])"
READ = "SELECT first, last, body FROM changes WHERE last > $1 ORDER BY last LIMIT $2"
HEAD = "SELECT number, incarnation FROM feed_head"
NEWEST = """
SELECT number, incarnation,
    origin <> origin_of('feed_head') OR coalesce(incarnation = $1::uuid AND number < $2, false) AS is_another,
    number > (SELECT number FROM feed_position) AS unpublished
FROM feed_head
"""
# When several processes find at once that the incarnation has ended, only the first one sets a new id.
RENEW = """
UPDATE feed_head SET incarnation = gen_random_uuid(), origin = origin_of('feed_head')
WHERE origin <> origin_of('feed_head') OR (incarnation = $1::uuid AND number < $2)
RETURNING number
"""
OLDEST = "SELECT first FROM changes ORDER BY last LIMIT 1"

# Read the changes after the position, and take the lease if it is free: it has ended, or this process holds it from a
# turn that failed ($3). A lease with an end beyond LEASE_S from now was written before the clock was set back, and
# counts as free. A statement that has waited for another publisher's statement finds the position moved, and takes
# nothing. If a crash of the database loses the lease, changes are published twice, so no disk flush is needed.
TAKE = f"""
WITH position AS MATERIALIZED (SELECT number FROM feed_position),
next AS MATERIALIZED (
    SELECT c.first, c.last, c.body FROM position
    CROSS JOIN LATERAL (SELECT * FROM changes WHERE last > position.number ORDER BY last LIMIT $1) AS c
),
mine AS (
    UPDATE feed_position AS p SET taken_until = clock_timestamp() + make_interval(secs => $2)
    FROM position
    WHERE p.number = position.number AND EXISTS (SELECT FROM next) AND (
        p.taken_until = $3
        OR p.taken_until NOT BETWEEN clock_timestamp() AND clock_timestamp() + make_interval(secs => $2))
    RETURNING p.taken_until AS until
)
SELECT next.first, next.last, CASE WHEN mine.until IS NOT NULL THEN next.body END AS body, position.number, mine.until,
       (SELECT incarnation FROM feed_head) AS incarnation, {ASYNCHRONOUS_COMMIT}
FROM position CROSS JOIN next LEFT JOIN mine ON true ORDER BY next.last
"""
# Move the position forward, and end the lease if it is still this process's own.
MOVE = f"""
WITH moved AS (
    UPDATE feed_position SET number = GREATEST(number, $1),
        taken_until = CASE WHEN taken_until = $2 THEN '-infinity' ELSE taken_until END
)
SELECT {ASYNCHRONOUS_COMMIT}
"""


async def append(connection: asyncpg.Connection, changes: Sequence[Change]) -> int:
    """Number the changes and write them, as the last statement of a transaction. Returns the last number, 0 when there
    are no changes.
    """
    if not changes:
        return 0
    # The rows are encoded before the counter is locked, because all writers contend for this lock.
    encoded = rows(changes)
    last: int = await connection.fetchval(APPEND, *encoded)
    return last


def rows(changes: Sequence[Change]) -> tuple[list[int], list[int], list[bytes]]:
    """Return the arguments of the SQL function `append_changes`: each row's first and last change, counted from 1, and
    its body.
    """
    parts: list[list[bytes]] = []
    size = 0
    for change in changes:
        part = encode(change)
        if not parts or len(parts[-1]) >= MAX_CHANGES_PER_ROW or size + len(part) > MAX_BYTES_PER_ROW:
            parts.append([])
            size = 0
        parts[-1].append(part)
        size += len(part)
    ends = list(accumulate(map(len, parts), initial=0))
    return [end + 1 for end in ends[:-1]], ends[1:], [b"[" + b",".join(row) + b"]" for row in parts]


async def read(
    connection: asyncpg.Connection, after: int, limit: int, found: Sequence[asyncpg.Record] | None = None
) -> tuple[list[FeedRow], bool]:
    """Return (the rows of the changes numbered above `after`, in order; whether there may be more). At most `limit`
    changes, fewer when they are large. The changes of a row are not decoded.

    found: the first rows, if the caller has read them. Outside of a transaction, rows may be trimmed between two
    statements; the returned changes then end before the hole.
    """
    rows: list[FeedRow] = []
    last = after + limit
    size = 0
    while True:
        wanted = min(last - after, ROWS_AT_ONCE)
        if found is None:
            found = await connection.fetch(READ, after, wanted)
        for record in found:
            first, body = record[0], record[2]
            if first > after + 1:
                return rows, True
            row = FeedRow(first=first, last=record[1], changes=msgspec.Raw(body))  # type: ignore[arg-type]
            rows.append(row if first > after and row.last <= last else _part(row, after + 1, min(row.last, last)))
            after = row.last
            size += len(body)
            if after >= last or size >= MAX_BYTES_READ:
                return rows, True
        if len(found) < wanted:
            return rows, False
        found = None


def _part(row: FeedRow, first: int, last: int) -> FeedRow:
    """The changes of a row from one number to another."""
    return FeedRow(first=first, last=last, changes=changes_in((row,))[first - row.first : last + 1 - row.first])


async def head(connection: asyncpg.Connection) -> FeedHead:
    """The newest committed number, and the id of its incarnation."""
    row = await connection.fetchrow(HEAD)
    return FeedHead(sequence=row["number"], incarnation=row["incarnation"])


async def newest(connection: asyncpg.Connection, seen: FeedHead | None) -> NewestHead:
    """Return the head. The incarnation gets a new id when the database was restored or promoted, or when its head is
    behind `seen`.
    """
    last = (seen.incarnation, seen.sequence) if seen is not None else (None, 0)
    found = await connection.fetchrow(NEWEST, *last)
    renewed = found["is_another"] and await connection.fetchval(RENEW, *last) is not None
    if found["is_another"]:
        return NewestHead(await head(connection), renewed, unpublished=True)
    return NewestHead(FeedHead(sequence=found["number"], incarnation=found["incarnation"]), False, found["unpublished"])
