"""Decides a group of claims, releases, reverts and swaps, in order, against the rows that are locked for the group.

A provider has two generations (Placement has one). Every write increments its `generation`, writes of allocations
included. Its `spec_generation` changes only with inventory, traits, aggregates and parentage. So usage alone never
makes a claim conflict: the claim is `conflict` when the provider's spec generation has changed since the host was
chosen, and `no_capacity` when the allocations do not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeGuard

from msgspec.structs import replace

from bus.contracts.feed import Change
from bus.contracts.placement import (
    MAX_LOST_NAMED,
    Claim,
    ClaimAll,
    ClaimAllResult,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    Release,
    ReleaseResult,
    Restate,
    RestateResult,
    Revert,
    RevertResult,
    Swap,
    SwapResult,
)
from placement_worker.domain.claim_ledger import (
    CHANGED,
    ClaimLedger,
    ClaimReply,
    ConsumerWrite,
    Decision,
    Lacking,
    allocations_of,
    fits,
    reply_form,
)
from placement_worker.domain.migration import (
    COUNTED_MIGRATION_TYPE,
    MIGRATION_TYPE,
    added_to,
    amount_of,
    is_migration,
    kept_alongside,
    total_of,
    whole_source,
)
from placement_worker.domain.server_groups import permitted, visible_members
from placement_worker.domain.values import (
    NOTHING,
    ClaimedProvider,
    ConsumerState,
    Fit,
    GroupKey,
    Members,
    ProviderAllocations,
)

ClaimItem = Claim | ClaimAll | Release | Restate | Revert | Swap
Outcomes = tuple[ClaimOutcome, ...]  # of a claim's options, in order

# The outcome of a claim none of whose options was taken is the first of these that one of the options has: the earlier
# an outcome stands here, the sooner a retry may succeed.
_HOPE = (
    ClaimOutcome.CONFLICT,
    ClaimOutcome.OVER_QUOTA,
    ClaimOutcome.NO_CAPACITY,
    ClaimOutcome.POLICY_VIOLATED,
    ClaimOutcome.PROVIDER_REMOVED,
    ClaimOutcome.INVALID,
)
# The type of a consumer whose row was trimmed, and which holds something again.
INSTANCE_TYPE = "INSTANCE"
# The code at the head of the reason when a cell names a provider of another cell.
OF_ANOTHER_CELL = "claim.foreign_cell: of another cell"
_CLAIMED, _FULL = ClaimOutcome.CLAIMED, ClaimOutcome.NO_CAPACITY
_INCOMPLETE = ClaimResult(outcome=ClaimOutcome.INCOMPLETE)


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
    """Decide a group in order; each item sees the effects of earlier ones.

    consumers, providers: every row that an item names or that a named consumer holds; a missing row does not exist.
    foreign: providers of other cells than the requester's. For the requester these providers are gone, and a consumer
    that holds allocations of them belongs to another cell. groups: the members of every server group that an item
    names. projects: the total that the consumers of each project with limits hold. Both are locked.
    """
    ledger = ClaimLedger(consumers, providers, known_classes, foreign, groups or {})
    ledger.projects.update({project: dict(held) for project, held in (projects or {}).items()})
    return ledger.decision([_decided(ledger, item) for item in items])


def _decided(ledger: ClaimLedger, item: ClaimItem) -> ClaimReply:
    if isinstance(item, Claim):
        return _claim(ledger, item)
    if isinstance(item, ClaimAll):
        return _claim_all(ledger, item)
    if isinstance(item, Release):
        return _release(ledger, item)
    if isinstance(item, Restate):
        return _restate(ledger, item)
    return _revert(ledger, item) if isinstance(item, Revert) else _swap(ledger, item)


def changes_of(decision: Decision) -> list[Change]:
    """Return a decision as changes of the feed, one for each provider. `feed.append` numbers them."""
    return [
        Change(provider=uuid, generation=generation, used=decision.used[uuid])
        for uuid, generation in decision.generations.items()
    ]


def _claim(ledger: ClaimLedger, claim: Claim) -> ClaimResult:
    ledger.claims += 1
    known = ledger.consumer(claim.consumer)
    allocations = allocations_of(known)
    if not claim.options:
        return ClaimResult(outcome=ClaimOutcome.INVALID, reason="claim.options: it names none")
    if claim.external and (claim.release_first or claim.migration is not None):
        return ClaimResult(outcome=ClaimOutcome.INVALID, reason="claim.foreign: it releases first or moves")
    if ledger.has_foreign_provider(allocations):
        return ClaimResult(outcome=ClaimOutcome.CONSUMER_CONFLICT, reason=OF_ANOTHER_CELL)
    if known is not None and known.allocations and _is_repeated(claim, known):
        return _claimed_before(ledger, claim, known)
    if not _may_claim(known, claim):
        return _changed(claim, known)
    source = of_migration = NOTHING
    if claim.migration is not None:
        problem = _migration_problem(ledger, claim, allocations)
        if problem is not None:
            return problem
        of_migration = allocations_of(ledger.consumer(claim.migration.uuid))
        source = (
            ledger.source_allocations(claim.migration, allocations, of_migration)
            if claim.release_first
            else allocations
        )
    outcomes: list[ClaimOutcome] = []
    past = ""
    before = total_of((allocations, of_migration))
    others = ledger.other_members(claim)
    for option in claim.options:
        wanted = allocations_after(claim, option, allocations)
        outcome = fits(ledger, option.allocations, before, wanted, option.spec_generations)
        if outcome is _CLAIMED and claim.server_group is not None:
            outcome = permitted(claim, option, others)
        if outcome is _CLAIMED and (past := ledger.past_limit(claim, wanted, allocations or source)):
            outcome = ClaimOutcome.OVER_QUOTA
        outcomes.append(outcome)
        if outcome is _CLAIMED:
            return _take(ledger, claim, known, tuple(outcomes), source)
    if claim.release_first and known is not None and known.allocations:
        return _release_only(ledger, claim, known, tuple(outcomes), source)
    return _refusal_result(ledger, claim, tuple(outcomes), past)


def _overall(outcomes: Outcomes) -> ClaimOutcome:
    return next(hope for hope in _HOPE if hope in outcomes)


def _refusal_result(ledger: ClaimLedger, claim: Claim, outcomes: Outcomes, past: str) -> ClaimResult:
    """Return the reply to a claim none of whose options was taken; nothing changes. past: the limit that was
    exceeded.
    """
    known, overall = ledger.consumer(claim.consumer), _overall(outcomes)
    allocations = allocations_of(known)
    members = (
        visible_members(ledger.other_members(claim, ledger.gang)) if ClaimOutcome.POLICY_VIOLATED in outcomes else {}
    )
    generation = known.generation if known is not None and known.allocations else None
    reason = (
        OF_ANOTHER_CELL if any(ledger.has_foreign_provider(option.allocations) for option in claim.options) else past
    )
    if overall is _FULL and len(ledger.lost) < MAX_LOST_NAMED:
        lacking = _lacking(ledger, claim.options[outcomes.index(_FULL)], allocations)
        if lacking:
            ledger.lost[ledger.claims - 1] = claim.consumer, lacking
    return ClaimResult(
        outcome=overall,
        outcomes=outcomes,
        consumer_generation=generation,
        reason=reason,
        members=members,
    )


def _lacking(ledger: ClaimLedger, option: ClaimOption, allocations: ProviderAllocations) -> Lacking:
    """The (provider, class) pairs that have too little free for this option."""
    return tuple(
        (uuid, name)
        for uuid, resources in option.allocations.items()
        for name, amount in resources.items()
        if ledger.fit(uuid, name, amount, amount - amount_of(allocations, uuid, name)) is Fit.NO_CAPACITY
    )


def _claim_all(ledger: ClaimLedger, item: ClaimAll) -> ClaimAllResult:
    """Take all claims of a gang or none. Every claim is tried, so that the answer names all conflicts at once."""
    consumers = frozenset(claim.consumer for claim in item.claims)
    trial = ledger.trial(consumers)
    ledger.claims += len(item.claims)
    if len(consumers) != len(item.claims) or any(one.release_first or one.migration for one in item.claims):
        wrong = ClaimResult(
            outcome=ClaimOutcome.INVALID, reason="claim_all: a consumer is named twice, releases first or moves"
        )
        return ClaimAllResult(results=(wrong,) * len(item.claims))
    results = tuple(_claim(trial, claim) for claim in item.claims)
    if all(result.outcome is _CLAIMED for result in results):
        ledger.adopt(trial)
        return ClaimAllResult(results=results)
    return ClaimAllResult(results=tuple(_INCOMPLETE if result.sequence else result for result in results))


def _is_repeated(claim: Claim, known: ConsumerState) -> bool:
    """Whether what the consumer holds is this very claim's."""
    if claim.external:
        return (known.claim_owner, known.project_id) == (claim.owner, claim.project_id)
    is_owners = claim.owner in (None, known.claim_owner) or claim.transfers_from == known.claim_owner
    return (known.attempt, known.project_id) == (claim.attempt, claim.project_id) and is_owners


