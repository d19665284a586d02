"""Allocation candidates: the allocations by which a request could be satisfied, over all trees (microversions 1.10 to
1.39).

The order is stable: first one candidate of every root, in the order of the roots' rows in the replica, then a second
one of every root that has one, and so on, so that a limit does not favour some roots. On one root, the providers that
can give the most slots come first, among equal ones those with the most free, and the slot with the most possible
providers changes first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from placement_worker.replica.columns import Recent, Rows
from placement_worker.replica.compiled import CompiledRequest, TreePattern
from placement_worker.replica.replica import Replica
from placement_worker.replica.request import CandidatesRequest
from placement_worker.replica.sharing import sharing_of
from placement_worker.replica.tree_solver import TimeBudget, TooLong

# The dead ends and the candidates beyond each root's first after which a search stops as not exhausted.
BUDGET = 100_000

# The dead ends that every pattern is allowed, however many patterns share the budget.
LEAST_SHARE = 256

# The bound of an answer's size: candidates times slots. Larger limits are cut to it.
MAX_CELLS = 400_000

# The number of roots in the first step of a search; each further step takes as many roots as all steps before.
FIRST_STEP = 2048


class CandidateSet:
    """Candidates in columns: `rows[i, s]` is the row of the provider that gives `slots[s]` in candidate i.

    exhausted: there are no further candidates. Otherwise the limit or the budget was reached, and there may be more.
    """

    def __init__(self, replica: Replica, compiled: CompiledRequest, rows: Rows, *, exhausted: bool) -> None:
        self._replica = replica
        self._one_per_tree = compiled.request.one_per_tree
        self.slots = compiled.slots
        self.rows = rows
        self.exhausted = exhausted

    def __len__(self) -> int:
        return len(self.rows)

    def columns(self) -> list[list[str]]:
        """For each slot, the uuid of the provider that gives it in each candidate."""
        return [self._replica.uuids_of(column) for column in self.rows.T]

    def touched(self) -> Rows:
        """The rows for the provider summaries, ascending: every member of each tree that gives resources.

        For a request of a version before trees (`one_per_tree`), only the providers that give resources.
        """
        giving = [at for at, slot in enumerate(self.slots) if slot.resources]
        given = np.unique(self.rows[:, giving])
        if self._one_per_tree:
            return given
        return np.sort(self._replica.members(np.unique(self._replica.root[given]).astype(np.intp))[0])


def candidates(
    replica: Replica,
    request: CandidatesRequest,
    *,
    limit: int | None = None,
    rng: random.Random | None = None,
    budget: int = BUDGET,
    time_budget: TimeBudget | None = None,
) -> CandidateSet:
    """Return up to `limit` candidates, in the stated order; with `rng`, a random sample of all candidates, in random
    order.

    budget: the bound of dead ends and of candidates beyond each root's first. When the budget is used up, `exhausted`
    is False, and an empty answer only means that no candidate was found. time_budget: the bound of the time. Raises
    QueryTooWide, TooLong.
    """
    compiled = compiled_for(replica, request)
    search = _CandidateSearch(replica, compiled, budget, time_budget)
    rows = search.rows(None if rng is not None else limit)
    exhausted = search.exhausted
    if rng is not None:
        kept = rng.sample(range(len(rows)), len(rows) if limit is None else min(limit, len(rows)))
        exhausted = exhausted and len(kept) == len(rows)
        rows = rows[kept]
    return CandidateSet(replica, compiled, rows, exhausted=exhausted)


class CompiledCache(Recent[bytes, CompiledRequest]):
    """The compiled requests that a replica caches."""


def compiled_for(replica: Replica, request: CandidatesRequest) -> CompiledRequest:
    """Return the request's tables."""
    key = msgspec.msgpack.encode(request)
    return replica.cache(CompiledCache).value(key, lambda: CompiledRequest(replica, request))


