"""Which cells exist, and which of them workers connect to. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.cells import CellRecord, LinkState
from bus.contracts.objects import CellBus, CellState, ChangedObject, StoredObject
from scheduler_worker.domain.objects import UNKNOWN, cell_decision

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
    """The cells that a worker connects to, and where the bus of each is; None: as in its settings.

    occupied: removed cells that still have instances on record. A scheduler had chosen such a cell before it received
    the removal; the build is carried to its end.
    """
    found: dict[str, CellBus | None] = {}
    for name in known_cells(settings, decisions):
        stored = decisions.get(name)
        decision = None if stored is None else cell_decision(stored)
        if decision is None or decision.state is not CellState.REMOVED or (name in occupied and not decision.abandoned):
            found[name] = None if decision is None or name in settings else decision.bus
    return found


def removed_cells(decisions: Decisions) -> dict[str, StoredObject]:
    """The cells that are removed, unless what they held was abandoned."""
    removed = {}
    for name, stored in decisions.items():
        decision = cell_decision(stored)
        if decision.state is CellState.REMOVED and not decision.abandoned:
            removed[name] = stored
    return removed


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


def cells_left(settings: Sequence[str], changed: Sequence[ChangedObject]) -> tuple[str, ...]:
    """The cells that a change takes out of use, if they have instances that prevent it."""
    return tuple(
        one.name
        for one in changed
        if (_is_removed(one.after) and not _is_removed(one.before))
        or (one.after is None and one.name not in settings and not _is_removed(one.before))
    )


def _is_removed(body: Mapping[str, object] | None) -> bool:
    return body is not None and body["state"] == CellState.REMOVED


def cell_record(
    name: str, settings: Sequence[str], decisions: Decisions, *, in_use: bool, link: tuple[LinkState, str]
) -> CellRecord:
    """One cell as it is shown. link: state of the connection of the scheduler that answers."""
    stored = decisions.get(name)
    if stored is None:
        return CellRecord(name=name, configured=name in settings, in_use=in_use, link=link[0], problem=link[1])
    decision = cell_decision(stored)
    return CellRecord(
        name=name,
        state=decision.state,
        reason=decision.reason,
        bus=decision.bus,
        configured=name in settings,
        in_use=in_use,
        by=stored.changed_by,
        at=stored.changed_at,
        version=stored.version,
        link=link[0],
        problem=link[1][:MAX_REASON],
    )
