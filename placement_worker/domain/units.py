"""Whether an inventory has room for an amount: Placement's rule of capacity, min_unit, max_unit and step_size.

The rule of units is one expression for numbers, columns of numbers and columns of the database.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol


class Rules(Protocol):
    """The part of an inventory that the rule reads: `InventoryUsage`, `StoredInventory`."""

    @property
    def capacity(self) -> int:
        """The most that all allocations together may have."""

    @property
    def min_unit(self) -> int:
        """The smallest amount of one allocation."""

    @property
    def max_unit(self) -> int:
        """The largest amount of one allocation."""

    @property
    def step_size(self) -> int:
        """Every allocation is a multiple of this amount."""


class Fit(Enum):
    """Whether an amount of a class of a provider can be allocated."""

    FITS = "fits"
    NO_INVENTORY = "no_inventory"  # the provider has nothing of the class
    FULL = "full"
    NOT_IN_UNITS = "not_in_units"


def is_in_units(amount: Any, min_unit: Any, max_unit: Any, step_size: Any) -> Any:
    """Whether one allocation may have this amount, regardless of free capacity. For integers the result is a bool, for
    arrays an array of bools, for SQLAlchemy's columns a condition.
    """
    return (min_unit <= amount) & (amount <= max_unit) & (amount % step_size == 0)


def is_allowed_amount(amount: int, rules: Rules) -> bool:
    """Whether one allocation may have this amount, regardless of free capacity."""
    return bool(is_in_units(amount, rules.min_unit, rules.max_unit, rules.step_size))


def fit(amount: int, rules: Rules | None, used: int, more: int) -> Fit:
    """Whether one allocation may have this amount when the usage grows by `more`, from `used`. Over capacity or not, an
    amount for which it does not grow is allowed.
    """
    if more <= 0:
        return Fit.FITS
    if rules is None:
        return Fit.NO_INVENTORY
    if used + more > rules.capacity:
        return Fit.FULL
    return Fit.FITS if is_allowed_amount(amount, rules) else Fit.NOT_IN_UNITS
