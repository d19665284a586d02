"""Decides a group of claims, releases and swaps, in order, against the rows that were loaded and locked for them.

Two generations (Placement has one): a provider's `generation` moves with every write, allocations included; its `shape`
only with inventory, traits, aggregates and parentage. A claim never conflicts because of usage alone: it is `raced`
when the shape it was chosen for is gone, and `full` when it does not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from bus.contracts.placement import (
    Change,
    Claim,
    ClaimAll,
    ClaimOption,
    ClaimOutcome,
    ConsumerAllocations,
    Migration,
    Release,
    Revert,
    Swap,
)
from placement_worker.domain.claim_verdict import ClaimVerdict, Decision
from placement_worker.domain.moves import MIGRATION_TYPE, amount_of, kept_beside, source_of, total_of
from placement_worker.domain.server_groups import (
    GroupCount,
    counted_by_class,
    group_key,
    held_by_class,
    permitted,
    visible_members,
)
from placement_worker.domain.values import NOTHING, ClaimedProvider, ConsumerState, GroupKey, Holding, Members

ClaimItem = Claim | ClaimAll | Release | Revert | Swap

# The outcome of a claim none of whose options was taken: the most hopeful of the options' own outcomes.
_HOPE = (
    ClaimOutcome.RACED,
    ClaimOutcome.OVER_LIMIT,
    ClaimOutcome.FULL,
    ClaimOutcome.RULED_OUT,
    ClaimOutcome.GONE,
    ClaimOutcome.INVALID,
)
# The code at the head of the reason when a cell names what another cell has.
OF_ANOTHER_CELL = "claim.foreign_cell: of another cell"
_NO_AMOUNTS: Mapping[str, int] = {}
_CLAIMED, _FULL, _GONE = ClaimOutcome.CLAIMED, ClaimOutcome.FULL, ClaimOutcome.GONE
_INCOMPLETE = ClaimVerdict(outcome=ClaimOutcome.INCOMPLETE)


def decide(
    items: Sequence[ClaimItem],
    consumers: Mapping[str, ConsumerState],
    providers: Mapping[str, ClaimedProvider],
    known_classes: Mapping[str, int],
    foreign: Collection[str] = frozenset(),
    *,
    groups: Mapping[GroupKey, Members] | None = None,
    projects: Mapping[str, Mapping[str, int]] | None = None,
) -> Decision:
    """Evaluate a group in order; each item sees what the ones before it did.

    foreign: providers of other cells than the requester's. For it they are gone, and a consumer that holds something
    of them is another's. groups: the members of every server group that an item names. projects: what the
    consumers of each project whose claims have limits hold together. Both are locked.
    `consumers` and `providers` hold every row that an item names or a named consumer holds; absent = does not exist.
    """
    ledger = _Ledger(consumers, providers, known_classes, foreign, groups or {})
    ledger.projects.update({project: dict(held) for project, held in (projects or {}).items()})
    verdicts: list[ClaimVerdict] = []
    for item in items:
        if isinstance(item, Claim):
            verdicts.append(_claim(ledger, item))
        elif isinstance(item, ClaimAll):
            verdicts.append(_claim_all(ledger, item))
        elif isinstance(item, Release):
            verdicts.append(_release(ledger, item))
        elif isinstance(item, Revert):
            verdicts.append(_revert(ledger, item))
        else:
            assert isinstance(item, Swap)
            verdicts.append(_swap(ledger, item))
    return Decision(verdicts, ledger.changed_consumers, ledger.used, ledger.generations, ledger.joined)


def changes_of(decision: Decision) -> list[Change]:
    """The feed's words for a decision: usage merged per provider, numbers still to be given."""
    return [
        Change(sequence=0, provider=uuid, generation=generation, used=decision.used[uuid])
        for uuid, generation in decision.generations.items()
    ]


def may_be_new(claim: Claim) -> bool:
    """Whether a claim may be of a consumer that holds nothing."""
    # A release_first that found nothing to release has what it wanted: it is being repeated after a crash.
    return claim.consumer_generation is None or claim.release_first


