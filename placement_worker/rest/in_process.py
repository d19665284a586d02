"""The REST API without a socket: the application over a book, and its service for callers in the same process."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

from bus.clock import Clock
from bus.faults import BrokenInvariant
from placement_worker.replica.local import LocalReplica
from placement_worker.rest.api import Api
from placement_worker.rest.application import Application
from placement_worker.rest.auth import Auth, NoAuth2
from placement_worker.rest.config import RestConfig
from placement_worker.rest.cors import Cors
from placement_worker.rest.policy import Policy
from placement_worker.store.port import PlacementStore


def application_over(
    store: PlacementStore,
    config: RestConfig,
    auth: Auth,
    *,
    clock: Clock,
    rng: random.Random,
    committed: Callable[[], None],
    broken: Callable[[BrokenInvariant], None],
) -> tuple[Api, Application]:
    """The application over a book, closed until its server opens it, and the API behind it.

    committed: called after each write. broken: called with a broken invariant.
    """
    api = Api(store.rest, LocalReplica(store), config, clock=clock, rng=rng, committed=committed)
    application = Application(api, auth, Policy(config.policy, clock), Cors(config.cors), broken=broken)
    application.opened = False
    return api, application


class InProcessRest:
    """Opens the application while its placement worker runs. Every caller is accepted, as by noauth2 on loopback."""

    def __init__(
        self,
        store: PlacementStore,
        config: RestConfig,
        *,
        clock: Clock,
        rng: random.Random,
        committed: Callable[[], None],
    ) -> None:
        self._failed: BrokenInvariant | None = None
        self._ended = asyncio.Event()
        self.api, self.application = application_over(
            store, config, NoAuth2(), clock=clock, rng=rng, committed=committed, broken=self._fail
        )

    @property
    def ready(self) -> bool:
        """Whether it answers, from the book."""
        return self.application.opened

    async def run(self) -> None:
        """Answer until drained. Raises BrokenInvariant."""
        self.application.opened = True
        try:
            await self._ended.wait()
        finally:
            self.application.opened = False
        if self._failed is not None:
            raise self._failed

    async def drain(self, grace_s: float) -> None:
        """Take nothing more; finish the requests under way."""
        self.application.opened = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.api.drain()
        self._ended.set()

    def _fail(self, error: BrokenInvariant) -> None:
        """The process must stop; requests under way still get their answers."""
        self._failed = self._failed or error
        self._ended.set()
