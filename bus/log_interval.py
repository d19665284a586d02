"""A bound of log lines about what a client may repeat as fast as it can publish: one line reports all of a minute."""

from __future__ import annotations

from bus.clock import Clock

LOG_INTERVAL_S = 60.0


class LogInterval:
    """Counts occurrences. A line about them is due at the first one, and then once an interval."""

    def __init__(self, clock: Clock, interval_s: float = LOG_INTERVAL_S) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._unreported = 0
        self._due_at = clock.monotonic()

    def count(self) -> int:
        """Count one occurrence. Returns the number to report now; 0: no line is due."""
        self._unreported += 1
        now = self._clock.monotonic()
        if now < self._due_at:
            return 0
        number, self._unreported = self._unreported, 0
        self._due_at = now + self._interval_s
        return number
