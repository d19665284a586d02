"""Walks side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def in_turn(walks: Iterable[Iterator[T]]) -> Iterator[T]:
    """One of each walk in turn, until all have ended."""
    going = list(walks)
    while going:  # ends: every round takes something or drops a walk
        still = []
        for walk in going:
            for one in walk:
                yield one
                still.append(walk)
                break
        going = still
