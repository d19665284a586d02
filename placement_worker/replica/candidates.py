"""Allocation candidates: what a request could be claimed as, over all trees (P-1.10 to P-1.39).

The order is stated and stable: first one candidate of every root, by the root's row in the book, then a second of
every root that has one, and so on, so that a limit never hides a root (trap 12). On one root those with most room
come first, from few providers, and the slot with the widest choice changes first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from msgspec import Struct

from placement_worker.replica.book import Book
from placement_worker.replica.columns import Rows
from placement_worker.replica.granular import Pattern, Search, search_for
from placement_worker.replica.patience import Patience, TooLong
from placement_worker.replica.request import UNNUMBERED, CandidatesRequest, Group, Slot
from placement_worker.replica.sharing import sharing_of
from placement_worker.replica.ways import ENDLESS

__all__ = ["UNNUMBERED", "Candidate", "CandidateSet", "CandidatesRequest", "Group", "Slot", "candidates"]

# Steps that lead nowhere, and candidates beyond each root's first, before a search stops and says so.
BUDGET = 100_000

# Steps that every pattern may waste, however many patterns share the budget.
LEAST_SHARE = 256

# Tries for candidates beyond each root's first: some, and some per unit of budget.
LEAST_TRIES = 200_000
TRIES = 5

# Providers named by all candidates together, slot by slot: what an answer may weigh. Limits are cut to it.
MAX_CELLS = 400_000

# Roots looked at first; each further step looks at as many as all before it.
FIRST_STEP = 2048


class Candidate(Struct, frozen=True):
    """One way to satisfy a request. mappings: per suffix the providers that satisfy that group (P-1.34).

    shapes: of the providers in the allocations, the shape generation that they were chosen for.
    """

    allocations: dict[str, dict[str, int]]
    mappings: dict[str, list[str]]
    shapes: dict[str, int]


class CandidateSet:
    """Candidates in columns: `rows[i, s]` is the row of the provider that gives `slots[s]` in candidate i.

    exhausted: there are no others. Otherwise the limit or the budget cut it, and there may be.
    """

    def __init__(self, book: Book, search: Search, rows: Rows, *, exhausted: bool) -> None:
        self._book = book
        self._one_per_tree = search.request.one_per_tree
        self.slots = search.slots
        self.rows = rows
        self.exhausted = exhausted

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Candidate:
        """One candidate, whole. To render many, go over `columns()` instead."""
        allocations: dict[str, dict[str, int]] = {}
        mappings: dict[str, list[str]] = {}
        shapes: dict[str, int] = {}
        for slot, row in zip(self.slots, self.rows[index].tolist(), strict=True):
            uuid = self._book.uuid_of(row)
            mapped = mappings.setdefault(slot.suffix, [])
            if uuid not in mapped:
                mapped.append(uuid)
            for name, amount in slot.resources.items():
                given = allocations.setdefault(uuid, {})
                given[name] = given.get(name, 0) + amount
                shapes[uuid] = self._book.shape_of(row)
        return Candidate(allocations, mappings, shapes)

    def __iter__(self) -> Iterator[Candidate]:
        return (self[index] for index in range(len(self)))

    def columns(self) -> list[list[str]]:
        """Per slot, the uuid of the provider that gives it, candidate by candidate."""
        return [self._book.uuids_of(column) for column in self.rows.T]

    @property
    def one_provider(self) -> bool:
        """Whether in every candidate one provider gives all, as on flat hosts: then each column tells everything."""
        return bool((self.rows == self.rows[:, :1]).all())

    def touched(self) -> Rows:
        """Rows for the provider summaries, ascending: every member of each tree that gives resources.

        Only the giving providers themselves when the request knows nothing of trees (`one_per_tree`).
        """
        giving = [at for at, slot in enumerate(self.slots) if slot.resources]
        given = np.unique(self.rows[:, giving])
        if self._one_per_tree:
            return given
        return np.sort(self._book.members(np.unique(self._book.root[given]).astype(np.intp))[0])


def candidates(
    book: Book,
    request: CandidatesRequest,
    *,
    limit: int | None = None,
    rng: random.Random | None = None,
    budget: int = BUDGET,
    patience: Patience | None = None,
) -> CandidateSet:
    """Up to `limit` candidates, in the stated order; with `rng`, a random sample of them all, in random order.

    budget: steps that lead nowhere, and candidates beyond each root's first. When it runs out, `exhausted` is False:
    then "none" only means that none was found. patience: the same for time. Raises QueryTooWide, TooLong.
    """
    search = search_for(book, request)
    if not search.possible:
        return CandidateSet(book, search, np.zeros((0, len(search.slots)), dtype=np.intp), exhausted=True)
    hunt = _Hunt(book, search, budget, patience)
    rows = hunt.rows(None if rng is not None else limit)
    exhausted = hunt.exhausted
    if rng is not None:
        kept = rng.sample(range(len(rows)), len(rows) if limit is None else min(limit, len(rows)))
        exhausted = exhausted and len(kept) == len(rows)
        rows = rows[kept]
    return CandidateSet(book, search, rows, exhausted=exhausted)


class _Hunt:
    """One search over all roots, a step of roots at a time while the limit is not reached."""

    def __init__(self, book: Book, search: Search, budget: int, patience: Patience | None) -> None:
        self._book = book
        self._patience = patience
        self._late = False  # the patience is at its end: what is found is all there will be
        self._search = search
        self._budget = budget
        self._most = MAX_CELLS // len(search.slots)
        self._tries = LEAST_TRIES + TRIES * budget
        self._patterns: dict[bytes, Pattern] = {}
        self._flat: list[Rows] = []
        self._may_repeat = False  # whether one candidate may be found on several roots
        self.exhausted = True

    def rows(self, limit: int | None) -> Rows:
        """The candidates' providers."""
        book = self._book
        if limit is not None and limit <= 0:
            self.exhausted = False
            return self._empty()
        reach = self._most if limit is None else min(limit, self._most)
        roots = book.rows_of_roots()
        sharing = sharing_of(book)
        self._may_repeat = bool(sharing.rows.size)
        position, step = 0, FIRST_STEP
        while position < len(roots) and not self._late:
            self._look_at(self._search.anchors(roots[position : position + step]))
            position += step
            step = position
            if position < len(roots) and (limit is not None or position >= reach):
                found = self._gather(1)
                if len(found) >= reach:
                    self.exhausted = False
                    return found[:reach]
        return self._all(limit, reach)

    def _look_at(self, roots: Rows) -> None:
        """Sort these roots into lone providers that give everything, and patterns of trees."""
        nested = self._search.entangled(roots)
        self._flat.append(self._search.flat(roots[~nested]))
        if not nested.any():
            return
        known = set(self._patterns)
        with self._in_time():
            self._search.patterns(roots[nested], self._patterns, self._patience)
        self._seek([self._patterns[key] for key in self._patterns if key not in known], 1)

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """What takes long. At the end of the patience it is left where it is, or the whole search is."""
        try:
            yield
        except TooLong:
            if self._patience is None or not self._patience.settles:
                raise
            self._late = True
            self.exhausted = False

    def _seek(self, patterns: list[Pattern], count: int) -> None:
        """Walk each pattern up to so many ways; what one does not need of the budget is left to the others."""
        with self._in_time():
            self._walk(patterns, count)

    def _walk(self, patterns: list[Pattern], count: int) -> None:
        for left, pattern in zip(range(len(patterns), 0, -1), patterns, strict=True):
            ways = pattern.ways
            before, tried = ways.dead_ends, ways.tries
            tries = self._tries if count > 1 else ENDLESS
            ways.look(count, max(LEAST_SHARE, self._budget // left), tries, self._patience)
            self._budget = max(0, self._budget - (ways.dead_ends - before))
            self._tries -= ways.tries - tried if count > 1 else 0
            self.exhausted = self.exhausted and not ways.cut

    def _all(self, limit: int | None, reach: int) -> Rows:
        """Further ways of every pattern, twice as many each time, until the limit is reached or there are no more."""
        count = 1
        most = self._gather(1)
        bound = min(reach, len(most) + self._budget) if limit is None else reach
        while len(most) < bound and self._tries > 0 and not self._late and (open_ones := self._open(count)):
            trees = sum(sum(len(rows) for rows in pattern.rows) for pattern in open_ones)
            # No more than the bound can use: a tree may have more ways than there is room to list.
            count = min(2 * count, count + max(1, -(-(bound - len(most)) // trees)))
            self._seek(open_ones, count)
            most = self._gather(count)
        if len(most) > bound or self._open(count):
            self.exhausted = False
        return most[:bound]

    def _open(self, count: int) -> list[Pattern]:
        """Patterns with ways beyond `count`, or that may have some."""
        patterns = self._patterns.values()
        return [p for p in patterns if len(p.ways.found) > count or not (p.ways.done or p.ways.cut)]

    def _gather(self, count: int) -> Rows:
        """The first `count` candidates of every root, in the stated order, none twice."""
        slots = len(self._search.slots)
        flat = np.concatenate([np.zeros(0, dtype=np.intp), *self._flat])
        if not self._patterns:
            return self._once(np.repeat(flat[:, None], slots, axis=1))
        rows, anchors, turns = [np.repeat(flat[:, None], slots, axis=1)], [flat], [np.zeros(len(flat), dtype=np.intp)]
        for pattern in self._patterns.values():
            ways = np.array(pattern.ways.found[:count], dtype=np.intp).reshape(-1, slots)
            if not len(ways):
                continue
            anchor, members = pattern.gather()
            rows.append(members[:, ways].reshape(-1, slots))
            anchors.append(np.repeat(anchor, len(ways)))
            turns.append(np.tile(np.arange(len(ways)), len(anchor)))
        order = np.lexsort((np.concatenate(anchors), np.concatenate(turns)))
        return self._once(np.concatenate(rows)[order])

    def _once(self, rows: Rows) -> Rows:
        """Leave out repetitions: only what sharing providers give alone can be found on more roots than one."""
        if not self._may_repeat or not len(rows):
            return rows
        shared = np.flatnonzero(sharing_of(self._book).are_sharers(rows).all(axis=1))
        if len(shared) < 2:
            return rows
        _, first = np.unique(rows[shared], axis=0, return_index=True)
        return np.delete(rows, np.setdiff1d(shared, shared[first]), axis=0)

    def _empty(self) -> Rows:
        return np.zeros((0, len(self._search.slots)), dtype=np.intp)
