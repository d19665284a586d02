"""Which trees could satisfy a granular request, and with which members: columns in, a few distinct patterns out.

Everything that a request asks of one provider is decided for all providers at once. What is left of a tree then is
a short list of members, each with a signature: the slots it can give, how much of the contended classes it has (in
steps that make a difference), the required traits it meets. Trees with equal lists are one pattern, walked once
(`ways`), however many hosts it stands for.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from placement_worker.replica.book import Book
from placement_worker.replica.columns import Flags, Rows
from placement_worker.replica.covers import QueryTooWide
from placement_worker.replica.field import Field, Members, kinds_of
from placement_worker.replica.patience import Patience
from placement_worker.replica.request import UNNUMBERED, CandidatesRequest, Group, slots_of
from placement_worker.replica.rows import NOBODY
from placement_worker.replica.sharing import sharing_of
from placement_worker.replica.tables import (
    GIVES,
    NOTHING,
    WRONG_PLACE,
    WRONG_TRAITS,
    Contended,
    Room,
    Rule,
    meets_any,
    table,
)
from placement_worker.replica.ways import Site, Ways

# More slots or any-of groups than this are refused; Placement's largest real requests have a dozen.
MAX_SLOTS = 128
MAX_REQUIRED = 60

# Requests whose tables are kept, the least recently used forgotten first.
COMPILED_KEPT = 64

# Patterns whose verdict is kept.
VERDICTS_KEPT = 10_000

# Patterns whose first ways are kept, the oldest forgotten first.
WALKS_KEPT = 256

# Bits that tell trees apart (a row and one).
TREE_BITS = 32

# Verdicts on a root.
NO, YES, UNKNOWN = 0, 1, 2


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


class Search:
    """One request against one book: the tables that decide it, kept from search to search."""

    def __init__(self, book: Book, request: CandidatesRequest) -> None:
        self.book = book
        self.request = request
        self.slots, self.groups = slots_of(request)
        if len(self.slots) > MAX_SLOTS:
            raise QueryTooWide(f"more than {MAX_SLOTS} groups and classes together")
        for group in request.groups:
            if len(group.required) > MAX_REQUIRED or len(group.member_of) > MAX_REQUIRED:
                raise QueryTooWide(f"more than {MAX_REQUIRED} required traits or aggregates in one group")
        asked = [group for group in request.groups if group.suffix == UNNUMBERED]
        # An un-numbered group without resources is met by nothing, as in Placement.
        self.possible = all(any(amount > 0 for amount in group.resources.values()) for group in asked) and bool(
            any(slot.resources for slot in self.slots)
        )
        self.required = asked[0].required if asked else ()
        self.anchored_in = [group.in_tree for group in asked if group.in_tree is not None]
        self.numbered = [at for at, slot in enumerate(self.slots) if slot.suffix != UNNUMBERED]
        self.apart = frozenset(self.numbered if request.group_policy == "isolate" and len(self.numbered) > 1 else ())
        self.rooms = [[Room(name, amount) for name, amount in slot.resources.items()] for slot in self.slots]
        self.subtrees = self._subtrees()
        self.contended = self._contended()
        self._known: dict[bytes, int] = {}
        self._walked: OrderedDict[bytes, Ways] = OrderedDict()
        self._begin()

    def _subtrees(self) -> tuple[tuple[int, ...], ...]:
        """Sets of two slots and more; of one alone there is nothing to say."""
        sets = [
            tuple(at for at, slot in enumerate(self.slots) if slot.suffix in suffixes and slot.suffix != UNNUMBERED)
            for suffixes in self.request.same_subtree
        ]
        return tuple(slots for slots in sets if len(slots) > 1)

    def _contended(self) -> list[Contended]:
        """Classes that several slots could ask of one provider: slots that must be apart never do."""
        askers: dict[str, list[int]] = {}
        for at, slot in enumerate(self.slots):
            for name in slot.resources:
                askers.setdefault(name, []).append(at)
        return [
            Contended(name, [self.slots[at].resources[name] for at in slots])
            for name, slots in sorted(askers.items())
            if len(slots) > 1 and not self.apart.issuperset(slots)
        ]

    def _begin(self) -> None:
        book, request = self.book, self.request
        self._epoch = book.epoch
        self._rules = {group.suffix: Rule(book, group) for group in request.groups}
        required, forbidden = frozenset(request.root_required), frozenset(request.root_forbidden)
        self._root_traits = table(book.trait_sets, lambda own: required.issubset(own) and not meets_any(own, forbidden))
        for room in (room for rooms in self.rooms for room in rooms):
            room.column = None
        for contended in self.contended:
            contended.column = None

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

    def entangled(self, roots: Rows) -> Flags:
        """Which roots do not stand alone: they have children, or somebody shares with them."""
        nested: Flags = self.book.first_member[roots] != NOBODY
        return nested | sharing_of(self.book).serves(roots)

    def patterns(self, roots: Rows, known: dict[bytes, Pattern], patience: Patience | None = None) -> None:
        """Sort these trees into patterns; trees that lack something outright are left out. Raises TooLong."""
        field = self._field(roots, patience)
        if field is None:
            return
        for key, trees, members in field.alike():
            pattern = known.get(key)
            if pattern is None:
                if patience is not None:
                    patience.check()
                pattern = known[key] = Pattern(Ways(self._site(field, members[0])))
            pattern.add(roots[trees], field.rows[members])

    def verdicts(self, roots: Rows, budget: int) -> NDArray[np.int8]:
        """Per root YES, NO, or UNKNOWN where the budget for one pattern of trees ended before that was clear."""
        found = np.full(len(roots), NO, dtype=np.int8)
        alone = ~self.entangled(roots)
        found[alone] = np.where(np.isin(roots[alone], self.flat(roots[alone])), YES, NO)
        entangled = np.flatnonzero(~alone)
        field = self._field(roots[entangled]) if entangled.size else None
        if field is None:
            return found
        for key, trees, members in field.alike():
            known = self._known.get(key)
            if known is None:
                ways = Ways(self._site(field, members[0]))
                known = YES if ways.look(1, budget) else UNKNOWN if ways.cut else NO
                if len(self._known) >= VERDICTS_KEPT:
                    self._known.clear()
                self._known[key] = known
            found[entangled[trees]] = known
        return found

    def ways(self, root: int, limit: int, budget: int) -> Rows:
        """Up to so many ways on one root, best first: per way and slot, the row that gives it."""
        roots = np.array([root], dtype=np.intp)
        if not self.possible:
            return np.zeros((0, len(self.slots)), dtype=np.intp)
        if not self.entangled(roots)[0]:
            return np.repeat(self.flat(roots)[:, None], len(self.slots), axis=1)
        field = self._field(roots)
        if field is None:
            return np.zeros((0, len(self.slots)), dtype=np.intp)
        key, _, members = next(field.alike())
        ways = self._walked.get(key)
        if ways is None:
            ways = self._walked[key] = Ways(self._site(field, members[0]))
            while len(self._walked) > WALKS_KEPT:
                self._walked.popitem(last=False)
        ways.look(limit, budget)
        found: Rows = field.rows[members[0]][np.array(ways.found[:limit], dtype=np.intp).reshape(-1, len(self.slots))]
        return found

    def given_by(self, rows: Rows) -> NDArray[np.int64]:
        """Per row, all that decides what it can give to one request: equal columns mean equal verdicts."""
        given = [room.of(rows) for rooms in self.rooms for room in rooms]
        limits = [contended.limit(rows) for contended in self.contended]
        return np.array([*given, *limits, self.book.traits[rows], self.book.aggregates[rows]], dtype=np.int64)

    def misses(self, roots: Rows) -> NDArray[np.int64]:
        """Per slot and root, how near the nearest member comes to giving it (see `tables`)."""
        rows, owners, own = self._members(roots)
        misses = np.full((len(self.slots), len(roots)), NOTHING, dtype=np.int64)
        clean = {group.suffix: self._clean(group, rows) for group in self.request.groups}
        placed = {g.suffix: self._placed(g, rows, owners, roots, own) for g in self.request.groups}
        for slot, asked in enumerate(self.slots):
            near = np.where(placed[asked.suffix], GIVES, WRONG_PLACE)
            near = np.where(clean[asked.suffix], near, WRONG_TRAITS)
            for room in self.rooms[slot]:
                near = np.minimum(near, room.nearness(rows))
            near = np.where(self.book.live[rows], near, NOTHING)
            np.maximum.at(misses[slot], owners, near)
        return misses

    def _field(self, roots: Rows, patience: Patience | None = None) -> Field | None:
        """The members that can give anything, of the trees that have someone for each slot."""
        rows, owners, own = self._members(roots)
        live = self.book.live[rows]
        eligible = np.empty((len(self.slots), len(rows)), dtype=np.bool_)
        alive = np.ones(len(roots), dtype=np.bool_)
        allowed = {
            group.suffix: live & self._clean(group, rows) & self._placed(group, rows, owners, roots, own)
            for group in self.request.groups
        }
        for slot, asked in enumerate(self.slots):
            if patience is not None:
                patience.check()
            able = allowed[asked.suffix] & alive[owners]
            for room in self.rooms[slot]:
                able[able] = room.of(rows[able])
            eligible[slot] = able
            has = np.zeros(len(roots), dtype=np.bool_)
            has[owners[able]] = True
            alive &= has
        kept = np.flatnonzero(alive[owners] & eligible.any(axis=0))
        if not kept.size:
            return None
        members = self._said(rows[kept], owners[kept], eligible[:, kept], kept >= own)
        return Field(self.book, members, subtrees=bool(self.subtrees))

    def _members(self, roots: Rows) -> tuple[Rows, Rows, int]:
        """All members of these trees and, from the returned place on, who shares with them; and whose tree."""
        rows, owners = self.book.members(roots)
        shared, served = sharing_of(self.book).serving(roots)
        if not len(shared):
            return rows, owners, len(rows)
        return np.concatenate([rows, shared]), np.concatenate([owners, served]), len(rows)

    def _said(self, rows: Rows, owners: Rows, eligible: NDArray[np.bool_], foreign: Flags) -> Members:
        one_per_tree = self.request.one_per_tree
        nothing = np.zeros(len(rows), dtype=np.int64)
        room = np.zeros(len(rows), dtype=np.float64)
        for asked in (asked for rooms in self.rooms for asked in rooms):
            if asked.column is not None:
                room += np.maximum(asked.column.free[rows], 0) / asked.amount
        limits = [contended.limit(rows) for contended in self.contended]
        return Members(
            rows=rows,
            owners=owners,
            eligible=eligible,
            limits=np.array(limits, dtype=np.int64).reshape(len(limits), len(rows)),
            covers=self._rules[UNNUMBERED].covers(self.book.traits[rows]) if self.required else nothing,
            trees=np.where(foreign, self.book.root[rows].astype(np.int64) + 1, 0) if one_per_tree else nothing,
            room=room,
            bits=(
                tuple(contended.bits() for contended in self.contended),
                len(self.required),
                TREE_BITS if one_per_tree else 0,
            ),
        )

    def _clean(self, group: Group, rows: Rows) -> Flags:
        """Which rows the group's traits leave: a numbered group's all, of an un-numbered one's the forbidden."""
        rule = self._rules[group.suffix]
        if rule.plain:
            return np.ones(len(rows), dtype=np.bool_)
        clean: Flags = rule.traits(self.book.traits[rows]) == 1
        return clean

    def _placed(self, group: Group, rows: Rows, owners: Rows, roots: Rows, own: int) -> Flags:
        """Which members the group's aggregates and tree leave; from `own` on, members are from other trees."""
        book, rule = self.book, self._rules[group.suffix]
        allowed = np.ones(len(rows), dtype=np.bool_)
        unnumbered = group.suffix == UNNUMBERED
        if group.in_tree is not None:
            if unnumbered:
                allowed[own:] = False  # the tree itself is chosen by `anchors`
            else:
                allowed = book.root[rows] == self._tree_of(group.in_tree)
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

    def _site(self, field: Field, members: NDArray[np.intp]) -> Site:
        """One tree of a pattern, as plain numbers for a walk."""
        eligible = [np.flatnonzero(field.eligible[slot, members]).tolist() for slot in range(len(self.slots))]
        unnumbered = frozenset(at for at, slot in enumerate(self.slots) if slot.suffix == UNNUMBERED)
        above = field.above(members) if self.subtrees else []
        return Site(
            eligible=eligible,
            kinds=kinds_of(field.codes[members], above),
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