class _Ledger:
    """The running state of one group: what was loaded, overlaid by what has been decided so far."""

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

    def trial(self, gang: Collection[str]) -> _Ledger:
        """A copy on which a gang's claims (of these consumers) are tried; what it decides is not decided here."""
        copy = _Ledger(self._consumers, self.providers, self.known_classes, self.foreign, self._groups)
        copy.joined = {key: dict(hosts) for key, hosts in self.joined.items()}
        copy._changes = list(self._changes)
        copy.projects = {project: dict(held) for project, held in self.projects.items()}
        copy.changed_consumers = dict(self.changed_consumers)
        copy.used = {uuid: dict(used) for uuid, used in self.used.items()}
        copy.generations = dict(self.generations)
        copy.gang = gang
        return copy

    def adopt(self, trial: _Ledger) -> None:
        """Decide what was tried."""
        self.joined, self.projects = trial.joined, trial.projects
        self.changed_consumers, self._changes = trial.changed_consumers, trial._changes
        self.used, self.generations = trial.used, trial.generations

    def consumer(self, uuid: str) -> ConsumerState | None:
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
        roots = {self.providers[uuid].root for uuid in _holding(self.changed_consumers[consumer])}
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
        """What the source of a move takes that has begun."""
        named = (uuid for holding in (migration.source, held, kept) for uuid in holding)
        roots = {uuid: self.providers[uuid].root for uuid in named if uuid in self.providers}
        return source_of(migration.source, held, kept, roots)

    def is_others(self, holding: Holding) -> bool:
        """Whether something of this is another cell's."""
        return bool(self.foreign) and any(uuid in self.foreign for uuid in holding)

    def used_of(self, uuid: str, name: str) -> int:
        touched = self.used.get(uuid)
        if touched is not None and name in touched:
            return touched[name]
        return self.providers[uuid].inventories[name].used

    def write(self, uuid: str, consumer: ConsumerState | None) -> None:
        if self.projects:
            self._count(self.consumer(uuid), -1)
            self._count(consumer, 1)
        self.changed_consumers[uuid] = consumer
        self._changes.append(uuid)

    def _count(self, consumer: ConsumerState | None, sign: int) -> None:
        """What a project of limits holds follows its consumers."""
        if consumer is not None and consumer.project_id in self.projects:
            held = self.projects[consumer.project_id]
            for name, amount in counted_by_class(consumer).items():
                held[name] = held.get(name, 0) + sign * amount

    def past_limit(self, claim: Claim, option: ClaimOption, held: Holding) -> str:
        """What the project would hold too much of; empty when nothing. What does not grow is allowed."""
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
        generations = self.generations
        return {uuid: generations[uuid] if uuid in generations else self.providers[uuid].generation for uuid in holding}


def _claim(ledger: _Ledger, claim: Claim) -> ClaimVerdict:
    known = ledger.consumer(claim.consumer)
    held = known.holding if known is not None else NOTHING
    if ledger.is_others(held):
        return ClaimVerdict(outcome=ClaimOutcome.CONSUMER_CHANGED, reason=OF_ANOTHER_CELL)
    if known is not None and held and known.attempt == claim.attempt and known.project_id == claim.project_id:
        return _claimed_before(ledger, claim, known)
    if not _may_claim(known, claim):
        generation = known.generation if known is not None and held else None
        return ClaimVerdict(outcome=ClaimOutcome.CONSUMER_CHANGED, consumer_generation=generation)
    source = kept = NOTHING
    if claim.migration is not None:
        flaw = _migration_flaw(ledger, claim, held)
        if flaw is not None:
            return flaw
        kept = _holding(ledger.consumer(claim.migration.uuid))
        source = ledger.source_of(claim.migration, held, kept) if claim.release_first else held
    outcomes: list[ClaimOutcome] = []
    past = ""
    others = ledger.others(claim) if claim.server_group is not None else {}
    for number, option in enumerate(claim.options):
        outcome = _fits(ledger, option, total_of((held, kept)) if kept else held, source)
        if outcome is _CLAIMED and claim.server_group is not None:
            outcome = permitted(claim, option, others)
        if outcome is _CLAIMED and claim.limits and (past := ledger.past_limit(claim, option, held or source)):
            outcome = ClaimOutcome.OVER_LIMIT
        outcomes.append(outcome)
        if outcome is _CLAIMED:
            return _take(ledger, claim, known, number, tuple(outcomes), source=source)
    overall = next(hope for hope in _HOPE if hope in outcomes)
    if claim.release_first and known is not None and held:
        return _release_only(ledger, claim, known, overall, tuple(outcomes), source=source)
    members = visible_members(claim, ledger.outside(claim, others)) if ClaimOutcome.RULED_OUT in outcomes else {}
    generation = known.generation if known is not None and held else None
    reason = OF_ANOTHER_CELL if any(ledger.is_others(option.allocations) for option in claim.options) else past
    return ClaimVerdict(
        outcome=overall, outcomes=tuple(outcomes), consumer_generation=generation, reason=reason, members=members
    )


