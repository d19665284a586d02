"""The running state of a group of claims: the loaded rows, overlaid by the decisions so far."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from bus.contracts.placement import Claim, ClaimOption, Migration
from placement_worker.domain.moves import source_of
from placement_worker.domain.server_groups import GroupCount, counted_by_class, group_key, held_by_class
from placement_worker.domain.values import NOTHING, ClaimedProvider, ConsumerState, GroupKey, Holding, Members


class ClaimLedger:
    """The state that the items of one group see and change. Made for one call of `claims.decide`.

    joined: {server group: {consumer: the host that it was claimed on}}. projects: the total that the consumers of each
    project with limits hold. changed_consumers, used, generations: the differences from the loaded rows. gang: the
    consumers whose claims are tried together.
    """

    def __init__(
        self,
        consumers: Mapping[str, ConsumerState],
        providers: Mapping[str, ClaimedProvider],
        known_classes: Mapping[str, int],
        foreign: Collection[str],
        groups: Mapping[GroupKey, Members],
    ) -> None:
        self.foreign = foreign
        self._groups = groups
        self.joined: dict[GroupKey, dict[str, str]] = {}
        self._counts: dict[GroupKey, GroupCount] = {}
        self._changes: list[str] = []  # consumers in the order of their changes; one may be in it several times
        self.projects: dict[str, dict[str, int]] = {}
        self._consumers = consumers
        self.providers = providers
        self.known_classes = known_classes
        self.changed_consumers: dict[str, ConsumerState | None] = {}
        self.used: dict[str, dict[str, int]] = {}
        self.generations: dict[str, int] = {}
        self.gang: Collection[str] = ()

    def trial(self, gang: Collection[str]) -> ClaimLedger:
        """A copy on which a gang's claims (of these consumers) are tried; its decisions are not
        made in the original.
        """
        copy = ClaimLedger(self._consumers, self.providers, self.known_classes, self.foreign, self._groups)
        copy.joined = {key: dict(hosts) for key, hosts in self.joined.items()}
        copy._changes = list(self._changes)
        copy.projects = {project: dict(held) for project, held in self.projects.items()}
        copy.changed_consumers = dict(self.changed_consumers)
        copy.used = {uuid: dict(used) for uuid, used in self.used.items()}
        copy.generations = dict(self.generations)
        copy.gang = gang
        return copy

    def adopt(self, trial: ClaimLedger) -> None:
        """Take the decisions of the trial over."""
        self.joined, self.projects = trial.joined, trial.projects
        self.changed_consumers, self._changes = trial.changed_consumers, trial._changes
        self.used, self.generations = trial.used, trial.generations

    def consumer(self, uuid: str) -> ConsumerState | None:
        """A consumer as it is by now; None: there is none."""
        if uuid in self.changed_consumers:
            return self.changed_consumers[uuid]
        return self._consumers.get(uuid)

    def others(self, claim: Claim) -> dict[str, int]:
        """How many members of the claim's server group each host has, without the claim's own consumer.

        A migration is a member as long as it holds the source, so that the instance may return there; it does not stand
        in its own instance's way.
        """
        key = group_key(claim)
        if key is None:
            return {}
        group = self._counts.get(key)
        if group is None:
            group = self._counts[key] = GroupCount(self._groups.get(key, {}))
        joined = self.joined.get(key, {})
        for consumer in self._changes[group.seen :]:
            if consumer in group.hosts or consumer in joined:
                changed = consumer in self.changed_consumers
                group.put(consumer, self._hosts_now(consumer, joined.get(consumer)) if changed else ())
        group.seen = len(self._changes)
        return group.without([claim.consumer, *([] if claim.migration is None else [claim.migration.uuid])])

    def outside(self, claim: Claim, others: dict[str, int]) -> dict[str, int]:
        """Of the other members those that are not of the gang that is tried: its own choices are not yet anywhere."""
        key = group_key(claim)
        return others if key is None or not self.gang else self._counts[key].without({claim.consumer, *self.gang})

    def _hosts_now(self, consumer: str, claimed: str | None) -> Sequence[str]:
        """Where a consumer is that this group has changed: by its claim, or where a swap has moved it."""
        roots = {self.providers[uuid].root for uuid in holding_of(self.changed_consumers[consumer])}
        return (claimed,) if claimed in roots else sorted(roots)

    def join(self, claim: Claim, host: str | None) -> None:
        """The claim's consumer is on this host now, for its server group."""
        key = group_key(claim)
        if key is not None and host is not None:
            self.joined.setdefault(key, {})[claim.consumer] = host
            self._changes.append(claim.consumer)

    def join_migration(self, claim: Claim, migration: str) -> None:
        """The migration is where the claim's consumer was, for its server group."""
        key = group_key(claim)
        if key is not None:
            joined = self.joined.setdefault(key, {})
            hosts = self._groups.get(key, {}).get(claim.consumer, ())
            host = joined.get(claim.consumer) or next(iter(hosts), None)
            if host is not None:
                joined[migration] = host
                self._changes.append(migration)

    def source_of(self, migration: Migration, held: Holding, kept: Holding) -> Holding:
        """The amount that the source of a move takes once it has begun."""
        named = (uuid for holding in (migration.source, held, kept) for uuid in holding)
        roots = {uuid: self.providers[uuid].root for uuid in named if uuid in self.providers}
        return source_of(migration.source, held, kept, roots)

    def is_others(self, holding: Holding) -> bool:
        """Whether any of these providers is another cell's."""
        return bool(self.foreign) and any(uuid in self.foreign for uuid in holding)

    def used_of(self, uuid: str, name: str) -> int:
        """How much of one class of a provider is used by now."""
        touched = self.used.get(uuid)
        if touched is not None and name in touched:
            return touched[name]
        return self.providers[uuid].inventories[name].used

    def write(self, uuid: str, consumer: ConsumerState | None) -> None:
        """Put a consumer down as changed; None: it holds nothing and is forgotten."""
        if self.projects:
            self._count(self.consumer(uuid), -1)
            self._count(consumer, 1)
        self.changed_consumers[uuid] = consumer
        self._changes.append(uuid)

    def _count(self, consumer: ConsumerState | None, sign: int) -> None:
        """The total of a project with limits follows from its consumers."""
        if consumer is not None and consumer.project_id in self.projects:
            held = self.projects[consumer.project_id]
            for name, amount in counted_by_class(consumer).items():
                held[name] = held.get(name, 0) + sign * amount

    def past_limit(self, claim: Claim, option: ClaimOption, held: Holding) -> str:
        """The class of which the project would hold too much; empty when nothing.

        A total that does not grow is allowed.
        """
        now, before, wanted = (
            self.projects.get(claim.project_id, {}),
            held_by_class(held),
            held_by_class(option.allocations),
        )
        for name, limit in sorted(claim.limits.items()):
            more = wanted.get(name, 0) - before.get(name, 0)
            if more > 0 and now.get(name, 0) + more > limit:
                return f"{name}: {now.get(name, 0)} of {limit} held, {more} more requested"
        return ""

    def move(self, before: Holding, after: Holding) -> None:
        """Usage follows one consumer's holding; every provider named moves its generation once."""
        for uuid, resources in after.items():
            self._touch(uuid, resources, 1)
        for uuid, resources in before.items():
            self._touch(uuid, resources, -1, again=uuid in after)

    def _touch(self, uuid: str, resources: Mapping[str, int], sign: int, *, again: bool = False) -> None:
        provider = self.providers[uuid]
        touched = self.used.get(uuid)
        if touched is None:
            touched = self.used[uuid] = {}
        for name, amount in resources.items():
            used = touched[name] if name in touched else provider.inventories[name].used
            touched[name] = used + sign * amount
        if not again:
            self.generations[uuid] = self.generations.get(uuid, provider.generation) + 1

    def generations_of(self, holding: Holding) -> dict[str, int]:
        """{provider: its generation by now} of what is held."""
        generations = self.generations
        return {uuid: generations[uuid] if uuid in generations else self.providers[uuid].generation for uuid in holding}


def holding_of(known: ConsumerState | None) -> Holding:
    """The allocations of a consumer; nothing, where it does not exist."""
    return known.holding if known is not None else NOTHING
