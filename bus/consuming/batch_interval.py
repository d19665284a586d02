"""How often a consumer takes a batch: a multiple of the time that a batch takes alone.

A batch costs as much as some 25 of its items, here and at each service that its handler calls. A consumer that takes
messages as soon as they arrive therefore fills a machine with small batches at any load, and all of them wait for each
other. So between two batches lie at least `GAP` times the duration of a quick batch. A message that comes after a
longer pause is taken at once; one that comes sooner waits for less than the gap, so for a bounded multiple of the time
that a boot takes alone, at every load. Only the quickest time is fed back, so nothing can oscillate. Law and
figures: docs/explanation/performance.md, "Batches".
"""

from __future__ import annotations

ITEMS_AS_A_BATCH = 25.0  # this many items cost as much as the batch itself
GAP = 3.0  # times the duration of a batch alone
LONGEST_S = 0.1  # the longest gap
DOUBLES_S = (
    600.0  # the duration of a batch alone is assumed to double in this time, unless one is seen that was as quick
)


class BatchInterval:
    """The gap between one batch and the next. Times are seconds of one monotonic clock, which the caller reads."""

    __slots__ = ("_alone_s", "_arrived_at", "_taken_at", "gap_s")

    def __init__(self) -> None:
        self.gap_s = 0.0
        self._alone_s: float | None = None  # the duration of a batch without items, by the quickest of late
        self._arrived_at = 0.0
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
            self._alone_s = min(base_s, self._alone_s * 2.0 ** ((now - self._arrived_at) / DOUBLES_S))
        self._arrived_at = now
        self.gap_s = 0.0 if more else min(GAP * self._alone_s, LONGEST_S)
