"""What a request asks of one provider, as tables over distinct values: resources, traits, aggregates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from placement_worker.replica.book import Book
from placement_worker.replica.columns import Amounts, ClassColumns, Distinct, Flags, Looked, Numbers, Rows
from placement_worker.replica.request import UNNUMBERED, Group

# Distinct sums of what several slots ask of one class; beyond it amounts are told apart one by one.
MAX_SUMS = 64

# How near a provider comes to giving what a slot asks, the nearest last.
NOTHING, TOO_SMALL, WRONG_UNIT, WRONG_TRAITS, WRONG_PLACE, IN_USE, GIVES = range(7)


class Room:
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
        if numbers.capacity <= 0 and numbers.total == 0:
            return NOTHING
        if numbers.capacity < self.amount:
            return TOO_SMALL
        able = numbers.min_unit <= self.amount <= numbers.max_unit and self.amount % numbers.step_size == 0
        return GIVES if able else WRONG_UNIT

    def of(self, rows: Rows) -> Flags:
        """Which rows can give it now."""
        if self.column is None or self._fits is None:
            return np.zeros(len(rows), dtype=np.bool_)
        fits: Flags = (self._fits(self.column.kind[rows]) == GIVES) & (self.column.free[rows] >= self.amount)
        return fits

    def nearness(self, rows: Rows) -> Amounts:
        """How near each row comes, by its inventory and what is left of it."""
        if self.column is None or self._fits is None:
            return np.full(len(rows), NOTHING, dtype=np.int64)
        near = self._fits(self.column.kind[rows])
        return np.where((near == GIVES) & (self.column.free[rows] < self.amount), IN_USE, near)


class Contended:
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
        self.column: ClassColumns | None = None
        self._most: Looked | None = None

    def look_up(self, book: Book) -> None:
        """Find the class's columns, once somebody has it."""
        if self.column is None and (column := book.column(self.name)) is not None:
            self.column = column
            self._most = Looked(column.kinds, lambda numbers: numbers.max_unit)

    def limit(self, rows: Rows) -> Amounts:
        """The most that each row can give to all slots together, rounded down to a sum that can be asked."""
        if self.column is None or self._most is None:
            return np.zeros(len(rows), dtype=np.int64)
        limit = np.clip(np.minimum(self.column.free[rows], self._most(self.column.kind[rows])), 0, self.total)
        if self.sums is None:
            return limit
        rounded: Amounts = self.sums[np.searchsorted(self.sums, limit, side="right") - 1]
        return rounded

    def bits(self) -> int:
        """Bits that a limit takes."""
        return self.total.bit_length()


class Rule:
    """What a group asks of a provider besides resources, per distinct set of traits and of aggregates."""

    def __init__(self, book: Book, group: Group) -> None:
        alone = group.suffix != UNNUMBERED
        # Sets: a query may name thousands, and is held against every distinct set of traits in the book.
        every = [frozenset(names) for names in group.required]
        required = every if alone else []
        forbidden = frozenset(group.forbidden)
        members = [frozenset(names) for names in group.member_of]
        outcasts = frozenset(group.forbidden_aggregates)
        self.group = group
        self.plain = not (required or forbidden)
        self.traits = table(book.trait_sets, lambda own: meets_all(own, required) and not meets_any(own, forbidden))
        self.flat_traits = table(book.trait_sets, lambda own: meets_all(own, every) and not meets_any(own, forbidden))
        self.member = table(book.aggregate_sets, lambda own: meets_all(own, members))
        self.outcast = table(book.aggregate_sets, lambda own: meets_any(own, outcasts))
        self.covers = Looked(
            book.trait_sets,
            lambda own: sum(1 << bit for bit, names in enumerate(every) if meets_any(own, names)),
        )


def table(values: Distinct[tuple[str, ...]], answer: Callable[[tuple[str, ...]], bool]) -> Looked:
    """A yes or no per distinct value, as 1 and 0."""
    return Looked(values, lambda value: int(answer(value)))


def meets_all(own: Sequence[str], groups: Iterable[frozenset[str]]) -> bool:
    """Whether each any-of group is met."""
    return all(meets_any(own, group) for group in groups)


def meets_any(own: Sequence[str], wanted: frozenset[str]) -> bool:
    """Whether any of these is there."""
    return not wanted.isdisjoint(own)
