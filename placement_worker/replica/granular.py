"""Which trees could satisfy a granular request, and with which members: columns in, a few distinct patterns out.

Everything that a request asks of one provider is decided for all providers at once. What is left of a tree then is
a short list of members, each with a signature: the slots it can give, how much of the contended classes it has (in
steps that make a difference), the required traits it meets. Trees with equal lists are one pattern, walked once
(`ways`), however many hosts it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from placement_worker.replica.book import NOBODY, Book
from placement_worker.replica.columns import Amounts, ClassColumns, Distinct, Flags, Looked, Numbers, Rows
from placement_worker.replica.covers import QueryTooWide
from placement_worker.replica.request import UNNUMBERED, CandidatesRequest, Group, slots_of
from placement_worker.replica.sharing import Sharing, sharing_of
from placement_worker.replica.ways import Site, Ways

# More slots or any-of groups than this are refused; Placement's largest real requests have a dozen.
MAX_SLOTS = 128
MAX_REQUIRED = 60

# Distinct sums of what several slots ask of one class; beyond it amounts are told apart one by one.
MAX_SUMS = 64

# Bits of a signature's word that are used.
WORD_BITS = 62

# Requests whose tables are kept, the least recently used forgotten first.
COMPILED_KEPT = 64


class Pattern:
    """A tree as the request sees it, and all the trees that look so: `rows[t, m]` is member m of the tree t."""

    def __init__(self, ways: Ways) -> None:
        self.ways = ways
        self.anchors: list[Rows] = []
        self.rows: list[Rows] = []

    def add(self, anchors: Rows, rows: Rows) -> None:
        """More trees of this pattern."""
        self.anchors.append(anchors)
        self.rows.append(rows)

    def gather(self) -> tuple[Rows, Rows]:
        """All its trees: the rows of their roots, and their members."""
        if len(self.anchors) > 1:
            self.anchors, self.rows = [np.concatenate(self.anchors)], [np.concatenate(self.rows)]
        return self.anchors[0], self.rows[0]


class _Room:
    """One class and an amount of it: which rows can give that much."""

    def __init__(self, name: str, amount: int) -> None:
        self.name = name
        self.amount = amount
        self.column: ClassColumns | None = None
        self._fits: Looked | None = None

    def look_up(self, book: Book) -> None:
        """Find the class's columns, once somebody has it."""
        if self.column is None and (column := book.column(self.name)) is not None:
            self.column = column
            self._fits = Looked(column.kinds, self._fit)

    def _fit(self, numbers: Numbers) -> int:
        able = numbers.min_unit <= self.amount <= numbers.max_unit and self.amount % numbers.step_size == 0
        return int(able and self.amount <= numbers.capacity)

    def of(self, rows: Rows) -> Flags:
        """Which rows can give it now."""
        if self.column is None or self._fits is None:
            return np.zeros(len(rows), dtype=np.bool_)
        fits: Flags = (self._fits(self.column.kind[rows]) == 1) & (self.column.free[rows] >= self.amount)
        return fits


class _Contended:
    """A class that several slots ask for: how much one provider may give in all, in steps that make a difference."""

    def __init__(self, name: str, amounts: Sequence[int]) -> None:
        self.name = name
        sums = {0}
        for amount in amounts:
            sums |= {have + amount for have in sums}
            if len(sums) > MAX_SUMS:
                break
        self.total = sum(amounts)
        self.sums = np.array(sorted(sums), dtype=np.int64) if len(sums) <= MAX_SUMS else None
        self._column: ClassColumns | None = None
        self._most: Looked | None = None

    def look_up(self, book: Book) -> None:
        """Find the class's columns, once somebody has it."""
        if self._column is None and (column := book.column(self.name)) is not None:
            self._column = column
            self._most = Looked(column.kinds, lambda numbers: numbers.max_unit)

    def limit(self, rows: Rows) -> Amounts:
        """The most that each row can give to all slots together, rounded down to a sum that can be asked."""
        if self._column is None or self._most is None:
            return np.zeros(len(rows), dtype=np.int64)
        limit = np.clip(np.minimum(self._column.free[rows], self._most(self._column.kind[rows])), 0, self.total)
        if self.sums is None:
            return limit
        rounded: Amounts = self.sums[np.searchsorted(self.sums, limit, side="right") - 1]
        return rounded

    def bits(self) -> int:
        """Bits that a limit takes."""
        return self.total.bit_length()


