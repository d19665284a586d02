"""Verdicts on roots that a look at one provider at a time does not decide: numbered groups, and what others share.

A plan asks here about such roots only, and hears which roots to look at again when a sharing provider moved.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placement_worker.replica.book import Book
from placement_worker.replica.columns import Flags, Rows
from placement_worker.replica.granular import Search
from placement_worker.replica.query import Query, request_of
from placement_worker.replica.sharing import Sharing, sharing_of

# Dead ends looked into for one pattern of trees before its verdict is "unknown".
BUDGET = 20_000


class Entangled:
    """One query's entangled roots."""

    def __init__(self, book: Book, query: Query) -> None:
        self.search = Search(book, request_of(query))
        self._book = book
        self._all = bool(query.groups)
        self._sharing: Sharing | None = None
        self._given = np.zeros((0, 0), dtype=np.int64)

    def refresh(self) -> None:
        """Make the tables right for the book as it is now."""
        self.search.refresh()

    def concerns(self, roots: Rows) -> Flags:
        """Which of these roots are decided here."""
        if self._all:
            return np.ones(len(roots), dtype=np.bool_)
        return sharing_of(self._book).serves(roots)

    def affected(self, moved: Rows) -> Rows | None:
        """The roots to judge again when these moved; None: all. A sharing provider that moved draws in its trees.

        Usage of a shared pool moves with every claim, but as long as it can give the same as before to one more
        request of this kind, no verdict changes.
        """
        sharing = sharing_of(self._book)
        givers = sharing.givers
        if sharing is self._sharing and not len(givers):
            return moved
        given = self.search.given_by(givers)
        before, self._given = self._given, given
        if sharing is not self._sharing:
            known, self._sharing = self._sharing, sharing
            if known is None or not sharing.same_pairs(known):
                return None
        if not len(givers) or not (changed := (given != before).any(axis=0)).any():
            return moved
        return np.union1d(moved, sharing.served_by(givers[changed]))

    def verdicts(self, roots: Rows) -> NDArray[np.int8]:
        """Per root YES, NO or UNKNOWN (see `granular`)."""
        if not self.search.possible:
            return np.zeros(len(roots), dtype=np.int8)
        return self.search.verdicts(roots, BUDGET)

    def ways(self, root: int, limit: int) -> Rows:
        """Up to so many ways on one root, best first: per way and slot, the row that gives it."""
        self.search.refresh()
        return self.search.ways(root, limit, BUDGET)

    def misses(self, roots: Rows) -> NDArray[np.int64]:
        """Per slot and root, how near the nearest member comes to giving it (NOTHING ... GIVES)."""
        return self.search.misses(roots)
