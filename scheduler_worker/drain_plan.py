"""Plans drains: the hosts of a target, and the destination of each of their instances, one after the other.

The choices are those of moves: the same search, filters, weighers and group rules, on the replica as it is. Each choice
counts the resources that the earlier ones take, and the hosts to which they move the members of a group. No instance
goes to a host of the drain, so resources and rules depend on no later move: a move that fits in this order fits at
every step of it.

What hosts hold is read from the book, and from the record of requests under way. The replica shows which hosts have
anything in use; only of these the book is queried for the holders.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.consuming.outcome import Retry
from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.book import MAX_HOLDERS, HostTree, HostTreeQuery, TreeHolder
from bus.contracts.drains import MAX_DRAINED, DrainPlan, DrainQuery, DrainTarget, PlannedMove
from bus.contracts.moves import Condition, MoveKind, MoveRequest
from bus.contracts.operations import AdminState
from bus.contracts.placement import LocatePage
from bus.faults import Transient
from bus.port import BusError
from bus.turns import next_turn
from placement_worker.replica.request import total_resources
from scheduler_worker.domain.delivery import LAST
from scheduler_worker.domain.drains import (
    DRAIN_KINDS,
    UNCONFIRMED,
    DrainedHost,
    HeldInstance,
    arriving,
    held_as_instance,
    held_by_migration,
    is_migration,
)
from scheduler_worker.domain.placement import PlacementUnavailable, unavailable_after
from scheduler_worker.domain.recorded_moves import MoveContext, PendingMove, RecordedMove, flavor_of
from scheduler_worker.domain.selector import Selector
from scheduler_worker.moves import Chosen, MoveEngine
from scheduler_worker.placing import ReplicaFollower
from scheduler_worker.store.port import FIRST_UUID, SchedulerStore


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
        named = [DrainedHost(uuid, name) for name, uuid in sorted((selector.name_of(uuid), uuid) for uuid in uuids)]
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


ANSWER_S = 10.0  # of placement
TREES = 50  # hosts that the book is queried about at a time
PAGE = 1000  # requests under way, or instances, that are read at a time


class DrainHolders:
    """Of one scheduler. api: the bus to placement."""

    def __init__(self, store: SchedulerStore, selector: Selector, follower: ReplicaFollower, api: Bus) -> None:
        self._store = store
        self._selector = selector
        self._follower = follower
        self._api = api

    async def held_on(self, hosts: Sequence[DrainedHost]) -> list[HeldInstance]:
        """The instances of which these hosts hold something, or are about to. Raises Transient.

        The requests are read before the book, so that one that ends in between is seen in one of the two. A build has
        its allocation before it is on record as scheduled.
        """
        if not hosts:
            return []
        found = await self._arriving(hosts)
        holders = await self._holders(hosts)
        known = await self._known({one.consumer for _, one in holders if not is_migration(one)})
        for host, one in holders:
            if not is_migration(one) and (held := held_as_instance(host, known[one.consumer])) is not None:
                found.append(held)
        return found + await self._by_migrations(holders)

    async def kept_on(self, hosts: Sequence[DrainedHost]) -> list[HeldInstance]:
        """The instances of which these hosts keep the source of a move. Raises Transient."""
        return await self._by_migrations(await self._holders(hosts))

    async def _by_migrations(self, holders: Sequence[tuple[DrainedHost, TreeHolder]]) -> list[HeldInstance]:
        kept = [(host, one) for host, one in holders if is_migration(one)]
        requests = await self._known({one.consumer for _, one in kept})
        moves = {uuid: context.move for uuid, context in requests.items()}
        known = await self._known({move.instance_uuid for move in moves.values() if move is not None})
        found = []
        for host, one in kept:
            move = moves[one.consumer]
            found.append(held_by_migration(host, one, move, None if move is None else known[move.instance_uuid]))
        return found

    async def _arriving(self, hosts: Sequence[DrainedHost]) -> list[HeldInstance]:
        """By the requests under way, along their index."""
        there = {host.uuid: host for host in hosts}
        moves: list[RecordedMove] = []
        after = FIRST_UUID
        while page := await self._store.open_moves(after, PAGE):
            moves += [one for one in page if one.host_uuid in there]
            after = page[-1].request_id
        known = await self._known({one.instance_uuid for one in moves})
        found = [arriving(there[one.host_uuid or ""], one, known[one.instance_uuid]) for one in moves]
        return [one for one in found if one is not None]

    async def _known(self, uuids: Iterable[str]) -> dict[str, MoveContext]:
        """The records of these instances, and of the requests with these ids."""
        found: dict[str, MoveContext] = {}
        ordered = sorted(uuids)
        for start in range(0, len(ordered), PAGE):
            async with self._store.operation() as unit:
                found |= await unit.known({uuid: uuid for uuid in ordered[start : start + PAGE]})
        return found

    async def _holders(self, hosts: Sequence[DrainedHost]) -> list[tuple[DrainedHost, TreeHolder]]:
        """By the book. Raises PlacementUnavailable."""
        if not await self._follower.refresh(timeout_s=ANSWER_S):
            raise PlacementUnavailable("the newest changes of the book did not come in time")
        found: list[tuple[DrainedHost, TreeHolder]] = []
        used = self._in_use(hosts)
        for start in range(0, len(used), TREES):
            part = used[start : start + TREES]
            after: dict[str, str] = {}  # {host: the last consumer known}
            while part:
                pages = await self._trees(part, after)
                for host, page in zip(part, pages, strict=True):
                    found += [(host, one) for one in page.holders]
                    if page.holders:
                        after[host.uuid] = page.holders[-1].consumer
                part = [host for host, page in zip(part, pages, strict=True) if page.more and page.holders]
        return found

    async def _trees(self, hosts: Sequence[DrainedHost], after: Mapping[str, str]) -> list[HostTree]:
        queries = [HostTreeQuery(provider=host.uuid, limit=MAX_HOLDERS, after=after.get(host.uuid)) for host in hosts]
        causes = [host.uuid for host in hosts]
        try:
            answers = await self._api.request_all(queries, HostTree, timeout_s=ANSWER_S, causes=causes)
        except (BusError, Transient) as error:
            raise PlacementUnavailable(str(error)) from error
        if failed := [one for one in answers if not isinstance(one, HostTree)]:
            raise unavailable_after(failed[0])
        return [one for one in answers if isinstance(one, HostTree)]

    def _in_use(self, hosts: Sequence[DrainedHost]) -> list[DrainedHost]:
        """The hosts of which something is in use, by the replica."""
        book = self._selector.book
        rows = {row: host for host in hosts if (row := book.row_of(host.uuid)) is not None}
        numbers = np.fromiter(rows, dtype=np.intp, count=len(rows))
        used = np.zeros(len(rows), dtype=np.bool_)
        for name in book.resource_classes():
            used |= book.usage(name, numbers) != 0
        return [host for host, is_used in zip(rows.values(), used, strict=True) if is_used]


SLICE = 100  # instances that are planned before other tasks run
HOST_FENCED, SERVICE_DOWN = "host.fenced", "service.down"  # why nothing can be moved away from a host
# Conditions in which a cell refuses every move of an instance (`begin` and `end_resized` in its rules of moves).
UNMOVABLE = {
    Condition.SHELVED: Refusal(code="instance.shelved", reason="it is shelved: unshelve or offload it first"),
    Condition.RESCUED: Refusal(code="instance.rescued", reason="it is rescued: unrescue it first"),
    Condition.RESIZED: Refusal(code="instance.resized", reason="a move of it awaits confirm or revert"),
}
KINDS_ONLY = Refusal(code="request.invalid", reason="a drain moves instances live or cold: live-migrate or migrate")


class InstanceToMove(Struct, frozen=True):
    """An active instance on a host that is to be drained."""

    source: DrainedHost
    known: MoveContext

    @property
    def uuid(self) -> str:
        """The instance's uuid."""
        assert self.known.build is not None
        return self.known.build.instance_uuid

    @property
    def project_id(self) -> str:
        """The instance's project."""
        assert self.known.build is not None
        return self.known.build.project_id

    @property
    def held(self) -> HeldInstance:
        """The instance as its host holds it: active there."""
        return HeldInstance(instance_uuid=self.uuid, project_id=self.project_id, source=self.source)


