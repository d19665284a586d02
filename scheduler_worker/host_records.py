"""The answer to a query for hosts: those of the replica, and those that only an operator's decision is on record about.

After a scheduler's start a host is listed before its compute service has announced it, and for as long as that is dead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from bus.contracts.build import HostRecord, HostsPage, HostsQuery
from bus.contracts.objects import FenceRecord
from bus.contracts.operations import AdminState
from scheduler_worker.domain.flavors import ZONE_KEY
from scheduler_worker.domain.hosts import NO_SERVICE, Mask, Rows
from scheduler_worker.domain.selector import Selector


class _Host(Struct, frozen=True):
    """A host to be listed. row: of the book; None: the book has no provider of it."""

    name: str
    uuid: str
    row: int | None


def hosts_page(query: HostsQuery, selector: Selector, fences: Mapping[str, FenceRecord]) -> HostsPage:
    """The hosts by name, with what their compute services announce. fences: of hosts, by uuid."""
    down = selector.table.down()
    listed = [one for one in _listed(selector) if _matches(one, query, selector, fences, down)]
    listed = sorted(listed, key=lambda one: one.name)[: query.limit]
    rows = np.array([one.row for one in listed if one.row is not None], dtype=np.intp)
    in_book = iter(_of_book(selector, rows))
    indexes = [selector.table.index_of(one.uuid) for one in listed]
    numbers = selector.metrics.known_of(np.array([-1 if one is None else one for one in indexes], dtype=np.intp))
    columns = [(name, values.tolist()) for name, values in numbers.items()]
    return HostsPage(
        hosts=tuple(
            _record(
                one,
                selector,
                _OfBook() if one.row is None else next(in_book),
                cell=_cell_of(one.uuid, selector, fences),
                down=down,
                metrics={name: values[at] for name, values in columns if not math.isnan(values[at])},
            )
            for at, one in enumerate(listed)
        ),
        feed_sequence=selector.book.sequence,
    )


def _listed(selector: Selector) -> list[_Host]:
    """Every root of the book, and the hosts without one that a decision keeps out of use: such a host may be fenced
    still, and has to be enabled or forgotten by a person. One that is enabled has left.
    """
    book, decisions = selector.book, selector.table.decisions()
    roots = [_Host(book.name_of(row), book.uuid_of(row), row) for row in book.rows_of_roots().tolist()]
    kept = [
        _Host(decision.host, uuid, None)
        for uuid, decision in decisions.items()
        if decision.state is not AdminState.ENABLED and book.row_of(uuid) is None
    ]
    return roots + kept


def _matches(one: _Host, query: HostsQuery, selector: Selector, fences: Mapping[str, FenceRecord], down: Mask) -> bool:
    if query.cell is not None and query.cell != _cell_of(one.uuid, selector, fences):
        return False
    return query.up is None or query.up == _is_up(selector, selector.table.index_of(one.uuid), down)


def _is_up(selector: Selector, index: int | None, down: Mask) -> bool:
    return not bool(down[NO_SERVICE if index is None else int(selector.table.service[index])])


def _cell_of(uuid: str, selector: Selector, fences: Mapping[str, FenceRecord]) -> str | None:
    """The cell that has announced the host, else that of its fence; None: not known."""
    last = selector.table.last_cell_of(uuid)
    return fences[uuid].cell if last is None and uuid in fences else last


class _OfBook(Struct, frozen=True):
    """The fields of one record that the book has."""

    resources: dict[str, tuple[float, float]] = {}
    zone: str | None = None
    aggregates: tuple[str, ...] = ()


def _of_book(selector: Selector, rows: Rows) -> Sequence[_OfBook]:
    """The book's fields of these hosts, in order, read a column at a time."""
    book = selector.book
    amounts = {
        name: (book.usage(name, rows).tolist(), book.totals(name, rows).tolist())
        for name in sorted(book.resource_classes())
    }
    members = [(one, book.in_aggregate(one.uuid, rows).tolist()) for one in selector.membership.aggregates]
    found = []
    for at in range(len(rows)):
        aggregates = [one for one, has in members if has[at]]
        found.append(
            _OfBook(
                resources={
                    name: (float(used[at]), float(total[at]))
                    for name, (used, total) in amounts.items()
                    if used[at] or total[at]
                },
                zone=next((one.metadata[ZONE_KEY] for one in aggregates if ZONE_KEY in one.metadata), None),
                aggregates=tuple(one.name for one in aggregates),
            )
        )
    return found


def _record(
    one: _Host, selector: Selector, book: _OfBook, *, cell: str | None, down: Mask, metrics: dict[str, float]
) -> HostRecord:
    table = selector.table
    index = table.index_of(one.uuid)
    service = NO_SERVICE if index is None else int(table.service[index])
    return HostRecord(
        uuid=one.uuid,
        name=one.name if index is None else table.names[index],
        cell=cell,
        service=None if service == NO_SERVICE else table.services[service].name,
        announced=index is not None,
        up=_is_up(selector, index, down),
        enabled=False if index is None else bool(table.enabled[index] and not table.admin[index]),
        admin=table.decision_of(one.uuid),
        contested_by=table.contested_by(one.uuid),
        resources=book.resources,
        failed_builds=0 if index is None else int(table.failed_builds[index]),
        zone=book.zone,
        aggregates=book.aggregates,
        metrics=metrics,
    )
