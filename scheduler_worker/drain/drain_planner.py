"""Plans of drains: the destination of each instance, one after the other, chosen as for a move and counting the earlier
choices. No instance goes to a host of the drain, so a plan that fits in this order fits at every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from bus.clock import Clock
from bus.consuming.outcome import Retry
from bus.contracts.actions import ACROSS_CELLS
from bus.contracts.base import Refusal
from bus.contracts.drains import DrainPlan, DrainQuery, DrainRecord, DrainTarget, PlannedMove
from bus.contracts.placement import LocatePage
from bus.yielding import yield_to_loop
from placement_worker.replica.request import total_resources
from scheduler_worker.action.action_checks import check_action
from scheduler_worker.action.destination import Chosen, DestinationChooser
from scheduler_worker.action.destination_request import Located, added_by
from scheduler_worker.action.pending_action import PendingAction
from scheduler_worker.drain.drain_inventory import DrainInventory
from scheduler_worker.drain.drain_steps import DRAIN_KINDS, UNCONFIRMED, NextMove, level_of, next_moves
from scheduler_worker.placement_client import answer_or_raise
from scheduler_worker.records.action_record import flavor_of
from scheduler_worker.records.drain_record import HOST_FENCED, BegunMoves, DrainedHost, InstanceOnHost
from scheduler_worker.requests.request_delivery import LAST
from scheduler_worker.selection.selector import Selector

SLICE = 100  # instances that are planned before other tasks run
WITHIN_CELL = Refusal(
    code=ACROSS_CELLS,
    reason="its instances could go to other cells only, and the setting actions_across_cells is off",
)
NO_OTHER_CELL = Refusal(code=ACROSS_CELLS, reason="no other cell has a host here to which its instances could go")
KINDS_ONLY = Refusal(code="request.invalid", reason="a drain moves instances live or cold: live-migrate or migrate")


GroupKey: TypeAlias = tuple[str, str]  # the project, and the uuid of its server group


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
        self._moved: dict[GroupKey, list[tuple[str, str]]] = {}  # (from, to)
        self._to: dict[str, str] = {}  # {instance: host}

    def hold(self) -> None:
        """Count all choices as used from here on."""
        for key, allocations in self._taken.items():
            self._selector.replica.assume(key, allocations)

    def release(self) -> None:
        """Stop counting them."""
        for key in self._taken:
            self._selector.replica.drop_assumed(key)

    def add(self, key: str, one: InstanceOnHost, located: Located, chosen: Chosen) -> None:
        """Add a choice; what it adds to the usage counts as used at once."""
        first = chosen.selections[0]
        self._taken[key] = added_by(first.allocations, located.allocations)
        self._selector.replica.assume(key, self._taken[key])
        self._to[one.instance_uuid] = first.host_uuid
        group = _group_of(one)
        if group is not None:
            self._moved.setdefault(group, []).append((one.source.uuid, first.host_uuid))

    def seen(self, one: InstanceOnHost, page: LocatePage) -> LocatePage:
        """Where the instances that this one depends on are, once the earlier moves are done."""
        members = dict(page.members)
        group = _group_of(one)
        for source, target in () if group is None else self._moved.get(group, ()):
            members[source] = members.get(source, 0) - 1
            members[target] = members.get(target, 0) + 1
        hosts = {uuid: (self._to[uuid],) if uuid in self._to else found for uuid, found in page.hosts.items()}
        return LocatePage(members={host: count for host, count in members.items() if count > 0}, hosts=hosts)


class DrainPlanner:
    """Makes plans for one scheduler."""

    def __init__(
        self, selector: Selector, destinations: DestinationChooser, inventory: DrainInventory, *, clock: Clock
    ) -> None:
        self._selector = selector
        self._destinations = destinations
        self._inventory = inventory
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
        if target is DrainTarget.CELL and not self._selector.config.settings.actions_across_cells:
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
        blocked = {one.uuid: "host.drained" for one in hosts}
        for start in range(0, len(decided.moves), SLICE):
            moves += await self._slice(decided.moves[start : start + SLICE], blocked, choices)
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
        flavor = None if one.known.build_request is None else self._selector.config.flavors.get(flavor_of(one.known))
        held = {} if flavor is None else total_resources(flavor.query)
        sizes = tuple(-amount for _, amount in sorted(held.items(), reverse=True))
        return _group_of(one) is None, sizes, one.instance_uuid

    async def _slice(
        self, planned: Sequence[NextMove], blocked: Mapping[str, str], choices: _Choices
    ) -> list[PlannedMove]:
        now = self._clock.time()
        pending = [PendingAction(batch_index=0, request=one.request, taken_at=now, delivery=LAST) for one in planned]
        contexts = {one.key: move.instance.known for one, move in zip(pending, planned, strict=True)}
        located = await self._destinations.locate(pending, contexts)
        found: list[PlannedMove] = []
        choices.hold()
        try:
            for request, move, where in zip(pending, planned, located, strict=True):
                place = answer_or_raise(where)
                place = replace(place, page=choices.seen(move.instance, place.page))
                chosen = await self._chosen(request, move.instance, place, blocked)
                if chosen.selections:
                    choices.add(request.request.request_id, move.instance, place, chosen)
                hosts = tuple(selection.host for selection in chosen.selections)
                failure = chosen.failure
                found.append(
                    _planned(move.instance, hosts, *(() if failure is None else (failure.code, failure.reason)))
                )
        finally:
            choices.release()
        return found

    async def _chosen(
        self, pending: PendingAction, one: InstanceOnHost, located: Located, blocked: Mapping[str, str]
    ) -> Chosen:
        """Hosts for one instance, or why there are none. It never waits, so a slice is planned on one state."""
        result = check_action(pending, one.known, self._selector.config)
        if isinstance(result, Refusal):
            return Chosen(failure=result)
        if one.source.uuid not in located.page.hosts.get(one.instance_uuid, ()):
            return Chosen(failure=Refusal(code="instance.elsewhere", reason="placement knows it on another host"))
        found = await self._destinations.choose(pending, one.known, located, planned=blocked)
        return Chosen(failure=Refusal(code=found.code, reason=found.reason)) if isinstance(found, Retry) else found


def _group_of(one: InstanceOnHost) -> GroupKey | None:
    built = one.known.build_request
    return None if built is None or built.server_group is None else (built.project_id, built.server_group.uuid)


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