class _Rule:
    """What a group asks of a provider besides resources, per distinct set of traits and of aggregates."""

    def __init__(self, book: Book, group: Group) -> None:
        own = group.suffix != UNNUMBERED
        required = group.required if own else ()
        self.group = group
        self.plain = not (required or group.forbidden)
        self.traits = _table(
            book.trait_sets, lambda traits: _all_met(traits, required) and not _any(traits, group.forbidden)
        )
        self.flat_traits = _table(
            book.trait_sets, lambda traits: _all_met(traits, group.required) and not _any(traits, group.forbidden)
        )
        self.member = _table(book.aggregate_sets, lambda names: _all_met(names, group.member_of))
        self.outcast = _table(book.aggregate_sets, lambda names: _any(names, group.forbidden_aggregates))
        self.covers = Looked(
            book.trait_sets,
            lambda traits: sum(1 << bit for bit, names in enumerate(group.required) if _any(traits, names)),
        )


class Search:
    """One request against one book: the tables that decide it, kept from search to search."""

    def __init__(self, book: Book, request: CandidatesRequest) -> None:
        self.book = book
        self.request = request
        self.slots, self.groups = slots_of(request)
        if len(self.slots) > MAX_SLOTS or any(len(group.required) > MAX_REQUIRED for group in request.groups):
            raise QueryTooWide(f"more than {MAX_SLOTS} groups and classes, or {MAX_REQUIRED} required traits")
        asked = [group for group in request.groups if group.suffix == UNNUMBERED]
        # An un-numbered group without resources is met by nothing, as in Placement.
        self.possible = all(any(amount > 0 for amount in group.resources.values()) for group in asked) and bool(
            any(slot.resources for slot in self.slots)
        )
        self.required = asked[0].required if asked else ()
        self.anchored_in = [group.in_tree for group in asked if group.in_tree is not None]
        self.numbered = [at for at, slot in enumerate(self.slots) if slot.suffix != UNNUMBERED]
        self.apart = frozenset(self.numbered if request.group_policy == "isolate" and len(self.numbered) > 1 else ())
        self.rooms = [[_Room(name, amount) for name, amount in slot.resources.items()] for slot in self.slots]
        self.subtrees = self._subtrees()
        self.contended = self._contended()
        self._begin()

    def _subtrees(self) -> tuple[tuple[int, ...], ...]:
        """Sets of two slots and more; of one alone there is nothing to say."""
        sets = [
            tuple(at for at, slot in enumerate(self.slots) if slot.suffix in suffixes and slot.suffix != UNNUMBERED)
            for suffixes in self.request.same_subtree
        ]
        return tuple(slots for slots in sets if len(slots) > 1)

    def _contended(self) -> list[_Contended]:
        amounts: dict[str, list[int]] = {}
        for slot in self.slots:
            for name, amount in slot.resources.items():
                amounts.setdefault(name, []).append(amount)
        return [_Contended(name, asked) for name, asked in sorted(amounts.items()) if len(asked) > 1]

    def _begin(self) -> None:
        book, request = self.book, self.request
        self._epoch = book.epoch
        self._rules = {group.suffix: _Rule(book, group) for group in request.groups}
        self._root_traits = _table(
            book.trait_sets,
            lambda traits: (
                all(name in traits for name in request.root_required) and not _any(traits, request.root_forbidden)
            ),
        )
        for room in (room for rooms in self.rooms for room in rooms):
            room.column = None
        for contended in self.contended:
            contended._column = None

    def refresh(self) -> None:
        """Make the tables right for the book as it is now."""
        if self._epoch != self.book.epoch:
            self._begin()
        for rooms in self.rooms:
            for room in rooms:
                room.look_up(self.book)
        for contended in self.contended:
            contended.look_up(self.book)

    # --- anchors

    def anchors(self, roots: Rows) -> Rows:
        """The roots that may anchor a candidate at all: their traits, and the un-numbered group's tree."""
        book = self.book
        if self.request.root_required or self.request.root_forbidden:
            roots = roots[self._root_traits(book.traits[roots]) == 1]
        for uuid in self.anchored_in:
            roots = roots[roots == self._tree_of(uuid)]
        return roots

    def _tree_of(self, uuid: str) -> int:
        row = self.book.row_of(uuid)
        return NOBODY if row is None else self.book.root_of(row)

    # --- flat trees

    def flat(self, roots: Rows) -> Rows:
        """Which of these lone providers can give everything."""
        book, left = self.book, roots
        if len(self.apart) > 1:
            return roots[:0]
        for group in self.request.groups:
            rule = self._rules[group.suffix]
            if group.in_tree is not None:
                left = left[left == self._tree_of(group.in_tree)]
            if group.required or group.forbidden:
                left = left[rule.flat_traits(book.traits[left]) == 1]
            if group.member_of:
                left = left[rule.member(book.aggregates[left]) == 1]
            if group.forbidden_aggregates:
                left = left[rule.outcast(book.aggregates[left]) == 0]
        for rooms in self.rooms:
            for room in rooms:
                left = left[room.of(left)]
        for contended in self.contended:
            left = left[contended.limit(left) >= contended.total]
        return left

    # --- trees and what is shared with them

    def patterns(self, roots: Rows, known: dict[bytes, Pattern]) -> None:
        """Sort these trees into patterns; trees that lack something outright are left out."""
        field = self._field(roots, sharing_of(self.book))
        if field is None:
            return
        starts, counts = field.bounds()
        for many in np.unique(counts).tolist():
            at = np.flatnonzero(counts == many)
            members = starts[at][:, None] + np.arange(many)
            self._sort_in(field, at, members, known)

    def _sort_in(self, field: _Field, at: Rows, members: Rows, known: dict[bytes, Pattern]) -> None:
        """Trees of one size: equal signatures in equal order are one pattern."""
        blob = np.ascontiguousarray(field.codes[members]).tobytes()
        width = len(blob) // len(at)
        alike: dict[bytes, list[int]] = {}
        for tree in range(len(at)):
            alike.setdefault(blob[tree * width : (tree + 1) * width], []).append(tree)
        for key, trees in alike.items():
            pattern = known.get(key)
            if pattern is None:
                pattern = known[key] = Pattern(Ways(self._site(field, members[trees[0]])))
            chosen = members[trees]
            pattern.add(field.anchors[at[trees]], field.rows[chosen])

    def _field(self, roots: Rows, sharing: Sharing) -> _Field | None:
        """The members that can give anything, of the trees that have someone for each slot."""
        rows, owners = self.book.members(roots)
        own = len(rows)
        shared, served = sharing.serving(roots)
        if len(shared):
            rows, owners = np.concatenate([rows, shared]), np.concatenate([owners, served])
        live = self.book.live[rows]
        eligible = np.empty((len(self.slots), len(rows)), dtype=np.bool_)
        alive = np.ones(len(roots), dtype=np.bool_)
        rules = {group.suffix: live & self._allowed(group, rows, owners, roots, own) for group in self.request.groups}
        for slot, asked in enumerate(self.slots):
            able = rules[asked.suffix] & alive[owners]
            for room in self.rooms[slot]:
                able[able] = room.of(rows[able])
            eligible[slot] = able
            has = np.zeros(len(roots), dtype=np.bool_)
            has[owners[able]] = True
            alive &= has
        kept = np.flatnonzero(alive[owners] & eligible.any(axis=0))
        if not kept.size:
            return None
        return _Field(self, roots, rows[kept], owners[kept], eligible=eligible[:, kept], foreign=kept >= own)

    def _allowed(self, group: Group, rows: Rows, owners: Rows, roots: Rows, own: int) -> Flags:
        """Which members the group's traits, aggregates and tree leave; from `own` on, members from other trees."""
        book, rule = self.book, self._rules[group.suffix]
        allowed = np.ones(len(rows), dtype=np.bool_)
        unnumbered = group.suffix == UNNUMBERED
        if group.in_tree is not None:
            if unnumbered:
                allowed[own:] = False  # the tree itself is chosen by `anchors`
            else:
                allowed = book.root[rows] == self._tree_of(group.in_tree)
        if not rule.plain:
            allowed &= rule.traits(book.traits[rows]) == 1
        if group.member_of:
            member = rule.member(book.aggregates[rows]) == 1
            if unnumbered:
                of_root = rule.member(book.aggregates[roots]) == 1
                member[:own] |= of_root[owners[:own]]
            allowed &= member
        if group.forbidden_aggregates:
            outcast = rule.outcast(book.aggregates[rows]) == 1
            if unnumbered:
                outcast |= (rule.outcast(book.aggregates[roots]) == 1)[owners]
            allowed &= ~outcast
        return allowed

    def covers(self, rows: Rows) -> Amounts:
        """Per row, the un-numbered group's required traits that it meets, as bits."""
        return self._rules[UNNUMBERED].covers(self.book.traits[rows])

    def _site(self, field: _Field, members: Rows) -> Site:
        """One tree of a pattern, as plain numbers for a walk."""
        eligible = [np.flatnonzero(field.eligible[slot, members]).tolist() for slot in range(len(self.slots))]
        unnumbered = frozenset(at for at, slot in enumerate(self.slots) if slot.suffix == UNNUMBERED)
        above = field.above(members) if self.subtrees else []
        return Site(
            eligible=eligible,
            kinds=_kinds(field.codes[members], above),
            apart=self.apart,
            needs=[tuple(slot.resources.get(c.name, 0) for c in self.contended) for slot in self.slots]
            if self.contended
            else [],
            limits=[tuple(limits) for limits in field.limits[:, members].T.tolist()] if self.contended else [],
            covering=unnumbered if self.required else frozenset(),
            covers=field.covers[members].tolist() if self.required else [],
            everything=(1 << len(self.required)) - 1,
            above=above,
            subtrees=self.subtrees,
            trees=field.trees[members].tolist() if self.request.one_per_tree else None,
            giving=frozenset(at for at, slot in enumerate(self.slots) if slot.resources),
        )


