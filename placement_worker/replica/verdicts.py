"""The verdicts of one query on all roots. Only roots that have changed are evaluated again.

A verdict is a small number: the code of a reason to reject the root (see `reasons`), or `passes`. Everything but usage
is evaluated once for each distinct set of traits, set of aggregates and kind of inventory, so a full evaluation takes a
few gathers. Between two decisions only the roots that claims and the feed have changed are evaluated, so a search is
nearly as cheap with a million hosts as with a thousand. The reason of a rejection is computed when it is first read.
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from placement_worker.replica.book import Book
from placement_worker.replica.columns import Amounts, Recent, Rows
from placement_worker.replica.compiled import CompiledRequest
from placement_worker.replica.predicates import GIVES, IN_USE, MemberRows
from placement_worker.replica.reasons import NOT_A_ROOT
from placement_worker.replica.request import UNNUMBERED, Group, Query, request_of
from placement_worker.replica.sharing import Sharing, sharing_of

Codes = NDArray[np.uint16]

# The queries whose verdicts are cached. A query takes about 12 bytes for
# each row.
QUERIES_KEPT = 64


class RootVerdicts:
    """The verdicts of one query, regardless of its pins (in_tree, only_roots, ignore_roots)."""

    def __init__(self, book: Book, query: Query) -> None:
        self.book = book
        self.compiled = CompiledRequest(book, request_of(query))
        self.reasons = self.compiled.reasons
        self.passes = self.reasons.passes
        self._tree = self.passes + 1
        self._of_tree = np.array([self.reasons.unexplained, self.passes, self.reasons.unknown])  # by NO, YES, UNKNOWN
        self._sharing: Sharing | None = None
        self._given = np.zeros((0, 0), dtype=np.int64)
        # the verdicts by shapes alone; `_tree` where the tree must be evaluated
        self._by_shape: Codes = np.zeros(0, dtype=np.uint16)
        self.verdicts: Codes = np.zeros(0, dtype=np.uint16)
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
        if self._moved_at == book.moves.end:
            return
        moved = self._affected(book.moves.since(self._moved_at))
        shaped = book.shape_moves.since(self._shaped_at)
        if moved is None or shaped is None or 2 * len(moved) > book.top:
            moved = shaped = book.rows_of_roots()
            self._by_shape, self.verdicts, self._roots = self._by_shape[:0], self.verdicts[:0], None
        self._evaluate_moved(moved, shaped)
        self._moved_at, self._shaped_at = book.moves.end, book.shape_moves.end

    def explain(self) -> None:
        """Replace each rejection without a reason by the reason why the root is rejected."""
        unexplained = np.flatnonzero(self.verdicts == self.reasons.unexplained)
        if len(unexplained):
            self.verdicts[unexplained] = explain(self.compiled, unexplained)

    def assignments(self, root: int, limit: int) -> list[list[int]]:
        """Return up to this many assignments on one root, best first, as the book is now. An assignment has a row for
        each slot.

        Only this tree is solved. Changes of other trees are left to the next refresh.
        """
        if not self.compiled.stands_alone(root):
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

    def _evaluate_moved(self, moved: Rows, shaped: Rows) -> None:
        if more := self.book.size - self.verdicts.size:
            self._by_shape = np.concatenate([self._by_shape, np.zeros(more, dtype=np.uint16)])
            self.verdicts = np.concatenate([self.verdicts, np.zeros(more, dtype=np.uint16)])
        if len(shaped):
            self._by_shape[shaped] = NOT_A_ROOT
            self._evaluate_shapes(shaped[self.book.is_root[shaped]])
        before, after = self.verdicts[moved], self._evaluate(moved)
        self.verdicts[moved] = after
        if ((before == self.passes) != (after == self.passes)).any():
            self._roots = None

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


class VerdictsCache(Recent[bytes, RootVerdicts]):
    """The verdicts that a book caches by query, so that a repeated query finds them nearly up to date."""

    MOST = QUERIES_KEPT


def verdicts_of(book: Book, query: Query) -> RootVerdicts:
    """Return the query's verdicts, refreshed."""
    verdicts = cached_verdicts(book, query)
    verdicts.refresh()
    return verdicts


