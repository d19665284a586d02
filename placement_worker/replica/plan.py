"""One query, remembered: each root's verdict, kept right by looking again only at what moved.

A verdict is a small number: the first step at which a root falls, or `passes`. Everything but usage is decided once per
distinct set of traits, set of aggregates and kind of inventory, so a full evaluation is a few gathers, and between
two decisions only the roots that claims and the feed touched are looked at. That keeps a search nearly as cheap at a
million hosts as at a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from placement_worker.replica.book import Book
from placement_worker.replica.columns import ClassColumns, Flags, Looked, Numbers, Rows
from placement_worker.replica.covers import Cover, can_cover
from placement_worker.replica.entangled import Entangled
from placement_worker.replica.query import Query
from placement_worker.replica.request import UNNUMBERED, Slot
from placement_worker.replica.rows import NOBODY
from placement_worker.replica.tables import GIVES

Codes = NDArray[np.uint16]

NOT_A_ROOT = 0

# Plans kept, the least recently used forgotten first. One costs about 12 bytes a row.
PLANS_KEPT = 64

UNIT = "amount not allowed (min_unit, max_unit, step_size)"


class Step(Struct, frozen=True):
    """What a verdict means: the funnel's step and the reason."""

    step: str
    reason: str


class Asked:
    """One class of the query: how much, and the codes of the ways to lack it, the nearest miss last."""

    def __init__(self, name: str, amount: int, steps: list[Step]) -> None:
        self.name = name
        self.amount = amount
        self.none = _code(steps, name, "none here")
        self.never = _code(steps, name, "capacity too small")
        self.reserved = _code(steps, name, "reserved")
        self.unit = _code(steps, name, UNIT)
        self.full = _code(steps, name, "in use")
        self.column: ClassColumns | None = None
        self.kinds: Looked | None = None

    def look_up(self, book: Book, passes: int) -> None:
        """Find the class's columns, once somebody has it."""
        if self.column is None and (column := book.column(self.name)) is not None:
            self.column = column
            self.kinds = Looked(column.kinds, lambda numbers: self._answer(numbers, passes))

    def _answer(self, numbers: Numbers, passes: int) -> int:
        if numbers.capacity <= 0 and numbers.total == 0:
            return self.none
        if numbers.capacity < self.amount:
            # A bare-metal node in use, in maintenance or being cleaned is not small: its unit is held back (I-3, I-4).
            return self.reserved if int(numbers.total * numbers.allocation_ratio) >= self.amount else self.never
        fits = numbers.min_unit <= self.amount <= numbers.max_unit and self.amount % numbers.step_size == 0
        return passes if fits else self.unit

    def static(self, rows: Rows) -> NDArray[np.int64]:
        """Codes by inventory alone; `passes` where it could fit on an empty provider."""
        if self.column is None or self.kinds is None:
            return np.full(len(rows), self.none, dtype=np.int64)
        return self.kinds(self.column.kind[rows])

    def lacks_room(self, rows: Rows) -> Flags:
        """Where less is free than asked."""
        if self.column is None:
            return np.ones(len(rows), dtype=np.bool_)
        return self.column.free[rows] < self.amount


