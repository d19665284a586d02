"""Publishes the feed: takes the next changes, sends them, and records the position up to which they are published.

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
from typing import Any

from msgspec import Struct

from bus.contracts.feed import FeedChanges
from placement_worker.store.port import BookRows

# Much longer than a broker takes to confirm. Replicas that miss the changes of a dead publisher request them meanwhile.
LEASE_S = 2.0


class Published(Struct, frozen=True):
    """The result of one turn of publishing. count: the changes that were published. more: further changes may be
    unpublished. taken: another process is publishing.
    """

    count: int
    more: bool
    taken: bool = False


class Publishing:
    """Publishes for one process, one turn at a time."""

    def __init__(self, rows: BookRows) -> None:
        self._rows = rows
        self._lease: Any = None  # of the last turn, until the turn has succeeded

    async def publish(self, send: Callable[[FeedChanges], Awaitable[None]], limit: int) -> Published:
        """Send the changes after the position and move the position. No connection is held while the broker
        confirms.
        """
        taken = await self._rows.take_changes(limit, LEASE_S, self._lease)
        if taken is None:
            return Published(0, False)
        if taken.lease is None:
            return Published(0, True, taken=True)
        self._lease = taken.lease
        last = taken.rows[-1].last
        await send(FeedChanges(rows=tuple(taken.rows), history=taken.history))
        await self._rows.move_position(last, taken.lease)
        self._lease = None
        return Published(last - taken.rows[0].first + 1, taken.more)
