"""Which required traits a set of providers meets together (P-48).

A cover is the set of required any-of groups that one provider's traits meet, as bits of an int. Distinct covers are
few and numbered, so rows hold small numbers however many groups a query has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Distinct unions looked at for one tree. Only a query of a dozen any-of groups over as many classes, each given by
# many differently endowed providers, gets near it; set cover is hard, so such a query is refused, not answered wrongly.
MAX_UNIONS = 20_000

# Patterns (which covers each class can have) whose answer is remembered.
MAX_PATTERNS = 4096


class QueryTooWide(Exception):
    """The combinations of required traits and providers are more than the budget."""

    code = "search.too_wide"


class Cover:
    """The required groups of one query, and the distinct covers seen."""

    def __init__(self, required: Sequence[Sequence[str]]) -> None:
        self.required = required
        self.everything = (1 << len(required)) - 1
        self.masks: list[int] = [self.everything]
        self._numbers: dict[int, int] = {self.everything: 0}
        self._having: dict[int, NDArray[np.bool_]] = {}
        self.known: dict[tuple[tuple[int, ...], ...], bool] = {}

    full = 0  # the number of the cover that meets every group

    def number_of(self, traits: Sequence[str]) -> int:
        """The number of these traits' cover."""
        mask = sum(1 << bit for bit, group in enumerate(self.required) if any(name in traits for name in group))
        number = self._numbers.setdefault(mask, len(self.masks))
        if number == len(self.masks):
            self.masks.append(mask)
        return number

    def having(self, bit: int) -> NDArray[np.bool_]:
        """By cover number: whether it meets that group."""
        known = self._having.get(bit)
        if known is None or known.size < len(self.masks):
            known = self._having[bit] = np.array([mask >> bit & 1 for mask in self.masks], dtype=np.bool_)
        return known


def can_cover(cover: Cover, choices: tuple[tuple[int, ...], ...]) -> bool:
    """Whether one cover out of each class's choices can meet every group together."""
    known = cover.known.get(choices)
    if known is None:
        if len(cover.known) >= MAX_PATTERNS:
            cover.known.clear()
        masks = [[cover.masks[number] for number in numbers] for numbers in choices]
        known = cover.known[choices] = cover.everything in unions(masks)
    return known


def unions(choices: Sequence[Sequence[int]]) -> list[int]:
    """The greatest unions that can be had by taking one mask out of each choice; ones inside another are left out."""
    reached = [0]
    for masks in choices:
        grown = {have | mask for have in reached for mask in greatest(masks)}
        if len(grown) > MAX_UNIONS:
            raise QueryTooWide(f"more than {MAX_UNIONS} combinations of required traits")
        reached = greatest(grown)
    return reached


def greatest(masks: Sequence[int] | set[int]) -> list[int]:
    """The masks that are not inside another one, descending."""
    kept: list[int] = []
    for mask in sorted(set(masks), key=lambda mask: (-mask.bit_count(), -mask)):
        if not any(mask & larger == mask for larger in kept):
            kept.append(mask)
    return kept
