"""The verdicts of one query on all roots. Only roots that have changed are evaluated again.

A verdict is a small number: the code of a reason to reject the root (see `reasons`), or `passes`. Everything but usage
is evaluated once for each distinct set of traits, set of aggregates and kind of inventory, so a full evaluation takes a
few gathers. Between two decisions only the roots that claims and the feed have changed are evaluated, so a search is
nearly as cheap with a million hosts as with a thousand. The reason of a rejection is computed when it is first read.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from placement_worker.replica.book import Book
from placement_worker.replica.columns import Flags, Recent, Rows
from placement_worker.replica.compiled import CompiledRequest
from placement_worker.replica.explanation import explain
from placement_worker.replica.reasons import NOT_A_ROOT
from placement_worker.replica.request import Query, request_of
from placement_worker.replica.sharing import Sharing, sharing_of

Codes = NDArray[np.uint16]

# The queries whose verdicts are cached. A query takes about 12 bytes for
# each row.
QUERIES_KEPT = 64


class RootVerdicts:
    """The verdicts of one query, regardless of its pins (in_tree, only_roots, ignore_roots)."""

    def __init__(self, book: Book, query: Query) -> None:
        self.book = book
        self.query = query
        self.compiled = CompiledRequest(book, request_of(query))
        self.reasons = self.compiled.reasons
        self.passes = self.reasons.passes
        self._tree = self.passes + 1
        self._of_tree = np.array([self.reasons.unexplained, self.passes, self.reasons.unknown])  # by NO, YES, UNKNOWN
        self._begin()

    def _begin(self) -> None:
        """Drop all verdicts; the next refresh evaluates every root."""
        self._epoch = self.book.epoch
        self._sharing: Sharing | None = None
        self._given = np.zeros((0, 0), dtype=np.int64)
        # the verdicts by shapes alone; `_tree` where the tree must be evaluated
        self._by_shape: Codes = np.zeros(0, dtype=np.uint16)
        self.verdicts: Codes = np.zeros(0, dtype=np.uint16)
        self.counts = np.zeros(self.passes + 1, dtype=np.int64)
        self._moved_at = self._shaped_at = -1
        self._roots: Rows | None = None

    @property
    def roots(self) -> Rows:
        """The rows of the roots that pass, ascending. The array is shared and read-only."""
        if self._roots is None:
            self._roots = np.flatnonzero(self.verdicts == self.passes)
            self._roots.flags.writeable = False
        return self._roots

    def refresh(self) -> None:
        """Bring the verdicts up to date with the book."""
        book = self.book
        if self._epoch != book.epoch:
            self._begin()
        if self._moved_at == book.moves.end:
            return
        self.compiled.refresh()
        moved = book.moves.since(self._moved_at)
        shaped = book.shape_moves.since(self._shaped_at)
        affected = self._affected(moved)
        if affected is None or shaped is None or 2 * len(affected) > book.top:
            self._evaluate_all()
        else:
            self._evaluate_moved(affected, shaped)
        self._moved_at, self._shaped_at = book.moves.end, book.shape_moves.end

    def explain(self) -> None:
        """Replace each rejection without a reason by the reason why the root is rejected."""
        if self.counts[self.reasons.unexplained]:
            unexplained = np.flatnonzero(self.verdicts == self.reasons.unexplained)
            self._set(unexplained, explain(self.compiled, unexplained).astype(np.uint16))

    def assignments(self, root: int, limit: int) -> list[list[int]]:
        """Return up to this many assignments on one root, best first, as the book is now. An assignment has a row for
        each slot.

        Only this tree is solved. Changes of other trees are left to the next refresh.
        """
        if not self.compiled.stands_alone(root):
            self.compiled.refresh()
            found: list[list[int]] = self.compiled.assignments(root, limit).tolist()
            return found
        self.refresh()
        return [[root] * len(self.compiled.slots)] if limit > 0 and self.verdicts[root] == self.passes else []

    def _affected(self, moved: Rows | None) -> Rows | None:
        """Return the roots to evaluate again when these have changed; None: all roots. A sharing provider that has
        changed affects the trees that it serves. Its usage changes with every claim, but no verdict changes as long as
        the provider can give the same as before to one more such request.
        """
        sharing = sharing_of(self.book)
        if sharing is self._sharing and not len(sharing.givers):
            return moved
        given = self.compiled.given_by(sharing.givers)
        before, self._given = self._given, given
        if sharing is not self._sharing:
            known, self._sharing = self._sharing, sharing
            if known is None or not sharing.same_pairs(known):
                return None
        if moved is None or not len(sharing.givers) or not (changed := (given != before).any(axis=0)).any():
            return moved
        return np.union1d(moved, sharing.served_by(sharing.givers[changed]))

    def _evaluate_all(self) -> None:
        self._by_shape = np.zeros(self.book.size, dtype=np.uint16)
        self.verdicts = np.zeros(self.book.size, dtype=np.uint16)
        roots = self.book.rows_of_roots()
        self._evaluate_shapes(roots)
        self.verdicts[roots] = self._evaluate(roots)
        self.counts = np.bincount(self.verdicts[roots], minlength=self.passes + 1)
        self._roots = None

    def _evaluate_moved(self, moved: Rows, shaped: Rows) -> None:
        if more := self.book.size - self.verdicts.size:
            self._by_shape = np.concatenate([self._by_shape, np.zeros(more, dtype=np.uint16)])
            self.verdicts = np.concatenate([self.verdicts, np.zeros(more, dtype=np.uint16)])
        if len(shaped):
            self._by_shape[shaped] = NOT_A_ROOT
            self._evaluate_shapes(shaped[self.book.is_root[shaped]])
        self._set(moved, self._evaluate(moved))

    def _set(self, rows: Rows, after: Codes) -> None:
        """Change these rows' verdicts, their counts and the list of passing roots."""
        before = self.verdicts[rows]
        if np.array_equal(before, after):
            return
        self.verdicts[rows] = after
        self.counts += np.bincount(after, minlength=self.passes + 1) - np.bincount(before, minlength=self.passes + 1)
        self.counts[NOT_A_ROOT] = 0
        self._move_roots(rows, before == self.passes, after == self.passes)

    def _move_roots(self, moved: Rows, passed: Flags, pass_now: Flags) -> None:
        """Update the list of passing roots, by two copies instead of a scan of all rows."""
        if self._roots is None:
            return
        gone, come = moved[passed & ~pass_now], moved[pass_now & ~passed]
        roots = self._roots
        if len(gone):
            roots = np.delete(roots, np.searchsorted(roots, gone))
        if len(come):
            roots = np.insert(roots, np.searchsorted(roots, come), come)
        roots.flags.writeable = False
        self._roots = roots

    def _evaluate_shapes(self, roots: Rows) -> None:
        """Return the verdicts on lone roots by inventory, traits and aggregates alone. Trees are evaluated as a whole
        each time.
        """
        flat = self.compiled.stand_alone(roots)
        self._by_shape[roots] = np.where(flat, self.reasons.unexplained, self._tree)
        fit = self.compiled.flat_by_shape(roots[flat])
        self._by_shape[fit[self.compiled.anchor_codes(fit) == self.passes]] = self.passes

    def _evaluate(self, rows: Rows) -> Codes:
        """Return the verdicts on rows that are, or were, roots."""
        codes = self._by_shape[rows]
        codes[~self.compiled.flat_has_capacity(rows) & (codes == self.passes)] = self.reasons.unexplained
        trees = codes == self._tree
        if trees.any():
            codes[trees] = self._evaluate_trees(rows[trees])
        return codes

    def _evaluate_trees(self, roots: Rows) -> Codes:
        """Return the verdicts on trees: on the root itself, then on the resources of the tree."""
        codes = self.compiled.anchor_codes(roots)
        open_ones = np.flatnonzero(codes == self.passes)
        codes[open_ones] = self._of_tree[self.compiled.tree_verdicts(roots[open_ones])]
        return codes.astype(np.uint16)


class VerdictsCache(Recent[object, RootVerdicts]):
    """The verdicts that a book caches by query, so that a repeated query finds them nearly up to date."""

    MOST = QUERIES_KEPT


def verdicts_of(book: Book, query: Query) -> RootVerdicts:
    """Return the query's verdicts, refreshed."""
    verdicts = cached_verdicts(book, query)
    verdicts.refresh()
    return verdicts


def cached_verdicts(book: Book, query: Query) -> RootVerdicts:
    """Return the query's verdicts as of their last refresh."""
    key = (
        tuple(sorted(query.resources.items())),
        query.required,
        query.forbidden,
        query.member_of,
        query.forbidden_aggregates,
        query.root_required,
        query.root_forbidden,
        query.root_member_of,
        query.root_forbidden_aggregates,
        query.in_tree,
        msgspec.msgpack.encode(query.groups) if query.groups else b"",
        query.group_policy,
        query.same_subtree,
    )
    return book.cache(VerdictsCache).value(key, lambda: RootVerdicts(book, query))