def _may_claim(known: ConsumerState | None, claim: Claim) -> bool:
    """Whether this attempt is the newest, and the consumer has the generation that the claim names (as in microversion
    1.28).
    """
    is_ended = known is not None and claim.attempt <= known.attempt and not _is_ended_by_other_owner(known, claim)
    if is_ended and not claim.external:
        return False
    if known is None or not known.allocations:
        # A claim with release_first may be repeated after a crash, and then finds nothing left to release.
        return claim.consumer_generation is None or claim.release_first
    return claim.consumer_generation == known.generation


def _is_ended_by_other_owner(known: ConsumerState, claim: Claim) -> bool:
    """Whether the attempt has ended only for another claim owner: a release by name refuses nothing of the owners after
    it.

    Nor of those before it, of records that are lost: their order does not show. What such a late claim takes starts
    nothing, because only the claim owner on record is dispatched; it is released by its scheduler, or stays for the
    audit.
    """
    is_owners_release = not known.allocations and known.claim_owner and claim.attempt == known.attempt
    return bool(is_owners_release) and claim.owner not in (None, known.claim_owner)


def _changed(claim: Claim, known: ConsumerState | None) -> ClaimResult:
    """The refusal of a claim that is not the newest, or of another claim owner than what is held. To its own project it
    shows what the consumer holds, and the attempt: not that of a migration, whose uuid a client may have requested a
    build under.
    """
    if known is None or not known.allocations:
        return ClaimResult(outcome=ClaimOutcome.CONSUMER_CONFLICT)
    refused = ClaimResult(outcome=ClaimOutcome.CONSUMER_CONFLICT, consumer_generation=known.generation)
    if known.project_id != claim.project_id:
        return refused
    is_build = known.attempt >= claim.attempt and known.consumer_type == claim.consumer_type
    return replace(refused, allocations=reply_form(known.allocations), attempt=known.attempt if is_build else 0)


