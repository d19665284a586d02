"""The first seconds of a process, in which it has not heard every host's announcement."""

from __future__ import annotations

from bus.clock import Clock
from scheduler_worker.domain.selector import Selector


class Warmup:
    """Counts from the first time that it is asked: before, there was no event loop, and nothing was received."""

    def __init__(self, selector: Selector, *, clock: Clock) -> None:
        self._selector = selector
        self._clock = clock
        self._since_s: float | None = None

    def is_on(self) -> bool:
        """Whether services that are up may not have announced all of their hosts to this process yet."""
        now_s = self._clock.monotonic()
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s < self._selector.config.hosts_warmup_s
