"""Side tasks of each scheduler that make the outside follow the objects on record: connections to cells, members of
provider aggregates, fences. Schedulers do so side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import structlog

from bus.bus import Bus
from bus.cell_links import CellLinks
from bus.clock import Clock
from bus.contracts.objects import MAX_AGGREGATE_HOSTS, CellsPage, FenceRecord
from bus.contracts.operations import CellFence
from bus.contracts.placement import AggregateMembers, AggregateMembersSet
from bus.faults import RequestRefused, RequestTimeout, Transient
from bus.port import BusError
from bus.retrying import doubled_s
from scheduler_worker.config import Aggregate
from scheduler_worker.domain.fences import command
from scheduler_worker.domain.object_changes import cell_record, cells_in_use, known_cells, removed_cells
from scheduler_worker.domain.selector import Selector
from scheduler_worker.fleet import hosts_of_services
from scheduler_worker.objects import ObjectRegistry
from scheduler_worker.store.port import SchedulerStore

log = structlog.get_logger(__name__)


async def changed_within(changed: asyncio.Event, seconds: float | None) -> bool:
    """Wait for a change, at the longest so long (None: without limit); returns whether there was one, and clears it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None if seconds is None else max(0.0, seconds)):
            await changed.wait()
    has_changed = changed.is_set()
    changed.clear()
    return has_changed


CHECK_S = 5.0  # between two looks while a cell is removed


class CellConnections:
    """Connects one scheduler to the cells in use."""

    # A removed cell may be given a build at any time: by a scheduler that has not received the removal, or because the
    # claim of a waiting build is found there.

    def __init__(
        self,
        registry: ObjectRegistry,
        store: SchedulerStore,
        links: CellLinks,
        settings: Sequence[str],  # the cells that its settings name
        *,
        # the cells that a message in the outbox, or a request without an end, is for
        awaited: Callable[[], Collection[str]],
    ) -> None:
        self._registry = registry
        self._store = store
        self._links = links
        self._settings = tuple(settings)
        self._awaited = awaited
        self._occupied: set[str] = set()
        self._read: object = None  # the decisions under which the record was read of all removed cells

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._apply()
            if await self._look():
                self._apply()
            is_removed = bool(removed_cells(self._registry.cells))
            await changed_within(self._registry.cells_changed, CHECK_S if is_removed else None)

    def _apply(self) -> None:
        self._links.set_cells(cells_in_use(self._settings, self._registry.cells, self._occupied))

    async def _look(self) -> bool:
        """Find which removed cells are still in use; returns whether the answer has changed.

        The whole record is read: once of all of them, whenever decisions have changed, and then of those in use.
        """
        before, decisions = self._occupied, self._registry.cells
        removed = removed_cells(decisions).keys()
        awaited = removed & self._awaited()
        unverified = {one for one in removed - awaited if decisions is not self._read or one in before}
        try:
            held = [name for name in sorted(unverified) if await self._store.machines(1, cell=name)]
            self._occupied, self._read = awaited.union(held), decisions
        except Transient as fault:
            log.warning("cells.not_looked_at", code=fault.code, reason=str(fault))
        if more := self._occupied - before:
            log.warning("cells.occupied", cells=sorted(more))
        return self._occupied != before

    async def page(self) -> CellsPage:
        """All cells, by the objects on record. Raises Transient."""
        await self._registry.reload()  # another scheduler may have written the newest just now
        decisions = self._registry.cells
        used = cells_in_use(self._settings, decisions, self._occupied)
        names = sorted({*known_cells(self._settings, decisions), *decisions})
        return CellsPage(
            revision=max(0, self._registry.revision),
            cells=tuple(
                cell_record(name, self._settings, decisions, in_use=name in used, link=self._links.state_of(name))
                for name in names
            ),
        )


def members_due(selector: Selector, aggregate: Aggregate) -> AggregateMembers | None:
    """The change of one provider aggregate; None: the replica agrees with the aggregate on record, or that names no
    hosts. A host whose name this scheduler has not received yet stays a member.
    """
    if aggregate.hosts is None:
        return None
    replica, table, named = selector.replica, selector.table, set(aggregate.hosts)
    rows = replica.rows_of_roots()
    members = rows[np.flatnonzero(replica.in_aggregate(aggregate.uuid, rows))].tolist()
    present = {replica.uuid_of(row): row for row in members}
    wanted = {uuids[0] for host in aggregate.hosts if len(uuids := selector.uuids_of(host)) == 1}
    leaves = []
    for uuid in sorted(present.keys() - wanted):
        at = table.index_of(uuid)
        if at is not None and not named & {uuid, table.names[at], replica.name_of(present[uuid])}:
            leaves.append(uuid)
    joins = [uuid for uuid in sorted(wanted - present.keys()) if replica.row_of(uuid) is not None]
    if not joins and not leaves:
        return None
    return AggregateMembers(
        aggregate=aggregate.uuid, joins=tuple(joins[:MAX_AGGREGATE_HOSTS]), leaves=tuple(leaves[:MAX_AGGREGATE_HOSTS])
    )


