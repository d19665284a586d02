"""Queue `scheduler.queries`: builds with their timeline, hosts, compute services, and operators' objects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received, Refuse
from bus.contracts.base import Message, Refusal
from bus.contracts.build import BuildPage, BuildQuery, BuildRecord, HostsQuery, TimelineEntry
from bus.contracts.cells import CellsQuery
from bus.contracts.drains import DrainQuery, DrainsQuery
from bus.contracts.host_metrics import HostMetricsQuery
from bus.contracts.moves import MovePage, MoveQuery
from bus.contracts.objects import ObjectLogQuery, ObjectsQuery
from bus.contracts.operations import ServiceRecord, ServicesPage, ServicesQuery
from bus.contracts.workers import WorkersQuery
from bus.faults import DatabaseUnavailable, Transient
from scheduler_worker.cells import CellKeeper
from scheduler_worker.domain.builds import is_search
from scheduler_worker.domain.hosts import HostTable
from scheduler_worker.domain.selector import Selector
from scheduler_worker.domain.waiting import WaitingTable
from scheduler_worker.domain.workers import WorkerTable
from scheduler_worker.drains import DrainKeeper
from scheduler_worker.host_metrics import host_metrics_page
from scheduler_worker.host_records import hosts_page
from scheduler_worker.objects import ObjectRegistry
from scheduler_worker.store.port import SchedulerStore


class QueryHandler:
    """Handles queue `scheduler.queries`."""

    def __init__(
        self,
        store: SchedulerStore,
        selector: Selector,
        drains: DrainKeeper,
        workers: WorkerTable,
        waiting: WaitingTable,
        *,
        clock: Clock,
        objects: ObjectRegistry,
        cells: CellKeeper,
    ) -> None:
        self._store = store
        self._objects = objects
        self._cells = cells
        self._selector = selector
        self._drains = drains
        self._workers = workers
        self._waiting = waiting
        self._clock = clock

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Builds that are queried by name take one statement; the other queries, which are rare, are answered one after
        another.

        After a long silence a client queries each of its builds: many at once, and at a time when the scheduler is slow
        anyway.
        """
        named = {uuid for received in batch if (uuid := _named_by(received.message)) is not None}
        by_name: dict[str, BuildRecord] | Refuse = {}
        if named:
            try:
                by_name = await self._store.builds_named(sorted(named))
            except DatabaseUnavailable as fault:
                by_name = Refuse(fault.code, fault.reason)
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
        message = received.message
        if isinstance(message, BuildQuery):
            try:
                return Done(reply=await self._builds(message))
            except DatabaseUnavailable as fault:  # answered at once: the requester does not wait for it
                return Refuse(fault.code, fault.reason)
        if isinstance(message, MoveQuery):
            try:
                return Done(reply=MovePage(moves=tuple(await self._store.moves(message))))
            except DatabaseUnavailable as fault:
                return Refuse(fault.code, fault.reason)
        if isinstance(message, DrainQuery | DrainsQuery):
            return await self._drain(message)
        if isinstance(message, WorkersQuery):
            return Done(reply=self._workers.page(message, self._clock.monotonic()))
        if isinstance(message, ServicesQuery):
            return Done(reply=self.services(message))
        if isinstance(message, HostsQuery):
            return Done(reply=await hosts_page(message, self._selector, self._objects.fences))
        if isinstance(message, HostMetricsQuery):
            return Done(reply=host_metrics_page(message, self._selector))
        try:
            if isinstance(message, ObjectsQuery):
                return Done(reply=await self._objects.page(message))
            if isinstance(message, CellsQuery):
                return Done(reply=await self._cells.page(message))
            assert isinstance(message, ObjectLogQuery), message
            return Done(reply=await self._objects.log(message))
        except Transient as fault:
            return Refuse(fault.code, fault.reason)

    async def _drain(self, query: DrainQuery | DrainsQuery) -> Outcome:
        try:
            answer = await (self._drains.plan(query) if isinstance(query, DrainQuery) else self._drains.page(query))
        except Transient as fault:
            return Refuse(fault.code, fault.reason)
        return Refuse(answer.code, answer.reason) if isinstance(answer, Refusal) else Done(reply=answer)

    def services(self, query: ServicesQuery) -> ServicesPage:
        """The compute services that have announced themselves, or that their cells list as down, by cell and name."""
        table, now_s = self._selector.table, self._clock.monotonic()
        known = len(table)
        usable = table.enabled[:known] & (table.admin[:known] == 0)
        # One index more at the front: hosts without a service (NO_SERVICE is -1).
        managed = np.bincount(table.service[:known] + 1, minlength=len(table.services) + 1)
        enabled = np.bincount(table.service[:known] + 1, weights=usable, minlength=len(table.services) + 1)
        in_book = np.bincount(table.service[self._selector.announced_in_book()] + 1, minlength=len(table.services) + 1)
        announced = [
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
                in_book=int(in_book[index + 1]),
            )
            for index, one in enumerate(table.services)
            if not one.forgotten
        ]
        found = sorted((*announced, *_dead_unannounced(table)), key=lambda one: (one.cell, one.name))
        requested = [one for one in found if query.cell in (None, one.cell) and query.up in (None, one.up)]
        return ServicesPage(services=tuple(requested[: query.limit]))


def _dead_unannounced(table: HostTable) -> list[ServiceRecord]:
    """Services that have been dead since before this scheduler's start."""
    found = [(cell, table.down_of(cell, name)) for cell, name in table.dead_unannounced()]
    return [
        ServiceRecord(
            name=down.service,
            cell=cell,
            up=False,
            epoch=down.epoch,
            code=down.code,
            reason=down.reason,
            since=down.since,
            announced=False,
        )
        for cell, down in found
    ]


def _named_by(message: Message) -> str | None:
    """The uuid of the instance, if a query names its build and nothing else."""
    if not isinstance(message, BuildQuery) or message.instance_uuid is None:
        return None
    uuid = message.instance_uuid
    return uuid if message == BuildQuery(instance_uuid=uuid, limit=message.limit) else None


def _with_sorted_timeline(build: BuildRecord) -> BuildRecord:
    """The timeline in order of time: announcements arrive late, out of order, and sometimes twice."""
    lines: dict[tuple[float, str, str, str], TimelineEntry] = {}
    for line in build.timeline:  # a repeated line differs only in the time of its publication
        lines.setdefault((line.at, line.who, line.what, line.detail), line)
    return replace(build, timeline=tuple(sorted(lines.values(), key=lambda line: line.at)))
