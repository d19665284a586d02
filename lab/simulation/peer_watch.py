"""The rules of server groups, hints and quotas, judged from the requests and from placement's allocations.

Nothing of the product's own counting is used: not who it takes for a member, nor its sum of what a project holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise

from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import CellBuild
from bus.contracts.placement import INSTANCES, GroupPolicy, Restate
from cell_conductor.state.instance import State
from cell_conductor.store.memory import MemoryInstanceTable
from lab.simulation.plan import Order, Plan
from lab.simulation.watch import Breach, is_open
from placement_worker.domain.migration import MIGRATION_TYPE
from placement_worker.store.memory_table import ConsumerRow, MemoryPlacementTable
from scheduler_worker.config import DEFAULT_FLAVORS

OVER_QUOTA = "quota.exceeded"
OVERLAP_S = 0.1  # between the reads of a transaction of placement and its commit
HOSTLESS = (State.OFFLOADED, State.TRANSFERRED)


def resources_of_flavor(name: str) -> dict[str, int]:
    """The amounts that a flavor requests, by class."""
    flavor = DEFAULT_FLAVORS[name]
    requested = {"VCPU": flavor.vcpus, "MEMORY_MB": flavor.memory_mb, "DISK_GB": flavor.disk_gb}
    specs = {key.removeprefix("resources:"): int(amount) for key, amount in flavor.extra_specs.items()}
    return {resource: amount for resource, amount in (requested | specs).items() if amount}


class PeerWatch:
    """Looks after every commit of placement and of a cell, and at what schedulers publish."""

    def __init__(
        self,
        plan: Plan,
        placement: MemoryPlacementTable,
        cells: Mapping[str, MemoryInstanceTable],
        now: Callable[[], float],
    ) -> None:
        self._plan = plan
        self._placement = placement
        self._cells = cells
        self._now = now
        self._orders: dict[str, Order] = {}
        self._projects: dict[str, None] = {}  # that ever requested a build
        self._since: dict[str, float] = {}  # when each was first requested
        self._seen: dict[str, ConsumerRow] = {}
        self._hosts: dict[str, list[tuple[float, str | None]]] = {}  # where each was, and since when
        self._held: dict[str, list[tuple[float, Counter[str]]]] = {}  # what each project held, and since when
        self._sources: dict[str, dict[str, Counter[str]]] = {}  # of each project's moves and restatements
        self._restated: dict[str, None] = {}  # instances that a recovery has found
        self._fenced: dict[str, None] = {}  # hosts that ever were
        # Instances that ever had no host: a scheduler may know it late, or no more, or have it between two hosts.
        self._offloaded: dict[str, None] = {}
        self.exempt: Collection[str] = ()  # of whom a restored database knows an old truth: no rule can be kept
        self.refused: dict[str, None] = {}  # refused for their project's quota

    def requested(self, order: Order) -> None:
        """A client is about to ask for a build."""
        self._orders.setdefault(order.uuid, order)
        self._projects[order.project] = None
        self._since.setdefault(order.uuid, self._now())

    def restate(self, message: Restate) -> None:
        """A machine runs there, whatever the quota and its group are."""
        self._restated[message.consumer] = None

    # --- placement

    def __call__(self) -> None:
        """After a commit of placement. Raises Breach."""
        consumers = self._placement.consumers
        changed = [uuid for uuid, kept in consumers.items() if self._seen.get(uuid) is not kept]
        gone = [uuid for uuid in self._seen if uuid not in consumers]
        if not changed and not gone:
            return
        self._seen = dict(consumers)
        for uuid in (*changed, *gone):
            host = self._root(uuid)
            where = self._hosts.setdefault(uuid, [])
            if host != (where[-1][1] if where else None):
                where.append((self._now(), host))
        self._quotas()
        self._groups({uuid: host for uuid, where in self._hosts.items() if (host := where[-1][1] if where else None)})

    def _root(self, uuid: str) -> str | None:
        kept = self._placement.consumers.get(uuid)
        holding = kept.consumer.allocations if kept is not None else {}
        return next((self._placement.providers[provider].root for provider in holding), None)

    def _quotas(self) -> None:
        """A project's total grows only within its quota, but for what moves keep on their sources, as in Nova, and what
        a recovery restates. A move takes its destination beside its source, and is held to its quota with what it needs
        more. Raises Breach.
        """
        claimed: dict[str, Counter[str]] = {}
        sources: dict[str, dict[str, Counter[str]]] = {}
        for uuid, kept in self._placement.consumers.items():
            # Other clients claim by themselves, without limits: a claim carries those that it is held to.
            if not kept.consumer.allocations or kept.consumer.project_id not in self._projects:
                continue
            amounts = Counter[str]()
            for resources in kept.consumer.allocations.values():
                amounts.update(resources)
            if kept.consumer.consumer_type != MIGRATION_TYPE:
                amounts[INSTANCES] = 1
            if kept.consumer.consumer_type == MIGRATION_TYPE or uuid in self._restated:
                sources.setdefault(kept.consumer.project_id, {})[uuid] = amounts
            else:
                claimed.setdefault(kept.consumer.project_id, Counter()).update(amounts)
        for project in sorted(claimed.keys() | sources.keys() | self._held.keys()):
            known, now = self._held.setdefault(project, []), claimed.get(project, Counter())
            kept_before, kept_now = self._sources.get(project, {}), sources.get(project, {})
            before = known[-1][1] if known else Counter[str]()
            total = sum(kept_now.values(), now)
            # A source that this commit has changed may have come after what it was held to; a recovery is held to none.
            held = sum((kept_now[one] for one in kept_now if kept_before.get(one) == kept_now[one]), now)
            self._sources[project] = kept_now
            if not known or before != total:
                known.append((self._now(), total))
            for name, most in self._plan.quota_of(project).items():
                if held[name] > max(most, before[name]):
                    raise Breach("quota", f"{project} holds {held[name]} {name} of {most}")

    def _groups(self, hosts: Mapping[str, str]) -> None:
        """Members of a group with a hard rule, on any host. Raises Breach."""
        members: dict[str, list[tuple[str, str]]] = {}
        self._fenced |= dict.fromkeys(host for table in self._cells.values() for host in table.fences)
        for uuid, host in hosts.items():
            order = self._orders.get(uuid)
            if order is not None and order.group is not None and uuid not in {*self.exempt, *self._restated}:
                members.setdefault(order.group.uuid, []).append((uuid, host))
        for mates in members.values():
            group = self._orders[mates[0][0]].group
            assert group is not None
            counted = Counter(host for _, host in mates)
            if group.policy is GroupPolicy.ANTI_AFFINITY and max(counted.values()) > group.max_per_host:
                raise Breach("apart", f"of the group {group.uuid}, {group.max_per_host} a host: {mates}")
            # Its members leave a fenced host one after the other, or are still there when it comes back.
            if group.policy is GroupPolicy.AFFINITY and len(counted.keys() - self._fenced.keys()) > 1:
                raise Breach("together", f"of the group {group.uuid}: {mates}")

    # --- cells

    def machines(self) -> None:
        """After a commit of a cell: what is active keeps the rules too. Raises Breach."""
        for table in self._cells.values():
            self._offloaded |= {uuid: None for uuid, one in table.instances.items() if one.state in HOSTLESS}
        self._groups(
            {
                uuid: instance.host_uuid
                for table in filter(is_open, self._cells.values())
                for uuid, instance in table.instances.items()
                if instance.state is State.ACTIVE and instance.host_uuid is not None
            }
        )

    # --- schedulers

    def sent(self, build: CellBuild) -> None:
        """A build is sent to a cell: its hosts, alternates too, are those that its hints allow. Raises Breach."""
        uuid = build.spec.instance_uuid
        order = self._orders.get(uuid)
        if order is None:
            return
        chosen = [selection.host_uuid for selection in build.selections]
        taken = {host for one in order.apart_from if (host := self._stayed(one, self._since[uuid])) in chosen}
        if taken:
            raise Breach("hints", f"{uuid} is to keep away from {sorted(taken)}, and is sent to {chosen}")
        if order.together_with:
            near = {host for one in order.together_with for host in self._been(one, self._since[uuid])}
            if not near.issuperset(chosen):
                raise Breach("hints", f"{uuid} is to be on one of {sorted(near)}, and is sent to {chosen}")

    def _stayed(self, uuid: str, since: float) -> str | None:
        """The host on which it has been all the time since then."""
        at, host = self._hosts[uuid][-1] if self._hosts.get(uuid) else (0.0, None)
        return host if at < since else None

    def _been(self, uuid: str, since: float) -> Iterator[str]:
        """Every host on which it was at any time since then."""
        where = self._hosts.get(uuid, [])
        for number, (_, host) in enumerate(where):
            until = where[number + 1][0] if number + 1 < len(where) else self._now()
            if host is not None and until >= since:
                yield host

    def event(self, event: BuildEvent) -> None:
        """A request refused because of a quota would have passed it at some time since it was requested.

        Raises Breach.
        """
        if event.code != OVER_QUOTA or event.state is not BuildState.FAILED or event.instance_uuid in self.refused:
            return
        uuid = event.instance_uuid
        self.refused[uuid] = None
        order = self._orders[uuid]
        # A gang's members are counted together, also those that hold nothing in the end.
        alone = {INSTANCES: 1, **resources_of_flavor(order.flavor)}
        requested = {name: order.count * amount for name, amount in alone.items()}
        quota = self._plan.quota_of(order.project)
        offloaded = Counter[str]()
        for one in filter(self._orders.__contains__, self._offloaded):
            if self._orders[one].project == order.project:
                offloaded.update({INSTANCES: 1, **resources_of_flavor(self._orders[one].flavor)})
        for held in self._held_since(order.project, self._since[uuid]):
            held.update(offloaded)
            if any(held[name] + requested.get(name, 0) > most for name, most in quota.items() if name in requested):
                return
        raise Breach("quota_refused", f"{uuid} of {order.project} was refused, and {quota} had room for {requested}")

    def _held_since(self, project: str, since: float) -> Iterator[Counter[str]]:
        """The project's total at each moment since then, with what was released in OVERLAP_S before it: a claim that is
        committed after a release which it had not seen refuses as if it had come first.
        """
        known = [(0.0, Counter[str]()), *self._held.get(project, [])]
        for number, (at, held) in enumerate(known):
            if number + 1 == len(known) or known[number + 1][0] >= since:
                counted = held.copy()  # its receiver may add to it
                for (_, before), (then, after) in pairwise(known[:number]):
                    if then >= at - OVERLAP_S:
                        counted += before - after  # what it grew by is in `held`
                yield counted

    def forget_refusals(self, instances: Iterable[str]) -> None:
        """Their scheduler's database was set back to before these requests: their clients may have them granted now."""
        for uuid in instances:
            self.refused.pop(uuid, None)

    # --- at rest

    def unsettled(self) -> Iterator[str]:
        """A refused request holds nothing, unless its scheduler's database was set back to before the refusal."""
        for uuid in self.refused:
            if uuid not in self.exempt and self._root(uuid) is not None:
                yield f"quota_refused: {uuid} was refused and holds something"
