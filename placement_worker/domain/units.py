"""The amounts that an inventory allows for one allocation: Placement's rule of min_unit, max_unit and step_size.

The rule stands here twice: for numbers and for columns of numbers, and as SQL; a test compares the two.
"""

from __future__ import annotations

from typing import Any, Protocol


class UnitRule(Protocol):
    """The part of an inventory that the rule reads: `Inventory` of the contracts, `InventoryUsage`."""

    @property
    def min_unit(self) -> int:
        """The smallest amount of one allocation."""

    @property
    def max_unit(self) -> int:
        """The largest amount of one allocation."""

    @property
    def step_size(self) -> int:
        """Every allocation is a multiple of this amount."""


def is_in_units(amount: Any, min_unit: Any, max_unit: Any, step_size: Any) -> Any:
    """Whether one allocation may have this amount, regardless of free capacity. For integers the result is a bool, for
    arrays an array of bools.
    """
    return (min_unit <= amount) & (amount <= max_unit) & (amount % step_size == 0)


def in_units_sql(amount: str, inventory: str = "i") -> str:
    """Return the same rule as an SQL condition. amount: an expression, which the condition repeats. inventory: the
    alias of the inventory's row.
    """
    low, high, step = (f"{inventory}.{name}" for name in ("min_unit", "max_unit", "step_size"))
    return f"{amount} >= {low} AND {amount} <= {high} AND {amount} % {step} = 0"


def is_allowed_amount(amount: int, rule: UnitRule) -> bool:
    """Whether one allocation may have this amount, regardless of free capacity."""
    return bool(is_in_units(amount, rule.min_unit, rule.max_unit, rule.step_size))