class _Field:
    """All members of all trees that matter, tree by tree, best first, with their signatures."""

    def __init__(
        self, search: Search, roots: Rows, rows: Rows, owners: Rows, *, eligible: NDArray[np.bool_], foreign: Flags
    ) -> None:
        book = search.book
        nothing = np.zeros(0, dtype=np.int64)
        limits = np.array([contended.limit(rows) for contended in search.contended], dtype=np.int64)
        covers = search.covers(rows) if search.required else nothing
        trees = np.where(foreign, book.root[rows].astype(np.int64) + 1, 0) if search.request.one_per_tree else nothing
        fields: list[tuple[NDArray[np.generic], int]] = [(flags, 1) for flags in eligible]
        fields += [(limit, contended.bits()) for limit, contended in zip(limits, search.contended, strict=True)]
        if search.required:
            fields.append((covers, len(search.required)))
        if search.request.one_per_tree:
            fields.append((trees, 32))
        words = _packed(fields, len(rows))
        room = _room(search, rows)
        nearest = _nearest_above(book, rows, owners) if search.subtrees else None
        order = _order(rows, owners, words, room, nearest)
        self.rows, self.owners, self.eligible = rows[order], owners[order], eligible[:, order]
        self.limits = limits[:, order] if len(limits) else limits
        self.covers = covers[order] if search.required else covers
        self.trees = trees[order] if search.request.one_per_tree else trees
        columns = [word[order] for word in words]
        starts = np.flatnonzero(np.r_[True, np.diff(self.owners) > 0])
        self._starts = starts
        self.anchors = roots[self.owners[starts]]
        if nearest is not None:
            place = np.empty(len(order), dtype=np.intp)
            place[order] = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
            up = nearest[order]
            self.nearest = np.where(up == NOBODY, NOBODY, place[up])
            columns.append(self.nearest.astype(np.int64))
        self.codes = np.stack(columns, axis=1)

    def bounds(self) -> tuple[Rows, Rows]:
        """Where each tree's members start, and how many they are."""
        return self._starts, np.diff(np.r_[self._starts, len(self.rows)])

    def above(self, members: Rows) -> list[int]:
        """Per member of one tree, itself and those of its ancestors that are members too, as bits."""
        above: list[int] = []
        for at, up in enumerate(self.nearest[members].tolist()):  # ancestors come first
            above.append((1 << at) | (0 if up == NOBODY else above[up]))
        return above


