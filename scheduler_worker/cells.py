"""Takes cells into use and out of use in a scheduler, and states which are in use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from bus.cell_links import CellLinks
from bus.clock import Clock
from bus.contracts.cells import CellsPage, CellsQuery
from bus.faults import Transient
from scheduler_worker.domain.cells import cell_record, cells_in_use, known_cells, removed_cells
from scheduler_worker.objects import ObjectRegistry
from scheduler_worker.store.port import SchedulerStore

log = structlog.get_logger(__name__)

# A scheduler that has not yet received the removal of a cell may still choose it. After a removal the record of builds
# is read this often, for this long.
CHECK_S = 5.0
CHECKED_FOR_S = 120.0


class CellKeeper:
    """The keeper of one scheduler. settings: the cells that its settings name."""

    def __init__(
        self,
        registry: ObjectRegistry,
        store: SchedulerStore,
        links: CellLinks,
        settings: Sequence[str],
        *,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._store = store
        self._links = links
        self._settings = tuple(settings)
        self._clock = clock
        self._occupied: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._registry.cells_changed.clear()
            self._adopt()
            if await self._look():
                self._adopt()
            await self._wait()

    def _adopt(self) -> None:
        self._links.want(cells_in_use(self._settings, self._registry.cells, self._occupied))

    async def _look(self) -> bool:
        """Read which removed cells still have instances on record; returns whether the answer has changed."""
        before = self._occupied
        try:
            self._occupied = frozenset(
                [name for name in removed_cells(self._registry.cells) if await self._store.machines(1, cell=name)]
            )
        except Transient as fault:
            log.warning("cells.not_looked_at", code=fault.code, reason=str(fault))
        if more := self._occupied - before:
            log.warning("cells.occupied", cells=sorted(more))
        return self._occupied != before

    async def _wait(self) -> None:
        """Wait for a decision about cells, or for the next look."""
        removed = removed_cells(self._registry.cells).values()
        now = self._clock.time()
        if not self._occupied and all(now - one.changed_at > CHECKED_FOR_S for one in removed):
            await self._registry.cells_changed.wait()
            return
        waiting = [
            asyncio.create_task(self._clock.sleep(CHECK_S)),
            asyncio.create_task(self._registry.cells_changed.wait()),
        ]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    async def page(self, query: CellsQuery) -> CellsPage:
        """All cells, as of the revision that the query names or a later one. Raises Transient."""
        if query.revision:
            await self._registry.announced(query.revision)
        else:
            await self._registry.reload()  # one round trip; another scheduler may have written the newest just now
        decisions = self._registry.cells
        used = cells_in_use(self._settings, decisions, self._occupied)
        names = sorted({*known_cells(self._settings, decisions), *decisions})
        return CellsPage(
            revision=max(0, self._registry.revision),
            cells=tuple(
                cell_record(name, self._settings, decisions, in_use=name in used, link=self._links.state_of(name))
                for name in names
            ),
        )
