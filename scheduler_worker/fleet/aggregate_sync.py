"""Makes the members of provider aggregates follow the objects on record. Schedulers do so side by side."""

from __future__ import annotations

import contextlib

import numpy as np
import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.objects import MAX_AGGREGATE_HOSTS
from bus.contracts.placement import AggregateMembers, AggregateMembersSet
from bus.faults import RequestRefused, RequestTimeout, Transient
from scheduler_worker.config import Aggregate
from scheduler_worker.objects.object_registry import ObjectRegistry, changed_within
from scheduler_worker.selection.selector import Selector

log = structlog.get_logger(__name__)


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
        for aggregate in self._selector.config.settings.aggregates:
            due = members_due(self._selector, aggregate)
            if due is not None:
                await self._api.request(due, AggregateMembersSet, timeout_s=ANSWER_S)
                log.info(
                    "aggregate.members_set", aggregate=aggregate.name, joins=len(due.joins), leaves=len(due.leaves)
                )

    async def _wait(self) -> bool:
        """Whether the aggregates have changed before the next look is due."""
        names_hosts = any(one.hosts is not None for one in self._selector.config.settings.aggregates)
        return await changed_within(self._registry.aggregates_changed, LOOK_S if names_hosts else None)
