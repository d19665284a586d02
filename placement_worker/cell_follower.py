"""Takes cells into use and out of use, as the schedulers have recorded them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from bus.bus import Bus
from bus.cell_links import CellLinks
from bus.clock import event_or_time
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.objects import CellsPage, CellsQuery, ObjectsRevision
from bus.faults import RequestRefused, Transient
from bus.transport import BusError

log = structlog.get_logger("placement")

ASK_TIMEOUT_S = 5.0
RETRY_S = 2.0  # wait after a query without an answer; the known cells stay in use
LOOK_S = 10.0  # interval of queries, in case a message is lost


class CellFollower:
    """Follows the recorded cells for one placement worker."""

    def __init__(self, api: Bus, links: CellLinks) -> None:
        self._api = api
        self._links = links
        self._announced = asyncio.Event()

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Handle queue `placement.control.{process}`: objects, possibly cells, have changed."""
        if any(isinstance(received.message, ObjectsRevision) for received in batch):
            self._announced.set()
        return [Done()] * len(batch)

    def on_reconnected(self) -> None:
        """Query again: the broker has deleted the private queue with the connection, and the messages in it are
        lost.
        """
        self._announced.set()

    async def run(self) -> None:
        """Query at start, at each change of objects, and every LOOK_S, until cancelled."""
        while True:
            self._announced.clear()
            answered = await self._look()
            await event_or_time(self._announced, self._api.clock, LOOK_S if answered else RETRY_S)

    async def _look(self) -> bool:
        """Query the cells and apply the answer. Returns whether a scheduler has answered."""
        try:
            page = await self._api.request(CellsQuery(), CellsPage, timeout_s=ASK_TIMEOUT_S)
        except (Transient, RequestRefused, BusError) as fault:
            log.info("cells.not_known", code=fault.code, reason=str(fault))
            return False
        # A cell that only this worker's settings name is in use, too.
        unknown = self._links.configured - {one.name for one in page.cells}
        self._links.set_cells({**dict.fromkeys(unknown), **{one.name: one.bus for one in page.cells if one.in_use}})
        return True
