"""Answers queries from this scheduler's memory: hosts, host metrics, compute services, workers."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Message
from bus.contracts.build import HostRecord, HostsPage, HostsQuery
from bus.contracts.host_metrics import HostMetricsQuery
from bus.contracts.objects import ZONE_KEY, FenceRecord
from bus.contracts.operations import AdminState, ServiceRecord, ServicesPage, ServicesQuery
from bus.contracts.workers import WorkersQuery
from bus.yielding import YieldingParts, yield_to_loop
from scheduler_worker.fleet.metrics_listener import host_metrics_page
from scheduler_worker.hosts.host_table import HostTable, Mask, Rows
from scheduler_worker.hosts.service_directory import NO_SERVICE
from scheduler_worker.hosts.worker_table import WorkerTable
from scheduler_worker.objects.object_registry import ObjectRegistry
from scheduler_worker.selection.selector import Selector

# In one turn of the event loop: hosts that are listed, 1 to 2 ms, and those whose records are made, 2 to 5.
HOSTS_AT_ONCE = 1_000
RECORDS_AT_ONCE = 250
# Lists of `HOSTS_AT_ONCE` that are freed in one turn: 1 to 3 ms.
LISTS_FREED_AT_ONCE = 10


class _Host(Struct, frozen=True):
    """A host to be listed."""

    name: str
    uuid: str
    is_in_placement: bool


async def hosts_page(query: HostsQuery, selector: Selector, fences: Mapping[str, FenceRecord]) -> HostsPage:
    """The hosts by name and uuid, or by uuid, with what their compute services report. fences: of hosts, by uuid. Made
    in parts, so of no single moment: `feed_sequence` is of the beginning, and a host that leaves meanwhile is left out.
    """
    replica, sequence = selector.replica, selector.replica.sequence
    parts = [
        _matching(_of_placement(selector, _page_after(uuids, query)), query, selector, fences)
        async for uuids in YieldingParts(replica.uuids_of(replica.rows_of_roots()), HOSTS_AT_ONCE)
    ]
    parts.append(_matching(_outside_placement(selector, query), query, selector, fences))
    records: list[HostRecord] = []
    found = heapq.merge(*parts, key=_order_of(query))
    async for part in YieldingParts(itertools.islice(found, query.limit), RECORDS_AT_ONCE):
        records += _records(part, selector, fences)
    more = next(found, None) is not None
    del found  # it refers to the lists
    # The last ones are freed in the turn that encodes the answer, 8 to 10 ms: all 40,000 hosts would add up to 8.
    while len(parts) > LISTS_FREED_AT_ONCE:
        del parts[-LISTS_FREED_AT_ONCE:]
        await yield_to_loop()
    return HostsPage(hosts=tuple(records), feed_sequence=sequence, more=more)


def _order_of(query: HostsQuery) -> Callable[[_Host], tuple[str, str]]:
    """Pages go by uuid: a host may have another name at the scheduler that answers the next one."""
    is_by_uuid = query.by_uuid or query.after_uuid is not None
    return lambda one: ("" if is_by_uuid else one.name, one.uuid)


def _page_after(uuids: Iterable[str], query: HostsQuery) -> Iterable[str]:
    after = query.after_uuid
    return uuids if after is None else (uuid for uuid in uuids if uuid > after)


def _of_placement(selector: Selector, uuids: Iterable[str]) -> Iterator[_Host]:
    """These hosts, unless they have left placement."""
    for uuid in uuids:
        if selector.replica.row_of(uuid) is not None:
            yield _Host(selector.name_of(uuid), uuid, is_in_placement=True)


def _outside_placement(selector: Selector, query: HostsQuery) -> Iterator[_Host]:
    """The hosts outside placement that a decision keeps out of use: such a host may be fenced still, and has to be
    enabled or deleted by a person. One that is enabled has left. And those of a service that is up: their inventory
    was refused, or has not come yet.
    """
    decisions = selector.table.decisions()
    kept = [uuid for uuid, one in decisions.items() if one.state is not AdminState.ENABLED]
    for uuid in _page_after(dict.fromkeys((*kept, *selector.not_in_placement())), query):
        if selector.replica.row_of(uuid) is None:
            yield _Host(selector.name_of(uuid), uuid, is_in_placement=False)


def _matching(
    hosts: Iterable[_Host], query: HostsQuery, selector: Selector, fences: Mapping[str, FenceRecord]
) -> list[_Host]:
    down = selector.table.services.down()
    return sorted((one for one in hosts if _matches(one, query, selector, fences, down)), key=_order_of(query))


def _records(listed: Sequence[_Host], selector: Selector, fences: Mapping[str, FenceRecord]) -> Iterator[HostRecord]:
    """The records of hosts in order, less those that have left placement since they were listed."""
    down = selector.table.services.down()
    rows = {one.uuid: row for one in listed if (row := selector.replica.row_of(one.uuid)) is not None}
    kept = [one for one in listed if one.uuid in rows or not one.is_in_placement]
    in_placement = dict(
        zip(rows, _fields_of_placement(selector, np.array(list(rows.values()), dtype=np.intp)), strict=True)
    )
    indexes = [selector.table.index_of(one.uuid) for one in kept]
    numbers = selector.metrics.metric_of(np.array([-1 if one is None else one for one in indexes], dtype=np.intp))
    columns = [(name, values.tolist()) for name, values in numbers.items()]
    for at, one in enumerate(kept):
        yield _record(
            one,
            selector,
            in_placement.get(one.uuid, _OfPlacement()),
            cell=_cell_of(one.uuid, selector, fences),
            down=down,
            metrics={name: values[at] for name, values in columns if not math.isnan(values[at])},
        )


def _matches(one: _Host, query: HostsQuery, selector: Selector, fences: Mapping[str, FenceRecord], down: Mask) -> bool:
    if query.cell is not None and query.cell != _cell_of(one.uuid, selector, fences):
        return False
    return query.up is None or query.up == _is_up(selector, selector.table.index_of(one.uuid), down)


def _is_up(selector: Selector, index: int | None, down: Mask) -> bool:
    return not bool(down[NO_SERVICE if index is None else int(selector.table.service[index])])


def _cell_of(uuid: str, selector: Selector, fences: Mapping[str, FenceRecord]) -> str | None:
    """The cell that has reported the host, else that of its fence; None: not known."""
    last = selector.table.last_cell_of(uuid)
    return fences[uuid].cell if last is None and uuid in fences else last


class _OfPlacement(Struct, frozen=True):
    """The fields of one record that placement has."""

    resources: dict[str, tuple[float, float]] = {}
    zone: str | None = None
    aggregates: tuple[str, ...] = ()


def _fields_of_placement(selector: Selector, rows: Rows) -> Sequence[_OfPlacement]:
    """Placement's fields of these hosts, in order, read a column at a time."""
    replica = selector.replica
    amounts = {
        name: (replica.usage(name, rows).tolist(), replica.capacities_in_use(name, rows).tolist())
        for name in sorted(replica.resource_classes())
    }
    members = [(one, replica.in_aggregate(one.uuid, rows).tolist()) for one in selector.config.membership.aggregates]
    found = []
    for at in range(len(rows)):
        aggregates = [one for one, has in members if has[at]]
        found.append(
            _OfPlacement(
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
    one: _Host,
    selector: Selector,
    in_placement: _OfPlacement,
    *,
    cell: str | None,
    down: Mask,
    metrics: dict[str, float],
) -> HostRecord:
    table = selector.table
    index = table.index_of(one.uuid)
    service = NO_SERVICE if index is None else int(table.service[index])
    return HostRecord(
        uuid=one.uuid,
        name=one.name,
        cell=cell,
        service=None if service == NO_SERVICE else table.services.states[service].name,
        reported=index is not None,
        up=_is_up(selector, index, down),
        enabled=False if index is None else bool(table.enabled[index] and not table.admin[index]),
        admin=table.decision_of(one.uuid),
        claimed_also_by=table.claimed_also_by(one.uuid),
        not_in_placement=_absence_reason(one, selector),
        resources=in_placement.resources,
        failed_builds=0 if index is None else int(table.failed_builds[index]),
        zone=in_placement.zone,
        aggregates=in_placement.aggregates,
        metrics=metrics,
    )


def _absence_reason(one: _Host, selector: Selector) -> str:
    if one.is_in_placement or selector.table.live_service_of(one.uuid) is None:
        return ""
    duplicate_names = [uuid for uuid in selector.table.find(one.name) if selector.replica.row_of(uuid) is not None]
    if duplicate_names:
        return f"placement has another host of this name: {', '.join(duplicate_names)}"
    return "its inventory has not come, or was refused"


class StatusHandler:
    """Handles queue `scheduler.status`. No answer waits for the database."""

    def __init__(self, selector: Selector, workers: WorkerTable, objects: ObjectRegistry, *, clock: Clock) -> None:
        self._selector = selector
        self._workers = workers
        self._objects = objects
        self._clock = clock

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Answer one query after another; each is rare."""
        return [Done(reply=await self._answer(received.message)) for received in batch]

    async def _answer(self, query: Message) -> Message:
        if isinstance(query, WorkersQuery):
            return self._workers.page(query, self._clock.monotonic())
        if isinstance(query, ServicesQuery):
            return self.services(query)
        if isinstance(query, HostsQuery):
            return await hosts_page(query, self._selector, self._objects.fences)
        assert isinstance(query, HostMetricsQuery), query
        return host_metrics_page(query, self._selector)

    def services(self, query: ServicesQuery) -> ServicesPage:
        """The compute services that have reported themselves, or that their cells list as down, by cell and name."""
        table, now_s = self._selector.table, self._clock.monotonic()
        known = len(table)
        usable = table.enabled[:known] & (table.admin[:known] == 0)
        # One index more at the frontend: hosts without a service (NO_SERVICE is -1).
        managed = np.bincount(table.service[:known] + 1, minlength=len(table.services.states) + 1)
        enabled = np.bincount(table.service[:known] + 1, weights=usable, minlength=len(table.services.states) + 1)
        in_placement = np.bincount(
            table.service[self._selector.reported_in_placement()] + 1, minlength=len(table.services.states) + 1
        )
        reported = [
            ServiceRecord(
                name=one.name,
                cell=one.cell,
                up=one.down is None,
                epoch=one.epoch,
                code="" if one.down is None else one.down.code,
                reason="" if one.down is None else one.down.reason,
                since=0.0 if one.down is None else one.down.since,
                last_seen_s=max(0.0, now_s - one.last_seen_s),
                hosts=int(managed[index + 1]),
                enabled=int(enabled[index + 1]),
                in_placement=int(in_placement[index + 1]),
            )
            for index, one in enumerate(table.services.states)
            if not one.deleted
        ]
        found = sorted((*reported, *_dead_not_reported(table)), key=lambda one: (one.cell, one.name))
        requested = [one for one in found if query.cell in (None, one.cell) and query.up in (None, one.up)]
        return ServicesPage(services=tuple(requested[: query.limit]))


def _dead_not_reported(table: HostTable) -> list[ServiceRecord]:
    """Services that have been dead since before this scheduler's start."""
    found = [(cell, table.services.down_of(cell, name)) for cell, name in table.services.dead_not_reported()]
    return [
        ServiceRecord(
            name=down.service,
            cell=cell,
            up=False,
            epoch=down.epoch,
            code=down.code,
            reason=down.reason,
            since=down.since,
            reported=False,
        )
        for cell, down in found
    ]