class _CandidateSearch:
    """One search over all roots, a step of roots at a time while the limit is not reached."""

    def __init__(
        self, replica: Replica, compiled: CompiledRequest, budget: int, time_budget: TimeBudget | None
    ) -> None:
        self._replica = replica
        self._time_budget = time_budget
        self._late = False  # the time budget is used up, and the search returns the candidates that it has found
        self._compiled = compiled
        self._budget = budget
        self._most = MAX_CELLS // max(1, len(compiled.slots))
        self._patterns: dict[bytes, TreePattern] = {}
        self._flat: list[Rows] = []
        self._may_repeat = False  # whether one candidate may be found on several roots
        self.exhausted = True

    def rows(self, limit: int | None) -> Rows:
        """Return, for each candidate and slot, the row of the provider that gives the slot."""
        replica = self._replica
        if not self._compiled.possible or (limit is not None and limit <= 0):
            self.exhausted = not self._compiled.possible
            return self._compiled.no_rows()
        reach = self._most if limit is None else min(limit, self._most)
        roots = replica.rows_of_roots()
        sharing = sharing_of(replica)
        self._may_repeat = bool(sharing.rows.size)
        position, step = 0, FIRST_STEP
        while position < len(roots) and not self._late:
            self._sort_roots(self._compiled.anchors(roots[position : position + step]))
            position += step
            step = position
            if position < len(roots) and (limit is not None or position >= reach):
                found = self._gather(1)
                if len(found) >= reach:
                    self.exhausted = False
                    return found[:reach]
        return self._all(limit, reach)

    def _sort_roots(self, roots: Rows) -> None:
        """Divide these roots into lone providers that give everything, and patterns of trees."""
        alone = self._compiled.stand_alone(roots)
        self._flat.append(self._compiled.flat(roots[alone]))
        if alone.all():
            return
        known = set(self._patterns)
        with self._in_time():
            self._compiled.patterns(roots[~alone], self._patterns, self._time_budget)
        self._seek([self._patterns[key] for key in self._patterns if key not in known], 1)

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """Run a part that may use up the time budget: then this part ends early, or TooLong ends the whole search."""
        try:
            yield
        except TooLong:
            if self._time_budget is None or not self._time_budget.keeps_partial:
                raise
            self._late = True
            self.exhausted = False

    def _seek(self, patterns: list[TreePattern], count: int) -> None:
        """Solve each pattern up to this many assignments. The budget that one pattern does not need is left to the
        others.
        """
        with self._in_time():
            for left, pattern in zip(range(len(patterns), 0, -1), patterns, strict=True):
                solver = pattern.solver
                before = solver.dead_ends
                solver.find(count, max(LEAST_SHARE, self._budget // left), self._time_budget)
                self._budget = max(0, self._budget - (solver.dead_ends - before))
                self.exhausted = self.exhausted and not solver.cut

    def _all(self, limit: int | None, reach: int) -> Rows:
        """Search further assignments of every pattern, twice as many each time, until the limit or the end is
        reached.
        """
        count = 1
        most = self._gather(1)
        bound = min(reach, len(most) + self._budget) if limit is None else reach
        while len(most) < bound and not self._late and (open_ones := self._open(count)):
            trees = sum(sum(len(rows) for rows in pattern.rows) for pattern in open_ones)
            # Not more than the bound allows: a tree may have more assignments than an answer can hold.
            count = min(2 * count, count + max(1, -(-(bound - len(most)) // trees)))
            self._seek(open_ones, count)
            most = self._gather(count)
        if len(most) > bound or self._open(count):
            self.exhausted = False
        return most[:bound]

    def _open(self, count: int) -> list[TreePattern]:
        """The patterns that have, or may have, assignments beyond `count`."""
        patterns = self._patterns.values()
        return [p for p in patterns if len(p.solver.found) > count or not (p.solver.done or p.solver.cut)]

    def _gather(self, count: int) -> Rows:
        """Return the first `count` candidates of every root, in the stated order and without repetitions."""
        slots = len(self._compiled.slots)
        flat = np.concatenate([np.zeros(0, dtype=np.intp), *self._flat])
        if not self._patterns:
            return self._once(np.repeat(flat[:, None], slots, axis=1))
        rows, anchors, turns = [np.repeat(flat[:, None], slots, axis=1)], [flat], [np.zeros(len(flat), dtype=np.intp)]
        for pattern in self._patterns.values():
            found = np.array(pattern.solver.found[:count], dtype=np.intp).reshape(-1, slots)
            if not len(found):
                continue
            anchor, members = pattern.gather()
            rows.append(members[:, found].reshape(-1, slots))
            anchors.append(np.repeat(anchor, len(found)))
            turns.append(np.tile(np.arange(len(found)), len(anchor)))
        order = np.lexsort((np.concatenate(anchors), np.concatenate(turns)))
        return self._once(np.concatenate(rows)[order])

    def _once(self, rows: Rows) -> Rows:
        """Remove repetitions: a candidate of sharing providers alone is found on each root that they serve."""
        if not self._may_repeat or not len(rows):
            return rows
        shared = np.flatnonzero(sharing_of(self._replica).are_sharing_providers(rows).all(axis=1))
        if len(shared) < 2:
            return rows
        _, first = np.unique(rows[shared], axis=0, return_index=True)
        return np.delete(rows, np.setdiff1d(shared, shared[first]), axis=0)
