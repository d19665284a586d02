"""Drains in the load of a chaos run: an operator empties one host after the other, and takes each back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from berth.bus_client import BuildClient
from berth.bus_client import drains as client_drains
from berth.drain_follow import follow
from bus.clock import Clock, new_uuid
from bus.contracts.drains import DrainStart, DrainTarget
from bus.contracts.operations import AdminState, SetAdminState
from bus.faults import RequestRefused, Transient
from bus.transport import BusError
from lab.chaos.plan import ChaosPlan

T = TypeVar("T")

OPERATOR = "chaos"
AT_ONCE = 8
DEADLINE_S = 15.0  # of one drain: with less than every second worker there, a host is not always empty by then
ENDED_S = 120.0
AGAIN_S = 0.5
MOST_TRIES = 200  # of one command, while no scheduler answers
HOSTS_S = 30.0


class Draining:
    """One drain at a time while the load lasts, its host enabled again before the next. codes: of what was refused."""

    def __init__(self, client: BuildClient, plan: ChaosPlan, *, clock: Clock, rng: random.Random) -> None:
        self.ended = 0
        self.moved = 0
        self.codes: Counter[str] = Counter()
        self._is_over = False
        self._client = client
        self._plan = plan
        self._clock = clock
        self._rng = rng

    async def run(self) -> None:
        """The plan's number of drains, one after the other, until it is stopped; the first in any case."""
        for number in range(self._plan.drains):
            if number and self._is_over:
                return
            page = await self._until_answered(lambda: self._client.hosts(limit=1000, timeout_s=HOSTS_S))
            if page is not None and page.hosts:
                await self._drain(self._rng.choice(sorted(host.name for host in page.hosts)))

    def stop(self) -> None:
        """Begin no further drain."""
        self._is_over = True

    async def _drain(self, host: str) -> None:
        drain, bus = new_uuid(self._rng), self._client.bus
        start = DrainStart(
            drain=drain,
            name=host,
            target=DrainTarget.HOST,
            by=OPERATOR,
            at_once=AT_ONCE,
            deadline_s=DEADLINE_S,
            force=True,
        )
        if await self._until_answered(lambda: client_drains.start(bus, start)) is None:
            return
        await self._ends(drain)
        enabled = SetAdminState(host=host, state=AdminState.ENABLED, by=OPERATOR)
        await self._until_answered(lambda: self._client.set_admin_state(enabled, timeout_s=HOSTS_S))
        self.ended += 1

    async def _ends(self, drain: str) -> None:
        followed = await self._until_answered(
            lambda: follow(partial(client_drains.one, self._client.bus, drain), clock=self._clock, timeout_s=ENDED_S)
        )
        if followed is not None:
            self.moved += len(followed.moved)

    async def _until_answered(self, request: Callable[[], Awaitable[T]]) -> T | None:
        """The answer of a scheduler; None: refused, or no answer in this many tries. All of it is idempotent."""
        for _ in range(MOST_TRIES):
            try:
                return await request()
            except RequestRefused as refused:
                self.codes[refused.code] += 1
                return None
            except (Transient, BusError) as fault:
                self.codes[fault.code] += 1
                await self._clock.sleep(AGAIN_S)
        return None
