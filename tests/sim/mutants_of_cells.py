"""Deliberate defects of cells added and removed. FOUND_BY: the seed, with `decided-cells` alone, that finds each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from bus.cell_links import CellLinks
from bus.contracts.objects import CellBus
from placement_worker.cells import CellFollower
from scheduler_worker import keepers as scheduler_cells


def placement_stays_with_its_settings() -> AbstractContextManager[Any]:
    """Placement connects to no cell that its settings do not name."""

    async def look(self: CellFollower) -> bool:
        return True

    return patch.object(CellFollower, "_look", look)


def removed_cell_is_not_taken_back() -> AbstractContextManager[Any]:
    """A worker that has left a cell does not connect to it again."""
    original = CellLinks.want

    def want(self: Any, cells: Mapping[str, CellBus | None]) -> None:
        left = {name for name, slot in self._slots.items() if not slot.wanted}
        original(self, {name: where for name, where in cells.items() if name not in left})

    return patch.object(CellLinks, "want", want)


def added_cell_is_not_taken_into_use() -> AbstractContextManager[Any]:
    """Schedulers go by their settings alone."""

    def in_use(settings: Any, _decisions: Any, _occupied: Any = ()) -> dict[str, CellBus | None]:
        return dict.fromkeys(settings)

    return patch.object(scheduler_cells, "cells_in_use", in_use)


MUTANTS_OF_CELLS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    placement_stays_with_its_settings,
    removed_cell_is_not_taken_back,
    added_cell_is_not_taken_into_use,
)
FOUND_BY: dict[str, int] = {
    "placement_stays_with_its_settings": 1,
    "removed_cell_is_not_taken_back": 4,
    "added_cell_is_not_taken_into_use": 1,
}
