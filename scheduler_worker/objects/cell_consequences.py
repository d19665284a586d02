"""The cells that workers connect to, by the settings and the objects of kind `cell`, and those that are being removed.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.objects import (
    CellBus,
    CellDecision,
    CellRecord,
    CellState,
    ChangedObject,
    LinkState,
    ObjectKind,
    StoredObject,
)
from scheduler_worker.records.object_records import UNKNOWN, Objects, cell_decision

IN_USE = "cell.in_use"

Decisions = Mapping[str, StoredObject]  # the objects of kind `cell`, by name


def known_cells(settings: Sequence[str], decisions: Decisions) -> tuple[str, ...]:
    """The cells that exist: those of the settings, then those that operators have added, by name."""
    added = (name for name, one in sorted(decisions.items()) if cell_decision(one).bus is not None)
    return tuple(dict.fromkeys((*settings, *added)))


def only_cell(settings: Sequence[str], decisions: Decisions) -> str | None:
    """The cell that every host is in; None: there is more than one, or there was."""
    known = known_cells(settings, decisions)
    return known[0] if len({*known, *decisions}) == 1 else None


def cells_in_use(
    settings: Sequence[str], decisions: Decisions, occupied: Collection[str] = ()
) -> dict[str, CellBus | None]:
    """The cells that a worker connects to, and where the bus of each is (None: as in its settings). occupied: removed
    cells with instances on record; a build that a scheduler sent there before it received the removal is carried to its
    end.
    """
    found: dict[str, CellBus | None] = {}
    for name in known_cells(settings, decisions):
        stored = decisions.get(name)
        decision = CellDecision(state=CellState.ENABLED) if stored is None else cell_decision(stored)
        if decision.state is not CellState.REMOVED or (name in occupied and not decision.abandoned):
            found[name] = None if name in settings else decision.bus
    return found


def removed_cells(decisions: Decisions) -> dict[str, StoredObject]:
    """The cells that are removed, unless what they held was abandoned."""
    removed = {}
    for name, stored in decisions.items():
        decision = cell_decision(stored)
        if decision.state is CellState.REMOVED and not decision.abandoned:
            removed[name] = stored
    return removed


def removal_of(present: Objects, name: str) -> CellDecision | None:
    """The decision that this cell, which is not in use here, is removed; None: an operator has entered it again. One
    without an object was removed, and its object deleted: if the settings named it, it would be in use.
    """
    stored = present.get((ObjectKind.CELL, name))
    decision = CellDecision(state=CellState.REMOVED) if stored is None else cell_decision(stored)
    return decision if decision.state is CellState.REMOVED else None


def unknown_cell(settings: Sequence[str], changed: Sequence[ChangedObject]) -> Refusal | None:
    """Why a decision about a cell that does not exist is refused: with a mistyped name the operator's cell would stay
    in use.
    """
    for one in changed:
        if one.after is not None and one.name not in settings and one.after.get("bus") is None:
            known = ", ".join(settings)
            reason = f"there is no cell {one.name!r} in the settings, which have: {known}; another one needs its bus"
            return Refusal(code=UNKNOWN, reason=reason[:MAX_REASON])
    return None


def cells_after_removal(settings: Sequence[str], changed: Sequence[ChangedObject]) -> tuple[str, ...]:
    """The cells that a change takes out of use, if they have instances that prevent it. One that was removed is in use
    while it has some (`cells_in_use`), or an operator has decided that they are abandoned, which goes with its object.
    """
    return tuple(
        one.name
        for one in changed
        if (_is_removed(one.after) and not _is_removed(one.before)) or (one.after is None and one.name not in settings)
    )


def _is_removed(body: Mapping[str, object] | None) -> bool:
    return body is not None and body["state"] == CellState.REMOVED


def cell_record(
    name: str, settings: Sequence[str], decisions: Decisions, *, in_use: bool, link: tuple[LinkState, str]
) -> CellRecord:
    """One cell as it is shown. link: state of the connection of the scheduler that answers."""
    problem = link[1][:MAX_REASON]
    record = CellRecord(name=name, configured=name in settings, in_use=in_use, link=link[0], problem=problem)
    stored = decisions.get(name)
    if stored is None:
        return record
    decision = cell_decision(stored)
    return replace(
        record,
        state=decision.state,
        reason=decision.reason,
        bus=decision.bus,
        by=stored.changed_by,
        at=stored.changed_at,
        version=stored.version,
    )