def _claimed_before(ledger: ClaimLedger, claim: Claim, known: ConsumerState) -> ClaimResult:
    if claim.owner is not None and claim.owner != known.claim_owner:
        ledger.write(claim.consumer, replace(known, claim_owner=claim.owner))
    option = next((n for n, option in enumerate(claim.options) if option.allocations == known.allocations), None)
    return ClaimResult(
        outcome=_CLAIMED,
        option=option,
        consumer_generation=known.generation,
        generations=ledger.generations_of(known.allocations),
        allocations=reply_form(known.allocations) if option is None else {},
    )


def _migration_problem(ledger: ClaimLedger, claim: Claim, allocations: ProviderAllocations) -> ClaimResult | None:
    """The reply when the consumer cannot move under this migration; None when it can."""
    assert claim.migration is not None
    uuid = claim.migration.uuid
    if uuid == claim.consumer:
        return ClaimResult(outcome=ClaimOutcome.INVALID, reason="claim.migration: an instance is not its own migration")
    migration = ledger.consumer(uuid)
    of_migration = allocations_of(migration)
    if ledger.has_foreign_provider(of_migration):
        return ClaimResult(outcome=ClaimOutcome.CONSUMER_CONFLICT, reason=OF_ANOTHER_CELL)
    if claim.release_first:
        # This is the claim of an alternate: the migration already holds the source of the same instance, or nothing.
        is_of_move = is_migration(migration) and migration.project_id == claim.project_id
        taken = of_migration and not is_of_move
    elif not allocations:
        return ClaimResult(outcome=ClaimOutcome.CONSUMER_CONFLICT, reason="claim.nothing_to_move: it holds nothing")
    else:
        taken = of_migration
    reason = "claim.migration_in_use: another consumer of this uuid holds something"
    return ClaimResult(outcome=ClaimOutcome.CONSUMER_CONFLICT, reason=reason) if taken else None


