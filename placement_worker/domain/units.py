"""Which amounts an inventory gives: Placement's rule of min_unit, max_unit and step_size.

Here once for numbers and for columns of them, and once as SQL; `store/schema.sql` has that text, which a test compares.
"""

from __future__ import annotations

from typing import Any, Protocol


class UnitRule(Protocol):
    """The part of an inventory that the rule reads: `Inventory` of the contracts, `InventoryUsage`."""

    @property
    def min_unit(self) -> int:
        """The least that one allocation may have."""

    @property
    def max_unit(self) -> int:
        """The most that one allocation may have."""

    @property
    def step_size(self) -> int:
        """Of which every allocation is a multiple."""


def is_in_units(amount: Any, min_unit: Any, max_unit: Any, step_size: Any) -> Any:
    """Whether one allocation may have this amount, regardless of free capacity: of integers a bool, of arrays an array
    of them.
    """
    return (min_unit <= amount) & (amount <= max_unit) & (amount % step_size == 0)


def in_units_sql(amount: str, inventory: str = "i") -> str:
    """The same as a condition in SQL. amount: an expression, repeated. inventory: the alias of its row."""
    low, high, step = (f"{inventory}.{name}" for name in ("min_unit", "max_unit", "step_size"))
    return f"{amount} >= {low} AND {amount} <= {high} AND {amount} % {step} = 0"


def is_allowed_amount(amount: int, rule: UnitRule) -> bool:
    """Whether one allocation may have this amount, regardless of free capacity."""
    return bool(is_in_units(amount, rule.min_unit, rule.max_unit, rule.step_size))
