"""Makes what is outside follow the objects on record: the cells that a scheduler connects to, and the members of
aggregates in the book. Schedulers do so side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import numpy as np
import structlog
from msgspec import Struct

from bus.bus import Bus
from bus.cell_links import CellLinks
from bus.clock import Clock
from bus.contracts.cells import CellsPage, CellsQuery
from bus.contracts.objects import MAX_AGGREGATE_HOSTS
from bus.contracts.placement import AggregateMembers, AggregateMembersSet
from bus.faults import RequestRefused, RequestTimeout, Transient
from scheduler_worker.config import Aggregate
from scheduler_worker.domain.object_changes import cell_record, cells_in_use, known_cells, removed_cells
from scheduler_worker.domain.selector import Selector
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


# A scheduler that has not yet received the removal of a cell may still choose it. After a removal the record of builds
# is read this often, for this long.
CHECK_S = 5.0
CHECKED_FOR_S = 120.0


class CellKeeper:
    """The keeper of one scheduler. settings: the cells that its settings name."""

    def __init__(
        self,
        registry: ObjectRegistry,
        store: SchedulerStore,
        links: CellLinks,
        settings: Sequence[str],
        *,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._store = store
        self._links = links
        self._settings = tuple(settings)
        self._clock = clock
        self._occupied: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._adopt()
            if await self._look():
                self._adopt()
            await changed_within(self._registry.cells_changed, CHECK_S if self._looks_again() else None)

    def _adopt(self) -> None:
        self._links.want(cells_in_use(self._settings, self._registry.cells, self._occupied))

    async def _look(self) -> bool:
        """Read which removed cells still have instances on record; returns whether the answer has changed."""
        before = self._occupied
        try:
            self._occupied = frozenset(
                [name for name in removed_cells(self._registry.cells) if await self._store.machines(1, cell=name)]
            )
        except Transient as fault:
            log.warning("cells.not_looked_at", code=fault.code, reason=str(fault))
        if more := self._occupied - before:
            log.warning("cells.occupied", cells=sorted(more))
        return self._occupied != before

    def _looks_again(self) -> bool:
        now = self._clock.time()
        removed = removed_cells(self._registry.cells).values()
        return bool(self._occupied) or any(now - one.changed_at <= CHECKED_FOR_S for one in removed)

    async def page(self, query: CellsQuery) -> CellsPage:
        """All cells, as of the revision that the query names or a later one. Raises Transient."""
        if query.revision:
            await self._registry.announced(query.revision)
        else:
            await self._registry.reload()  # one round trip; another scheduler may have written the newest just now
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


class MembersDue(Struct, frozen=True):
    """The change of one provider aggregate: uuids of hosts, at most MAX_AGGREGATE_HOSTS each."""

    aggregate: str
    joins: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()


def members_due(selector: Selector, aggregate: Aggregate) -> MembersDue | None:
    """Return None when the replica agrees with the aggregate on record, or when the aggregate names no hosts at all.

    A host whose name this scheduler has not received yet stays a member until its name is known.
    """
    if aggregate.hosts is None:
        return None
    book, table, named = selector.book, selector.table, set(aggregate.hosts)
    rows = book.rows_of_roots()
    members = rows[np.flatnonzero(book.in_aggregate(aggregate.uuid, rows))].tolist()
    present = {book.uuid_of(row): row for row in members}
    wanted = {uuids[0] for host in aggregate.hosts if len(uuids := selector.uuids_of(host)) == 1}
    leaves = []
    for uuid in sorted(present.keys() - wanted):
        at = table.index_of(uuid)
        if at is not None and not named & {uuid, table.names[at], book.name_of(present[uuid])}:
            leaves.append(uuid)
    joins = [uuid for uuid in sorted(wanted - present.keys()) if book.row_of(uuid) is not None]
    if not joins and not leaves:
        return None
    return MembersDue(aggregate.uuid, tuple(joins[:MAX_AGGREGATE_HOSTS]), tuple(leaves[:MAX_AGGREGATE_HOSTS]))


LOOK_S = 10.0  # how often the book's members are compared with the aggregates on record that name their hosts
ANSWER_S = 10.0


class AggregateKeeper:
    """The keeper of one scheduler. api: the bus to placement."""

    def __init__(self, registry: ObjectRegistry, selector: Selector, api: Bus, *, clock: Clock) -> None:
        self._registry = registry
        self._selector = selector
        self._api = api
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
                await self._set(aggregate.name, due)

    async def _set(self, name: str, due: MembersDue) -> None:
        requested = AggregateMembers(aggregate=due.aggregate, joins=due.joins, leaves=due.leaves)
        await self._api.request(requested, AggregateMembersSet, timeout_s=ANSWER_S)
        log.info("aggregate.members_set", aggregate=name, joins=len(due.joins), leaves=len(due.leaves))

    async def _wait(self) -> bool:
        """Whether the aggregates have changed before the next look is due."""
        names_hosts = any(one.hosts is not None for one in self._selector.config.aggregates)
        return await changed_within(self._registry.aggregates_changed, LOOK_S if names_hosts else None)
