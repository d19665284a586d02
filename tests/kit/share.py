"""A share of some tests, drawn by a text: the same text draws the same ones, whatever order they come in."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import sha256


def drawn(names: Collection[str], share: int, by: str) -> frozenset[str]:
    """One in `share` of the names, rounded up."""
    ordered = sorted(names, key=lambda name: (sha256(f"{by} {name}".encode()).digest(), name))
    return frozenset(ordered[: -(-len(ordered) // share)])
