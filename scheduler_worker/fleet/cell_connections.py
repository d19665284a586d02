"""Connects a scheduler to the cells in use, and disconnects it from those that are not any more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import structlog

from bus.cell_links import CellLinks
from bus.contracts.objects import CellsPage
from bus.faults import Transient
from scheduler_worker.objects.cell_consequences import cell_record, cells_in_use, known_cells, removed_cells
from scheduler_worker.objects.object_registry import ObjectRegistry, changed_within
from scheduler_worker.store.port import SchedulerStore

log = structlog.get_logger(__name__)

CHECK_S = 5.0  # between two looks while a cell is removed


class CellConnections:
    """Connects one scheduler to the cells in use."""

    # A removed cell may be given a build at any time: by a scheduler that has not received the removal, or because the
    # claim of a waiting build is found there.

    def __init__(
        self,
        registry: ObjectRegistry,
        store: SchedulerStore,
        links: CellLinks,
        settings: Sequence[str],  # the cells that its settings name
        *,
        # the cells that a message in the outbox, or a request without an end, is for
        awaited: Callable[[], Collection[str]],
    ) -> None:
        self._registry = registry
        self._store = store
        self._links = links
        self._settings = tuple(settings)
        self._awaited = awaited
        self._occupied: set[str] = set()
        self._read: object = None  # the decisions under which the record was read of all removed cells

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._apply()
            if await self._look():
                self._apply()
            is_removed = bool(removed_cells(self._registry.cells))
            await changed_within(self._registry.cells_changed, CHECK_S if is_removed else None)

    def _apply(self) -> None:
        self._links.set_cells(cells_in_use(self._settings, self._registry.cells, self._occupied))

    async def _look(self) -> bool:
        """Find which removed cells are still in use; returns whether the answer has changed.

        The whole record is read: once of all of them, whenever decisions have changed, and then of those in use.
        """
        before, decisions = self._occupied, self._registry.cells
        removed = removed_cells(decisions).keys()
        awaited = removed & self._awaited()
        unverified = {one for one in removed - awaited if decisions is not self._read or one in before}
        try:
            held = [name for name in sorted(unverified) if await self._store.machines(1, cell=name)]
            self._occupied, self._read = awaited.union(held), decisions
        except Transient as fault:
            log.warning("cells.not_looked_at", code=fault.code, reason=str(fault))
        if more := self._occupied - before:
            log.warning("cells.occupied", cells=sorted(more))
        return self._occupied != before

    async def page(self) -> CellsPage:
        """All cells, by the objects on record. Raises Transient."""
        await self._registry.reload()  # another scheduler may have written the newest just now
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