def allocations_after(claim: Claim, option: ClaimOption, allocations: ProviderAllocations) -> ProviderAllocations:
    """What the claim's consumer holds when it has taken this option."""
    return added_to(allocations, option.allocations) if claim.external else option.allocations


def _take(
    ledger: ClaimLedger, claim: Claim, known: ConsumerState | None, outcomes: Outcomes, source: ProviderAllocations
) -> ClaimResult:
    """Take the last option that was tried."""
    number = len(outcomes) - 1
    wanted = allocations_after(claim, claim.options[number], allocations_of(known))
    if claim.migration is not None:
        _keep_source(ledger, claim, kept_alongside(source, wanted))
    ledger.move(allocations_of(known), wanted)
    ledger.join(claim)
    generation = 1 if known is None else known.generation + 1
    owner = (known.claim_owner if known is not None else "") if claim.owner is None else claim.owner
    attempt = 0 if claim.external else claim.attempt  # 0: what is held is no build of berth's, whatever was before
    ledger.write(
        claim.consumer,
        ConsumerState(generation, attempt, claim.project_id, claim.user_id, claim.consumer_type, wanted, owner),
    )
    return ClaimResult(
        outcome=_CLAIMED,
        option=number,
        outcomes=outcomes,
        consumer_generation=generation,
        generations=ledger.generations_of(wanted),
        sequence=CHANGED,
    )


def _keep_source(ledger: ClaimLedger, claim: Claim, wanted: ProviderAllocations, kind: str = MIGRATION_TYPE) -> None:
    """Replace the allocations of the migration by `wanted`, the part of the source that it keeps. kind: its type."""
    assert claim.migration is not None
    uuid = claim.migration.uuid
    known = ledger.consumer(uuid)
    allocations = allocations_of(known)
    if allocations == wanted and (known is None or not known.allocations or known.consumer_type == kind):
        return
    if allocations != wanted:
        ledger.join_migration(claim, uuid)
        ledger.move(allocations, wanted)
    generation = 1 if known is None else known.generation + 1
    ledger.write(
        uuid,
        ConsumerState(generation, claim.attempt, claim.project_id, claim.user_id, kind, wanted) if wanted else None,
    )


def _release_only(
    ledger: ClaimLedger, claim: Claim, known: ConsumerState, outcomes: Outcomes, source: ProviderAllocations
) -> ClaimResult:
    """Release what the consumer holds, for a claim with release_first that does not fit. Older attempts have
    ended; this one may still be repeated. The migration of a move counts in the instance's place until then.
    """
    if claim.migration is not None:
        _keep_source(ledger, claim, source, COUNTED_MIGRATION_TYPE)
    ledger.move(known.allocations, NOTHING)
    ledger.write(claim.consumer, _ended_up_to(known, claim.attempt - 1))
    return ClaimResult(
        outcome=_overall(outcomes),
        outcomes=outcomes,
        sequence=CHANGED,
        generations=ledger.generations_of(known.allocations),
    )


def _ended_up_to(known: ConsumerState, attempt: int, by: str | None = None) -> ConsumerState:
    """The row that refuses claims up to this attempt. by: of this claim owner alone (None: of every owner)."""
    return ConsumerState(
        known.generation,
        attempt,
        known.project_id,
        known.user_id,
        known.consumer_type,
        claim_owner="" if by is None else by,
    )


