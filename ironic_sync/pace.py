"""Bounds the rate of single reads: in a storm of notifications they would leave no time to receive further
notifications.
"""

from __future__ import annotations

WINDOW_S = 1.0
ROUNDING_S = 1e-3  # a clock that was asked to sleep to the end of the window may wake a rounding error before it


class Pace:
    """Allows a number of reads in each window of a second, all of them at once if necessary."""

    def __init__(self, per_window: int) -> None:
        self._per_window = per_window
        self._began = float("-inf")
        self._taken = 0

    def wait_s(self, now: float) -> float:
        """Seconds until the next may begin; 0: now."""
        left_s = self._began + WINDOW_S - now
        return left_s if self._taken >= self._per_window and left_s > ROUNDING_S else 0.0

    def take(self, now: float) -> None:
        """Record that a read begins."""
        if now - self._began >= WINDOW_S - ROUNDING_S:
            self._began, self._taken = now, 0
        self._taken += 1
