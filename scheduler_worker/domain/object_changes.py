"""What a change of objects leads to: the cells that workers connect to, hosts' availability zones, and fences with the
cell that has to acknowledge each. A host whose cell is not known gets no fence, even by force: a cell that does not
have the host acknowledges too, and its own cell would build on it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.objects import (
    ZONE_KEY,
    Aggregate,
    CellBus,
    CellDecision,
    CellRecord,
    CellState,
    ChangedObject,
    LinkState,
    ObjectKind,
    StoredObject,
)
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.fences import fence_after_change, fence_of
from scheduler_worker.domain.hosts import CELL_UNKNOWN
from scheduler_worker.domain.objects import (
    UNKNOWN,
    ChangePlan,
    Objects,
    RecordedObjects,
    cell_decision,
    cells_of,
    zones_that_move,
)
from scheduler_worker.domain.selector import Selector
from scheduler_worker.domain.view import HostsView, Membership, in_use

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


HostZones = Mapping[str, Mapping[str, str]]  # {host: {zone: the first aggregate that puts it there}}


def zones_after(selector: Selector, after: SchedulerConfig) -> HostsView:
    """All hosts in the aggregates of a configuration that is not in force yet."""
    membership = Membership(after.aggregates, selector.members_named(after.aggregates))
    return replace(selector.all_hosts(), membership=membership)


def zones_in(view: HostsView) -> HostZones:
    """The zones of each host by uuid; a host in none is left out."""
    zones: dict[str, dict[str, str]] = {}
    uuids = [view.replica.uuid_of(row) for row in view.rows.tolist()]
    for aggregate in view.membership.with_key(ZONE_KEY):
        for at in np.flatnonzero(view.member_of(aggregate.uuid)).tolist():
            zones.setdefault(uuids[at], {}).setdefault(aggregate.metadata[ZONE_KEY], aggregate.name)
    return zones


def zones_named(aggregates: Iterable[Aggregate]) -> HostZones:
    """The zones of each host that aggregates name, as they name it."""
    zones: dict[str, dict[str, str]] = {}
    for aggregate in aggregates:
        if ZONE_KEY in aggregate.metadata:
            for host in aggregate.hosts or ():
                zones.setdefault(host, {}).setdefault(aggregate.metadata[ZONE_KEY], aggregate.name)
    return zones


def zone_conflict(before: HostZones, after: HostZones, name_of: Callable[[str], str] = str) -> str | None:
    """Why a change is refused: it puts a host into a second zone, which Nova refuses, too. None: it does not.

    A host that is in two already, by Placement's API, hinders no other change.
    """
    for host, zones in sorted(after.items()):
        if len(zones) > 1 and zones.keys() - before.get(host, {}).keys():
            (zone, name), (other, second), *_ = sorted(zones.items())
            both = f"{zone!r} by aggregate {name!r} and in {other!r} by aggregate {second!r}"
            return f"host {name_of(host)} would be in zone {both}: a host is in one availability zone"
    return None


def zones_of_each(view: HostsView, default_zone: str) -> dict[str, list[str]]:
    """All zones of each host by name: a request for any of them is built there."""
    replica, found = view.replica, zones_in(view)
    return {replica.name_of(row): list(found.get(replica.uuid_of(row), (default_zone,))) for row in view.rows.tolist()}


def zones_after_removal(selector: Selector, after: SchedulerConfig) -> str | None:
    """Why a configuration is refused: it takes hosts with instances out of a zone. None: it does not."""
    view = selector.all_hosts()
    replica, used = view.replica, in_use(view.replica, view.rows)
    before = zones_of_each(view, selector.config.default_availability_zone)
    then = zones_of_each(zones_after(selector, after), after.default_availability_zone)
    return zones_that_move(before, then, [replica.name_of(row) for row in view.rows[used].tolist()])


def fence_changes(
    present: RecordedObjects,
    planned: ChangePlan,
    last_cell_of: Callable[[str], str | None],
    *,
    named: str | None,
    settings: Sequence[str],
    force: bool,
) -> Sequence[ChangedObject] | Refusal:
    """The changes of fences, or why there are none. last_cell_of: of a host, where known. named: the cell the operator
    names for a host whose cell nothing shows. settings: the settings' cells; of only one ever, all hosts are in it.
    force: at once.
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
            return Refusal(code=CELL_UNKNOWN, reason=reason)
        assert cell is not None
        cells[uuid] = cell
    revision = present.revision + 1
    return fence_after_change(
        planned.changed,
        present.objects,
        revision,
        lambda uuid: last_cell_of(uuid) or cells.get(uuid),
        force=force,
        token=present.token,
    )
