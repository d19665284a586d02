"""The fences that follow from a change of objects, each with the cell that has to acknowledge it. Pure.

A cell acknowledges the fence of a host that it does not have, too. If that counted, the host's own cell would build on
it once it is switched on. So a host whose cell is not known gets no fence, also where a change is forced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.objects import ChangedObject, ObjectKind
from scheduler_worker.domain.cells import known_cells, only_cell
from scheduler_worker.domain.fences import fence_of, followed
from scheduler_worker.domain.hosts import CELL_UNKNOWN
from scheduler_worker.domain.objects import ChangePlan, RecordedObjects, cells_of


def fence_changes(
    present: RecordedObjects,
    planned: ChangePlan,
    last_cell_of: Callable[[str], str | None],
    *,
    named: str | None,
    settings: Sequence[str],
    force: bool,
) -> Sequence[ChangedObject] | Refusal:
    """The changes of fences, or why there are none. last_cell_of: of a host, where it is known.

    named: the cell that the operator names for a host whose cell nothing shows. settings: the cells of the settings.
    force: fences end at once. Where there was only ever one cell, every host is in it.
    """
    decided = cells_of(present.objects)
    known = known_cells(settings, decided)
    only = only_cell(settings, decided)
    cells: dict[str, str] = {}
    for uuid in planned.hosts_fenced:
        stored = present.objects.get((ObjectKind.FENCE, uuid))
        shown = last_cell_of(uuid) or (None if stored is None else fence_of(stored).cell)
        cell = shown or named or only
        if shown is None and cell not in known:
            what = f"nothing shows the cell of host {uuid}" if cell is None else f"there is no cell {cell!r}"
            reason = f"{what}, which has to acknowledge the fence: name the cell with the host's UUID (`--cell`)"
            return Refusal(code=CELL_UNKNOWN, reason=reason[:MAX_REASON])
        assert cell is not None
        cells[uuid] = cell
    revision = present.revision + 1
    return followed(
        planned.changed, present.objects, revision, lambda uuid: last_cell_of(uuid) or cells.get(uuid), force=force
    )
