"""Publishes fences to the cells of their hosts: soon again until the cell has acknowledged one, then now and then."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.objects import FenceRecord
from bus.contracts.operations import CellFence
from bus.faults import RequestRefused, Transient
from bus.retrying import doubled_s
from bus.transport import BusError
from scheduler_worker.fleet.host_listener import hosts_of_services
from scheduler_worker.objects.fence_rules import command
from scheduler_worker.objects.object_registry import ObjectRegistry
from scheduler_worker.selection.selector import Selector

log = structlog.get_logger(__name__)

REPUBLISH_S = 5.0  # to a cell that has not recorded a fence, or is to lift one, it is published again after this
REPEAT_S = 300.0  # the pause is doubled up to this, and is that of any other fence: its cell may have been restored


class FencePublisher:
    """Publishes the fences of one scheduler's registry."""

    # A fence has to reach the cell of its host and no other: the first that acknowledges it may be one that does not
    # have the host. A host that no compute service has reported here is in the cell of the dead service that placement
    # has it as.

    def __init__(self, registry: ObjectRegistry, cells: Mapping[str, Bus], *, clock: Clock) -> None:
        self._registry = registry
        self._cells = cells  # the bus of each
        self._clock = clock
        # {(host, cell): what was published, how often, and when the last time (monotonic)}
        self._published: dict[tuple[str, str], tuple[CellFence, int, float]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(REPUBLISH_S)
            known = self._registry.fences
            self._published = {place: one for place, one in self._published.items() if place[0] in known}
            for uuid in tuple(known):
                fence = self._registry.fences.get(uuid)
                if fence is not None:  # else its host is used again: its cell has lifted it during another's publishing
                    await self._publish(uuid, fence)

    async def _publish(self, uuid: str, fence: FenceRecord) -> None:
        """To the host's cell, or to all cells if that is not known: a cell ignores the fence of another cell's host."""
        order = command(uuid, fence, self._registry.decision_of(uuid))
        for bus in [one for name, one in self._cells.items() if fence.cell in (None, name)]:
            if bus.unavailable_reason:  # it is published again; other cells' fences would wait for the confirm
                continue
            times = self._due(order, fence, bus.name)
            if times is None:
                continue
            try:
                await bus.publish(order, cause=uuid)
            except BusError as fault:
                log.info("fence.not_published", cell=bus.name, host=order.host, code=fault.code, reason=str(fault))
            else:
                self._published[uuid, bus.name] = order, times + 1, self._clock.monotonic()

    def _due(self, order: CellFence, fence: FenceRecord, cell: str) -> int | None:
        """How often it was published to this cell as it is now; None: it is not due."""
        now_s = self._clock.monotonic()
        is_open = (not fence.is_acknowledged or fence.unfencing) and not fence.forced
        last, times, at_s = self._published.setdefault((order.host_uuid, cell), (order, 0, now_s))
        # One that is on record as acknowledged, too: that record, or the cell's, may have been restored.
        if not fence.forced and (last != order or not times):
            return 0
        # A forced fence's cell may be gone for good.
        pause_s = doubled_s(REPUBLISH_S, REPEAT_S, times - 1) if is_open else REPEAT_S
        return times if now_s - at_s >= pause_s else None


CELL_ANSWER_S = 2.0  # of placement; a person waits for the decision
MAX_SERVICES = 20  # dead ones that placement is queried about
LOGGED = 10


async def find_cells(selector: Selector, api: Bus, uuids: Collection[str]) -> None:
    """Find the cells of hosts that are to be fenced, unless nothing shows them or placement does not answer in time.

    A host's cell is that which first reported it. api: the bus to placement.
    """
    for cell, service in selector.table.services.dead_not_reported()[:MAX_SERVICES]:
        unknown = sorted(uuid for uuid in uuids if selector.table.last_cell_of(uuid) is None)
        if not unknown:
            return
        try:
            await hosts_of_services(selector, api, cell, [service], timeout_s=CELL_ANSWER_S)
        except (Transient, RequestRefused) as fault:
            log.warning("host.cell_unknown", hosts=unknown[:LOGGED], code=fault.code)
            return