def search_for(book: Book, request: CandidatesRequest) -> Search:
    """The request's tables, refreshed."""
    key = msgspec.msgpack.encode(request)
    search = book.compiled.get(key)
    if search is None:
        search = book.compiled[key] = Search(book, request)
        while len(book.compiled) > COMPILED_KEPT:
            book.compiled.popitem(last=False)
    else:
        book.compiled.move_to_end(key)
    search.refresh()
    return search


def _packed(fields: Sequence[tuple[NDArray[np.generic], int]], count: int) -> list[NDArray[np.int64]]:
    """The fields side by side in as few words as hold them."""
    words = [np.zeros(count, dtype=np.int64)]
    used = 0
    for values, bits in fields:
        if used + bits > WORD_BITS:
            words.append(np.zeros(count, dtype=np.int64))
            used = 0
        words[-1] |= values.astype(np.int64) << used
        used += bits
    return words


def _room(search: Search, rows: Rows) -> NDArray[np.float64]:
    """How much of all that is asked each row has, as a multiple: what best means among members alike."""
    room = np.zeros(len(rows), dtype=np.float64)
    for rooms in search.rooms:
        for asked in rooms:
            if asked.column is not None:
                room += np.maximum(asked.column.free[rows], 0) / asked.amount
    return room


def _order(
    rows: Rows, owners: Rows, words: Sequence[NDArray[np.int64]], room: NDArray[np.float64], nearest: Rows | None
) -> Rows:
    """Tree by tree; in a tree ancestors first, like members together and those with most room first."""
    keys = (rows, -room, *reversed(words))
    if nearest is None:
        return np.lexsort((*keys, owners))
    depth = np.zeros(len(rows), dtype=np.int64)
    up = nearest
    while (deeper := up != NOBODY).any():  # ends: each round goes up by one, and trees have no loops
        depth += deeper
        up = np.where(deeper, nearest[up], NOBODY)
    rank = np.zeros(len(rows), dtype=np.int64)
    for level in range(int(depth.max(initial=0)) + 1):
        here = np.flatnonzero(depth == level)
        below = rank[nearest[here]] if level else np.zeros(len(here), dtype=np.int64)
        sorted_here = np.lexsort((*(key[here] for key in keys), below, owners[here]))
        rank[here[sorted_here]] = np.arange(len(here))
    return np.lexsort((rank, depth, owners))


