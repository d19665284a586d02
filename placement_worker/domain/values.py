"""The values of placement that decisions read: a provider's inventory, a consumer's allocations; and the names of
classes and traits: which placement accepts, and which known name a mistyped one is close to.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any

import os_resource_classes
from msgspec import Struct

from bus.contracts.placement import ProviderState


class Fit(Enum):
    """Whether an amount of a class of a provider can be allocated."""

    FITS = "fits"
    NO_INVENTORY = "no_inventory"  # the provider has nothing of the class
    NO_CAPACITY = "no_capacity"
    NOT_IN_UNITS = "not_in_units"


def is_in_units(amount: Any, min_unit: Any, max_unit: Any, step_size: Any) -> Any:
    """Whether one allocation may have this amount, regardless of free capacity. For integers the result is a bool, for
    arrays an array of bools, for SQLAlchemy's columns a condition.
    """
    return (min_unit <= amount) & (amount <= max_unit) & (amount % step_size == 0)


def is_allowed_amount(amount: int, rules: InventoryUsage | StoredInventory) -> bool:
    """Whether one allocation may have this amount, regardless of free capacity."""
    return bool(is_in_units(amount, rules.min_unit, rules.max_unit, rules.step_size))


def fit(amount: int, rules: InventoryUsage | StoredInventory | None, used: int, more: int) -> Fit:
    """Whether one allocation may have this amount when the usage grows by `more`, from `used`. Over capacity or not, an
    amount for which it does not grow is allowed.
    """
    if more <= 0:
        return Fit.FITS
    if rules is None:
        return Fit.NO_INVENTORY
    if used + more > rules.capacity:
        return Fit.NO_CAPACITY
    return Fit.FITS if is_allowed_amount(amount, rules) else Fit.NOT_IN_UNITS


# A provider with this trait shares its inventory with other trees, so a consumer of it need not be on its host.
SHARING = "MISC_SHARES_VIA_AGGREGATE"

ProviderAllocations = Mapping[str, Mapping[str, int]]  # {provider: {class: amount}}
NOTHING: ProviderAllocations = {}

# GroupKey names a server group: (project, uuid). Members has its members that hold allocations: {consumer: its hosts}.
GroupKey = tuple[str, str]
Members = Mapping[str, Sequence[str]]

# The largest integer up to which a double represents every integer exactly. Capacities are cut to it.
MAX_CAPACITY = 2**53

# The `cell` of a root that was first reported on the API bus: the name of that bus.
ABOVE_CELLS = "api"


class InventoryUsage(Struct, frozen=True, gc=False):
    """The limits that one inventory sets for a claim, and its usage when it was read."""

    capacity: int
    min_unit: int
    max_unit: int
    step_size: int
    used: int


class ClaimedProvider(Struct, frozen=True):
    """A provider as a claim sees it; its row is locked. root: the uuid of the provider at the top of its tree, the
    host. shares: with other trees.
    """

    generation: int
    spec_generation: int
    inventories: dict[str, InventoryUsage]
    root: str
    shares: bool = False


class ConsumerState(Struct, frozen=True):
    """A consumer and its allocations. claim_owner: whose claim it is ('': unknown). Without allocations
    it states ended attempts: those up to `attempt` are refused, this last one, where it has a claim owner, to that
    owner alone.
    """

    generation: int
    attempt: int
    project_id: str
    user_id: str
    consumer_type: str
    allocations: ProviderAllocations = NOTHING
    claim_owner: str = ""


class StoredInventory(Struct, frozen=True, gc=False):
    """One inventory of one provider. capacity: computed when the inventory is written (`stored_inventory`), and only
    read afterwards.

    orphaned: its reporter no longer reports the inventory, but consumers use it. Its capacity is 0 until it is unused
    and deleted.
    """

    total: int
    reserved: int
    min_unit: int
    max_unit: int
    step_size: int
    allocation_ratio: float
    capacity: int
    orphaned: bool = False


class Provider(Struct, frozen=True):
    """A whole provider, as an inventory update sees it. used: the usage of every class that has any.

    cell: set on roots, and valid for the whole tree: the cell whose bus first reported the root, or ABOVE_CELLS for the
    API bus. None: no report has named the root yet (the REST API created it, or the rows are older than this column).
    own_traits: the traits that were set through the REST API; reports neither add nor remove them.
    """

    uuid: str
    name: str
    parent: str | None
    root: str
    generation: int
    spec_generation: int
    inventories: dict[str, StoredInventory]
    used: dict[str, int]
    traits: tuple[str, ...]
    aggregates: tuple[str, ...]
    cell: str | None = None
    own_traits: tuple[str, ...] = ()

    @property
    def is_changed_by_clients(self) -> bool:
        """Whether it has what its reporter did not give it, and could not give it back."""
        return bool(self.aggregates or self.own_traits)

    @property
    def shares(self) -> bool:
        """Whether it shares its inventory with other trees."""
        return SHARING in self.traits


def is_foreign(cell: str | None, bus: str) -> bool:
    """Whether reports of a root of this cell are refused on this bus."""
    return bus != ABOVE_CELLS and cell not in (None, bus)


def is_closed(cell: str | None, bus: str) -> bool:
    """Whether claims of a tree of this cell are refused on this bus.

    A root that was reported on the API bus is open to claims on every bus.
    """
    return cell != ABOVE_CELLS and is_foreign(cell, bus)


def capacity(total: int, reserved: int, allocation_ratio: float) -> int:
    """Return the capacity by Placement's rule, (total - reserved) * allocation_ratio, rounded down and between 0 and
    MAX_CAPACITY.
    """
    return math.floor(max(0, min((total - reserved) * allocation_ratio, MAX_CAPACITY)))


def stored_inventory(inventory: Any) -> StoredInventory:
    """Return an inventory, as a source reports it or a body has it, with its capacity."""
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
    """Return a provider in the form of the feed and of the snapshot."""
    return ProviderState(
        uuid=provider.uuid,
        name=provider.name,
        parent_uuid=provider.parent,
        root_uuid=provider.root,
        generation=provider.generation,
        spec_generation=provider.spec_generation,
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
    """Return the part of a provider that the decision about a claim needs."""
    inventories = {
        name: InventoryUsage(
            inventory.capacity, inventory.min_unit, inventory.max_unit, inventory.step_size, provider.used.get(name, 0)
        )
        for name, inventory in provider.inventories.items()
    }
    return ClaimedProvider(provider.generation, provider.spec_generation, inventories, provider.root, provider.shares)


CUSTOM = "CUSTOM_"
MAX_NAME = 255
STANDARD_CLASSES: frozenset[str] = frozenset(os_resource_classes.STANDARDS)

_FOREIGN = re.compile(r"[^0-9A-Za-z]+")
_CUSTOM_NAME = re.compile(r"CUSTOM_[A-Z0-9_]+")


def is_class(name: str) -> bool:
    """Whether this is a standard or a custom resource class (`CUSTOM_` and upper-case letters, digits, `_`)."""
    return name in STANDARD_CLASSES or (len(name) <= MAX_NAME and _CUSTOM_NAME.fullmatch(name) is not None)


def suggestion(name: str, known: Collection[str] = STANDARD_CLASSES) -> str:
    """Return `; did you mean X?` for a name that is refused: X is the closest known name, or else the name with
    CUSTOM_.
    """
    near = difflib.get_close_matches(name[:MAX_NAME].upper(), sorted(known))
    own = CUSTOM + _FOREIGN.sub("_", name.removeprefix(CUSTOM)).strip("_").upper()
    suggested = near[0] if near else own if len(own) <= MAX_NAME and own != CUSTOM else ""
    return f"; did you mean {suggested}?" if suggested else ""


def is_custom(name: str) -> bool:
    """Whether a class or trait is custom, and may therefore be created on demand."""
    return name.startswith(CUSTOM)
