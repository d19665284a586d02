"""What hosts hold, by placement and by the records; and which hosts the target of a drain has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.drains import MAX_DRAINED, MAX_PLANNED, DrainTarget
from bus.contracts.operations import AdminState
from bus.contracts.placement_queries import MAX_CONSUMERS, HostTree, HostTreeQuery, TreeConsumer
from bus.faults import Transient
from bus.transport import BusError
from scheduler_worker.build.placer import ReplicaFollower, await_newest
from scheduler_worker.drain.drain_steps import instances_on, is_migration
from scheduler_worker.fleet.host_listener import Warmup, hosts_of_services
from scheduler_worker.hosts.host_table import CELL_SILENT
from scheduler_worker.placement_client import PlacementUnavailable, answer_or_raise
from scheduler_worker.records.action_record import ActionContext, RecordedAction, RequestKey
from scheduler_worker.records.drain_record import HOST_FENCED, SERVICE_DOWN, DrainedHost, InstanceOnHost
from scheduler_worker.records.fence_record import is_fenced
from scheduler_worker.selection.host_view import in_use
from scheduler_worker.selection.selector import Selector
from scheduler_worker.store.port import FIRST_UUID, SchedulerStore

ANSWER_S = 10.0  # of placement
TREES = 50  # hosts that placement is queried about at a time
PAGES, PAGE_HOSTS = 4, 10  # that a pass looks at
TURN_S = 1.0  # so long a pass looks at the same hosts
PAGE = 1000  # requests under way, or instances, that are read at a time


class DrainInventory:
    """What hosts hold, as one scheduler finds it."""

    # What hosts hold is read from placement, and, before a drain ends, also from the record of requests under way and
    # of all builds. The replica shows which hosts have anything in use; only those are queried.

    def __init__(
        self,
        store: SchedulerStore,
        selector: Selector,
        follower: ReplicaFollower,
        api: Bus,  # the bus to placement
        *,
        warmup: Warmup,
        clock: Clock,
    ) -> None:
        self._store = store
        self._selector = selector
        self._follower = follower
        self._api = api
        self._warmup = warmup
        self._clock = clock

    async def hosts_of(
        self, name: str, target: DrainTarget | None, cell: str | None
    ) -> tuple[DrainTarget, tuple[DrainedHost, ...]] | Refusal:
        """The hosts of a target by name, and what kind of target it is. An aggregate may have none.

        target: None: the one kind that has an object of this name. Raises PlacementUnavailable, or RequestRefused.
        """
        cell_of = self._selector.table.last_cell_of
        tried = tuple(DrainTarget) if target is None else (target,)
        found: dict[DrainTarget, tuple[DrainedHost, ...]] = {}
        for kind in tried:
            named = sorted(map(self.host, await self._uuids_of(kind, name)), key=lambda one: (one.name, one.uuid))
            hosts = tuple(one for one in named if cell in (None, cell_of(one.uuid)) or kind is DrainTarget.CELL)
            if hosts or (kind is DrainTarget.AGGREGATE and self._aggregates_of(name)):
                found[kind] = hosts
        if not found:
            code = "host.unknown" if target is None else f"{target}.unknown"
            what = "host, compute service, cell or aggregate" if target is None else target.value
            return Refusal(code=code, reason=f"there is no {what} {name}")
        if len(found) > 1:
            kinds = ", ".join(kind.value for kind in found)
            reason = f"{name} is the name of: {kinds}; name the kind of the target"
            return Refusal(code="drain.ambiguous", reason=reason)
        ((kind, hosts),) = found.items()
        if kind is DrainTarget.HOST and len(hosts) > 1:
            places = ", ".join(one.uuid for one in hosts)
            reason = f"{len(hosts)} hosts are called {name}: name one of {places}"
            return Refusal(code="host.ambiguous", reason=reason[:MAX_REASON])
        if kind is DrainTarget.SERVICE and len({cell_of(one.uuid) for one in hosts}) > 1:
            reason = f"services of several cells are called {name}: name the cell"
            return Refusal(code="service.ambiguous", reason=reason)
        if kind is DrainTarget.CELL and not self._selector.table.services.is_complete(name, self._clock.monotonic()):
            reason = f"not every compute service of {name} is known here, nor which hosts it has"
            return Refusal(code=CELL_SILENT, reason=reason)
        if len(hosts) > MAX_DRAINED:
            reason = f"{name} has {len(hosts)} hosts; a drain takes {MAX_DRAINED}"
            return Refusal(code="drain.too_large", reason=reason)
        return kind, hosts

    async def _uuids_of(self, kind: DrainTarget, name: str) -> Collection[str]:
        table, replica = self._selector.table, self._selector.replica
        if kind is DrainTarget.HOST:
            return self._selector.hosts_matching(name, is_warming_up=self._warmup.is_on())
        if kind is DrainTarget.AGGREGATE:
            rows = replica.rows_of_roots()
            members = [rows[replica.in_aggregate(uuid, rows)] for uuid in self._aggregates_of(name)[:1]]
            return [replica.uuid_of(row) for part in members for row in part.tolist()]
        found = partial(hosts_of_services, self._selector, self._api, timeout_s=ANSWER_S)
        if kind is DrainTarget.CELL:  # besides, those that their service lists no more
            rows = self._selector.reported_in_placement()
            there = rows[np.isin(table.cell[rows], [at for at, cell in enumerate(table.cells) if cell == name])]
            return {*map(table.uuids.__getitem__, there.tolist()), *await found(name, table.services.names_in(name))}
        return {uuid for cell in table.services.cells_of(name) for uuid in await found(cell, [name])}

    def _aggregates_of(self, name: str) -> list[str]:
        return [one.uuid for one in self._selector.config.membership.aggregates if name in (one.name, one.uuid)]

    def host(self, uuid: str) -> DrainedHost:
        """A host as it is now.

        One that no service has reported since this scheduler started counts as down once all should have come.
        """
        table = self._selector.table
        decision = table.decision_of(uuid)
        code = ""
        if decision is not None and decision.state is AdminState.FENCED:
            code = HOST_FENCED
        elif table.is_down(uuid) or (table.live_service_of(uuid) is None and not self._warmup.is_on()):
            code = SERVICE_DOWN
        return DrainedHost(uuid, self._selector.name_of(uuid), code)

    def of_drain(self, drain: str) -> dict[str, DrainedHost]:
        """The hosts of a drain, by uuid. A fenced one has left it; while its fence is lifted, the drain waits."""
        decided = self._selector.table.hosts_of_drain(drain)
        return {
            uuid: replace(self.host(uuid), drain=drain) for uuid, decision in decided.items() if not is_fenced(decision)
        }

    def pages(self, hosts: Mapping[str, DrainedHost], now: float) -> list[list[DrainedHost]]:
        """The hosts that a pass looks at, in pages: those of which something is in use by the replica, the ones that
        instances can leave first. Of many the first by name, which become empty first, and some at a place that goes
        round with the clock, so that instances which only wait keep no others from their turn.
        """
        used = self.in_use(sorted(hosts.values(), key=lambda one: (bool(one.code), one.name, one.uuid)))
        pages = [used[start : start + PAGE_HOSTS] for start in range(0, len(used), PAGE_HOSTS)]
        if len(pages) <= PAGES:
            return pages
        fixed = PAGES // 2
        turn = fixed + int(now / TURN_S) * (PAGES - fixed) % (len(pages) - fixed)
        return [*pages[:fixed], *(pages[fixed:] * 2)[turn - fixed : turn + PAGES - 2 * fixed]]

    async def instances_on(self, hosts: Sequence[DrainedHost], *, everything: bool = False) -> list[InstanceOnHost]:
        """The instances of which these hosts hold something by placement. Raises Transient, or RequestRefused.
        everything: by placement's newest state, and with what is about to come, or is on record there.
        """
        # A build has its allocation before it is on record as scheduled. The requests are read before placement, so
        # that one that ends in between is seen in one of the two.
        there = {host.uuid: host for host in hosts}
        found: list[tuple[DrainedHost | None, str, RecordedAction | None, TreeConsumer | None]] = []
        if everything and hosts:
            after = FIRST_UUID
            while page := await self._store.open_actions(after, PAGE):
                found += [
                    (there[one.host_uuid or ""], one.instance_uuid, one, None) for one in page if one.host_uuid in there
                ]
                after = page[-1].request_id
            await await_newest(self._follower, ANSWER_S)
            hosts = self.in_use(hosts)
        holders = await self._consumers(hosts)
        requests = await self._known({one.consumer for _, one in holders if is_migration(one)})
        for host, one in holders:
            by = requests[one.consumer].action if is_migration(one) else None
            found.append((host, one.consumer if by is None else by.instance_uuid, by, one))
        after = FIRST_UUID
        while everything and (active := await self._store.active_on(sorted(there), MAX_PLANNED, after=after)):
            found += [(None, uuid, None, None) for uuid in active]
            after = active[-1]
        known = await self._known({uuid for _, uuid, _, _ in found})
        instances: list[InstanceOnHost | None] = []
        for at, uuid, by, holder in found:
            build = known[uuid].build
            source = at or there.get("" if build is None else build.host_uuid or "")
            instances.append(None if source is None else instances_on(source, known[uuid], by, holder))
        return [one for one in instances if one is not None]

    async def _known(self, uuids: Iterable[str]) -> dict[str, ActionContext]:
        """The records of these instances, and of the requests with these ids. No request is made under them."""
        found: dict[RequestKey, ActionContext] = {}
        ordered = sorted(uuids)
        for start in range(0, len(ordered), PAGE):
            async with self._store.operation() as unit:
                found |= await unit.known([(uuid, uuid) for uuid in ordered[start : start + PAGE]])
        return {uuid: replace(one, names_instance=False) for (uuid, _), one in found.items()}

    async def _consumers(self, hosts: Sequence[DrainedHost]) -> list[tuple[DrainedHost, TreeConsumer]]:
        """By placement. Raises PlacementUnavailable, or RequestRefused."""
        found: list[tuple[DrainedHost, TreeConsumer]] = []
        for start in range(0, len(hosts), TREES):
            part = hosts[start : start + TREES]
            after: dict[str, str] = {}  # {host: the last consumer known}
            while part:
                pages = await self._trees(part, after)
                for host, page in zip(part, pages, strict=True):
                    found += [(host, one) for one in page.consumers]
                    if page.consumers:
                        after[host.uuid] = page.consumers[-1].consumer
                part = [host for host, page in zip(part, pages, strict=True) if page.more and page.consumers]
        return found

    async def _trees(self, hosts: Sequence[DrainedHost], after: Mapping[str, str]) -> list[HostTree]:
        queries = [HostTreeQuery(provider=host.uuid, limit=MAX_CONSUMERS, after=after.get(host.uuid)) for host in hosts]
        causes = [host.uuid for host in hosts]
        try:
            answers = await self._api.request_all(queries, HostTree, timeout_s=ANSWER_S, causes=causes)
        except (BusError, Transient) as error:
            raise PlacementUnavailable(str(error)) from error
        return [answer_or_raise(one) for one in answers]

    def in_use(self, hosts: Iterable[DrainedHost]) -> list[DrainedHost]:
        """The hosts of which something is in use, by the replica."""
        replica = self._selector.replica
        rows = {row: host for host in hosts if (row := replica.row_of(host.uuid)) is not None}
        used = in_use(replica, np.fromiter(rows, dtype=np.intp, count=len(rows)))
        return [host for host, is_used in zip(rows.values(), used, strict=True) if is_used]
