"""One query, remembered: each root's verdict, kept right by looking again only at what moved.

A verdict is a small number: the first step at which a root falls, or `passes`. Everything but usage is decided once per
distinct set of traits, set of aggregates and kind of inventory, so a full evaluation is a few gathers, and between
two decisions only the roots that claims and the feed touched are looked at. That keeps a search nearly as cheap at a
million hosts as at a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from placement_worker.replica.book import Book
from placement_worker.replica.columns import Flags, Looked, Rows
from placement_worker.replica.covers import Cover, can_cover
from placement_worker.replica.entangled import Entangled
from placement_worker.replica.query import Query
from placement_worker.replica.rows import NOBODY
from placement_worker.replica.steps import NOT_A_ROOT, Steps, meets_any
from placement_worker.replica.tables import GIVES

Codes = NDArray[np.uint16]


class Plan:
    """The verdicts of one query without its pins (in_tree, only_roots, ignore_roots)."""

    def __init__(self, book: Book, query: Query) -> None:
        self.book = book
        self.query = query
        self.entangled = Entangled(book, query)
        self.steps = Steps(query, self.entangled.search.slots)
        self.asked = self.steps.asked
        self.passes = self.steps.passes
        self.begin()

    def begin(self) -> None:
        """Forget all verdicts; the next refresh evaluates every root."""
        book, query = self.book, self.query
        self.epoch = book.epoch
        self.cover = Cover(query.required)
        self.flat_traits = Looked(book.trait_sets, self.steps.of_flat_traits)
        self.root_traits = Looked(book.trait_sets, self.steps.of_root_traits)
        self.clean = Looked(book.trait_sets, lambda traits: int(not meets_any(traits, query.forbidden)))
        self.covers = Looked(book.trait_sets, self.cover.number_of)
        self.member = Looked(book.aggregate_sets, lambda own: int(all(meets_any(own, g) for g in query.member_of)))
        self.outcast = Looked(book.aggregate_sets, lambda own: int(meets_any(own, query.forbidden_aggregates)))
        self.flat_aggregates = Looked(book.aggregate_sets, self.steps.of_flat_aggregates)
        self.root_aggregates = Looked(book.aggregate_sets, self.steps.of_root_aggregates)
        for asked in self.asked:
            asked.column = asked.kinds = None
        self.static: Codes = np.zeros(0, dtype=np.uint16)
        self.verdicts: Codes = np.zeros(0, dtype=np.uint16)
        self.counts = np.zeros(self.passes + 1, dtype=np.int64)
        self.moved_at = self.shaped_at = -1
        self._roots: Rows | None = None

    @property
    def roots(self) -> Rows:
        """Rows of the roots that pass, ascending. Shared: not writeable."""
        if self._roots is None:
            self._roots = np.flatnonzero(self.verdicts == self.passes)
            self._roots.flags.writeable = False
        return self._roots

    def refresh(self) -> None:
        """Make the verdicts right for the book as it is now."""
        book = self.book
        if self.epoch != book.epoch:
            self.begin()
        if self.moved_at == book.moves.end:
            return
        for asked in self.asked:
            asked.look_up(book, self.passes)
        self.entangled.refresh()
        moved = book.moves.since(self.moved_at)
        shaped = book.shape_moves.since(self.shaped_at)
        affected = self.entangled.affected(moved if moved is not None else np.zeros(0, dtype=np.intp))
        moved = None if moved is None else affected
        if moved is None or shaped is None or 2 * len(moved) > book.top:
            self._evaluate_all()
        else:
            self._evaluate_moved(moved, shaped)
        self.moved_at, self.shaped_at = book.moves.end, book.shape_moves.end

    def _evaluate_all(self) -> None:
        self.static = np.zeros(self.book.size, dtype=np.uint16)
        self.verdicts = np.zeros(self.book.size, dtype=np.uint16)
        roots = self.book.rows_of_roots()
        self._shape(roots)
        self.verdicts[roots] = self._judge(roots)
        self.counts = np.bincount(self.verdicts[roots], minlength=self.passes + 1)
        self._roots = None

    def _evaluate_moved(self, moved: Rows, shaped: Rows) -> None:
        if self.verdicts.size < self.book.size:
            more = np.zeros(self.book.size - self.verdicts.size, dtype=np.uint16)
            self.static = np.concatenate([self.static, more])
            self.verdicts = np.concatenate([self.verdicts, more])
        if len(shaped):
            self.static[shaped] = NOT_A_ROOT
            self._shape(shaped[self.book.is_root[shaped]])
        before, after = self.verdicts[moved], self._judge(moved)
        if np.array_equal(before, after):
            return
        self.verdicts[moved] = after
        self.counts += np.bincount(after, minlength=self.passes + 1) - np.bincount(before, minlength=self.passes + 1)
        self.counts[NOT_A_ROOT] = 0
        self._move_roots(moved, before == self.passes, after == self.passes)

    def _move_roots(self, moved: Rows, passed: Flags, pass_now: Flags) -> None:
        """Carry the list of passing roots along: two copies instead of a scan of all rows."""
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

    # --- flat trees: one provider each

    def _shape(self, roots: Rows) -> None:
        """What inventory, traits and aggregates alone say of flat roots. Nested ones are judged whole each time."""
        book = self.book
        codes = np.minimum(self.flat_traits(book.traits[roots]), self.flat_aggregates(book.aggregates[roots]))
        if not self.asked:
            codes = np.minimum(codes, self.steps.nothing)
        for asked in self.asked:
            codes = np.minimum(codes, asked.static(roots))
        self.static[roots] = codes

    def _judge(self, rows: Rows) -> Codes:
        """Verdicts of rows that are, or were, roots."""
        codes = self.static[rows]
        for asked in self.asked:
            lacks = asked.lacks_room(rows) & (codes > asked.full)
            codes[lacks] = asked.full
        entangled = self.entangled.concerns(rows) & (codes != NOT_A_ROOT)
        if entangled.any():
            codes[entangled] = self._judge_entangled(rows[entangled])
        nested = (self.book.first_member[rows] != NOBODY) & (codes != NOT_A_ROOT) & ~entangled
        if nested.any():
            codes[nested] = self._judge_nested(rows[nested])
        return codes

    # --- numbered groups and sharing providers

    def _judge_entangled(self, roots: Rows) -> Codes:
        """Verdicts of whole trees. Why one falls is only looked into when somebody asks (`explained`)."""
        codes = self._root_codes(roots)
        open_ones = np.flatnonzero(codes == self.passes)
        verdicts = self.entangled.verdicts(roots[open_ones])
        codes[open_ones] = np.array([self.steps.unfit, self.passes, self.steps.unknown])[verdicts]
        return codes.astype(np.uint16)

    def ways(self, root: int, limit: int) -> Rows | None:
        """Up to so many ways on an entangled root, best first, as it is now; None when it is not entangled.

        Verdicts need not be fresh: what moved meanwhile is judged by the next search, all at once.
        """
        one = np.array([root], dtype=np.intp)
        if not self.entangled.concerns(one)[0]:
            return None
        if not self.book.is_root[root] or self._root_codes(one)[0] != self.passes:
            return np.zeros((0, len(self.entangled.search.slots)), dtype=np.intp)
        return self.entangled.ways(root, limit)

    def explained(self) -> Codes:
        """The verdicts, with the nearest miss of each entangled root that falls."""
        unfit = np.flatnonzero(self.verdicts == self.steps.unfit)
        if not unfit.size or not self.entangled.search.possible:
            return self.verdicts
        misses = self.entangled.misses(unfit)
        codes = self.verdicts.copy()
        for slot in range(len(misses) - 1, -1, -1):  # the first group that nobody satisfies is the reason
            lacking = misses[slot] < GIVES
            codes[unfit[lacking]] = np.array(self.steps.nearness[slot])[misses[slot][lacking]]
        return codes

    def _root_codes(self, roots: Rows) -> NDArray[np.int64]:
        """What the roots' own traits and aggregates say."""
        book = self.book
        return np.minimum(self.root_traits(book.traits[roots]), self.root_aggregates(book.aggregates[roots]))

    # --- nested trees: each class from any one provider of the tree

    def usable(self, rows: Rows, owners: Rows, roots: Rows) -> tuple[Flags, Flags, Flags]:
        """Members that forbidden traits leave, that member_of then leaves, and that forbidden aggregates then leave."""
        book = self.book
        clean = (self.clean(book.traits[rows]) == 1) & book.live[rows]
        own, of_root = book.aggregates[rows], book.aggregates[roots]
        member = (self.member(own) | self.member(of_root)[owners]) == 1
        outcast = (self.outcast(own) | self.outcast(of_root)[owners]) == 1
        return clean, clean & member, clean & member & ~outcast

    def _judge_nested(self, roots: Rows) -> Codes:
        """Verdicts of whole trees, step by step; a root keeps the first step at which it falls."""
        book, passes = self.book, self.passes
        rows, owners = book.members(roots)
        count = len(roots)
        codes = self._root_codes(roots)
        clean, member, usable = self.usable(rows, owners, roots)
        codes = np.minimum(codes, np.where(_some(owners, clean, count), passes, self.steps.has))
        covers = self.covers(book.traits[rows])  # numbers new covers, so before `having`
        for bit, code in enumerate(self.steps.lacks):
            has = clean & self.cover.having(bit)[covers]
            codes = np.minimum(codes, np.where(_some(owners, has, count), passes, code))
        codes = np.minimum(codes, np.where(_some(owners, member, count), passes, self.steps.not_member))
        codes = np.minimum(codes, np.where(_some(owners, usable, count), passes, self.steps.bad_member))
        able = []
        for asked in self.asked:
            kinds = asked.static(rows)
            kinds = np.where((kinds == passes) & asked.lacks_room(rows), asked.full, kinds)
            nearest = np.full(count, asked.none, dtype=np.int64)
            np.maximum.at(nearest, owners[usable], kinds[usable])
            codes = np.minimum(codes, nearest)
            able.append(usable & (kinds == passes))
        if not self.asked:
            codes = np.minimum(codes, self.steps.nothing)
        elif self.query.required:
            self._judge_together(codes, rows, owners, able)
        return codes.astype(np.uint16)

    def _judge_together(self, codes: NDArray[np.int64], rows: Rows, owners: Rows, able: Sequence[Flags]) -> None:
        """Required traits must be met by the very providers that give the resources (P-48)."""
        covers = self.covers(self.book.traits[rows])
        alone = np.logical_or.reduce(able) & (covers == self.cover.full)
        open_roots = (codes == self.passes) & ~_some(owners, alone, len(codes))
        if not open_roots.any():
            return
        choices: dict[int, list[set[int]]] = {int(root): [set() for _ in able] for root in np.flatnonzero(open_roots)}
        for number, able_here in enumerate(able):
            chosen = able_here & open_roots[owners]
            for owner, cover in zip(owners[chosen].tolist(), covers[chosen].tolist(), strict=True):
                choices[owner][number].add(cover)
        for root, sets in choices.items():
            if not can_cover(self.cover, tuple(tuple(sorted(numbers)) for numbers in sets)):
                codes[root] = self.steps.apart


def _some(owners: Rows, which: Flags, count: int) -> Flags:
    """Per owner: whether any of its members is marked."""
    marked = np.zeros(count, dtype=np.bool_)
    marked[owners[which]] = True
    return marked
