"""The allocation of a migration while its instance moves: the source's amounts, less those that the destination takes
of the same providers.

While an instance moves, two consumers hold allocations for it: the instance holds those on the destination, the
migration those on the source. Where both take the same class of one provider (a resize in place, a storage pool that
both hosts share) the book counts the larger amount and not the sum, because only one of the two machines runs at a
time, and either of them may stay in the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from placement_worker.domain.values import Holding

MIGRATION_TYPE = "MIGRATION"

_NO_AMOUNTS: Mapping[str, int] = {}


def amount_of(holding: Holding, provider: str, resource_class: str) -> int:
    """The amount of one class of one provider in a holding."""
    return holding.get(provider, _NO_AMOUNTS).get(resource_class, 0)


def total_of(holdings: Iterable[Holding]) -> dict[str, dict[str, int]]:
    """The sum of holdings, by provider and class."""
    total: dict[str, dict[str, int]] = {}
    for holding in holdings:
        for uuid, resources in holding.items():
            row = total.setdefault(uuid, {})
            for name, amount in resources.items():
                row[name] = row.get(name, 0) + amount
    return total


def source_of(requested: Holding, held: Holding, kept: Holding, roots: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Return the allocations that the source of a move holds once the move has begun.

    requested: as in the move's claim; held: by the instance; kept: by the migration; roots: of the providers that these
    name, as far as they exist.

    Amounts that source and destination share are in `held` alone. Where inventories have moved within a host, `held`
    and `kept` may name other providers of its tree than `requested`, and not the same ones. So the amounts that are
    missing in `kept` are counted by class and taken from the allocations in the source's trees, first from providers
    that `requested` names, then from any. Amounts that neither consumer holds were released by another client: these
    are added again at the providers where the rest of their class is.
    """
    trees = {roots[uuid] for uuid in (*requested, *kept) if uuid in roots}
    both = total_of((kept, {uuid: held[uuid] for uuid in sorted(held) if roots.get(uuid) in trees}))
    missing = _total_by_class(requested)
    missing.subtract(_total_by_class(kept))
    source = {uuid: dict(resources) for uuid, resources in kept.items()}
    where_it_was = [(uuid, name, min(amount, amount_of(both, uuid, name))) for uuid, name, amount in _rows(requested)]
    held_by_neither = [row for row in _rows(requested) if amount_of(both, row[0], row[1])]
    for uuid, name, most in (*where_it_was, *_rows(both), *held_by_neither):
        more = min(missing[name], most - amount_of(source, uuid, name))
        if more > 0:
            source.setdefault(uuid, {})[name] = amount_of(source, uuid, name) + more
            missing[name] -= more
    return source


def _rows(holding: Holding) -> list[tuple[str, str, int]]:
    return [(uuid, name, amount) for uuid, resources in holding.items() for name, amount in resources.items()]


def _total_by_class(holding: Holding) -> Counter[str]:
    total: Counter[str] = Counter()
    for resources in holding.values():
        total.update(resources)
    return total


def kept_beside(source: Holding, taken: Holding) -> dict[str, dict[str, int]]:
    """Return the allocations of the migration while the instance holds `taken`: the sum of both is the larger amount of
    each class.
    """
    kept: dict[str, dict[str, int]] = {}
    for uuid, resources in source.items():
        row = {name: amount - amount_of(taken, uuid, name) for name, amount in resources.items()}
        if row := {name: amount for name, amount in row.items() if amount > 0}:
            kept[uuid] = row
    return kept
