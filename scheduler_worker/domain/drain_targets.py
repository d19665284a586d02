"""Which hosts a drain is about: those of one name, of a compute service, a cell or an aggregate. Pure."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.drains import MAX_DRAINED, DrainTarget
from scheduler_worker.domain.selector import Selector


class DrainedHost(Struct, frozen=True):
    """A host that is drained, or is to be."""

    uuid: str
    name: str


def hosts_of(
    selector: Selector, name: str, target: DrainTarget | None, cell: str | None
) -> tuple[DrainTarget, tuple[DrainedHost, ...]] | Refusal:
    """The hosts of a target by name, and what kind of target it is. An aggregate may have none.

    target: None: the one kind that has an object of this name.
    """
    cell_of = selector.table.last_cell_of
    tried = tuple(DrainTarget) if target is None else (target,)
    found: dict[DrainTarget, tuple[DrainedHost, ...]] = {}
    for kind in tried:
        uuids = _FIND[kind](selector, name)
        if uuids is None:
            continue
        named = sorted((_host(selector, uuid) for uuid in uuids), key=lambda one: (one.name, one.uuid))
        found[kind] = tuple(one for one in named if cell in (None, cell_of(one.uuid)) or kind is DrainTarget.CELL)
    found = {kind: hosts for kind, hosts in found.items() if hosts or kind is DrainTarget.AGGREGATE}
    if not found:
        code = "host.unknown" if target is None else f"{target}.unknown"
        what = "host, compute service, cell or aggregate" if target is None else target.value
        return Refusal(code=code, reason=f"there is no {what} {name}")
    if len(found) > 1:
        kinds = ", ".join(kind.value for kind in found)
        return Refusal(code="drain.ambiguous", reason=f"{name} is the name of: {kinds}; name the kind of the target")
    ((kind, hosts),) = found.items()
    if kind is DrainTarget.HOST and len(hosts) > 1:
        places = ", ".join(one.uuid for one in hosts)
        reason = f"{len(hosts)} hosts are called {name}: name one of {places}"
        return Refusal(code="host.ambiguous", reason=reason[:MAX_REASON])
    if kind is DrainTarget.SERVICE and len({cell_of(one.uuid) for one in hosts}) > 1:
        return Refusal(code="service.ambiguous", reason=f"services of several cells are called {name}: name the cell")
    if len(hosts) > MAX_DRAINED:
        return Refusal(code="drain.too_large", reason=f"{name} has {len(hosts)} hosts; a drain takes {MAX_DRAINED}")
    return kind, hosts


def _host(selector: Selector, uuid: str) -> DrainedHost:
    index = selector.table.index_of(uuid)
    name = selector.name_of(uuid) if index is None else selector.table.names[index]
    return DrainedHost(uuid, name)


def _of_name(selector: Selector, name: str) -> list[str] | None:
    return selector.uuids_of(name) or None


def _of_service(selector: Selector, name: str) -> list[str] | None:
    table = selector.table
    places = [at for at, service in enumerate(table.services) if service.name == name]
    if not places:
        return None
    managed = np.isin(table.service[: len(table)], places)
    return [table.uuids[at] for at in np.flatnonzero(managed).tolist()]


def _of_cell(selector: Selector, name: str) -> list[str] | None:
    table = selector.table
    if name not in table.cells:
        return None
    there = table.cell[: len(table)] == table.cells.index(name)
    return [table.uuids[at] for at in np.flatnonzero(there).tolist()]


def _of_aggregate(selector: Selector, name: str) -> list[str] | None:
    uuids = [one.uuid for one in selector.membership.aggregates if name in (one.name, one.uuid)]
    if not uuids:
        return None
    book = selector.book
    rows = book.rows_of_roots()
    members = book.in_aggregate(uuids[0], rows)
    return [book.uuid_of(row) for row in rows[members].tolist()]


_FIND = {
    DrainTarget.HOST: _of_name,
    DrainTarget.SERVICE: _of_service,
    DrainTarget.CELL: _of_cell,
    DrainTarget.AGGREGATE: _of_aggregate,
}
