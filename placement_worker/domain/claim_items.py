"""The rows that a group of claims names, which are locked for the group, and the reply to each item."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.groups import GroupPolicy
from bus.contracts.placement import (
    MAX_LOST_NAMED,
    Claim,
    ClaimAll,
    ClaimAllResult,
    ClaimHolder,
    ClaimOutcome,
    ClaimResult,
    Release,
    ReleaseResult,
    Revert,
    RevertResult,
    Swap,
    SwapResult,
)
from placement_worker.domain.claim_verdict import ClaimVerdict, Lacking
from placement_worker.domain.claims import ClaimItem
from placement_worker.domain.moves import MIGRATION_TYPE
from placement_worker.domain.server_groups import HARD, group_key
from placement_worker.domain.values import ABOVE_CELLS, ConsumerState, GroupKey, Holding

ClaimReply = ClaimResult | ClaimAllResult | ReleaseResult | RevertResult | SwapResult


def single_items(items: Sequence[ClaimItem]) -> Iterator[Claim | Release | Revert | Swap]:
    """Yield the items, with the claims of a gang in place of the gang."""
    for item in items:
        if isinstance(item, ClaimAll):
            yield from item.claims
        else:
            yield item


def claims_of(items: Sequence[ClaimItem]) -> Iterator[Claim]:
    """All claims, including those of gangs."""
    return (item for item in single_items(items) if isinstance(item, Claim))


def consumers_of(items: Sequence[ClaimItem]) -> list[str]:
    """Every consumer that the items name, each once."""
    named: dict[str, None] = {}
    for item in single_items(items):
        if isinstance(item, Claim | Release | Revert):
            named[item.consumer] = None
            if isinstance(item, Revert) or (isinstance(item, Claim) and item.migration is not None):
                assert item.migration is not None
                named[item.migration.uuid] = None
        else:
            named.update(dict.fromkeys(entry.consumer for entry in item.consumers))
    return list(named)


def providers_of(items: Sequence[ClaimItem], consumers: Mapping[str, ConsumerState]) -> set[str]:
    """Every provider that the items name or these consumers hold."""
    wanted: set[str] = set()
    for item in single_items(items):
        if isinstance(item, Claim):
            for option in item.options:
                wanted.update(option.allocations)
            if item.migration is not None:
                wanted.update(item.migration.source)
        elif isinstance(item, Revert):
            wanted.update(item.migration.source)
        elif not isinstance(item, Release):
            for entry in item.consumers:
                wanted.update(entry.allocations)
    for consumer in consumers.values():
        wanted.update(consumer.holding)
    return wanted


def groups_of(items: Sequence[ClaimItem]) -> list[GroupKey]:
    """The server groups that these items name, in the order of their locks."""
    return sorted({key for claim in claims_of(items) if (key := group_key(claim)) is not None})


def projects_of(items: Sequence[ClaimItem]) -> list[str]:
    """The projects whose claims have limits, in the order of their locks."""
    return sorted({claim.project_id for claim in claims_of(items) if claim.limits})


def lowest_limits(items: Sequence[ClaimItem]) -> dict[tuple[str, str], int]:
    """Return {(project, class): the lowest limit that the claims state}."""
    found: dict[tuple[str, str], int] = {}
    for claim in claims_of(items):
        for name, limit in claim.limits.items():
            key = (claim.project_id, name)
            found[key] = min(found.get(key, limit), limit)
    return found


def knows_classes(known: Mapping[str, int], items: Sequence[ClaimItem]) -> bool:
    """Whether the items name no other resource classes than these."""
    for item in single_items(items):
        if isinstance(item, Claim):
            holdings: Iterable[Holding] = (option.allocations for option in item.options)
        elif isinstance(item, Release):
            continue
        elif isinstance(item, Revert):
            holdings = (item.migration.source,)
        else:
            holdings = (entry.allocations for entry in item.consumers)
        for holding in holdings:
            for resources in holding.values():
                if not known.keys() >= resources.keys():
                    return False
    return True


MAX_GROUP_MEMBERS_READ = 100  # members of a group with affinity, beside the consumers that the transaction names


class WantedMembers(Struct, frozen=True):
    """The members of server groups that decide about a group of claims.

    hosts: (project, group, host): all members there, so that the size of the group does not matter. moved: (project,
    group, consumer): members that the same transaction may move. together: groups with affinity, of which `most`
    members are wanted: enough that at least one of them does not move.
    """

    hosts: list[tuple[str, str, str]]
    moved: list[tuple[str, str, str]]
    together: list[GroupKey]
    most: int


def wanted_members(items: Sequence[ClaimItem], holders: Collection[str] | None = None) -> WantedMembers:
    """Return the members that decide about these items. holders: the consumers among those that the items name that
    hold allocations, if known.
    """
    hosts: set[tuple[str, str, str]] = set()
    together: set[GroupKey] = set()
    moved: set[tuple[str, str, str]] = set()
    for claim in claims_of(items):
        if claim.server_group is not None and (key := group_key(claim)) is not None:
            if claim.server_group.policy in HARD:
                hosts.update((*key, option.host) for option in claim.options if option.host is not None)
            if claim.server_group.policy is GroupPolicy.AFFINITY:
                together.add(key)
            moved.update((*key, one) for one in consumers_of([claim]))
    # A revert and a swap name no group, so a consumer that they move may be a member of any; a release only takes away.
    # No claim's consumer is paired with the other claims' groups: a batch may name as many groups as consumers.
    others = [one for one in single_items(items) if isinstance(one, Revert | Swap) or _is_alone(one)]
    moved.update((*key, one) for one in consumers_of(others) for key in groups_of(items))
    held = moved if holders is None else {one for one in moved if one[2] in holders}
    most = MAX_GROUP_MEMBERS_READ + len(consumers_of(items))
    return WantedMembers(sorted(hosts), sorted(held), sorted(together), most)


def _is_alone(item: Claim | Release | Revert | Swap) -> bool:
    return isinstance(item, Claim) and item.server_group is None


def expected_consumers(items: Sequence[ClaimItem]) -> dict[str, ConsumerState]:
    """Return the row that each named consumer gets if it is new and its first write succeeds."""
    expected: dict[str, ConsumerState] = {}
    for item in single_items(items):
        if isinstance(item, Claim):
            if item.consumer not in expected:
                expected[item.consumer] = ConsumerState(
                    1, item.attempt, item.project_id, item.user_id, item.consumer_type, run=item.by or ""
                )
            if item.migration is not None:
                migration = ConsumerState(1, item.attempt, item.project_id, item.user_id, MIGRATION_TYPE)
                expected.setdefault(item.migration.uuid, migration)
        elif isinstance(item, Release):
            expected.setdefault(item.consumer, ConsumerState(0, item.attempt or 0, "", "", ""))
        elif isinstance(item, Revert):
            for uuid in (item.consumer, item.migration.uuid):
                expected.setdefault(uuid, ConsumerState(0, item.attempt, "", "", ""))
        else:
            for entry in item.consumers:
                new = ConsumerState(1, 0, entry.project_id, entry.user_id, entry.consumer_type)
                expected.setdefault(entry.consumer, new)
    return expected


def lost_claims(items: Sequence[ClaimItem], verdicts: Sequence[ClaimVerdict]) -> dict[int, tuple[str, Lacking]]:
    """Return {place among the single items: (consumer, what it lacked)} of the first claims that found a provider full,
    at most MAX_LOST_NAMED: the holders are looked up for these alone.
    """
    full = (
        (place, (item.consumer, verdict.lacking))
        for place, (item, verdict) in enumerate(zip(single_items(items), _single_verdicts(verdicts), strict=True))
        if isinstance(item, Claim) and verdict.lacking
    )
    return dict(islice(full, MAX_LOST_NAMED))


def with_holders(
    verdicts: Sequence[ClaimVerdict], found: Mapping[int, tuple[ClaimHolder, ...]]
) -> Sequence[ClaimVerdict]:
    """Return the verdicts with the holders that were found for lost claims. found: by the places of `lost_claims`."""
    if not found:
        return verdicts
    places = count()

    def named(verdict: ClaimVerdict) -> ClaimVerdict:
        if verdict.of_gang:
            return replace(verdict, of_gang=tuple(map(named, verdict.of_gang)))
        holders = found.get(next(places))
        return replace(verdict, holders=holders) if holders else verdict

    return [named(one) for one in verdicts]


def _single_verdicts(verdicts: Sequence[ClaimVerdict]) -> Iterator[ClaimVerdict]:
    """Yield the verdicts on the single items, in their order."""
    for verdict in verdicts:
        yield from verdict.of_gang or (verdict,)


def reply(
    item: ClaimItem,
    verdict: ClaimVerdict,
    sequence: int,
    bus: str = ABOVE_CELLS,
) -> ClaimReply:
    """The reply to one item."""
    number = sequence if verdict.changed else 0
    if isinstance(item, Claim):
        return _claim_result(verdict, number, bus)
    if isinstance(item, ClaimAll):
        return ClaimAllResult(
            results=tuple(_claim_result(one, sequence if one.changed else 0, bus) for one in verdict.of_gang)
        )
    if isinstance(item, Release):
        return ReleaseResult(outcome=verdict.outcome, sequence=number)
    if isinstance(item, Revert):
        return RevertResult(
            outcome=verdict.outcome,
            consumer_generation=verdict.consumer_generation,
            holding={uuid: dict(amounts) for uuid, amounts in verdict.holding.items()},
            sequence=number,
            reason=verdict.reason,
        )
    return SwapResult(
        outcome=ClaimOutcome(verdict.outcome),
        consumer=verdict.consumer,
        generations=verdict.generations,
        sequence=number,
        reason=verdict.reason,
    )


def _claim_result(verdict: ClaimVerdict, number: int, bus: str) -> ClaimResult:
    return ClaimResult(
        outcome=ClaimOutcome(verdict.outcome),
        option=verdict.option,
        outcomes=verdict.outcomes,
        consumer_generation=verdict.consumer_generation,
        generations=verdict.generations,
        sequence=number,
        reason=verdict.reason,
        holding={uuid: dict(amounts) for uuid, amounts in verdict.holding.items()},
        members=verdict.members if bus == ABOVE_CELLS else {},  # a cell learns nothing of other cells' hosts
        holders=verdict.holders,
        attempt=verdict.attempt,
    )
