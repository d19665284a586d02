"""A worker's connection to the bus of a cell. An unavailable cell does not delay the others; it is served when it
becomes available.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from bus.bus import Bus
from bus.consuming.consumer import Consumer
from bus.port import BusUnavailable
from bus.retrying import CELL_UNAVAILABLE, Retrying

log = structlog.get_logger(__name__)


class CellLink:
    """Opens the bus of one cell and consumes there, as a side task of the service. beside: further tasks, which run
    while the link is up.
    """

    def __init__(
        self,
        bus: Bus,
        consumers: Sequence[Consumer],
        beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        self.name = bus.name
        self._bus = bus
        self._consumers = consumers
        self._beside = beside
        self.up = asyncio.Event()

    async def run(self) -> None:
        """Connect, however long that takes, and consume until drained. Raises the fault that ended a consumer."""
        await self._bus.transport.open()
        await Retrying(CELL_UNAVAILABLE, self._bus.clock).call(
            self._start,
            lambda error: isinstance(error, BusUnavailable),
            on_failure=lambda error, _: log.warning("cell.unavailable", cell=self.name, reason=str(error)),
        )
        self.up.set()
        async with asyncio.TaskGroup() as running:
            for body in self._beside:
                running.create_task(body())
            for consumer in self._consumers:
                running.create_task(consumer.run())

    async def _start(self) -> None:
        await self._bus.declare_shared()
        for consumer in self._consumers:
            if not consumer.started:
                await consumer.start()

    async def drain(self, grace_s: float) -> None:
        """Take no further messages, and finish the batches in progress within the grace time (seconds)."""
        await asyncio.gather(*(consumer.drain(grace_s) for consumer in self._consumers))

    async def close(self) -> None:
        """Close the connection."""
        await self._bus.close()


async def wait_for(links: Sequence[CellLink], wait_s: float) -> None:
    """Wait a bounded time (seconds) for the cells, so that in a system whose processes start together all cells are
    served when it is ready.
    """
    try:
        async with asyncio.timeout(wait_s):
            await asyncio.gather(*(link.up.wait() for link in links))
    except TimeoutError:
        log.warning("cells.unavailable", cells=[link.name for link in links if not link.up.is_set()])
