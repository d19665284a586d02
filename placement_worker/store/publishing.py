"""Publishing the feed: one statement to take the next changes, one to record how far they are published.

Every change up to the position has been confirmed by the broker at least once. It is moved forward alone,
and only over changes that the process that moves it has just sent: so it holds however many publish, and whatever a
crash of the database takes back of it (a visible change is on disk, its number is never given again). Changes may
repeat, never skip.

A lease keeps two processes from sending the same, which is a matter of cost only: who takes changes takes the position
for a moment, by the database's clock. Other processes wait for a publisher that dies or hangs no longer than this.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime

from bus.contracts.placement import FeedChanges
from bus.persistence.database import Database
from bus.persistence.guarded_statement import ASYNCHRONOUS_COMMIT
from placement_worker.store import feed
from placement_worker.store.port import Published

# Much longer than a broker takes to confirm; replicas that miss a dead publisher's changes ask for them meanwhile.
LEASE_S = 2.0

# The changes after the position, which is taken if it is free: no process has taken it, or it is this process's own
# from a turn that failed ($3). A lease that ends later than one can is of a clock that was set back. A statement that
# waited for another publisher's finds the position moved, and takes nothing. Losing any of this in a crash of the
# database costs a repetition: not worth a disk flush.
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
# Forward alone, and no other's lease is ended.
MOVE = f"""
WITH moved AS (
    UPDATE feed_position SET number = GREATEST(number, $1),
        taken_until = CASE WHEN taken_until = $2 THEN '-infinity' ELSE taken_until END
)
SELECT {ASYNCHRONOUS_COMMIT}
"""


class Publishing:
    """One process's turns at publishing, one at a time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lease: datetime | None = None  # of the last turn, until it has ended well

    async def publish(self, send: Callable[[FeedChanges], Awaitable[None]], limit: int) -> Published:
        """Send the changes after the position and move it. No connection is held while the broker confirms."""
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
