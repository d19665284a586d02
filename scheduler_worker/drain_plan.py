"""What hosts hold, and plans of drains: the destination of each instance, one after the other, chosen as for a move and
counting the earlier choices. No instance goes to a host of the drain, so a plan that fits in this order fits at every
step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.consuming.outcome import Retry
from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.book import MAX_CONSUMERS, HostTree, HostTreeQuery, TreeConsumer
from bus.contracts.drains import MAX_DRAINED, MAX_PLANNED, DrainPlan, DrainQuery, DrainRecord, DrainTarget, PlannedMove
from bus.contracts.moves import ACROSS_CELLS
from bus.contracts.operations import AdminState
from bus.contracts.placement import LocatePage
from bus.faults import Transient
from bus.port import BusError
from bus.turns import yield_to_loop
from placement_worker.replica.request import total_resources
from scheduler_worker.domain.drains import (
    DRAIN_KINDS,
    HOST_FENCED,
    SERVICE_DOWN,
    UNCONFIRMED,
    BegunMoves,
    DrainedHost,
    InstanceOnHost,
    NextMove,
    instances_on,
    is_migration,
    level_of,
    next_moves,
)
from scheduler_worker.domain.hosts import CELL_SILENT
from scheduler_worker.domain.moves import Located
from scheduler_worker.domain.placement import PlacementUnavailable, answer_or_raise
from scheduler_worker.domain.recorded_moves import ActionContext, PendingAction, RecordedAction, RequestKey, flavor_of
from scheduler_worker.domain.requests import LAST
from scheduler_worker.domain.selector import Selector
from scheduler_worker.domain.view import in_use
from scheduler_worker.fleet import Warmup, hosts_of_services
from scheduler_worker.moves import ActionEngine, Chosen
from scheduler_worker.placing import ReplicaFollower
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
        if kind is DrainTarget.CELL and not self._selector.table.is_complete(name, self._clock.monotonic()):
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
            return {*map(table.uuids.__getitem__, there.tolist()), *await found(name, table.services_in(name))}
        return {uuid for cell in table.cells_of_service(name) for uuid in await found(cell, [name])}

    def _aggregates_of(self, name: str) -> list[str]:
        return [one.uuid for one in self._selector.membership.aggregates if name in (one.name, one.uuid)]

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
        """The hosts of a drain, by uuid. One whose fence is not lifted yet has left it, even if the decision on record
        is still the drain's (taken over to lift the fence, or a fence that the restored record lacks).
        """
        hosts = {uuid: replace(self.host(uuid), drain=drain) for uuid in self._selector.table.hosts_of_drain(drain)}
        return {uuid: host for uuid, host in hosts.items() if host.code != HOST_FENCED}

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
            if not await self._follower.refresh(timeout_s=ANSWER_S):
                raise PlacementUnavailable("the newest changes of placement did not come in time")
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


SLICE = 100  # instances that are planned before other tasks run
WITHIN_CELL = Refusal(
    code=ACROSS_CELLS,
    reason="its instances could go to other cells only, and the setting actions_across_cells is off",
)
NO_OTHER_CELL = Refusal(code=ACROSS_CELLS, reason="no other cell has a host here to which its instances could go")
KINDS_ONLY = Refusal(code="request.invalid", reason="a drain moves instances live or cold: live-migrate or migrate")


class MadePlan(Struct, frozen=True):
    """A plan, and the hosts that it is of."""

    plan: DrainPlan
    hosts: tuple[DrainedHost, ...]

    @property
    def stuck(self) -> int:
        """How many instances cannot move."""
        return sum(not one.hosts for one in self.plan.moves)


class _Choices:
    """The choices of a plan so far. They count as used while a slice is planned, and for no other request."""

    def __init__(self, selector: Selector) -> None:
        self._selector = selector
        self._taken: dict[str, Mapping[str, Mapping[str, int]]] = {}
        self._moved: dict[str, list[tuple[str, str]]] = {}  # {server group: (from, to)}
        self._to: dict[str, str] = {}  # {instance: host}

    def hold(self) -> None:
        """Count all choices as used from here on."""
        for key, allocations in self._taken.items():
            self._selector.replica.assume(key, allocations)

    def release(self) -> None:
        """Stop counting them."""
        for key in self._taken:
            self._selector.replica.drop_assumed(key)

    def add(self, key: str, one: InstanceOnHost, chosen: Chosen) -> None:
        """Add a choice; it counts as used at once."""
        first = chosen.selections[0]
        self._taken[key] = first.allocations
        self._selector.replica.assume(key, first.allocations)
        self._to[one.instance_uuid] = first.host_uuid
        group = _group_of(one)
        if group is not None:
            self._moved.setdefault(group, []).append((one.source.uuid, first.host_uuid))

    def seen(self, one: InstanceOnHost, page: LocatePage) -> LocatePage:
        """Where the instances that this one depends on are, once the earlier moves are done."""
        members = dict(page.members)
        for source, target in self._moved.get(_group_of(one) or "", ()):
            members[source] = members.get(source, 0) - 1
            members[target] = members.get(target, 0) + 1
        hosts = {uuid: (self._to[uuid],) if uuid in self._to else found for uuid, found in page.hosts.items()}
        return LocatePage(members={host: count for host, count in members.items() if count > 0}, hosts=hosts)


class DrainPlanner:
    """Makes plans for one scheduler."""

    def __init__(self, selector: Selector, actions: ActionEngine, holders: DrainInventory, *, clock: Clock) -> None:
        self._selector = selector
        self._actions = actions
        self._inventory = holders
        self._clock = clock

    async def plan(self, query: DrainQuery) -> MadePlan | Refusal:
        """How a target could be drained now. Nothing is begun, and no resources stay held. Raises Transient, or
        RequestRefused.
        """
        if query.kind not in DRAIN_KINDS:
            return KINDS_ONLY
        found = await self._inventory.hosts_of(query.host, query.target, query.cell)
        if isinstance(found, Refusal):
            return found
        target, hosts = found
        if target is DrainTarget.CELL and not self._selector.config.actions_across_cells:
            return WITHIN_CELL
        table, rows = self._selector.table, self._selector.reported_in_placement()
        if target is DrainTarget.CELL and {table.cells[at] for at in np.unique(table.cell[rows])} <= {query.host}:
            return NO_OTHER_CELL
        self._selector.assumed.drop_confirmed()
        instances = await self._inventory.instances_on(hosts, everything=True)
        # What is not active there is no part of the plan, but for the source of an unconfirmed action: a revert needs
        # it. A fenced host is not drained, and what it keeps is no concern of the drain.
        instances = [
            one for one in instances if not one.code or (one.code == UNCONFIRMED and one.source.code != HOST_FENCED)
        ]
        instances.sort(key=self.order)
        record = DrainRecord(name=query.host, target=target, kind=query.kind, by="")
        now = self._clock.time()
        level = replace(level_of(record, now), at_once=query.limit)
        decided = next_moves(level, instances, {}, BegunMoves(), now)
        moves: list[PlannedMove] = []
        choices = _Choices(self._selector)
        barred = {one.uuid: "host.drained" for one in hosts}
        for start in range(0, len(decided.moves), SLICE):
            moves += await self._slice(decided.moves[start : start + SLICE], barred, choices)
            await yield_to_loop()
        waiting = [_planned(one.instance, code=one.code, reason=one.reason) for one in decided.waiting if one.code]
        single = hosts[0] if target is DrainTarget.HOST else None
        plan = DrainPlan(
            host=query.host if single is None else single.name,
            host_uuid=None if single is None else single.uuid,
            target=target,
            hosts=len(hosts),
            moves=(*moves, *waiting)[: query.limit],
            more=len(decided.moves) + len(decided.waiting) > query.limit,
        )
        return MadePlan(plan, hosts)

    def order(self, one: InstanceOnHost) -> tuple[bool, tuple[int, ...], str]:
        """Members of groups first, because the fewest hosts fit them; then the larger before the smaller."""
        flavor = None if one.known.build_request is None else self._selector.flavors.get(flavor_of(one.known))
        held = {} if flavor is None else total_resources(flavor.query)
        sizes = tuple(-amount for _, amount in sorted(held.items(), reverse=True))
        return _group_of(one) is None, sizes, one.instance_uuid

    async def _slice(
        self, planned: Sequence[NextMove], barred: Mapping[str, str], choices: _Choices
    ) -> list[PlannedMove]:
        now = self._clock.time()
        pending = [PendingAction(batch_index=0, request=one.request, taken_at=now, delivery=LAST) for one in planned]
        contexts = {one.key: move.instance.known for one, move in zip(pending, planned, strict=True)}
        located = await self._actions.locate(pending, contexts)
        found: list[PlannedMove] = []
        choices.hold()
        try:
            for request, move, where in zip(pending, planned, located, strict=True):
                place = answer_or_raise(where)
                place = replace(place, page=choices.seen(move.instance, place.page))
                chosen = await self._chosen(request, move.instance, place, barred)
                if chosen.selections:
                    choices.add(request.request.request_id, move.instance, chosen)
                hosts = tuple(selection.host for selection in chosen.selections)
                failure = chosen.failure
                found.append(
                    _planned(move.instance, hosts, *(() if failure is None else (failure.code, failure.reason)))
                )
        finally:
            choices.release()
        return found

    async def _chosen(
        self, pending: PendingAction, one: InstanceOnHost, located: Located, barred: Mapping[str, str]
    ) -> Chosen:
        """Hosts for one instance, or why there are none. It never waits, so a slice is planned on one state."""
        result = self._actions.check(pending, one.known)
        if isinstance(result, Refusal):
            return Chosen(failure=result)
        if one.source.uuid not in located.page.hosts.get(one.instance_uuid, ()):
            return Chosen(failure=Refusal(code="instance.elsewhere", reason="placement knows it on another host"))
        found = await self._actions.choose(pending, one.known, located, planned=barred)
        return Chosen(failure=Refusal(code=found.code, reason=found.reason)) if isinstance(found, Retry) else found


def _group_of(one: InstanceOnHost) -> str | None:
    built = one.known.build_request
    return None if built is None or built.server_group is None else built.server_group.uuid


def _planned(one: InstanceOnHost, hosts: tuple[str, ...] = (), code: str = "", reason: str = "") -> PlannedMove:
    return PlannedMove(
        instance_uuid=one.instance_uuid,
        project_id=one.project_id,
        flavor="" if one.known.build_request is None else flavor_of(one.known),
        source=one.source.name,
        hosts=hosts,
        code=code,
        reason=reason,
    )
