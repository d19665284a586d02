"""Evaluates one candidates request against one replica: lone providers by columns, trees by patterns. The results are
kept between searches.

The requirements on a single provider are evaluated for all providers at once (`predicates`). For a lone provider that
is sufficient. Of a tree, the members that meet them form a short list, each with a signature: the slots that the member
can give, its free amounts of the contended classes (rounded to steps that make a difference), and the required traits
that it has. Trees with equal lists are one pattern, which is solved once (`tree_solver`), however many hosts have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from placement_worker.replica.columns import Flags, LookupTable, Recent, Rows, lookup_table
from placement_worker.replica.predicates import ContendedClass, MemberRows, Reasons, ResourceFit, rules_of
from placement_worker.replica.replica import Replica
from placement_worker.replica.request import UNNUMBERED, CandidatesRequest, QueryTooWide, slots_of
from placement_worker.replica.sharing import sharing_of
from placement_worker.replica.tree_solver import TimeBudget, TreeProblem, TreeSolver
from placement_worker.replica.trees import NO_ROW

# Requests with more slots or any-of groups are refused; the largest real requests have a dozen.
MAX_SLOTS = 128
MAX_REQUIRED = 60

# The dead ends after which the result on a pattern of trees is "unknown".
BUDGET = 20_000

# The number of patterns whose result is cached.
CACHED_RESULTS = 10_000

# The results on a tree.
NO, YES, UNKNOWN = 0, 1, 2


class TreePattern:
    """Trees that are equal for the request. `rows[t, m]` is the row of member m of tree t."""

    def __init__(self, solver: TreeSolver) -> None:
        self.solver = solver
        self.anchors: list[Rows] = []
        self.rows: list[Rows] = []

    def add(self, anchors: Rows, rows: Rows) -> None:
        """Add trees of this pattern."""
        self.anchors.append(anchors)
        self.rows.append(rows)

    def gather(self) -> tuple[Rows, Rows]:
        """Return all trees of the pattern: the rows of their roots, and the rows of their members."""
        return np.concatenate(self.anchors), np.concatenate(self.rows)


class SolversCache(Recent[bytes, TreeSolver]):
    """The solvers of patterns, kept for further assignments."""

    MOST = 256


class CompiledRequest:
    """The tables that evaluate one request against one replica, in one of its epochs."""

    def __init__(self, replica: Replica, request: CandidatesRequest) -> None:
        self.replica = replica
        self.request = request
        self.slots = slots_of(request)
        if len(self.slots) > MAX_SLOTS:
            raise QueryTooWide(f"more than {MAX_SLOTS} groups and classes together")
        for group in request.groups:
            if len(group.required) > MAX_REQUIRED or len(group.member_of) > MAX_REQUIRED:
                raise QueryTooWide(f"more than {MAX_REQUIRED} required traits or aggregates in one group")
        requested = [group for group in request.groups if group.suffix == UNNUMBERED]
        # No provider satisfies an un-numbered group without resources, as in Placement.
        self.possible = all(any(amount > 0 for amount in group.resources.values()) for group in requested) and bool(
            any(slot.resources for slot in self.slots)
        )
        self.unnumbered = requested[0] if requested else None
        self.required = requested[0].required if requested else ()
        numbered = [at for at, slot in enumerate(self.slots) if slot.suffix != UNNUMBERED]
        self.apart = frozenset(numbered if request.group_policy == "isolate" and len(numbered) > 1 else ())
        self.fits = [
            [ResourceFit(replica, name, amount) for name, amount in slot.resources.items()] for slot in self.slots
        ]
        self._all_fits = [fit for fits in self.fits for fit in fits]
        self._any_root_rules = bool(
            request.root_required
            or request.root_forbidden
            or request.root_member_of
            or request.root_forbidden_aggregates
        )
        self.subtrees = self._subtrees()
        self.contended = self._contended()
        self._totals = self._sums()
        self._cached_results: dict[bytes, int] = {}
        self._solvers = SolversCache()
        self.rules = {group.suffix: rules_of(replica, group) for group in request.groups}

    @cached_property
    def reasons(self) -> Reasons:
        """The meaning of result codes."""
        return Reasons(self.request, self.slots)

    @cached_property
    def _of_roots(self) -> tuple[LookupTable, LookupTable]:
        """The codes of the results on traits and on aggregates of roots."""
        traits = lookup_table(self.replica.trait_sets, self.reasons.of_root_traits)
        return traits, lookup_table(self.replica.aggregate_sets, self.reasons.of_root_aggregates)

    def _subtrees(self) -> tuple[tuple[int, ...], ...]:
        """The sets of slots that `same_subtree` names. Sets of one slot are left out, because they require nothing."""
        sets = [
            tuple(at for at, slot in enumerate(self.slots) if slot.suffix in suffixes and slot.suffix != UNNUMBERED)
            for suffixes in self.request.same_subtree
        ]
        return tuple(slots for slots in sets if len(slots) > 1)

    def _contended(self) -> list[ContendedClass]:
        """The classes that several slots may take from one provider, which slots that must be apart never do."""
        slots_of_class: dict[str, list[int]] = {}
        for at, slot in enumerate(self.slots):
            for name in slot.resources:
                slots_of_class.setdefault(name, []).append(at)
        return [
            ContendedClass(self.replica, name, [self.slots[at].resources[name] for at in slots])
            for name, slots in sorted(slots_of_class.items())
            if len(slots) > 1 and not self.apart.issuperset(slots)
        ]

    def _sums(self) -> list[ResourceFit]:
        """The free amounts by class that a provider needs to give all slots."""
        sums: dict[str, ResourceFit] = {}
        for fit in self._all_fits:
            one = sums.get(fit.name)
            sums[fit.name] = fit if one is None else ResourceFit(self.replica, fit.name, one.amount + fit.amount)
        return list(sums.values())

    # --- anchors: the requirements on the root itself

    def anchors(self, roots: Rows) -> Rows:
        """Return the roots that may anchor a candidate, by their own traits and aggregates and by the requested
        tree.
        """
        if self._any_root_rules:
            roots = roots[self.anchor_codes(roots) == self.reasons.passes]
        if self.unnumbered is not None and self.unnumbered.in_tree is not None:
            roots = roots[roots == self.rules[UNNUMBERED].tree()]
        return roots

    def anchor_codes(self, roots: Rows) -> NDArray[np.int64]:
        """Return the codes of the results on the roots' own traits and aggregates."""
        traits, aggregates = self._of_roots
        return np.minimum(traits(self.replica.traits[roots]), aggregates(self.replica.aggregates[roots]))

    # --- lone providers: roots without children that nothing is shared with

    def stand_alone(self, roots: Rows) -> Flags:
        """Per root, whether it has no children and no provider shares with it."""
        nested: Flags = self.replica.first_member[roots] != NO_ROW
        return ~(nested | sharing_of(self.replica).serves(roots))

    def stands_alone(self, root: int) -> bool:
        """Whether this root has no children and no provider that shares with it."""
        return bool(self.replica.first_member[root] == NO_ROW) and not sharing_of(self.replica).serves_root(root)

    def flat(self, roots: Rows) -> Rows:
        """Per lone provider, whether it can give all slots now."""
        left = self.flat_by_spec(roots)
        return left[self.flat_has_capacity(left)]

    def flat_by_spec(self, roots: Rows) -> Rows:
        """Per lone provider, whether it could give all slots if it were unused."""
        if len(self.apart) > 1 or not self.possible:
            return roots[:0]
        left = roots
        for group in self.request.groups:
            left = self.rules[group.suffix].flat(left)
        tables: list[ResourceFit | ContendedClass] = [*self._all_fits, *self.contended]
        for table in tables:
            if len(left):  # a table is filled when it is first read
                left = left[table.by_inventory(left)]
        return left

    def flat_has_capacity(self, rows: Rows) -> Flags:
        """Per row, whether the sum of all slots is free."""
        room = np.ones(len(rows), dtype=np.bool_)
        for total in self._totals:
            if total.column is None:
                return np.zeros(len(rows), dtype=np.bool_)
            room &= total.column.free[rows] >= total.amount
        return room

    def has_capacity(self, row: int) -> bool:
        """Whether the sum of all slots is free on this one; each pick asks it, so without numpy's cost of a call."""
        return all(total.column is not None and total.column.free.item(row) >= total.amount for total in self._totals)

    # --- trees and the providers that are shared with them

    def patterns(self, roots: Rows, known: dict[bytes, TreePattern], time_budget: TimeBudget | None = None) -> None:
        """Divide these trees into patterns, without trees that have no member for some slot or rule. Raises TooLong."""
        members = self._ordered_members(roots, time_budget)
        if members is None:
            return
        for key, trees, indices in members.alike():
            pattern = known.get(key)
            if pattern is None:
                if time_budget is not None:
                    time_budget.check()
                pattern = known[key] = TreePattern(TreeSolver(self._problem(members, indices[0])))
            pattern.add(roots[trees], members.rows[indices])

    def tree_results(self, roots: Rows) -> NDArray[np.int8]:
        """Per root, YES or NO; UNKNOWN when the budget for its pattern ended before a result."""
        found = np.full(len(roots), NO, dtype=np.int8)
        members = self._ordered_members(roots) if self.possible and len(roots) else None
        if members is None:
            return found
        for key, trees, indices in members.alike():
            known = self._cached_results.get(key)
            if known is None:
                solver = TreeSolver(self._problem(members, indices[0]))
                known = YES if solver.find(1, BUDGET) else UNKNOWN if solver.cut else NO
                if len(self._cached_results) >= CACHED_RESULTS:
                    self._cached_results.clear()
                self._cached_results[key] = known
            found[trees] = known
        return found

    def assignments(self, root: int, limit: int) -> Rows:
        """Return up to this many assignments on one tree, best first. An assignment has, for each slot, the row that
        gives it.
        """
        roots = np.array([root], dtype=np.intp)
        if not self.possible or not self.replica.is_root[root] or self.anchor_codes(roots)[0] != self.reasons.passes:
            return self.no_rows()
        members = self._ordered_members(roots)
        if members is None:
            return self.no_rows()
        key, _, indices = next(members.alike())
        solver = self._solvers.value(key, lambda: TreeSolver(self._problem(members, indices[0])))
        solver.find(limit, BUDGET)
        found: Rows = members.rows[np.array(solver.found[:limit], dtype=np.intp).reshape(-1, len(self.slots))]
        return found

    def no_rows(self) -> Rows:
        """No assignment."""
        return np.zeros((0, len(self.slots)), dtype=np.intp)

    def given_by(self, rows: Rows) -> NDArray[np.int64]:
        """Per row, the values that decide what it can give to one request: rows with equal values have equal
        results.
        """
        given = [fit.now(rows) for fit in self._all_fits]
        limits = [contended.limit(rows) for contended in self.contended]
        return np.array([*given, *limits, self.replica.traits[rows], self.replica.aggregates[rows]], dtype=np.int64)

    def _ordered_members(self, roots: Rows, time_budget: TimeBudget | None = None) -> OrderedMembers | None:
        """The members that can give a slot, of the trees that have a member for each slot."""
        members = self.members(roots)
        allowed = {suffix: rules.allowed(members) for suffix, rules in self.rules.items()}
        eligible = np.zeros((len(self.slots), len(members.rows)), dtype=np.bool_)
        complete = np.ones(len(roots), dtype=np.bool_)  # trees with a member for each slot so far
        for slot, requested in enumerate(self.slots):
            if time_budget is not None:
                time_budget.check()
            able = (allowed[requested.suffix] & complete[members.owners]).nonzero()[0]
            for fit in self.fits[slot]:
                able = able[fit.now(members.rows[able])]
            if not able.size:
                return None
            eligible[slot, able] = True
            complete = np.zeros(len(roots), dtype=np.bool_)
            complete[members.owners[able]] = True
        kept = (complete[members.owners] & eligible.any(axis=0)).nonzero()[0]
        described = self._described(members.rows[kept], members.owners[kept], eligible[:, kept], kept >= members.own)
        return OrderedMembers(self.replica, described, subtrees=bool(self.subtrees))

    def members(self, roots: Rows) -> MemberRows:
        """Return all members of these trees, and the providers that share with them."""
        rows, owners = self.replica.members(roots)
        sharing, own = sharing_of(self.replica), len(rows)
        if len(sharing.donors):
            shared, served = sharing.serving(roots)
            rows, owners = np.concatenate([rows, shared]), np.concatenate([owners, served])
        return MemberRows(roots, rows, owners, own)

    def _described(self, rows: Rows, owners: Rows, eligible: NDArray[np.bool_], foreign: Flags) -> TreeMembers:
        one_per_tree = self.request.one_per_tree
        room = np.zeros(len(rows), dtype=np.float64)
        for fit in self._all_fits:
            if fit.column is not None:
                room += np.maximum(fit.column.free[rows], 0) / fit.amount
        limits = np.empty((len(self.contended), len(rows)), dtype=np.int64)
        for number, contended in enumerate(self.contended):
            limits[number] = contended.limit(rows)
        return TreeMembers(
            rows=rows,
            owners=owners,
            eligible=eligible,
            limits=limits,
            covers=self.rules[UNNUMBERED].covers(rows) if self.required else None,
            trees=np.where(foreign, self.replica.root[rows].astype(np.int64) + 1, 0) if one_per_tree else None,
            capacity=room,
        )

    def _problem(self, members: OrderedMembers, indices: NDArray[np.intp]) -> TreeProblem:
        """Return one tree of a pattern in plain numbers, for the solver."""
        eligible = [np.flatnonzero(members.eligible[slot, indices]).tolist() for slot in range(len(self.slots))]
        unnumbered = frozenset(at for at, slot in enumerate(self.slots) if slot.suffix == UNNUMBERED)
        above = members.above(indices) if self.subtrees else []
        return TreeProblem(
            eligible=eligible,
            kinds=kinds_of(members.signatures[indices], above),
            apart=self.apart,
            needs=[tuple(slot.resources.get(c.name, 0) for c in self.contended) for slot in self.slots]
            if self.contended
            else [],
            limits=[tuple(limits) for limits in members.limits[:, indices].T.tolist()] if self.contended else [],
            covering=unnumbered if self.required else frozenset(),
            covers=[] if members.covers is None else members.covers[indices].tolist(),
            everything=(1 << len(self.required)) - 1,
            above=above,
            subtrees=self.subtrees,
            trees=None if members.trees is None else members.trees[indices].tolist(),
            giving=frozenset(at for at, slot in enumerate(self.slots) if slot.resources),
        )


