"""Publishes the feed: one statement takes the next changes, and one records the position up to which they are
published.

The broker has confirmed every change up to the position at least once. The position only moves forward, and only over
changes that the moving process has just sent. This holds with any number of publishers, and also if a crash of the
database loses the latest position: visible changes are on disk, and their numbers are never given again. So changes may
be published twice, but none is skipped.

A lease keeps two processes from sending the same changes, which would only be a waste: a process that takes changes
holds the position until a time of the database's clock. So other processes wait no longer than LEASE_S for a publisher
that dies or hangs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime

from bus.contracts.placement import FeedChanges
from bus.persistence.database import Database
from bus.persistence.guarded_statement import ASYNCHRONOUS_COMMIT
from placement_worker.store import feed
from placement_worker.store.port import Published

# Much longer than a broker takes to confirm. Replicas that miss the changes of a dead publisher request them meanwhile.
LEASE_S = 2.0

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
       (SELECT history FROM feed_head) AS history, {ASYNCHRONOUS_COMMIT}
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


class Publishing:
    """Publishes for one process, one turn at a time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lease: datetime | None = None  # of the last turn, until the turn has succeeded

    async def publish(self, send: Callable[[FeedChanges], Awaitable[None]], limit: int) -> Published:
        """Send the changes after the position and move the position. No connection is held while the broker
        confirms.
        """
        async with self._database.single() as connection:
            found = await connection.fetch(TAKE, min(limit, feed.ROWS_AT_ONCE), LEASE_S, self._lease)
            if not found:
                return Published(0, False)
            if found[0]["until"] is None:
                return Published(0, True, taken=True)
            lease = self._lease = found[0]["until"]
            changes, more = await feed.read(connection, found[0]["number"], limit, found)
        await send(FeedChanges(changes=tuple(changes), history=found[0]["history"]))
        async with self._database.single() as connection:
            await connection.fetchval(MOVE, changes[-1].sequence, lease)
        self._lease = None
        return Published(len(changes), more)