def _nearest_above(book: Book, rows: Rows, owners: Rows) -> Rows:
    """Per member, the index of its nearest ancestor that is a member of the same tree too; NOBODY without one."""
    keys = owners * book.size + rows
    order = np.argsort(keys)
    ordered = keys[order]
    nearest = np.full(len(rows), NOBODY, dtype=np.intp)
    open_ones = np.arange(len(rows))
    up = book.parent[rows].astype(np.intp)
    for _ in range(len(book)):
        going = up != NOBODY
        open_ones, up = open_ones[going], up[going]
        if not open_ones.size:
            break
        wanted = owners[open_ones] * book.size + up
        place = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
        hit = ordered[place] == wanted
        nearest[open_ones[hit]] = order[place[hit]]
        open_ones, up = open_ones[~hit], book.parent[up[~hit]].astype(np.intp)
    return nearest


def _kinds(codes: NDArray[np.int64], above: Sequence[int]) -> list[int]:
    """Members alike in signature and, where it matters, in place: under the same parent, with nobody below."""
    with_some_below = 0
    for at, bits in enumerate(above):
        with_some_below |= bits & ~(1 << at)
    numbers: dict[object, int] = {}
    kinds = []
    for at, code in enumerate(codes.tolist()):
        key = (tuple(code), at if with_some_below >> at & 1 else NOBODY)
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


def _table(values: Distinct[tuple[str, ...]], answer: Callable[[tuple[str, ...]], bool]) -> Looked:
    return Looked(values, lambda value: int(answer(value)))


def _all_met(own: Sequence[str], groups: Iterable[Sequence[str]]) -> bool:
    return all(_any(own, group) for group in groups)


def _any(own: Sequence[str], wanted: Sequence[str]) -> bool:
    return any(name in own for name in wanted)
