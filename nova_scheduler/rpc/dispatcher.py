"""What answers calls, and for how long it is tried."""

from __future__ import annotations

import random
from typing import Protocol

from bus.clock import Clock
from bus.faults import Transient
from bus.retrying import NOVA_CALL, Retrying
from nova_scheduler.wire.envelope import Call


class CallDispatcher(Protocol):
    """What answers calls. The server has checked method and version, and answers `ping` itself."""

    async def call(self, call: Call) -> object:
        """The result of a call as JSON values; ignored for casts, which come one after the other. May be cancelled, and
        called again with the same `unique_id` after any part was done. Raises RemoteFault, which the client raises;
        NotDecided: forwarded to a stock nova-scheduler; Transient: called again until the client gives up.
        """
        # Any other exception is logged, and the client told that the call failed.


class RetryingDispatcher:
    """Calls again what could not be answered for now."""

    def __init__(self, dispatcher: CallDispatcher, clock: Clock, rng: random.Random) -> None:
        self._dispatcher = dispatcher
        self._retrying = Retrying(NOVA_CALL, clock, rng)

    async def call(self, call: Call) -> object:
        """The result of a call (`CallDispatcher.call`). Raises Transient where the policy stops."""
        return await self._retrying.call(
            lambda: self._dispatcher.call(call), lambda error: isinstance(error, Transient)
        )
