"""Detects that this process stood still: stopped, swapped out, or with its machine. Messages that are read soon after
may have waited since the stall began, unseen, and their requesters may have given them up and decided otherwise.
"""

from __future__ import annotations

import math

LOOK_S = 0.5  # between two looks of a process that runs
STALL_S = 2.0  # a look that comes so long after the one before is the end of a stall
BACKLOG_S = 5.0  # so long after a stall what waited in the connection may still be read


class StallWatch:
    """The stalls of one process, whose service looks every LOOK_S; all its buses share one. It begins with the first
    look. Times are seconds of one monotonic clock, which the caller reads.
    """

    # A process that is busy for so long may count as stalled; a delivery is then given back to the broker once, without
    # need.

    def __init__(self) -> None:
        self._looked_at = math.inf
        self._began_at = self._ended_at = -math.inf  # the last stall

    def look(self, now: float) -> None:
        """The process runs at this time."""
        self._note(now)
        self._looked_at = now

    def waiting_since(self, now: float) -> float:
        """Return the earliest time from which a message that is read now can have waited in this process."""
        self._note(now)
        return self._began_at if now - self._ended_at < BACKLOG_S else now

    def _note(self, now: float) -> None:
        if now - self._looked_at >= STALL_S:
            if self._looked_at - self._ended_at >= BACKLOG_S:  # otherwise what waited in the last one may still wait
                self._began_at = self._looked_at
            self._ended_at = self._looked_at = now