class MadePlan(Struct, frozen=True):
    """A plan and its input: the hosts, the instances in the order of the plan's moves, and those of which a host keeps
    the source of an unconfirmed move.
    """

    plan: DrainPlan
    hosts: tuple[DrainedHost, ...]
    instances: tuple[InstanceToMove, ...]
    kept: tuple[HeldInstance, ...] = ()

    @property
    def stuck(self) -> int:
        """How many instances cannot move."""
        return sum(not one.hosts for one in self.plan.moves)


class _Choices:
    """The choices of a plan so far. They count as used while a slice is planned, and for no other request."""

    def __init__(self, selector: Selector) -> None:
        self._selector = selector
        self._taken: dict[str, Mapping[str, Mapping[str, int]]] = {}
        self._moved: dict[str, list[tuple[str, str, str]]] = {}  # {server group or "": (instance, from, to)}
        self._to: dict[str, str] = {}  # {instance: host}

    def hold(self) -> None:
        """Count all choices as used from here on."""
        for key, allocations in self._taken.items():
            self._selector.book.assume(key, allocations)

    def release(self) -> None:
        """Stop counting them."""
        for key in self._taken:
            self._selector.book.forget(key)

    def add(self, key: str, one: InstanceToMove, chosen: Chosen) -> None:
        """Add a choice; it counts as used at once."""
        first = chosen.selections[0]
        self._taken[key] = first.allocations
        self._selector.book.assume(key, first.allocations)
        self._to[one.uuid] = first.host_uuid
        group = _group_of(one)
        if group is not None:
            self._moved.setdefault(group, []).append((one.uuid, one.source.uuid, first.host_uuid))

    def seen(self, one: InstanceToMove, page: LocatePage) -> LocatePage:
        """Where the instances that this one depends on are, once the earlier moves are done."""
        members = dict(page.members)
        for _, source, target in self._moved.get(_group_of(one) or "", ()):
            members[source] = members.get(source, 0) - 1
            members[target] = members.get(target, 0) + 1
        hosts = {uuid: (self._to[uuid],) if uuid in self._to else found for uuid, found in page.hosts.items()}
        return LocatePage(members={host: count for host, count in members.items() if count > 0}, hosts=hosts)