def _release(ledger: ClaimLedger, release: Release) -> ReleaseResult:
    known = ledger.consumer(release.consumer)
    attempt = release.attempt
    if known is None or not known.allocations:
        before = ConsumerState(0, 0, "", "", "") if known is None else known
        is_of_other_owner = before.attempt == attempt and before.claim_owner not in ("", release.owner)
        if attempt is not None and (before.attempt < attempt or is_of_other_owner):
            # A claim of this attempt may still be in flight; it is refused when it arrives, because its attempt has
            # ended. Of two owners it is refused whosever it is.
            ledger.write(release.consumer, _ended_up_to(before, attempt, None if is_of_other_owner else release.owner))
        return ReleaseResult(outcome="absent")
    if ledger.has_foreign_provider(known.allocations):
        return ReleaseResult(outcome="consumer_conflict")
    is_other = release.of_migration and not is_migration(known)
    is_other |= release.project_id not in (None, known.project_id)
    is_other |= release.owner not in (None, known.claim_owner)
    if is_other or (attempt is not None and known.attempt > attempt):
        return ReleaseResult(outcome="consumer_conflict")
    ledger.move(known.allocations, NOTHING)
    ledger.write(release.consumer, None if attempt is None else _ended_up_to(known, attempt, release.owner))
    return ReleaseResult(outcome="released", sequence=CHANGED)


def _keeps_source(revert: Revert, of_instance: ProviderAllocations, of_migration: ProviderAllocations) -> bool:
    """Whether a consumer that is no migration by its type must be one: it alone has something where the source was.

    Another client may have written it anew, with a type of its own or none.
    """
    source = revert.migration.source.keys()
    return bool(source & of_migration.keys()) and not source & of_instance.keys()


def _revert(ledger: ClaimLedger, revert: Revert) -> RevertResult:
    """Give the source's allocations back to the instance. Capacity is compared with the sum that the instance and its
    migration hold before and after, as for a swap.
    """
    if revert.consumer == revert.migration.uuid:
        return RevertResult(outcome="consumer_conflict", reason="revert.migration: it is the instance itself")
    known, migration = ledger.consumer(revert.consumer), ledger.consumer(revert.migration.uuid)
    if not is_migration(migration) and not _keeps_source(revert, allocations_of(known), allocations_of(migration)):
        migration = None  # an instance that was built under the request's uuid: its allocation is its own
    of_instance, of_migration = allocations_of(known), allocations_of(migration)
    if ledger.has_foreign_provider(of_instance) or ledger.has_foreign_provider(of_migration):
        return RevertResult(outcome="consumer_conflict", reason=OF_ANOTHER_CELL)
    if known is None and migration is not None and migration.allocations:
        # The move has taken longer than ended attempts are kept: those of an instance that holds nothing are gone.
        known = ConsumerState(0, revert.attempt - 1, migration.project_id, migration.user_id, INSTANCE_TYPE)
    if known is None or known.attempt > revert.attempt:
        return RevertResult(
            outcome="consumer_conflict", consumer_generation=None if known is None else known.generation
        )
    if migration is not None and migration.allocations and migration.project_id != known.project_id:
        return RevertResult(outcome="consumer_conflict")
    if known.attempt == revert.attempt and not of_migration:
        return RevertResult(
            outcome="reverted", consumer_generation=known.generation, allocations=reply_form(of_instance)
        )
    source: ProviderAllocations = of_instance
    if known.attempt > revert.source_attempt:
        source = whole_source(
            revert.migration.source, ledger.source_allocations(revert.migration, of_instance, of_migration)
        )
        outcome = fits(ledger, source, total_of((of_instance, of_migration)), source)
        if outcome is not _CLAIMED:
            return RevertResult(outcome=outcome.value, reason="revert.no_room: the source has less than it had")
        ledger.move(of_instance, source)
        ledger.move(of_migration, NOTHING)
        if migration is not None:
            ledger.write(revert.migration.uuid, None)
    after = replace(known, generation=known.generation + 1, attempt=revert.attempt, allocations=source)
    ledger.write(revert.consumer, after)
    return RevertResult(
        outcome="reverted",
        sequence=CHANGED,
        consumer_generation=after.generation,
        allocations=reply_form(source),
    )


