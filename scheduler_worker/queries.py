"""Answers queries: on queue `scheduler.records` from the database (builds with their timeline, moves, drains, objects),
on `scheduler.status` from this scheduler's memory (hosts, host metrics, compute services, workers).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received, Refuse
from bus.contracts.base import Message, Refusal
from bus.contracts.build import BuildPage, BuildQuery, BuildRecord, HostRecord, HostsPage, HostsQuery, TimelineEntry
from bus.contracts.drains import DrainQuery, DrainsQuery
from bus.contracts.host_metrics import HostMetricsQuery
from bus.contracts.moves import ActionPage, ActionQuery
from bus.contracts.objects import ZONE_KEY, CellsQuery, FenceRecord, ObjectLogQuery, ObjectsQuery
from bus.contracts.operations import AdminState, ServiceRecord, ServicesPage, ServicesQuery
from bus.contracts.workers import WorkersQuery
from bus.faults import RequestRefused, Transient
from bus.turns import YieldingParts, yield_to_loop
from scheduler_worker.domain.builds import is_search
from scheduler_worker.domain.fleet import WaitingTable, WorkerTable
from scheduler_worker.domain.hosts import NO_SERVICE, HostTable, Mask, Rows
from scheduler_worker.domain.selector import Selector
from scheduler_worker.drains import DrainController
from scheduler_worker.fleet import host_metrics_page
from scheduler_worker.keepers import CellConnections
from scheduler_worker.objects import ObjectRegistry
from scheduler_worker.store.port import SchedulerStore

T = TypeVar("T")


class QueryHandler:
    """Handles queue `scheduler.records`."""

    def __init__(
        self,
        store: SchedulerStore,
        drains: DrainController,
        waiting: WaitingTable,
        *,
        clock: Clock,
        objects: ObjectRegistry,
        cells: CellConnections,
    ) -> None:
        self._store = store
        self._objects = objects
        self._cells = cells
        self._drains = drains
        self._waiting = waiting
        self._clock = clock

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Builds queried by name take one statement: after a long silence a client queries each of its builds, at a
        time when the scheduler is slow anyway. The other queries, which are rare, are answered one after another.
        """
        named = {uuid for received in batch if (uuid := _named_by(received.message)) is not None}
        by_name = await _or_refused(self._store.builds_named(sorted(named))) if named else {}
        return [
            await self._answer(received)
            if (uuid := _named_by(received.message)) is None
            else self._one_of(by_name, uuid)
            for received in batch
        ]

    async def _builds(self, query: BuildQuery) -> BuildPage:
        found, last = await self._store.builds(query), None
        if is_search(query) and len(found) < query.limit:
            last = await self._store.searched_to(query)
        at, instance = last or (None, None)
        builds = tuple(map(self._with_timeline, found))
        return BuildPage(builds=builds, searched_to=at, searched_to_instance=instance)

    def _one_of(self, found: dict[str, BuildRecord] | Refuse, uuid: str) -> Outcome:
        """The answer about one build; an empty page if it is not on record."""
        if isinstance(found, Refuse):
            return found
        return Done(reply=BuildPage(builds=(self._with_timeline(found[uuid]),) if uuid in found else ()))

    def _with_timeline(self, build: BuildRecord) -> BuildRecord:
        """The build with its timeline in order, and what it waits for now as the last line."""
        line = self._waiting.line_of(build, self._clock.monotonic())
        build = _with_sorted_timeline(build)
        return build if line is None else replace(build, timeline=(*build.timeline, line))

    async def _answer(self, received: Received) -> Outcome:
        answer = await _or_refused(self._page(received.message))
        if isinstance(answer, Refusal):
            return Refuse(answer.code, answer.reason)
        return answer if isinstance(answer, Refuse) else Done(reply=answer)

    async def _page(self, message: Message) -> Message | Refusal:
        match message:
            case BuildQuery():
                return await self._builds(message)
            case ActionQuery():
                return ActionPage(actions=tuple(await self._store.actions(message)))
            case DrainQuery():
                return await self._drains.plan(message)
            case DrainsQuery():
                return await self._drains.page(message)
            case ObjectsQuery():
                return await self._objects.page(message)
            case CellsQuery():
                return await self._cells.page()
        assert isinstance(message, ObjectLogQuery), message
        return await self._objects.log(message)


async def _or_refused(answer: Awaitable[T]) -> T | Refuse:
    """The answer, or at once that there is none: its requester does not wait for what is unavailable."""
    try:
        return await answer
    except (Transient, RequestRefused) as fault:
        return Refuse(fault.code, fault.reason)


def _named_by(message: Message) -> str | None:
    """The uuid of the instance, if a query names its build and nothing else."""
    if not isinstance(message, BuildQuery) or message.instance_uuid is None:
        return None
    uuid = message.instance_uuid
    return uuid if message == BuildQuery(instance_uuid=uuid, limit=message.limit) else None


def _with_sorted_timeline(build: BuildRecord) -> BuildRecord:
    """The timeline in order of time: events arrive late, out of order, and sometimes twice."""
    lines: dict[tuple[float, str, str, str], TimelineEntry] = {}
    for line in build.timeline:  # a repeated line differs only in the time of its publication
        lines.setdefault((line.at, line.actor, line.what, line.detail), line)
    return replace(build, timeline=tuple(sorted(lines.values(), key=lambda line: line.at)))


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
    down = selector.table.down()
    return sorted((one for one in hosts if _matches(one, query, selector, fences, down)), key=_order_of(query))


def _records(listed: Sequence[_Host], selector: Selector, fences: Mapping[str, FenceRecord]) -> Iterator[HostRecord]:
    """The records of hosts in order, less those that have left placement since they were listed."""
    down = selector.table.down()
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
    members = [(one, replica.in_aggregate(one.uuid, rows).tolist()) for one in selector.membership.aggregates]
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
        service=None if service == NO_SERVICE else table.services[service].name,
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
    namesakes = [uuid for uuid in selector.table.find(one.name) if selector.replica.row_of(uuid) is not None]
    if namesakes:
        return f"placement has another host of this name: {', '.join(namesakes)}"
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
        managed = np.bincount(table.service[:known] + 1, minlength=len(table.services) + 1)
        enabled = np.bincount(table.service[:known] + 1, weights=usable, minlength=len(table.services) + 1)
        in_placement = np.bincount(
            table.service[self._selector.reported_in_placement()] + 1, minlength=len(table.services) + 1
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
            for index, one in enumerate(table.services)
            if not one.deleted
        ]
        found = sorted((*reported, *_dead_not_reported(table)), key=lambda one: (one.cell, one.name))
        requested = [one for one in found if query.cell in (None, one.cell) and query.up in (None, one.up)]
        return ServicesPage(services=tuple(requested[: query.limit]))


def _dead_not_reported(table: HostTable) -> list[ServiceRecord]:
    """Services that have been dead since before this scheduler's start."""
    found = [(cell, table.down_of(cell, name)) for cell, name in table.dead_not_reported()]
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