LOOK_S = 10.0  # how often placement's members are compared with the aggregates on record that name their hosts
ANSWER_S = 10.0


class AggregateSync:
    """Keeps the provider aggregates of placement equal to the host aggregates on record. One per scheduler."""

    def __init__(self, registry: ObjectRegistry, selector: Selector, api: Bus, *, clock: Clock) -> None:
        self._registry = registry
        self._selector = selector
        self._api = api  # the bus to placement
        self._clock = clock

    async def run(self) -> None:
        """Compare at once when the aggregates on record change, and every LOOK_S, until cancelled."""
        while True:
            with contextlib.suppress(Transient, RequestTimeout, RequestRefused):
                if not await self._wait():
                    await self._registry.reload()  # objects that are no longer in force set nothing
                await self.look()

    async def look(self) -> None:
        """Change the members that differ from the record. Raises RequestTimeout or RequestRefused."""
        for aggregate in self._selector.config.aggregates:
            due = members_due(self._selector, aggregate)
            if due is not None:
                await self._api.request(due, AggregateMembersSet, timeout_s=ANSWER_S)
                log.info(
                    "aggregate.members_set", aggregate=aggregate.name, joins=len(due.joins), leaves=len(due.leaves)
                )

    async def _wait(self) -> bool:
        """Whether the aggregates have changed before the next look is due."""
        names_hosts = any(one.hosts is not None for one in self._selector.config.aggregates)
        return await changed_within(self._registry.aggregates_changed, LOOK_S if names_hosts else None)


REPUBLISH_S = 5.0  # to a cell that has not recorded a fence, or is to lift one, it is published again after this
REPEAT_S = 300.0  # the pause is doubled up to this, and is that of any other fence: its cell may have been restored


class FencePublisher:
    """Publishes the fences of one scheduler's registry."""

    # A fence has to reach the cell of its host and no other: the first that acknowledges it may be one that does not
    # have the host. A host that no compute service has reported here is in the cell of the dead service that placement
    # has it as.

    def __init__(self, registry: ObjectRegistry, cells: Mapping[str, Bus], *, clock: Clock) -> None:
        self._registry = registry
        self._cells = cells  # the bus of each
        self._clock = clock
        # {(host, cell): what was published, how often, and when the last time (monotonic)}
        self._published: dict[tuple[str, str], tuple[CellFence, int, float]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(REPUBLISH_S)
            known = self._registry.fences
            self._published = {place: one for place, one in self._published.items() if place[0] in known}
            for uuid in tuple(known):
                fence = self._registry.fences.get(uuid)
                if fence is not None:  # else its host is used again: its cell has lifted it during another's publishing
                    await self._publish(uuid, fence)

    async def _publish(self, uuid: str, fence: FenceRecord) -> None:
        """To the host's cell, or to all cells if that is not known: a cell ignores the fence of another cell's host."""
        order = command(uuid, fence, self._registry.decision_of(uuid))
        for bus in [one for name, one in self._cells.items() if fence.cell in (None, name)]:
            if bus.unavailable_reason:  # it is published again; other cells' fences would wait for the confirm
                continue
            times = self._due(order, fence, bus.name)
            if times is None:
                continue
            try:
                await bus.publish(order, cause=uuid)
            except BusError as fault:
                log.info("fence.not_published", cell=bus.name, host=order.host, code=fault.code, reason=str(fault))
            else:
                self._published[uuid, bus.name] = order, times + 1, self._clock.monotonic()

    def _due(self, order: CellFence, fence: FenceRecord, cell: str) -> int | None:
        """How often it was published to this cell as it is now; None: it is not due."""
        now_s = self._clock.monotonic()
        is_open = (not fence.is_acknowledged or fence.unfencing) and not fence.forced
        last, times, at_s = self._published.setdefault((order.host_uuid, cell), (order, 0, now_s))
        if is_open and (last != order or not times):
            return 0
        # A forced fence's cell may be gone for good.
        pause_s = doubled_s(REPUBLISH_S, REPEAT_S, times - 1) if is_open else REPEAT_S
        return times if now_s - at_s >= pause_s else None


CELL_ANSWER_S = 2.0  # of placement; a person waits for the decision
MAX_SERVICES = 20  # dead ones that placement is queried about
LOGGED = 10


async def find_cells(selector: Selector, api: Bus, uuids: Collection[str]) -> None:
    """Find the cells of hosts that are to be fenced, unless nothing shows them or placement does not answer in time.

    A host's cell is that which first reported it. api: the bus to placement.
    """
    for cell, service in selector.table.dead_not_reported()[:MAX_SERVICES]:
        unknown = sorted(uuid for uuid in uuids if selector.table.last_cell_of(uuid) is None)
        if not unknown:
            return
        try:
            await hosts_of_services(selector, api, cell, [service], timeout_s=CELL_ANSWER_S)
        except (Transient, RequestRefused) as fault:
            log.warning("host.cell_unknown", hosts=unknown[:LOGGED], code=fault.code)
            return
