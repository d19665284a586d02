"""Finds the sharing providers and the trees that they serve.

A provider with the sharing trait serves each tree that has a member in one of the provider's aggregates. Traits,
aggregates and parentage alone decide this, so the pairs are kept until a spec generation changes.
"""

from __future__ import annotations

import numpy as np
import numpy.ma  # numpy.unique imports it when it is first called: 8 ms of the first search

from placement_worker.domain.values import SHARING
from placement_worker.replica.columns import Flags, Recent, Rows
from placement_worker.replica.replica import Replica


class Sharing:
    """The pairs of a sharing provider and the root of a tree that it serves, by root. The provider's own tree is left
    out.
    """

    def __init__(self, replica: Replica) -> None:
        self.rows = _sharing_providers(replica)
        self._is_sharing_provider = np.zeros(replica.top, dtype=np.bool_)
        self._is_sharing_provider[self.rows] = True
        self._roots, self._sharing_providers = _served(replica, self.rows)
        self.donors = np.unique(self._sharing_providers)  # the sharing providers that serve a tree

    def serving(self, roots: Rows) -> tuple[Rows, Rows]:
        """Return the sharing providers that serve these trees from other trees, and for each the position of the root
        that it serves.
        """
        first = np.searchsorted(self._roots, roots, side="left")
        many = np.searchsorted(self._roots, roots, side="right") - first
        owners = np.repeat(np.arange(len(roots)), many)
        ends = np.cumsum(many)
        within = np.arange(len(owners)) - np.repeat(ends - many, many)
        return self._sharing_providers[np.repeat(first, many) + within], owners

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
        return np.unique(self._roots[np.isin(self._sharing_providers, rows)])

    def same_pairs(self, other: Sharing) -> bool:
        """Whether the same providers serve the same trees."""
        return np.array_equal(self._roots, other._roots) and np.array_equal(
            self._sharing_providers, other._sharing_providers
        )

    def are_sharing_providers(self, rows: Rows) -> Flags:
        """Per row, whether it is a sharing provider."""
        return self._is_sharing_provider[rows]


class SharingCache(Recent[int, Sharing]):
    """The pairs that a replica caches until a spec generation changes."""

    MOST = 1


def sharing_of(replica: Replica) -> Sharing:
    """Return the sharing providers and the trees that they serve, by the present spec generations."""
    return replica.cache(SharingCache).value(replica.spec_changes.end, lambda: Sharing(replica))


def _sharing_providers(replica: Replica) -> Rows:
    """Return the rows of sharing providers. A sharing provider without an aggregate serves only its own tree, and is
    left out.
    """
    shares = np.array([SHARING in traits for traits in replica.trait_sets.values], dtype=np.bool_)
    if not shares.any():
        return np.zeros(0, dtype=np.intp)
    return np.flatnonzero(shares[replica.traits[: replica.top]] & replica.live[: replica.top])


def _served(replica: Replica, sharing_providers: Rows) -> tuple[Rows, Rows]:
    """Return (root, sharing_provider) pairs, sorted by root and then by sharing_provider."""
    nothing = np.zeros(0, dtype=np.intp)
    if not sharing_providers.size:
        return nothing, nothing
    # Rows by their set of aggregates, so that each aggregate finds its members without a scan.
    members = np.flatnonzero(replica.live[: replica.top] & (replica.aggregates[: replica.top] > 0))
    members = members[np.argsort(replica.aggregates[members], kind="stable")]
    numbers = replica.aggregates[members]
    sets_with: dict[str, list[int]] = {}
    for number, names in enumerate(replica.aggregate_sets.values):
        for name in names:
            sets_with.setdefault(name, []).append(number)
    roots_by_set: dict[int, Rows] = {}
    roots, served_by = [nothing], [nothing]
    for sharing_provider in sharing_providers.tolist():
        own = int(replica.aggregates[sharing_provider])
        if own not in roots_by_set:
            together = sorted({n for name in replica.aggregate_sets.values[own] for n in sets_with[name]})
            low, high = np.searchsorted(numbers, together, "left"), np.searchsorted(numbers, together, "right")
            found = [members[start:stop] for start, stop in zip(low.tolist(), high.tolist(), strict=True)]
            roots_by_set[own] = np.unique(replica.root[np.concatenate([nothing, *found])]).astype(np.intp)
        mine = roots_by_set[own]
        mine = mine[replica.is_root[mine] & (mine != replica.root[sharing_provider])]
        roots.append(mine)
        served_by.append(np.full(len(mine), sharing_provider, dtype=np.intp))
    root, sharing_rows = np.concatenate(roots), np.concatenate(served_by)
    order = np.lexsort((sharing_rows, root))
    return root[order], sharing_rows[order]
