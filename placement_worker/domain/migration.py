"""The allocation of a migration while its instance moves: the source's amounts, less those that the destination takes
of the same providers.

While an instance moves, two consumers hold allocations for it: the instance holds those on the destination, the
migration those on the source. Where both take the same class of one provider (a resize in place, a storage pool that
both hosts share) placement counts the larger amount and not the sum, because only one of the two machines runs at a
time, and either of them may stay in the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeGuard

from placement_worker.domain.values import ConsumerState, ProviderAllocations

MIGRATION_TYPE = "MIGRATION"
# The type of a migration whose instance holds nothing, because the claim for its next destination has released the last
# one and found no room. It counts as an instance of the project's quota, so that no other claim takes its share.
COUNTED_MIGRATION_TYPE = "MIGRATION_COUNTED"
MIGRATION_TYPES = (MIGRATION_TYPE, COUNTED_MIGRATION_TYPE)

_NO_AMOUNTS: Mapping[str, int] = {}


def is_migration(consumer: ConsumerState | None) -> TypeGuard[ConsumerState]:
    """Whether this is a migration. A client may have an instance built under the uuid of a move's request."""
    return consumer is not None and consumer.consumer_type in MIGRATION_TYPES


def amount_of(allocations: ProviderAllocations, provider: str, resource_class: str) -> int:
    """The amount of one class of one provider in these allocations."""
    return allocations.get(provider, _NO_AMOUNTS).get(resource_class, 0)


def total_of(parts: Iterable[ProviderAllocations]) -> dict[str, dict[str, int]]:
    """The sum of allocations, by provider and class."""
    total: dict[str, dict[str, int]] = {}
    for allocations in parts:
        for uuid, resources in allocations.items():
            row = total.setdefault(uuid, {})
            for name, amount in resources.items():
                row[name] = row.get(name, 0) + amount
    return total


def allocations_at_source(
    requested: ProviderAllocations,
    of_instance: ProviderAllocations,
    of_migration: ProviderAllocations,
    roots: Mapping[str, str],
) -> dict[str, dict[str, int]]:
    """Return the part of a move's source that the instance and its migration still hold, never more than both hold.

    requested: as in the move's claim; of_instance, of_migration: what they hold; roots: of the providers that these
    name, as far as they exist.

    Amounts that source and destination share are in `of_instance` alone. Where inventories have moved within a host,
    `of_instance` and `of_migration` may name other providers of its tree than `requested`, and not the same ones. So
    the amounts that are missing in `of_migration` are counted by class and taken from the allocations in the source's
    trees, first from providers that `requested` names, then from any.
    """
    trees = {roots[uuid] for uuid in (*requested, *of_migration) if uuid in roots}
    both = total_of(
        (of_migration, {uuid: of_instance[uuid] for uuid in sorted(of_instance) if roots.get(uuid) in trees})
    )
    where_it_was = [(uuid, name, min(amount, amount_of(both, uuid, name))) for uuid, name, amount in _rows(requested)]
    return _with_missing(requested, of_migration, (*where_it_was, *_rows(both)))


def whole_source(requested: ProviderAllocations, source: ProviderAllocations) -> dict[str, dict[str, int]]:
    """Return `source`, as `allocations_at_source` returned it, with the amounts that another client has released: they
    are added again at the providers where the rest of their class is. The caller checks the capacity of these.
    """
    return _with_missing(requested, source, [row for row in _rows(requested) if amount_of(source, row[0], row[1])])


def _with_missing(
    requested: ProviderAllocations, present: ProviderAllocations, places: Iterable[tuple[str, str, int]]
) -> dict[str, dict[str, int]]:
    """`present` with the amounts of `requested` that it lacks by class, in the first places that have room.

    places: (provider, class, the most that the result may hold there).
    """
    missing = _total_by_class(requested)
    missing.subtract(_total_by_class(present))
    result = {uuid: dict(resources) for uuid, resources in present.items()}
    for uuid, name, most in places:
        more = min(missing[name], most - amount_of(result, uuid, name))
        if more > 0:
            result.setdefault(uuid, {})[name] = amount_of(result, uuid, name) + more
            missing[name] -= more
    return result


def _rows(allocations: ProviderAllocations) -> list[tuple[str, str, int]]:
    return [(uuid, name, amount) for uuid, resources in allocations.items() for name, amount in resources.items()]


def _total_by_class(allocations: ProviderAllocations) -> Counter[str]:
    total: Counter[str] = Counter()
    for resources in allocations.values():
        total.update(resources)
    return total


def added_to(allocations: ProviderAllocations, wanted: ProviderAllocations) -> dict[str, dict[str, int]]:
    """Return what a consumer holds that takes `wanted` besides: the larger amount of each class of a provider of both,
    as for a move.
    """
    return total_of((kept_alongside(allocations, wanted), wanted))


def kept_alongside(source: ProviderAllocations, wanted: ProviderAllocations) -> dict[str, dict[str, int]]:
    """Return the allocations of the migration while the instance holds `wanted`: the sum of both is the larger amount
    of each class.
    """
    kept: dict[str, dict[str, int]] = {}
    for uuid, resources in source.items():
        row = {name: amount - amount_of(wanted, uuid, name) for name, amount in resources.items()}
        if row := {name: amount for name, amount in row.items() if amount > 0}:
            kept[uuid] = row
    return kept