# The slots of one word of a signature.
WORD_BITS = 62


class TreeMembers(Struct, frozen=True):
    """The properties of members, in any order. owners: the position of each one's tree among the roots, ascending.

    eligible: per slot, which of them can give it alone. limits: per contended class, the most that each can give in
    all. covers: the required traits each meets, as bits. trees: whose tree each is in, 0 for its owner's. capacity: how
    much of all that is requested it has.
    """

    rows: Rows
    owners: Rows
    eligible: NDArray[np.bool_]
    limits: NDArray[np.int64]
    covers: NDArray[np.int64] | None
    trees: NDArray[np.int64] | None
    capacity: NDArray[np.float64]


class OrderedMembers:
    """Members in order: tree by tree, ancestors before descendants, first those that can give most slots, like ones
    together, most room first.

    signatures: members with equal signatures are alike; where subtrees matter, a signature also has the position of the
    nearest ancestor.
    """

    def __init__(self, replica: Replica, members: TreeMembers, *, subtrees: bool) -> None:
        words = _signatures(members)
        nearest = _nearest_above(replica, members.rows, members.owners) if subtrees else None
        order = _order(members, words, nearest)
        self.rows = members.rows[order]
        self.eligible = members.eligible[:, order]
        self.limits = members.limits[:, order]
        self.covers = None if members.covers is None else members.covers[order]
        self.trees = None if members.trees is None else members.trees[order]
        owners = members.owners[order]
        changes = (owners[1:] != owners[:-1]).nonzero()[0] + 1
        self._starts = np.concatenate([[0], changes])
        self._counts = np.concatenate([changes, [len(order)]]) - self._starts
        self._owners = owners[self._starts]
        columns = [word[order] for word in words]
        if nearest is not None:
            place = np.empty(len(order), dtype=np.intp)
            place[order] = np.arange(len(order)) - np.repeat(self._starts, self._counts)
            up = nearest[order]
            self._nearest = np.where(up == NO_ROW, NO_ROW, place[up])
            columns.append(self._nearest.astype(np.int64))
        self.signatures = columns[0][:, None] if len(columns) == 1 else np.stack(columns, axis=1)

    def alike(self) -> Iterator[tuple[bytes, Rows, NDArray[np.intp]]]:
        """Yield the groups of trees with equal members: a key, the positions of the trees, and for each tree the
        indices of its members.
        """
        if len(self._starts) == 1:
            yield self.signatures.tobytes(), self._owners, np.arange(len(self.rows))[None]
            return
        for many in sorted(set(self._counts.tolist())):
            trees = np.flatnonzero(self._counts == many)
            members = self._starts[trees][:, None] + np.arange(many)
            blob = np.ascontiguousarray(self.signatures[members]).tobytes()
            width = len(blob) // len(trees)
            groups: dict[bytes, list[int]] = {}
            for at in range(len(trees)):
                groups.setdefault(blob[at * width : (at + 1) * width], []).append(at)
            for key, chosen in groups.items():
                yield key, self._owners[trees[chosen]], members[chosen]

    def above(self, members: Rows) -> list[int]:
        """Per member of one tree, the bits of the member and of its ancestors that are members, too."""
        above: list[int] = []
        for at, up in enumerate(self._nearest[members].tolist()):  # ancestors come first
            above.append((1 << at) | (0 if up == NO_ROW else above[up]))
        return above


