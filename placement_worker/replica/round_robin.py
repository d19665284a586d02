"""Takes items of several iterators in turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def round_robin(iterators: Iterable[Iterator[T]]) -> Iterator[T]:
    """Yield one item of each iterator in turn, until all have ended."""
    open_ones = list(iterators)
    while open_ones:  # ends: every round takes an item or drops an iterator
        still_open = []
        for iterator in open_ones:
            for item in iterator:
                yield item
                still_open.append(iterator)
                break
        open_ones = still_open
