"""What a migration holds while its instance moves: the source, less what the destination takes of the same.

While an instance moves, two consumers hold allocations for it: the instance its destination, the migration its source.
Where both take the same class of one provider (a resize in place, a storage pool that both hosts share) the book counts
the larger of the two once, never the sum: only one of the two machines runs, and either may be the one that stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from placement_worker.domain.values import Holding

MIGRATION_TYPE = "MIGRATION"

_NO_AMOUNTS: Mapping[str, int] = {}


def amount_of(holding: Holding, provider: str, resource_class: str) -> int:
    """How much of a class a holding takes of a provider."""
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


def source_of(requested: Holding, held: Holding, kept: Holding) -> dict[str, dict[str, int]]:
    """What the source takes, once the move has begun.

    asked: as in the move's claim; held: by the instance; kept: by the migration. The book's own record wins where
    inventories were moved meanwhile: a provider of which neither consumer holds anything is left out.
    """
    source = {uuid: dict(resources) for uuid, resources in kept.items()}
    for uuid, resources in requested.items():
        if uuid in held or uuid in kept:
            row = source.setdefault(uuid, {})
            for name, amount in resources.items():
                if name in row or amount_of(held, uuid, name):
                    row[name] = max(amount, row.get(name, 0))
    return {uuid: resources for uuid, resources in source.items() if resources}


def kept_beside(source: Holding, taken: Holding) -> dict[str, dict[str, int]]:
    """What the migration holds while the instance holds `taken`: together they hold the larger of each."""
    kept: dict[str, dict[str, int]] = {}
    for uuid, resources in source.items():
        row = {name: amount - amount_of(taken, uuid, name) for name, amount in resources.items()}
        if row := {name: amount for name, amount in row.items() if amount > 0}:
            kept[uuid] = row
    return kept