def kinds_of(signatures: NDArray[np.int64], above: Sequence[int]) -> list[int]:
    """Return the kind of each member. Members of one kind have equal signatures and, where subtrees matter, the same
    parent and no members below them.
    """
    with_some_below = 0
    for at, bits in enumerate(above):
        with_some_below |= bits & ~(1 << at)
    numbers: dict[object, int] = {}
    kinds = []
    for at, signature in enumerate(signatures.tolist()):
        key = (tuple(signature), at if with_some_below >> at & 1 else NO_ROW)
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


def _signatures(members: TreeMembers) -> list[NDArray[np.int64]]:
    """Return each member's signature as columns: the slots that it can give as bits, and all that it is like."""
    words = []
    for first in range(0, len(members.eligible), WORD_BITS):
        part = members.eligible[first : first + WORD_BITS]
        words.append((1 << np.arange(len(part))) @ part)
    return [*words, *members.limits, *(like for like in (members.covers, members.trees) if like is not None)]


def _order(members: TreeMembers, words: Sequence[NDArray[np.int64]], nearest: Rows | None) -> Rows:
    """Return the order of the members that OrderedMembers describes."""
    owners = members.owners
    keys = (members.rows, -members.capacity, *reversed(words), -members.eligible.sum(axis=0))
    if nearest is None:
        return np.lexsort((*keys, owners))
    depth = np.zeros(len(owners), dtype=np.int64)
    up = nearest
    while (deeper := up != NO_ROW).any():  # ends: each round goes up by one, and trees have no loops
        depth += deeper
        up = np.where(deeper, nearest[up], NO_ROW)
    rank = np.zeros(len(owners), dtype=np.int64)
    for level in range(int(depth.max(initial=0)) + 1):
        here = np.flatnonzero(depth == level)
        below = rank[nearest[here]] if level else np.zeros(len(here), dtype=np.int64)
        sorted_here = np.lexsort((*(key[here] for key in keys), below, owners[here]))
        rank[here[sorted_here]] = np.arange(len(here))
    return np.lexsort((rank, depth, owners))


def _nearest_above(replica: Replica, rows: Rows, owners: Rows) -> Rows:
    """Per member, the index of its nearest ancestor among the members of the same tree; NO_ROW when there is none."""
    keys = owners * replica.size + rows
    order = np.argsort(keys)
    ordered = keys[order]
    nearest = np.full(len(rows), NO_ROW, dtype=np.intp)
    open_ones = np.arange(len(rows))
    up = replica.parent[rows].astype(np.intp)
    for _ in range(len(replica)):
        going = up != NO_ROW
        open_ones, up = open_ones[going], up[going]
        if not open_ones.size:
            break
        wanted = owners[open_ones] * replica.size + up
        place = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
        hit = ordered[place] == wanted
        nearest[open_ones[hit]] = order[place[hit]]
        open_ones, up = open_ones[~hit], replica.parent[up[~hit]].astype(np.intp)
    return nearest
