"""The state of a group of claims, or of writes of the REST API, while it is decided: the loaded rows, overlaid by the
decisions so far.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.placement import (
    Claim,
    ClaimAllResult,
    ClaimOutcome,
    ClaimResult,
    Migration,
    ReleaseResult,
    RestateResult,
    RevertResult,
    SwapResult,
)
from placement_worker.domain.migration import allocations_at_source, total_of
from placement_worker.domain.server_groups import (
    GroupCount,
    counted_by_class,
    decisive_hosts,
    group_key,
    hosts_of,
    usage_by_class,
)
from placement_worker.domain.values import (
    NOTHING,
    ClaimedProvider,
    ConsumerState,
    Fit,
    GroupKey,
    Members,
    ProviderAllocations,
    fit,
)

NO_GROUPS: Mapping[GroupKey, Members] = {}
_UNTOUCHED: Mapping[str, int] = {}

# (provider, class) pairs with too little free.
Lacking = tuple[tuple[str, str], ...]
ClaimReply = ClaimResult | ClaimAllResult | ReleaseResult | RestateResult | RevertResult | SwapResult

# The feed's number in the reply to an item that has written something, until the transaction has one.
CHANGED = 1


class Decision(Struct, frozen=True):
    """The reply to every item, and the rows to write. Each row occurs once and has absolute values.

    replies: with CHANGED for the number in the feed, and without the conflicting consumers. consumers: the new state of
    each changed consumer; None: the row is deleted. used, generations: the new values of each changed provider. joined:
    the new members of each server group. lost: {place among the claims: (consumer, what it lacked)} of the first claims
    that found no capacity at a provider, at most MAX_LOST_NAMED: their conflicting consumers are looked up for these
    alone. above: the (provider, class) that may be above its capacity, as it runs there.
    """

    replies: list[ClaimReply]
    consumers: dict[str, ConsumerState | None]
    used: dict[str, dict[str, int]]
    generations: dict[str, int]
    joined: dict[GroupKey, dict[str, None]] = {}
    lost: dict[int, tuple[str, Lacking]] = {}
    above: Set[tuple[str, str]] = frozenset()


class AnyGeneration(Struct, frozen=True):
    """The write names no consumer generation, as all writes of the REST API before microversion 1.28."""


ANY = AnyGeneration()
Expected = int | None | AnyGeneration


class ConsumerWrite(Struct, frozen=True):
    """The new allocations of one consumer; an empty holding removes it.

    expects: the generation that the consumer must have; None: it must hold nothing. consumer_type: None before 1.38; an
    existing consumer then keeps its type, and a new one has none. attempt: no later one may have written; None: any.
    """

    consumer: str
    allocations: ProviderAllocations
    project_id: str
    user_id: str
    consumer_type: str | None = None
    expects: Expected = ANY
    attempt: int | None = None


class ClaimLedger:
    """The state that the items of one group read and change. Each call of `claims.decide` makes one.

    joined: the new members of each server group, in the order of their claims. projects: the total that the consumers
    of each project with limits hold. changed_consumers, used, generations: the differences from the loaded rows. gang:
    the consumers whose claims are tried together, empty outside of a gang's trial.
    """

    def __init__(
        self,
        consumers: Mapping[str, ConsumerState],
        providers: Mapping[str, ClaimedProvider],
        known_classes: Mapping[str, int],
        foreign: Collection[str] = frozenset(),
        groups: Mapping[GroupKey, Members] = NO_GROUPS,
    ) -> None:
        self.foreign = foreign
        self._groups = groups
        self.joined: dict[GroupKey, dict[str, None]] = {}
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
        self.claims = 0  # how many are decided, or are about to be
        self.lost: dict[int, tuple[str, Lacking]] = {}
        self.above = set[tuple[str, str]]()

    def decision(self, replies: list[ClaimReply]) -> Decision:
        """The replies, and the rows to write."""
        return Decision(
            replies, self.changed_consumers, self.used, self.generations, self.joined, self.lost, self.above
        )

    def trial(self, gang: Collection[str]) -> ClaimLedger:
        """Return a copy on which the claims of a gang are tried, so that the original stays as it is. gang: the
        consumers.
        """
        copy = ClaimLedger(self._consumers, self.providers, self.known_classes, self.foreign, self._groups)
        copy.joined = {key: dict(members) for key, members in self.joined.items()}
        copy._changes = list(self._changes)
        copy.projects = {project: dict(held) for project, held in self.projects.items()}
        copy.changed_consumers = dict(self.changed_consumers)
        copy.used = {uuid: dict(used) for uuid, used in self.used.items()}
        copy.generations = dict(self.generations)
        copy.gang = gang
        copy.claims, copy.lost, copy.above = self.claims, self.lost, self.above
        return copy

    def adopt(self, trial: ClaimLedger) -> None:
        """Take over the decisions of the trial."""
        self.joined, self.projects = trial.joined, trial.projects
        self.changed_consumers, self._changes = trial.changed_consumers, trial._changes
        self.used, self.generations = trial.used, trial.generations

    def consumer(self, uuid: str) -> ConsumerState | None:
        """The consumer after the decisions so far; None when it does not exist."""
        if uuid in self.changed_consumers:
            return self.changed_consumers[uuid]
        return self._consumers.get(uuid)

    def other_members(self, claim: Claim, gang: Collection[str] = ()) -> dict[str, int]:
        """Return how many members of the claim's server group each host has that matters to the claim, without its own
        consumer and these. gang: the one that is tried, because its claims are not committed.

        A migration is a member as long as it holds allocations on the source, so that the instance may return there.
        The claim's own migration is not counted either.
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
                # Its hosts now, by what it holds, as of every other member.
                allocations = allocations_of(self.changed_consumers[consumer])
                group.put(consumer, hosts_of(self.providers[uuid] for uuid in allocations))
        group.seen = len(self._changes)
        own = {claim.consumer} if claim.migration is None else {claim.consumer, claim.migration.uuid}
        return group.without(own.union(gang), decisive_hosts(claim))

    def join(self, claim: Claim) -> None:
        """Record that the claim's consumer is a member of its server group. Its row is written next."""
        key = group_key(claim)
        if key is not None:
            self.joined.setdefault(key, {})[claim.consumer] = None

    def join_migration(self, claim: Claim, migration: str) -> None:
        """Record that the migration is a member of the claim's server group, if the claim's consumer was one where it
        was. Its row is written next.
        """
        key = group_key(claim)
        if key is not None:
            joined = self.joined.setdefault(key, {})
            if claim.consumer in joined or self._groups.get(key, {}).get(claim.consumer):
                joined[migration] = None

    def source_allocations(
        self, migration: Migration, of_instance: ProviderAllocations, of_migration: ProviderAllocations
    ) -> ProviderAllocations:
        """The part of a move's source that the instance and its migration still hold."""
        named = (uuid for allocations in (migration.source, of_instance, of_migration) for uuid in allocations)
        roots = {uuid: self.providers[uuid].root for uuid in named if uuid in self.providers}
        return allocations_at_source(migration.source, of_instance, of_migration, roots)

    def has_foreign_provider(self, allocations: ProviderAllocations) -> bool:
        """Whether one of these providers belongs to another cell."""
        return any(uuid in self.foreign for uuid in allocations)

    def write(self, uuid: str, consumer: ConsumerState | None) -> None:
        """Record the new state of a consumer; None: its row is deleted."""
        self._count(self.consumer(uuid), -1)
        self._count(consumer, 1)
        self.changed_consumers[uuid] = consumer
        self._changes.append(uuid)

    def _count(self, consumer: ConsumerState | None, sign: int) -> None:
        """Add a consumer's amounts to the total of its project, if the project has limits; sign -1 subtracts them."""
        if consumer is not None and consumer.project_id in self.projects:
            held = self.projects[consumer.project_id]
            for name, amount in counted_by_class(consumer).items():
                held[name] = held.get(name, 0) + sign * amount

    def past_limit(self, claim: Claim, after: ProviderAllocations, current: ProviderAllocations) -> str:
        """Describe the first class of which the project would exceed its limit when the consumer holds `after` instead
        of `current`; empty when there is none.

        A claim that does not increase the consumer's amount of a class is allowed, and what a move keeps on its source
        is not compared, as for a resize in Nova. A revert has no limit: all of its source counts already.
        """
        now, before = self.projects.get(claim.project_id, {}), usage_by_class(current)
        wanted = usage_by_class(after)
        for name, limit in sorted(claim.limits.items()):
            total, more = now.get(name, 0), wanted.get(name, 0) - before.get(name, 0)
            if more > 0 and total + more > limit:
                return f"{name}: {total} of {limit} held, {more} more requested"
        return ""

    def fit(self, uuid: str, name: str, amount: int, more: int) -> Fit:
        """Whether one allocation may have this amount when the usage of a class of a provider grows by `more`."""
        inventory = self.providers[uuid].inventories.get(name)
        used = self.used.get(uuid, _UNTOUCHED).get(name, inventory and inventory.used)
        return fit(amount, inventory, used or 0, more)

    def move(self, before: ProviderAllocations, after: ProviderAllocations) -> None:
        """Change the usage from some allocations of a consumer to others, and increment the generation of each provider
        once.
        """
        self.shift(before, after)
        self.bump({**after, **before})

    def shift(self, before: ProviderAllocations, after: ProviderAllocations) -> None:
        """Change the usage from some allocations of a consumer to others, and leave the generations as they are."""
        for allocations, sign in ((after, 1), (before, -1)):
            for uuid, resources in allocations.items():
                provider = self.providers[uuid]
                touched = self.used.get(uuid)
                if touched is None:
                    touched = self.used[uuid] = {}
                    self.generations.setdefault(uuid, provider.generation)
                for name, amount in resources.items():
                    used = touched[name] if name in touched else provider.inventories[name].used
                    touched[name] = used + sign * amount

    def bump(self, uuids: Iterable[str]) -> None:
        """Increment the generation of each of these providers, whose usage was changed."""
        for uuid in uuids:
            self.generations[uuid] += 1

    def allocations_of(self, uuid: str) -> ProviderAllocations:
        """The allocations of a consumer after the decisions so far."""
        return allocations_of(self.consumer(uuid))

    def is_expected(self, write: ConsumerWrite) -> bool:
        """Whether the consumer has the generation that the write names, and no later attempt has written it."""
        known = self.consumer(write.consumer)
        if known is not None and write.attempt is not None and known.attempt > write.attempt:
            return False
        generation = known.generation if known is not None and known.allocations else None
        return write.expects in (ANY, generation)

    def totals(self, writes: Sequence[ConsumerWrite]) -> tuple[ProviderAllocations, ProviderAllocations]:
        """The sums that all these consumers hold before and after the writes, with which capacities are compared."""
        return total_of(self.allocations_of(write.consumer) for write in writes), total_of(
            write.allocations for write in writes
        )

    def replace(self, writes: Sequence[ConsumerWrite], *, bump_previous: bool) -> None:
        """Record that each consumer holds what its write says from now on, under its next generation. A consumer that
        is left with nothing keeps the number of its ended attempts, so that a late claim of an old one cannot create it
        again.

        bump_previous: increment the generations of the providers, too, that a consumer with new allocations has left.
        """
        written: dict[str, None] = {}  # each provider once, in a stated order
        for write in writes:
            known = self.consumer(write.consumer)
            before, wanted = allocations_of(known), write.allocations
            self.shift(before, wanted)
            written.update(dict.fromkeys({**wanted, **before} if bump_previous else wanted or before))
            if wanted:
                old = known or ConsumerState(0, 0, "", "", "")
                # What is written over ended attempts is not of their type, nor the claim of their claim owner: a late
                # release by that owner would give the room away.
                kind, claim_owner = (old.consumer_type, old.claim_owner) if old.allocations else ("", "")
                kind = kind if write.consumer_type is None else write.consumer_type
                attempt = max(write.attempt or 0, old.attempt)
                owner = (write.project_id, write.user_id, kind)
                self.write(write.consumer, ConsumerState(old.generation + 1, attempt, *owner, wanted, claim_owner))
            elif known is not None and known.allocations:
                self.empty(write.consumer, known)
        self.bump(written)

    def empty(self, uuid: str, known: ConsumerState) -> None:
        """Record that a consumer holds nothing any more: the number of its ended attempts stays, if it had any."""
        self.write(uuid, replace(known, allocations=NOTHING) if known.attempt else None)

    def generations_of(self, allocations: ProviderAllocations) -> dict[str, int]:
        """Return {provider: generation} of the providers in these allocations, after the decisions so far."""
        generations = self.generations
        return {
            uuid: generations[uuid] if uuid in generations else self.providers[uuid].generation for uuid in allocations
        }


