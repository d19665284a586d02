"""Queue `scheduler.requests`: build and delete requests, a batch in and an outcome for each message out."""

from __future__ import annotations

from collections.abc import Sequence

from bus.clock import Clock
from bus.consuming.outcome import Outcome, Received
from bus.contracts.build import BuildRequest
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.deletes import pending_delete
from scheduler_worker.domain.pending import pending_build
from scheduler_worker.engine import SchedulingEngine
from scheduler_worker.retention import max_request_age_s


class RequestHandler:
    """Handles queue `scheduler.requests`."""

    def __init__(
        self, engine: SchedulingEngine, flavors: Sequence[str], *, clock: Clock, config: SchedulerConfig
    ) -> None:
        self._engine = engine
        self._flavors = flavors
        self._clock = clock
        self._max_age_s = max_request_age_s(config)

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """All of a batch together."""
        now = self._clock.time()
        builds = [
            pending_build(received, position, now=now, flavors=self._flavors, max_age_s=self._max_age_s)
            for position, received in enumerate(batch)
            if isinstance(received.message, BuildRequest)
        ]
        deletes = [
            pending_delete(received, position)
            for position, received in enumerate(batch)
            if not isinstance(received.message, BuildRequest)
        ]
        outcomes = await self._engine.process(builds, deletes)
        return [outcomes[position] for position in range(len(batch))]
