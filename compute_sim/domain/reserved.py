"""The resources of quarantined machines, taken out of the inventory that the host reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from bus.contracts.cell import ReservedMachine
from bus.contracts.placement import Inventory, ProviderReport

ROUNDING = 1e-9  # a quotient that is a whole number but for its last bits is not rounded up


def with_reserved(tree: Sequence[ProviderReport], machines: Iterable[ReservedMachine]) -> tuple[ProviderReport, ...]:
    """The tree with what these machines take added to `reserved`: never more than there is."""
    # `reserved` counts before the allocation ratio, allocations after it. Rounded up: less is offered, never more.
    taken = amounts_of(machines)
    if not taken:
        return tuple(tree)
    return tuple(
        replace(
            provider,
            inventories={
                name: _reserved(inventory, taken[provider.uuid, name])
                for name, inventory in provider.inventories.items()
            },
        )
        for provider in tree
    )


def amounts_of(machines: Iterable[ReservedMachine]) -> Counter[tuple[str, str]]:
    """The sum of the machines' resources, by provider and class."""
    taken: Counter[tuple[str, str]] = Counter()
    for machine in machines:
        for provider, resources in (machine.allocations or {}).items():
            for name, amount in resources.items():
                taken[provider, name] += amount
    return taken


def uncounted_classes(tree: Sequence[ProviderReport], machine: ReservedMachine) -> tuple[str, ...]:
    """The classes of a machine's resources that its host reports nowhere: they cannot be reserved there."""
    there = {(provider.uuid, name) for provider in tree for name in provider.inventories}
    return tuple(sorted({name for provider, name in amounts_of((machine,)) if (provider, name) not in there}))


def _reserved(inventory: Inventory, amount: int) -> Inventory:
    if not amount:
        return inventory
    more = math.ceil(amount / inventory.allocation_ratio - ROUNDING)
    return replace(inventory, reserved=min(inventory.total, inventory.reserved + more))