def _restate(ledger: ClaimLedger, item: Restate) -> RestateResult:
    """Have an instance hold what its cell says, and its former migrations nothing. Its machine runs there: what is
    above the capacity is said, and held.
    """
    known = ledger.consumer(item.consumer)
    allocations = allocations_of(known)
    wanted = allocations if item.allocations is None else item.allocations
    if known is None and wanted:
        known = ConsumerState(0, 0, item.project_id, item.user_id, INSTANCE_TYPE)
    if known is not None and allocations and (known.attempt == 0 or known.project_id != item.project_id):
        return RestateResult(outcome="consumer_conflict")
    if known is not None and (known.attempt > item.attempt or ledger.has_foreign_provider(allocations)):
        return RestateResult(outcome="consumer_conflict")
    over = {
        uuid: one.allocations
        for uuid in item.migrations
        if _is_ended_migration(one := ledger.consumer(uuid), ledger, item)
    }
    generation = known.generation if known is not None and allocations else None
    if wanted == allocations and not over and (known is None or known.attempt == item.attempt):
        return RestateResult(outcome="restated", consumer_generation=generation)
    outcome = fits(ledger, wanted, total_of((allocations, *over.values())), wanted)
    is_above = outcome is _FULL and all(
        ledger.fit(uuid, name, amount, amount) is not Fit.NO_INVENTORY
        for uuid, resources in wanted.items()
        for name, amount in resources.items()
    )
    if outcome is not _CLAIMED and not is_above:
        return RestateResult(outcome=outcome.value, consumer_generation=generation)
    if is_above:
        ledger.above.update((uuid, name) for uuid, resources in wanted.items() for name in resources)
    for uuid, holding in over.items():
        ledger.move(holding, NOTHING)
        ledger.write(uuid, None)
    if wanted != allocations:
        ledger.move(allocations, wanted)
    if known is not None:
        owner = (item.project_id, known.user_id or item.user_id, known.consumer_type or INSTANCE_TYPE)
        after = ConsumerState(known.generation + 1, item.attempt, *owner, wanted, known.claim_owner)
        ledger.write(item.consumer, after)
        generation = after.generation if wanted else None
    return RestateResult(outcome="restated", over_capacity=is_above, consumer_generation=generation, sequence=CHANGED)


def _is_ended_migration(known: ConsumerState | None, ledger: ClaimLedger, item: Restate) -> TypeGuard[ConsumerState]:
    """Whether it is a migration that a restatement ends."""
    is_own = is_migration(known) and known.project_id == item.project_id
    return is_own and bool(allocations_of(known)) and not ledger.has_foreign_provider(allocations_of(known))


def _swap(ledger: ClaimLedger, swap: Swap) -> SwapResult:
    """Replace the allocations of several consumers, all or none."""
    writes = [
        ConsumerWrite(
            entry.consumer,
            entry.allocations,
            entry.project_id,
            entry.user_id,
            entry.consumer_type,
            entry.consumer_generation,
            entry.attempt,
        )
        for entry in swap.consumers
    ]
    if len({write.consumer for write in writes}) != len(writes):
        return SwapResult(outcome=ClaimOutcome.INVALID, reason="a consumer is named twice")
    before, after = ledger.totals(writes)
    if all(ledger.allocations_of(write.consumer) == write.allocations for write in writes):
        return SwapResult(outcome=_CLAIMED, generations=ledger.generations_of(before))
    for write in writes:
        if ledger.has_foreign_provider(ledger.allocations_of(write.consumer)):
            return SwapResult(outcome=ClaimOutcome.CONSUMER_CONFLICT, consumer=write.consumer, reason=OF_ANOTHER_CELL)
        if not ledger.is_expected(write):
            return SwapResult(outcome=ClaimOutcome.CONSUMER_CONFLICT, consumer=write.consumer)
    for write in writes:
        outcome = fits(ledger, write.allocations, before, after)
        if outcome is not _CLAIMED:
            return SwapResult(outcome=outcome, consumer=write.consumer)
    ledger.replace(writes, bump_previous=True)
    return SwapResult(outcome=_CLAIMED, sequence=CHANGED, generations=ledger.generations_of({**before, **after}))