def allocations_of(known: ConsumerState | None) -> ProviderAllocations:
    """The allocations of a consumer, empty when the consumer does not exist."""
    return known.allocations if known is not None else NOTHING


def reply_form(allocations: ProviderAllocations) -> dict[str, dict[str, int]]:
    """Allocations as replies show them."""
    return {uuid: dict(amounts) for uuid, amounts in allocations.items()}


def fits(
    ledger: ClaimLedger,
    wanted: ProviderAllocations,
    before: ProviderAllocations,
    after: ProviderAllocations,
    spec_generations: Mapping[str, int] = _UNTOUCHED,
) -> ClaimOutcome:
    """Return whether allocations fit. PROVIDER_REMOVED takes precedence over NO_CAPACITY, that over
    CONFLICT, and CONFLICT over INVALID.

    before, after: what all consumers of the item hold together, with which capacities are compared (microversion 1.13).
    spec_generations: of the providers when they were chosen.
    """
    invalid = False
    conflicting: set[str] = set()
    for uuid, resources in wanted.items():
        provider = ledger.providers.get(uuid)
        if provider is None or uuid in ledger.foreign:
            return ClaimOutcome.PROVIDER_REMOVED
        if not resources:
            invalid = True
        if spec_generations.get(uuid, provider.spec_generation) != provider.spec_generation:
            conflicting.add(uuid)
    for uuid, resources in wanted.items():
        held, total = before.get(uuid, _UNTOUCHED), after[uuid]
        for name, amount in resources.items():
            fit = ledger.fit(uuid, name, amount, total[name] - held.get(name, 0))
            # Inventory that was removed after the host was chosen has perhaps moved to a child provider: a conflict,
            # not too little capacity.
            if fit is Fit.NO_CAPACITY or (
                fit is Fit.NO_INVENTORY and name in ledger.known_classes and uuid not in conflicting
            ):
                return ClaimOutcome.NO_CAPACITY
            invalid = invalid or fit is not Fit.FITS
    if conflicting:
        return ClaimOutcome.CONFLICT
    return ClaimOutcome.INVALID if invalid else ClaimOutcome.CLAIMED
