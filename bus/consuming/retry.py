"""Repeats a handler's call until the servers that it depends on are available, so that an outage uses up no retries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from bus import metrics
from bus.consuming.port import ConsumedBus
from bus.retrying import UNTIL_AVAILABLE, Retrying

log = structlog.get_logger("bus.consuming.consumer")

T = TypeVar("T")


class RetryUntilAvailable:
    """The calls of one consumer. Each of its batches may wait for a server that it depends on."""

    def __init__(self, bus: ConsumedBus, row: str) -> None:
        self.queue = row
        self._row = row
        self._bus = bus
        self._since: dict[object, float] = {}  # of each call that waits

    @property
    def waited_s(self) -> float:
        """The time (seconds) that the longest waiting call has waited; 0 when none waits."""
        oldest = min(self._since.values(), default=None)
        return 0.0 if oldest is None else self._bus.clock.monotonic() - oldest

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call the function until no transient fault occurs. Other exceptions are raised."""
        retrying = Retrying(UNTIL_AVAILABLE, self._bus.clock, self._bus.rng)
        call = object()
        try:
            return await retrying.call(function, on_failure=lambda error, _: self._stalled(call, error))
        finally:
            self._since.pop(call, None)

    def _stalled(self, call: object, error: BaseException) -> None:
        code = str(getattr(error, "code", ""))
        if call not in self._since:
            self._since[call] = self._bus.clock.monotonic()
            log.warning("consumer.waits", queue=self.queue, code=code, reason=str(error))
        metrics.STALLS.labels(self._bus.name, self._row, code).inc()
