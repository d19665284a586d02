"""Notifies cells of fences until they have acknowledged them. Any number of schedulers do so side by side."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.objects import FenceRecord
from bus.port import BusError
from scheduler_worker.domain.fences import command
from scheduler_worker.objects import ObjectRegistry

log = structlog.get_logger(__name__)

REPUBLISH_S = 5.0  # to a cell that has not recorded a fence, or is to lift one, it is published again after this
REPEAT_S = 300.0  # to every cell all of its fences are published again after this: its record may have been set back


class FencePublisher:
    """Publishes the fences of one scheduler's registry. cells: the bus of each."""

    def __init__(self, registry: ObjectRegistry, cells: Mapping[str, Bus], *, clock: Clock) -> None:
        self._registry = registry
        self._cells = cells
        self._clock = clock

    async def run(self) -> None:
        """Until cancelled."""
        repeated_s = self._clock.monotonic()
        while True:
            await self._clock.sleep(REPUBLISH_S)
            everything = self._clock.monotonic() - repeated_s >= REPEAT_S
            if everything:
                repeated_s = self._clock.monotonic()
            for uuid in tuple(self._registry.fences):
                fence = self._registry.fences.get(uuid)
                if fence is None:  # its host is used again: its cell has lifted it while another one was published
                    continue
                is_open = fence.acknowledged < fence.version or fence.lifting
                if everything or (is_open and not fence.forced):  # a forced fence's cell may be gone for good
                    await self._publish(uuid, fence)

    async def _publish(self, uuid: str, fence: FenceRecord) -> None:
        """To the host's cell, or to all cells if that is not known: a cell ignores the fence of another cell's host."""
        order = command(uuid, fence, self._registry.decision_of(uuid))
        for bus in [one for name, one in self._cells.items() if fence.cell in (None, name)]:
            try:
                await bus.publish(order, cause=uuid)
            except BusError as fault:
                log.info("fence.not_published", cell=bus.name, host=order.host, code=fault.code, reason=str(fault))
