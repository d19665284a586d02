"""A revert that a client has requested, and the quota of its project."""

from __future__ import annotations

from collections import Counter

from bus.contracts.cell import Selection
from bus.contracts.moves import CellMove

from .instance import Instance
from .move_events import move_of


def past_quota(instance: Instance, request: CellMove) -> str:
    """Which class the project would hold too much of, if the instance had the amounts of its move's source again; "":
    none.

    A smaller instance may have left room that the project has used since. A move that fails is not compared: it has to
    go back.
    """
    source = move_of(instance).source
    if source is None:
        return ""
    before, now = _by_class(source), _by_class(instance.here)
    for name, left in sorted(request.room.items()):
        more = before[name] - now[name]
        if more > left:
            return f"{name}: {more} more than now, and {left} of the quota are left; confirm it, or make room"
    return ""


def _by_class(selection: Selection) -> Counter[str]:
    total: Counter[str] = Counter()
    for resources in selection.allocations.values():
        total.update(resources)
    return total