def _claim_all(ledger: _Ledger, item: ClaimAll) -> ClaimVerdict:
    """All or none. Each claim is tried, so that one answer names all that stand in the way."""
    consumers = frozenset(claim.consumer for claim in item.claims)
    if len(consumers) != len(item.claims) or any(one.release_first or one.migration for one in item.claims):
        wrong = ClaimVerdict(
            outcome=ClaimOutcome.INVALID, reason="claim_all: a consumer is named twice, releases first or moves"
        )
        return replace(wrong, of_gang=(wrong,) * len(item.claims))
    trial = ledger.trial(consumers)
    verdicts = tuple(_claim(trial, claim) for claim in item.claims)
    if all(verdict.outcome is _CLAIMED for verdict in verdicts):
        changed = any(verdict.changed for verdict in verdicts)
        ledger.adopt(trial)
        return ClaimVerdict(outcome=_CLAIMED, changed=changed, of_gang=verdicts)
    tried = tuple(_INCOMPLETE if verdict.changed else verdict for verdict in verdicts)
    return ClaimVerdict(outcome=ClaimOutcome.INCOMPLETE, of_gang=tried)


def _may_claim(known: ConsumerState | None, claim: Claim) -> bool:
    """Whether this attempt is the newest, and the consumer is still as the asker knew it (microversion 1.28)."""
    if known is not None and claim.attempt <= known.attempt:
        return False
    if known is None or not known.holding:
        return may_be_new(claim)
    return claim.consumer_generation == known.generation


def _claimed_before(ledger: _Ledger, claim: Claim, known: ConsumerState) -> ClaimVerdict:
    option = next((n for n, option in enumerate(claim.options) if option.allocations == known.holding), None)
    return ClaimVerdict(
        outcome=_CLAIMED,
        option=option,
        consumer_generation=known.generation,
        generations=ledger.generations_of(known.holding),
        holding=known.holding if option is None else NOTHING,
    )


def _migration_flaw(ledger: _Ledger, claim: Claim, held: Holding) -> ClaimVerdict | None:
    """Why the consumer cannot move under this migration; None: it can."""
    assert claim.migration is not None
    uuid = claim.migration.uuid
    if uuid == claim.consumer:
        return ClaimVerdict(
            outcome=ClaimOutcome.INVALID, reason="claim.migration: an instance is not its own migration"
        )
    migration = ledger.consumer(uuid)
    kept = _holding(migration)
    if ledger.is_others(kept):
        return ClaimVerdict(outcome=ClaimOutcome.CONSUMER_CHANGED, consumer=uuid, reason=OF_ANOTHER_CELL)
    if claim.release_first:
        # Of an alternate's claim: the migration holds the source of this very instance, or nothing of it is left over.
        taken = kept and migration is not None and migration.project_id != claim.project_id
    elif not held:
        return ClaimVerdict(outcome=ClaimOutcome.CONSUMER_CHANGED, reason="claim.nothing_to_move: it holds nothing")
    else:
        taken = kept
    reason = "claim.migration_in_use: another consumer of this uuid holds something"
    return ClaimVerdict(outcome=ClaimOutcome.CONSUMER_CHANGED, consumer=uuid, reason=reason) if taken else None


def _take(
    ledger: _Ledger,
    claim: Claim,
    known: ConsumerState | None,
    number: int,
    outcomes: tuple[ClaimOutcome, ...],
    *,
    source: Holding,
) -> ClaimVerdict:
    wanted = claim.options[number].allocations
    if claim.migration is not None:
        _keep_source(ledger, claim, kept_beside(source, wanted))
    ledger.move(known.holding if known is not None else NOTHING, wanted)
    if claim.server_group is not None:
        ledger.join(claim, claim.options[number].host)
    generation = 1 if known is None else known.generation + 1
    ledger.write(
        claim.consumer,
        ConsumerState(generation, claim.attempt, claim.project_id, claim.user_id, claim.consumer_type, wanted),
    )
    return ClaimVerdict(
        outcome=_CLAIMED,
        option=number,
        outcomes=outcomes,
        consumer_generation=generation,
        generations=ledger.generations_of(wanted),
        changed=True,
    )


def _keep_source(ledger: _Ledger, claim: Claim, wanted: Holding) -> None:
    """The migration holds this of the source from now on."""
    assert claim.migration is not None
    uuid = claim.migration.uuid
    known = ledger.consumer(uuid)
    held = _holding(known)
    if held == wanted:
        return
    ledger.join_migration(claim, uuid)
    ledger.move(held, wanted)
    generation = 1 if known is None else known.generation + 1
    ledger.write(
        uuid,
        ConsumerState(generation, claim.attempt, claim.project_id, claim.user_id, MIGRATION_TYPE, wanted)
        if wanted
        else None,
    )


