"""Finds the sharing providers and the trees that they serve.

A provider with the sharing trait serves each tree that has a member in one of the provider's aggregates. Traits,
aggregates and parentage alone decide this, so the pairs are kept until a shape changes.
"""

from __future__ import annotations

import numpy as np
import numpy.ma  # numpy.unique imports it when it is first called: 8 ms of the first search

from placement_worker.domain.values import SHARING
from placement_worker.replica.book import Book
from placement_worker.replica.columns import Flags, Recent, Rows


class Sharing:
    """The pairs of a sharing provider and the root of a tree that it serves, by root. The provider's own tree is left
    out.
    """

    def __init__(self, book: Book) -> None:
        self.rows = _sharers(book)
        self._is_sharer = np.zeros(book.top, dtype=np.bool_)
        self._is_sharer[self.rows] = True
        self._roots, self._sharers = _served(book, self.rows)
        self.givers = np.unique(self._sharers)  # the sharing providers that serve a tree

    def serving(self, roots: Rows) -> tuple[Rows, Rows]:
        """Return the sharing providers that serve these trees from other trees, and for each the position of the root
        that it serves.
        """
        first = np.searchsorted(self._roots, roots, side="left")
        many = np.searchsorted(self._roots, roots, side="right") - first
        owners = np.repeat(np.arange(len(roots)), many)
        ends = np.cumsum(many)
        within = np.arange(len(owners)) - np.repeat(ends - many, many)
        return self._sharers[np.repeat(first, many) + within], owners

    def serves(self, roots: Rows) -> Flags:
        """Per tree, whether a sharing provider of another tree serves it."""
        if not len(self._roots):
            return np.zeros(len(roots), dtype=np.bool_)
        place = np.minimum(np.searchsorted(self._roots, roots), len(self._roots) - 1)
        served: Flags = self._roots[place] == roots
        return served

    def serves_root(self, root: int) -> bool:
        """Whether a sharing provider of another tree serves this tree."""
        if not len(self._roots):
            return False
        place = int(np.searchsorted(self._roots, root))
        return place < len(self._roots) and int(self._roots[place]) == root

    def served_by(self, rows: Rows) -> Rows:
        """Return the roots of the other trees that these rows serve, ascending."""
        return np.unique(self._roots[np.isin(self._sharers, rows)])

    def same_pairs(self, other: Sharing) -> bool:
        """Whether the same providers serve the same trees."""
        return np.array_equal(self._roots, other._roots) and np.array_equal(self._sharers, other._sharers)

    def are_sharers(self, rows: Rows) -> Flags:
        """Per row, whether it is a sharing provider."""
        return self._is_sharer[rows]


class SharingCache(Recent[int, Sharing]):
    """The pairs that a book caches until a shape changes."""

    MOST = 1


def sharing_of(book: Book) -> Sharing:
    """Return the sharing providers and the trees that they serve, by the present shapes."""
    return book.cache(SharingCache).value(book.shape_moves.end, lambda: Sharing(book))


def _sharers(book: Book) -> Rows:
    """Return the rows of sharing providers. A sharing provider without an aggregate serves only its own tree, and is
    left out.
    """
    shares = np.array([SHARING in traits for traits in book.trait_sets.values], dtype=np.bool_)
    if not shares.any():
        return np.zeros(0, dtype=np.intp)
    return np.flatnonzero(shares[book.traits[: book.top]] & book.live[: book.top])


def _served(book: Book, sharers: Rows) -> tuple[Rows, Rows]:
    """Return (root, sharer) pairs, sorted by root and then by sharer."""
    nothing = np.zeros(0, dtype=np.intp)
    if not sharers.size:
        return nothing, nothing
    # Rows by their set of aggregates, so that each aggregate finds its members without a scan.
    members = np.flatnonzero(book.live[: book.top] & (book.aggregates[: book.top] > 0))
    members = members[np.argsort(book.aggregates[members], kind="stable")]
    numbers = book.aggregates[members]
    sets_with: dict[str, list[int]] = {}
    for number, names in enumerate(book.aggregate_sets.values):
        for name in names:
            sets_with.setdefault(name, []).append(number)
    roots_by_set: dict[int, Rows] = {}
    roots, served_by = [nothing], [nothing]
    for sharer in sharers.tolist():
        own = int(book.aggregates[sharer])
        if own not in roots_by_set:
            together = sorted({n for name in book.aggregate_sets.values[own] for n in sets_with[name]})
            low, high = np.searchsorted(numbers, together, "left"), np.searchsorted(numbers, together, "right")
            found = [members[start:stop] for start, stop in zip(low.tolist(), high.tolist(), strict=True)]
            roots_by_set[own] = np.unique(book.root[np.concatenate([nothing, *found])]).astype(np.intp)
        mine = roots_by_set[own]
        mine = mine[book.is_root[mine] & (mine != book.root[sharer])]
        roots.append(mine)
        served_by.append(np.full(len(mine), sharer, dtype=np.intp))
    root, sharer_rows = np.concatenate(roots), np.concatenate(served_by)
    order = np.lexsort((sharer_rows, root))
    return root[order], sharer_rows[order]
