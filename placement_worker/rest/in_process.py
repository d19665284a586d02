"""The REST API without a socket: the ASGI application for a book, and the service that runs it for callers in the same
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

from bus.clock import Clock
from bus.faults import BrokenInvariant
from placement_worker.book import ResourceBook
from placement_worker.replica.catch_up import LocalReplica
from placement_worker.rest.api import Api
from placement_worker.rest.application import Application
from placement_worker.rest.auth import Auth, NoAuth2
from placement_worker.rest.config import RestConfig
from placement_worker.rest.policy import Policy


class InProcessRest:
    """The application for a book, which is open while its placement worker runs. It accepts every caller, as noauth2 on
    loopback does, unless it gets another `auth`.

    committed: a function that is called after each write.
    """

    def __init__(
        self,
        store: ResourceBook,
        config: RestConfig,
        *,
        clock: Clock,
        rng: random.Random,
        committed: Callable[[], None],
        auth: Auth | None = None,
    ) -> None:
        self._failed: BrokenInvariant | None = None
        self._ended = asyncio.Event()
        self.api = Api(store, LocalReplica(store), config, clock=clock, rng=rng, committed=committed)
        policy = Policy(config.policy, clock)
        self.application = Application(self.api, auth or NoAuth2(), policy, broken=self._fail)
        self.application.opened = False

    @property
    def ready(self) -> bool:
        """Whether requests are answered from the book."""
        return self.application.opened

    async def run(self) -> None:
        """Answer requests until drained. Raises BrokenInvariant."""
        self.application.opened = True
        try:
            await self._ended.wait()
        finally:
            self.application.opened = False
        if self._failed is not None:
            raise self._failed

    async def drain(self, grace_s: float) -> None:
        """Accept no further requests, and finish those in progress within the grace time (seconds)."""
        self.application.opened = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.api.drain()
        self._ended.set()

    def _fail(self, error: BrokenInvariant) -> None:
        """Stop the process because of this error. Requests in progress are still answered."""
        self._failed = self._failed or error
        self._ended.set()