def _release_only(
    ledger: _Ledger,
    claim: Claim,
    known: ConsumerState,
    overall: ClaimOutcome,
    outcomes: tuple[ClaimOutcome, ...],
    *,
    source: Holding,
) -> ClaimVerdict:
    """release_first, and nothing fits: the older attempts are over, this one may still be repeated."""
    if claim.migration is not None:
        _keep_source(ledger, claim, source)
    ledger.move(known.holding, NOTHING)
    ledger.write(claim.consumer, _fence(known, claim.attempt - 1))
    return ClaimVerdict(
        outcome=overall, outcomes=outcomes, changed=True, generations=ledger.generations_of(known.holding)
    )


def _fence(known: ConsumerState, attempt: int) -> ConsumerState:
    return ConsumerState(known.generation, attempt, known.project_id, known.user_id, known.consumer_type)


def _fits(ledger: _Ledger, option: ClaimOption, held: Holding, source: Holding = NOTHING) -> ClaimOutcome:
    """What one option would come to. Full goes before raced, raced before invalid.

    held: what the consumer holds now, with its migration. source: of a move; the larger of it and the option counts.
    """
    invalid = raced = False
    shapes = option.shapes
    for uuid, resources in option.allocations.items():
        provider = ledger.providers.get(uuid)
        if provider is None or uuid in ledger.foreign:
            return _GONE
        if not resources:
            invalid = True
        if uuid in shapes and shapes[uuid] != provider.shape:
            raced = True
    for uuid, resources in option.allocations.items():
        inventories = ledger.providers[uuid].inventories
        before = held.get(uuid, _NO_AMOUNTS)
        for name, amount in resources.items():
            more = (max(amount, amount_of(source, uuid, name)) if source else amount) - before.get(name, 0)
            if more <= 0:
                continue  # over capacity or not, what does not worsen it is allowed
            inventory = inventories.get(name)
            if inventory is None:
                known, shape = name in ledger.known_classes, ledger.providers[uuid].shape
                # Gone since it was chosen, perhaps to a child of the same host: raced, not full.
                if known and shapes.get(uuid, shape) == shape:
                    return _FULL
                invalid = invalid or not known
                continue
            if ledger.used_of(uuid, name) + more > inventory.capacity:
                return _FULL
            if amount < inventory.min_unit or amount > inventory.max_unit or amount % inventory.step_size:
                invalid = True
    if raced:
        return ClaimOutcome.RACED
    return ClaimOutcome.INVALID if invalid else _CLAIMED


def _release(ledger: _Ledger, release: Release) -> ClaimVerdict:
    known = ledger.consumer(release.consumer)
    attempt = release.attempt
    if known is None or not known.holding:
        if attempt is not None and (known is None or known.attempt < attempt):
            # A claim of this attempt may still be on its way; the fence turns it down when it comes.
            fence = _fence(known, attempt) if known is not None else ConsumerState(0, attempt, "", "", "")
            ledger.write(release.consumer, fence)
        return ClaimVerdict(outcome="absent")
    if ledger.is_others(known.holding):
        return ClaimVerdict(outcome="consumer_changed", reason=OF_ANOTHER_CELL)
    if (attempt is not None and known.attempt > attempt) or release.project_id not in (None, known.project_id):
        return ClaimVerdict(outcome="consumer_changed", consumer_generation=known.generation)
    ledger.move(known.holding, NOTHING)
    ledger.write(release.consumer, None if attempt is None else _fence(known, attempt))
    return ClaimVerdict(outcome="released", changed=True, generations=ledger.generations_of(known.holding))


