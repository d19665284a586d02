"""Sets how often a consumer takes a batch: the interval is a multiple of the time that handling a batch takes.

A batch costs as much as some 25 of its items, in the consumer and in each service that its handler calls. So a consumer
that takes messages as soon as they arrive fills a machine with small batches at any load, which wait for each other.
Therefore the interval between two batches is at least `GAP` times the duration of the quickest recent batch. A message
that arrives after a longer pause is taken at once. An earlier one waits for less than the interval, which is a bounded
multiple of a single boot's duration at any load. Only the quickest duration is fed back, so the interval cannot
oscillate. The law and measurements are in docs/concepts/performance.md, "Batches".
"""

from __future__ import annotations

ITEMS_AS_A_BATCH = 25.0  # this many items cost as much as the batch itself
GAP = 3.0  # in multiples of the duration of a batch without items
LONGEST_S = 0.1  # the longest gap
DOUBLES_S = 600.0  # the duration of a batch without items is assumed to double in this time, unless one is as quick


class BatchInterval:
    """The interval between one batch and the next. Times are seconds of one monotonic clock, which the caller reads."""

    __slots__ = ("_alone_s", "_arrived_at", "_taken_at", "gap_s")

    def __init__(self) -> None:
        self.gap_s = 0.0
        self._alone_s: float | None = None  # the duration of a batch without items, by the quickest recent batch
        self._arrived_at = 0.0
        self._taken_at: float | None = None

    def wait_s(self, now: float) -> float:
        """Return how long (seconds) to wait before the next batch; 0 or less: no wait."""
        return 0.0 if self._taken_at is None else self._taken_at + self.gap_s - now

    def start_batch(self, now: float) -> None:
        """Record that a batch is taken."""
        self._taken_at = now

    def end_batch(self, seconds: float, items: int, now: float, *, more: bool) -> None:
        """Record that a batch is done. more: enough messages wait that an interval would not make the next batch
        larger.
        """
        base_s = seconds / (1.0 + items / ITEMS_AS_A_BATCH)
        if self._alone_s is None:
            self._alone_s = base_s
        else:
            self._alone_s = min(base_s, self._alone_s * 2.0 ** ((now - self._arrived_at) / DOUBLES_S))
        self._arrived_at = now
        self.gap_s = 0.0 if more else min(GAP * self._alone_s, LONGEST_S)
