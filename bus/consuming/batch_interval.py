"""How often a consumer takes a batch: at once while there is time for it, in larger batches where there is not.

A batch costs as much as some 25 of its items, here and at everyone whom its handler asks. A consumer that takes what
has come as soon as it can therefore fills a machine with small batches at any load, and all of them wait for each
other. So the time that a batch takes is held against what it took when nothing else went on, as TCP Vegas does with
round trips. Where it is much longer, whatever it waits for is short, and batches are taken less often; as soon as it
is not, at once again. Figures: docs/lab/performance.md, "At half the rate".
"""

from __future__ import annotations

ITEMS_AS_A_BATCH = 25.0  # so many items cost as much as a batch costs anyway
BUSY = 2.5  # a batch that took so many times longer than alone: wait longer before the next
CALM = 1.6  # ... no longer than this: wait less
LONGER, SHORTER = 1.3, 0.8
FIRST_S, LONGEST_S = 0.004, 0.1  # the shortest gap and the longest
DOUBLES_S = 600.0  # what a batch takes alone is taken to double in this time, unless one is seen that was as quick


class AdaptiveBatchInterval:
    """The gap between one batch and the next. Times are seconds of one monotonic clock, which the caller reads."""

    __slots__ = ("_alone_s", "_heard_at", "_taken_at", "gap_s")

    def __init__(self) -> None:
        self.gap_s = 0.0
        self._alone_s: float | None = None  # what a batch without items would take, by the quickest of late
        self._heard_at = 0.0
        self._taken_at: float | None = None

    def wait_s(self, now: float) -> float:
        """How long to wait before the next batch is taken; 0 or less: not at all."""
        return 0.0 if self._taken_at is None else self._taken_at + self.gap_s - now

    def start_batch(self, now: float) -> None:
        """A batch is taken."""
        self._taken_at = now

    def end_batch(self, seconds: float, items: int, now: float, *, more: bool) -> None:
        """A batch is done. more: so much waits that a gap would not make the next one larger."""
        base_s = seconds / (1.0 + items / ITEMS_AS_A_BATCH)
        if self._alone_s is None:
            self._alone_s = base_s
        else:
            self._alone_s = min(base_s, self._alone_s * 2.0 ** ((now - self._heard_at) / DOUBLES_S))
        self._heard_at = now
        if more:
            self.gap_s = 0.0
        elif base_s > BUSY * self._alone_s:
            self.gap_s = min(max(self.gap_s * LONGER, FIRST_S), LONGEST_S)
        elif base_s < CALM * self._alone_s:
            self.gap_s = self.gap_s * SHORTER if self.gap_s > FIRST_S else 0.0