class Plan:
    """The verdicts of one query without its pins (in_tree, only_roots, ignore_roots)."""

    def __init__(self, book: Book, query: Query) -> None:
        self.book = book
        self.query = query
        self.steps: list[Step] = [Step("", "")]  # code 0: not a root
        self.entangled = Entangled(book, query)
        self._name_codes()
        self.passes = len(self.steps)
        self.begin()

    def _name_codes(self) -> None:
        query, steps = self.query, self.steps
        self.root_lacks = [_code(steps, "traits", f"root lacks {_any_of(group)}") for group in query.root_required]
        self.root_has = _code(steps, "traits", f"root has {_any_of(query.root_forbidden)}")
        self.has = _code(steps, "traits", f"has {_any_of(query.forbidden)}")
        self.lacks = [_code(steps, "traits", f"lacks {_any_of(group)}") for group in query.required]
        belongs = " and ".join(_any_of(group) for group in query.root_member_of)
        self.root_not_member = _code(steps, "aggregates", f"not in {belongs}")
        self.root_bad_member = _code(steps, "aggregates", f"in {_any_of(query.root_forbidden_aggregates)}")
        wanted = " and ".join(_any_of(group) for group in query.member_of)
        self.not_member = _code(steps, "aggregates", f"not in {wanted}")
        self.bad_member = _code(steps, "aggregates", f"in {_any_of(query.forbidden_aggregates)}")
        asked = sorted((name, amount) for name, amount in query.resources.items() if amount > 0)
        self.asked = [Asked(name, amount, steps) for name, amount in asked]
        self.apart = _code(steps, "together", "traits and resources not on the same providers")
        self.nothing = _code(steps, "resources", "nothing is asked")
        self.nearness = [self._name_misses(slot) for slot in self.entangled.search.slots]
        groups = ", ".join(group.suffix.removeprefix("_") for group in query.groups)
        self.unfit = _code(steps, f"groups {groups}" if groups else "together", "groups do not fit together")
        self.unknown = _code(steps, "together", "too many combinations to try")

    def _name_misses(self, slot: Slot) -> list[int]:
        """The codes of a slot of an entangled root, by how near it came (see `tables`)."""
        for asked in self.asked if slot.suffix == UNNUMBERED else ():
            if asked.name in slot.resources:
                return [asked.none, asked.never, asked.unit, self.has, self.not_member, asked.full]
        name = f"group {slot.suffix.removeprefix('_')}"
        reasons = ("none here", "capacity too small", UNIT, "traits not met", "aggregates not met", "in use")
        return [_code(self.steps, name, reason) for reason in reasons]

    def begin(self) -> None:
        """Forget all verdicts; the next refresh evaluates every root."""
        book, query = self.book, self.query
        self.epoch = book.epoch
        self.cover = Cover(query.required)
        self.flat_traits = Looked(book.trait_sets, self._flat_trait_code)
        self.root_traits = Looked(book.trait_sets, self._root_trait_code)
        self.clean = Looked(book.trait_sets, lambda traits: int(not _meets_any(traits, query.forbidden)))
        self.covers = Looked(book.trait_sets, self.cover.number_of)
        self.member = Looked(book.aggregate_sets, lambda own: int(all(_meets_any(own, g) for g in query.member_of)))
        self.outcast = Looked(book.aggregate_sets, lambda own: int(_meets_any(own, query.forbidden_aggregates)))
        self.flat_aggregates = Looked(book.aggregate_sets, self._flat_aggregate_code)
        self.root_aggregates = Looked(book.aggregate_sets, self._root_aggregate_code)
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
            codes = np.minimum(codes, self.nothing)
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
        codes[open_ones] = np.array([self.unfit, self.passes, self.unknown])[verdicts]
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
        unfit = np.flatnonzero(self.verdicts == self.unfit)
        if not unfit.size or not self.entangled.search.possible:
            return self.verdicts
        misses = self.entangled.misses(unfit)
        codes = self.verdicts.copy()
        for slot in range(len(misses) - 1, -1, -1):  # the first group that nobody satisfies is the reason
            lacking = misses[slot] < GIVES
            codes[unfit[lacking]] = np.array(self.nearness[slot])[misses[slot][lacking]]
        return codes

    def _root_codes(self, roots: Rows) -> NDArray[np.int64]:
        """What the roots' own traits and aggregates say."""
        book = self.book
        return np.minimum(self.root_traits(book.traits[roots]), self.root_aggregates(book.aggregates[roots]))

    def _root_aggregate_code(self, own: tuple[str, ...]) -> int:
        if not all(_meets_any(own, group) for group in self.query.root_member_of):
            return self.root_not_member
        return self.root_bad_member if _meets_any(own, self.query.root_forbidden_aggregates) else self.passes

    def _root_trait_code(self, traits: tuple[str, ...]) -> int:
        for group, code in zip(self.query.root_required, self.root_lacks, strict=True):
            if not _meets_any(traits, group):
                return code
        return self.root_has if _meets_any(traits, self.query.root_forbidden) else self.passes

    def _flat_trait_code(self, traits: tuple[str, ...]) -> int:
        code = self._root_trait_code(traits)
        if code != self.passes:
            return code
        if _meets_any(traits, self.query.forbidden):
            return self.has
        for group, lacking in zip(self.query.required, self.lacks, strict=True):
            if not _meets_any(traits, group):
                return lacking
        return self.passes

    def _flat_aggregate_code(self, own: tuple[str, ...]) -> int:
        code = self._root_aggregate_code(own)
        if code != self.passes:
            return code
        if not all(_meets_any(own, group) for group in self.query.member_of):
            return self.not_member
        return self.bad_member if _meets_any(own, self.query.forbidden_aggregates) else self.passes

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
        codes = np.minimum(codes, np.where(_some(owners, clean, count), passes, self.has))
        covers = self.covers(book.traits[rows])  # numbers new covers, so before `having`
        for bit, code in enumerate(self.lacks):
            has = clean & self.cover.having(bit)[covers]
            codes = np.minimum(codes, np.where(_some(owners, has, count), passes, code))
        codes = np.minimum(codes, np.where(_some(owners, member, count), passes, self.not_member))
        codes = np.minimum(codes, np.where(_some(owners, usable, count), passes, self.bad_member))
        able = []
        for asked in self.asked:
            kinds = asked.static(rows)
            kinds = np.where((kinds == passes) & asked.lacks_room(rows), asked.full, kinds)
            nearest = np.full(count, asked.none, dtype=np.int64)
            np.maximum.at(nearest, owners[usable], kinds[usable])
            codes = np.minimum(codes, nearest)
            able.append(usable & (kinds == passes))
        if not self.asked:
            codes = np.minimum(codes, self.nothing)
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
                codes[root] = self.apart


def plan_of(book: Book, query: Query) -> Plan:
    """The query's plan, refreshed."""
    plan = kept_plan(book, query)
    plan.refresh()
    return plan


def kept_plan(book: Book, query: Query) -> Plan:
    """The query's plan as it was last; its tables are right, its verdicts may be old."""
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
        msgspec.msgpack.encode(query.groups),
        query.group_policy,
        query.same_subtree,
    )
    plan = book.plans.get(key)
    if plan is None:
        plan = book.plans[key] = Plan(book, query)
        while len(book.plans) > PLANS_KEPT:
            book.plans.popitem(last=False)
    else:
        book.plans.move_to_end(key)
    if plan.epoch != book.epoch:
        plan.begin()
    return plan


def _code(steps: list[Step], step: str, reason: str) -> int:
    steps.append(Step(step, reason))
    return len(steps) - 1


def _any_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def _meets_any(own: Sequence[str], wanted: Sequence[str]) -> bool:
    return any(name in own for name in wanted)


def _some(owners: Rows, which: Flags, count: int) -> Flags:
    """Per owner: whether any of its members is marked."""
    marked = np.zeros(count, dtype=np.bool_)
    marked[owners[which]] = True
    return marked
