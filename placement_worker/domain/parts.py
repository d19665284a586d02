"""The parts of a batch of messages that are applied in a transaction each.

Some of the work on a transaction is one turn of the event loop, and grows with the providers and names that its
messages list, not with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from bus.contracts.placement import Claim, ClaimAll, InventoryUpdate, Swap

from .claims import ClaimItem

T = TypeVar("T")

# 10 ms each. 256 claims of ten hosts have 2,560, and 128 hosts of 50 traits 7,000: they are one part. A message that
# has more is a part of its own.
MAX_CLAIMED = 4_096
MAX_REPORTED = 8_192


def parts(items: Sequence[T], entries: Callable[[T], int], most: int) -> list[list[T]]:
    """The items in order, in lists of at most so many entries."""
    found: list[list[T]] = []
    left = 0
    for item in items:
        count = entries(item)
        if not found or count > left:
            found.append([])
            left = most
        left -= count
        found[-1].append(item)
    return found


def entries_of_claim(item: ClaimItem) -> int:
    """The providers that a claim, a gang or a swap names."""
    if isinstance(item, Claim):
        return 1 + sum(len(option.allocations) for option in item.options)
    if isinstance(item, ClaimAll):
        return sum(map(entries_of_claim, item.claims))
    return 1 + sum(len(each.allocations) for each in item.consumers) if isinstance(item, Swap) else 1


def entries_of_report(update: InventoryUpdate) -> int:
    """The providers of a report, with their classes, traits, aggregates and consumers."""
    return 1 + sum(
        1 + len(one.inventories) + len(one.traits) + len(one.aggregates or ()) + len(one.takes)
        for one in update.providers
    )
