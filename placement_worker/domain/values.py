"""The book's values as decisions see them: a provider's inventory, a consumer's allocations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from bus.contracts.placement import Inventory, ProviderState

Holding = Mapping[str, Mapping[str, int]]  # {provider: {class: amount}}
NOTHING: Holding = {}

# A server group: (project, its uuid). Its members that hold something: {consumer: the hosts that it is on}.
GroupKey = tuple[str, str]
Members = Mapping[str, Sequence[str]]

# Below the largest integer that a double holds exactly, for any total and ratio.
MAX_CAPACITY = 2**53

# Where a provider belongs that was first reported above all cells: the API bus, by its name.
ABOVE_CELLS = "api"


class InventoryUsage(Struct, frozen=True, gc=False):
    """The limits that one inventory puts to a claim, and how much of it was used when it was read."""

    capacity: int
    min_unit: int
    max_unit: int
    step_size: int
    used: int


class ClaimedProvider(Struct, frozen=True):
    """A provider as a claim sees it, locked. root: the provider at the top of its tree, its host."""

    generation: int
    shape: int
    inventories: dict[str, InventoryUsage]
    root: str


class ConsumerState(Struct, frozen=True):
    """The holder of an allocation. With an empty holding it is only a fence: attempts up to this one are over."""

    generation: int
    attempt: int
    project_id: str
    user_id: str
    consumer_type: str
    holding: Holding = NOTHING


class StoredInventory(Struct, frozen=True, gc=False):
    """One inventory of one provider. capacity is computed here, once, and read everywhere after.

    stranded: its source no longer reports it, but it is in use: capacity 0 until the last user has gone.
    """

    total: int
    reserved: int
    min_unit: int
    max_unit: int
    step_size: int
    allocation_ratio: float
    capacity: int
    stranded: bool = False


class Provider(Struct, frozen=True):
    """A provider whole, as an inventory update sees it. `used` has every class that is not at 0.

    cell: of a root alone, and its whole tree follows it: the bus that first reported it, a cell's or the API bus
    (ABOVE_CELLS). None: no report has stated it yet (the REST API made it, or a book older than cells' bounds).
    lasting: the traits that the REST API gave it; a report neither brings nor takes them. Only read for reports and
    exports; the REST API's own writes leave it to the database.
    """

    uuid: str
    name: str
    parent: str | None
    root: str
    generation: int
    shape: int
    inventories: dict[str, StoredInventory]
    used: dict[str, int]
    traits: tuple[str, ...]
    aggregates: tuple[str, ...]
    cell: str | None = None
    lasting: tuple[str, ...] = ()


def is_foreign(cell: str | None, bus: str) -> bool:
    """Whether a root of this cell is not to be reported on this bus."""
    return bus != ABOVE_CELLS and cell not in (None, bus)


def is_closed(cell: str | None, bus: str) -> bool:
    """Whether a tree of this cell is not to be claimed on this bus.

    A root that was reported above cells is open to all.
    """
    return cell != ABOVE_CELLS and is_foreign(cell, bus)


def capacity(total: int, reserved: int, allocation_ratio: float) -> int:
    """How much can be handed out: Placement's rule, rounded down, within bounds."""
    product = (total - reserved) * allocation_ratio
    if not product > 0:
        return 0
    return math.floor(product) if product < MAX_CAPACITY else MAX_CAPACITY


def stored_inventory(inventory: Inventory) -> StoredInventory:
    """A reported inventory with its capacity."""
    return StoredInventory(
        inventory.total,
        inventory.reserved,
        inventory.min_unit,
        inventory.max_unit,
        inventory.step_size,
        inventory.allocation_ratio,
        capacity(inventory.total, inventory.reserved, inventory.allocation_ratio),
    )


def state_of(provider: Provider) -> ProviderState:
    """A provider as it is in the feed and in the snapshot."""
    return ProviderState(
        uuid=provider.uuid,
        name=provider.name,
        parent_uuid=provider.parent,
        root_uuid=provider.root,
        generation=provider.generation,
        shape=provider.shape,
        inventories={
            name: (
                float(inventory.capacity),
                inventory.min_unit,
                inventory.max_unit,
                inventory.step_size,
                inventory.total,
                inventory.reserved,
                inventory.allocation_ratio,
            )
            for name, inventory in sorted(provider.inventories.items())
        },
        used={name: amount for name, amount in sorted(provider.used.items()) if amount},
        traits=provider.traits,
        aggregates=provider.aggregates,
    )


def claimed_provider(provider: Provider) -> ClaimedProvider:
    """The part of a provider that a claim needs: what fits into it, and whether it has changed."""
    inventories = {
        name: InventoryUsage(
            inventory.capacity, inventory.min_unit, inventory.max_unit, inventory.step_size, provider.used.get(name, 0)
        )
        for name, inventory in provider.inventories.items()
    }
    return ClaimedProvider(provider.generation, provider.shape, inventories, provider.root)
