"""Which amounts an inventory gives: Placement's rule of min_unit, max_unit and step_size, once for single amounts.

Over columns it is `replica.predicates`, over rows `store/schema.sql` and `store/rest_reads.py`.
"""

from __future__ import annotations

from typing import Protocol


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


def is_allowed_amount(amount: int, rule: UnitRule) -> bool:
    """Whether one allocation may have this amount, whatever is free."""
    return rule.min_unit <= amount <= rule.max_unit and amount % rule.step_size == 0