class DrainPlanner:
    """Makes plans for one scheduler."""

    def __init__(
        self, store: SchedulerStore, selector: Selector, moves: MoveEngine, holders: DrainHolders, *, clock: Clock
    ) -> None:
        self._store = store
        self._selector = selector
        self._moves = moves
        self._holders = holders
        self._clock = clock

    def hosts(
        self, name: str, target: DrainTarget | None, cell: str | None
    ) -> tuple[DrainTarget, tuple[DrainedHost, ...]] | Refusal:
        """The hosts and instances that are drained under this name."""
        return hosts_of(self._selector, name, target, cell)

    async def plan(self, query: DrainQuery) -> MadePlan | Refusal:
        """How a target could be drained now. Nothing is begun, and no resources stay held. Raises Transient."""
        if query.kind not in DRAIN_KINDS:
            return KINDS_ONLY
        found = self.hosts(query.host, query.target, query.cell)
        if isinstance(found, Refusal):
            return found
        target, hosts = found
        self._selector.holds.settle()
        instances = await self.instances_on(hosts, query.limit + 1)
        instances, more = instances[: query.limit], len(instances) > query.limit
        instances.sort(key=self._order)
        moves: list[PlannedMove] = []
        choices = _Choices(self._selector)
        drained = {one.uuid: "host.drained" for one in hosts}
        for start in range(0, len(instances), SLICE):
            moves += await self._slice(instances[start : start + SLICE], query.kind, drained, choices)
            await next_turn()
        kept = await self._kept(hosts, {one.uuid for one in instances})
        kept, more = kept[: query.limit - len(instances)], more or len(instances) + len(kept) > query.limit
        single = hosts[0] if target is DrainTarget.HOST else None
        plan = DrainPlan(
            host=query.host if single is None else single.name,
            host_uuid=None if single is None else single.uuid,
            target=target,
            hosts=len(hosts),
            moves=(*moves, *map(_not_planned, kept)),
            more=more,
        )
        return MadePlan(plan, hosts, tuple(instances), tuple(kept))

    async def _kept(self, hosts: Sequence[DrainedHost], active: Collection[str]) -> list[HeldInstance]:
        """The instances of which a host keeps the source of an unconfirmed move. A fenced host is not drained."""
        there = [one for one in hosts if not self._is_fenced(one)]
        kept = await self._holders.kept_on(there)
        found = {one.instance_uuid: one for one in kept if one.code == UNCONFIRMED}
        return [one for uuid, one in sorted(found.items()) if uuid not in active]

    async def held_on(self, hosts: Sequence[DrainedHost]) -> list[HeldInstance]:
        """The instances of which these hosts hold something, or are about to. Raises Transient."""
        return await self._holders.held_on(hosts)

    async def instances_on(
        self, hosts: Sequence[DrainedHost], limit: int, *, after: str = FIRST_UUID
    ) -> list[InstanceToMove]:
        """The active instances on these hosts, by uuid, up to a bound. Raises Transient."""
        there = {host.uuid: host for host in hosts}
        uuids = await self._store.active_on(sorted(there), limit, after=after)
        async with self._store.operation() as unit:
            known = await unit.known({uuid: uuid for uuid in uuids})
        found: list[InstanceToMove] = []
        for uuid in uuids:
            context = known[uuid]
            if context.build is not None and (host := there.get(context.build.host_uuid or "")) is not None:
                found.append(InstanceToMove(host, replace(context, names_instance=False)))
        return found

    def _order(self, one: InstanceToMove) -> tuple[bool, tuple[int, ...], str]:
        """Members of groups first, because the fewest hosts fit them; then the larger before the smaller."""
        flavor = self._selector.flavors.get(flavor_of(one.known))
        held = {} if flavor is None else total_resources(flavor.query)
        sizes = tuple(-amount for _, amount in sorted(held.items(), reverse=True))
        return _group_of(one) is None, sizes, one.uuid

    async def _slice(
        self, instances: Sequence[InstanceToMove], kind: MoveKind, drained: Mapping[str, str], choices: _Choices
    ) -> list[PlannedMove]:
        pending = [_pending(one, kind, self._clock.time()) for one in instances]
        contexts = {request.request.request_id: one.known for request, one in zip(pending, instances, strict=True)}
        pages = await self._moves.locate(pending, contexts)
        planned: list[PlannedMove] = []
        choices.hold()
        try:
            for request, one, page in zip(pending, instances, pages, strict=True):
                chosen = await self._chosen(request, one, choices.seen(one, page), drained)
                if chosen.selections:
                    choices.add(request.request.request_id, one, chosen)
                planned.append(_planned(one, chosen))
        finally:
            choices.release()
        return planned

    async def _chosen(
        self, pending: PendingMove, one: InstanceToMove, page: LocatePage, drained: Mapping[str, str]
    ) -> Chosen:
        """Hosts for one instance, or why there are none. It never waits, so a slice is planned on one state."""
        verdict = self._moves.check(pending, one.known)
        if isinstance(verdict, Refusal):
            return Chosen(failure=verdict)
        if (refused := UNMOVABLE.get(one.known.now.condition)) is not None:
            return Chosen(failure=refused)
        unreachable = self._unreachable(one.source)
        if unreachable is not None:
            return Chosen(failure=unreachable)
        if one.source.uuid not in page.hosts.get(one.uuid, ()):
            return Chosen(failure=Refusal(code="instance.elsewhere", reason="placement knows it on another host"))
        found = await self._moves.choose(pending, one.known, page, planned=drained)
        return Chosen(failure=Refusal(code=found.code, reason=found.reason)) if isinstance(found, Retry) else found

    def _unreachable(self, host: DrainedHost) -> Refusal | None:
        """Why nothing can be moved away from this host; None: it can."""
        if self._is_fenced(host):
            return Refusal(code=HOST_FENCED, reason=f"{host.name} is fenced: its instances are evacuated, not moved")
        if self._selector.table.live_service_of(host.uuid) is None:
            reason = f"the compute service of {host.name} is down: fence the host and evacuate, or wait for it"
            return Refusal(code=SERVICE_DOWN, reason=reason)
        return None

    def _is_fenced(self, host: DrainedHost) -> bool:
        decision = self._selector.table.decision_of(host.uuid)
        return decision is not None and decision.state is AdminState.FENCED


def _group_of(one: InstanceToMove) -> str | None:
    built = one.known.build_request
    return None if built is None or built.server_group is None else built.server_group.uuid


def _pending(one: InstanceToMove, kind: MoveKind, now: float) -> PendingMove:
    """A request that is only planned. Its id is no uuid, so it cannot be the id of an instance or a request."""
    request = MoveRequest(request_id=f"plan {one.uuid}", instance_uuid=one.uuid, project_id=one.project_id, kind=kind)
    return PendingMove(position=0, request=request, digest=b"", taken_at=now, delivery=LAST)


def _planned(one: InstanceToMove, chosen: Chosen) -> PlannedMove:
    why = chosen.failure
    return PlannedMove(
        instance_uuid=one.uuid,
        project_id=one.project_id,
        flavor=flavor_of(one.known),
        source=one.source.name,
        hosts=tuple(selection.host for selection in chosen.selections),
        code="" if why is None else why.code,
        reason="" if why is None else why.reason,
    )


def _not_planned(one: HeldInstance) -> PlannedMove:
    return PlannedMove(
        instance_uuid=one.instance_uuid,
        project_id=one.project_id,
        flavor=one.flavor,
        source=one.source.name,
        code=one.code,
        reason=one.reason,
    )
