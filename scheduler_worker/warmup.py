"""The first seconds of a process, in which it has not heard every host's announcement."""

from __future__ import annotations

from bus.clock import Clock
from scheduler_worker.domain.selector import Selector


class Warmup:
    """Of one process. It has no end before it begins: before, nothing was received."""

    def __init__(self, selector: Selector, *, clock: Clock) -> None:
        self._selector = selector
        self._clock = clock
        self._since_s: float | None = None

    async def begin(self) -> None:
        """Count from now on: the objects on record are in force, and the cells in reach have been connected to."""
        self._since_s = self._clock.monotonic()

    def is_on(self) -> bool:
        """Whether services that are up may not have announced all of their hosts to this process yet."""
        since_s = self._since_s
        return since_s is None or self._clock.monotonic() - since_s < self._selector.config.hosts_warmup_s