def cached_verdicts(book: Book, query: Query) -> RootVerdicts:
    """Return the query's verdicts as of their last refresh."""
    without_pins = replace(query, only_roots=(), ignore_roots=())
    key = msgspec.msgpack.encode(without_pins, order="deterministic")
    return book.cache(VerdictsCache).value(key, lambda: RootVerdicts(book, query))


def explain(compiled: CompiledRequest, roots: Rows) -> Amounts:
    """Return the code of each of these roots, none of which can take the request. A root that is rejected for several
    reasons has the code of the first.
    """
    reasons = compiled.reasons
    codes = compiled.anchor_codes(roots)
    if not compiled.possible:
        return np.minimum(codes, reasons.nothing)
    members = compiled.members(roots)
    best = np.zeros(len(members.rows), dtype=np.int64)
    for slot, requested in enumerate(compiled.slots):
        levels = _levels(compiled, slot, requested.suffix, members)
        codes = np.minimum(codes, reasons.of_level[slot][members.greatest(levels)])
        if requested.suffix == UNNUMBERED:
            best = np.maximum(best, _ranked(levels, slot, len(compiled.slots)))
    if compiled.unnumbered is not None:
        codes = np.minimum(codes, _no_member_left(compiled, compiled.unnumbered, members))
        codes = np.minimum(codes, _traits_out_of_reach(compiled, members, best))
    return np.minimum(codes, reasons.unfit)


def _levels(compiled: CompiledRequest, slot: int, suffix: str, members: MemberRows) -> Amounts:
    """Return the fit level of each member: how close it comes to giving the slot."""
    levels = np.full(len(members.rows), GIVES, dtype=np.int64)
    for level, wrong in compiled.rules[suffix].unmet(members):
        levels[wrong] = np.minimum(levels[wrong], level)
    for fit in compiled.fits[slot]:
        levels = np.minimum(levels, fit.levels(members.rows))
    return levels


def _ranked(levels: Amounts, slot: int, slots: int) -> Amounts:
    """Return levels and slots in one number each: a higher level is a larger number, and among equal levels an earlier
    slot.
    """
    return levels * slots + slots - 1 - slot


def _no_member_left(compiled: CompiledRequest, group: Group, members: MemberRows) -> Amounts:
    """Return the codes of roots for which a rule of the un-numbered group rejects all members of the tree, whatever
    resources they have.
    """
    reasons, rules = compiled.reasons, compiled.rules[UNNUMBERED]
    left = rules.clean(members)
    codes = _unless(left, reasons.has, compiled, members)
    covers = rules.covers(members.rows)
    for bit, code in enumerate(reasons.lacks):
        codes = np.minimum(codes, _unless(left & (covers >> bit & 1 == 1), code, compiled, members))
    if group.member_of:
        left &= rules.in_aggregates(members)
        codes = np.minimum(codes, _unless(left, reasons.not_member, compiled, members))
    if group.forbidden_aggregates:
        left &= ~rules.in_forbidden_aggregates(members)
        codes = np.minimum(codes, _unless(left, reasons.bad_member, compiled, members))
    return codes


def _unless(left: NDArray[np.bool_], code: int, compiled: CompiledRequest, members: MemberRows) -> Amounts:
    return np.where(members.have(left), compiled.reasons.passes, code)


def _traits_out_of_reach(compiled: CompiledRequest, members: MemberRows, best: Amounts) -> Amounts:
    """Return the codes of roots where a required trait is only on members that give no resources, or that would give
    them if they were not in use.

    best: the highest level of each member over the un-numbered group's slots (see _ranked).
    """
    reasons, slots = compiled.reasons, len(compiled.slots)
    in_use = np.array([codes[IN_USE] for codes in reasons.of_level])
    covers = compiled.rules[UNNUMBERED].covers(members.rows)
    codes = np.full(len(members.roots), reasons.passes, dtype=np.int64)
    for bit in range(len(compiled.required)):
        nearest = members.greatest(np.where(covers >> bit & 1 == 1, best, 0))
        level, slot = nearest // slots, slots - 1 - nearest % slots
        code = np.where(level == GIVES, reasons.passes, np.where(level == IN_USE, in_use[slot], reasons.apart))
        codes = np.minimum(codes, code)
    return codes
