"""Calling until what a consumer depends on is there: an outage uses up no retries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
import tenacity

from bus import metrics
from bus.consuming.port import ConsumedBus
from bus.faults import Transient
from bus.port import BusError, BusForbidden

log = structlog.get_logger("bus.consuming.consumer")

T = TypeVar("T")

# Waits between calls while something we depend on is away: from the first, doubled, to the longest; halved at random.
FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 5.0


class RetryUntilAvailable:
    """One consumer's: each of its workers, by its number, may be waiting for what it depends on."""

    def __init__(self, bus: ConsumedBus, row: str) -> None:
        self.queue = row
        self._row = row
        self._bus = bus
        self._since: dict[int, float] = {}

    @property
    def waited_s(self) -> float:
        """For how long the longest waiting worker has waited; 0: none waits."""
        oldest = min(self._since.values(), default=None)
        return 0.0 if oldest is None else self._bus.clock.monotonic() - oldest

    async def call(self, number: int, function: Callable[[], Awaitable[T]]) -> T:
        """Call until what we depend on is there; anything but a passing fault is raised."""
        try:
            return await function()
        except (Transient, BusError) as error:
            if isinstance(error, BusForbidden):
                raise
            self._stalled(number, error)
        clock, rng = self._bus.clock, self._bus.rng

        async def once() -> T:  # tenacity awaits only what it can see to be a coroutine function
            return await function()

        def wait(state: tenacity.RetryCallState) -> float:
            longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(state.attempt_number, 30))
            return longest * (0.5 + rng.random() / 2)

        again = tenacity.AsyncRetrying(
            sleep=clock.sleep,
            wait=wait,
            retry=tenacity.retry_if_exception(_passes),
            before_sleep=lambda state: self._stalled(number, state.outcome.exception() if state.outcome else None),
            reraise=True,
        )
        await clock.sleep(FIRST_WAIT_S * (0.5 + rng.random() / 2))
        try:
            return await again(once)
        finally:
            self._since.pop(number, None)

    def _stalled(self, number: int, error: BaseException | None) -> None:
        code = str(getattr(error, "code", ""))
        if number not in self._since:
            self._since[number] = self._bus.clock.monotonic()
            log.warning("consumer.waits", queue=self.queue, code=code, reason=str(error))
        metrics.STALLS.labels(self._bus.name, self._row, code).inc()


def _passes(error: BaseException) -> bool:
    """Whether waiting helps."""
    return isinstance(error, Transient | BusError) and not isinstance(error, BusForbidden)