def _revert(ledger: _Ledger, revert: Revert) -> ClaimVerdict:
    """The instance holds its source again. Judged like a swap: by what both consumers hold before and after."""
    if revert.consumer == revert.migration.uuid:
        return ClaimVerdict(outcome="consumer_changed", reason="revert.migration: it is the instance itself")
    known, migration = ledger.consumer(revert.consumer), ledger.consumer(revert.migration.uuid)
    held, kept = _holding(known), _holding(migration)
    if ledger.is_others(held) or ledger.is_others(kept):
        return ClaimVerdict(outcome="consumer_changed", reason=OF_ANOTHER_CELL)
    if known is None or known.attempt > revert.attempt:
        return ClaimVerdict(outcome="consumer_changed", consumer_generation=None if known is None else known.generation)
    if kept and migration is not None and migration.project_id != known.project_id:
        return ClaimVerdict(outcome="consumer_changed", consumer=revert.migration.uuid)
    if known.attempt == revert.attempt and not kept:
        return ClaimVerdict(outcome="reverted", consumer_generation=known.generation, holding=held)
    source: Holding = held
    if known.attempt > revert.source_attempt:
        source = ledger.source_of(revert.migration, held, kept)
        before = total_of((held, kept))
        outcome = _fits_swap(ledger, source, before, total_of((source,)))
        if outcome is not _CLAIMED:
            return ClaimVerdict(outcome=outcome.value, reason="revert.no_room: the source has less than it had")
        ledger.move(held, source)
        ledger.move(kept, NOTHING)
        if migration is not None:
            ledger.write(revert.migration.uuid, None)
    after = ConsumerState(
        known.generation + 1, revert.attempt, known.project_id, known.user_id, known.consumer_type, source
    )
    ledger.write(revert.consumer, after)
    return ClaimVerdict(
        outcome="reverted",
        changed=True,
        consumer_generation=after.generation,
        generations=ledger.generations_of(source),
        holding=source,
    )


def _swap(ledger: _Ledger, swap: Swap) -> ClaimVerdict:
    """All or none. Usage is judged by the sum of what all its consumers hold before and after (microversion 1.13)."""
    entries = swap.consumers
    if len({entry.consumer for entry in entries}) != len(entries):
        return ClaimVerdict(outcome=ClaimOutcome.INVALID, reason="a consumer is named twice")
    known = {entry.consumer: ledger.consumer(entry.consumer) for entry in entries}
    before = total_of(_holding(consumer) for consumer in known.values())
    if all(_holding(known[entry.consumer]) == entry.allocations for entry in entries):
        return ClaimVerdict(outcome=_CLAIMED, generations=ledger.generations_of(before))
    for entry in entries:
        consumer = known[entry.consumer]
        generation = consumer.generation if consumer is not None and consumer.holding else None
        if ledger.is_others(_holding(consumer)):
            return ClaimVerdict(outcome=ClaimOutcome.CONSUMER_CHANGED, consumer=entry.consumer, reason=OF_ANOTHER_CELL)
        if entry.consumer_generation != generation:
            return ClaimVerdict(outcome=ClaimOutcome.CONSUMER_CHANGED, consumer=entry.consumer)
    after = total_of(entry.allocations for entry in entries)
    for entry in entries:
        outcome = _fits_swap(ledger, entry.allocations, before, after)
        if outcome is not _CLAIMED:
            return ClaimVerdict(outcome=outcome, consumer=entry.consumer)
    for entry in entries:
        _replace(ledger, entry, known[entry.consumer])
    return ClaimVerdict(outcome=_CLAIMED, changed=True, generations=ledger.generations_of({**before, **after}))


def _fits_swap(ledger: _Ledger, wanted: Holding, before: Holding, after: Holding) -> ClaimOutcome:
    for uuid, resources in wanted.items():
        provider = ledger.providers.get(uuid)
        if provider is None or uuid in ledger.foreign:
            return _GONE
        if not resources:
            return ClaimOutcome.INVALID
        for name, amount in resources.items():
            more = after[uuid][name] - before.get(uuid, {}).get(name, 0)
            if more <= 0:
                continue
            inventory = provider.inventories.get(name)
            if inventory is None:
                return _FULL if name in ledger.known_classes else ClaimOutcome.INVALID
            if ledger.used_of(uuid, name) + more > inventory.capacity:
                return _FULL
            if amount < inventory.min_unit or amount > inventory.max_unit or amount % inventory.step_size:
                return ClaimOutcome.INVALID
    return _CLAIMED


def _replace(ledger: _Ledger, entry: ConsumerAllocations, known: ConsumerState | None) -> None:
    before, wanted = _holding(known), entry.allocations
    ledger.move(before, wanted)
    if wanted:
        generation = 1 if known is None else known.generation + 1
        attempt = 0 if known is None else known.attempt
        after = ConsumerState(generation, attempt, entry.project_id, entry.user_id, entry.consumer_type, wanted)
        ledger.write(entry.consumer, after)
    elif before and known is not None:
        # A late claim of an attempt that is over must not bring the consumer back.
        ledger.write(entry.consumer, _fence(known, known.attempt) if known.attempt else None)


def _holding(known: ConsumerState | None) -> Holding:
    return known.holding if known is not None else NOTHING
