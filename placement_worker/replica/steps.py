"""What a verdict means: the steps at which a root can fall, in order, each with its code and its reason.

A root's verdict is the least code that anything about it says, and `passes` is above them all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from placement_worker.replica.book import Book
from placement_worker.replica.columns import ClassColumns, Flags, Looked, Numbers, Rows
from placement_worker.replica.query import Query
from placement_worker.replica.request import UNNUMBERED, Slot

NOT_A_ROOT = 0

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


class Steps:
    """The steps of one query, and what traits and aggregates by themselves say."""

    def __init__(self, query: Query, slots: Sequence[Slot]) -> None:
        self._query = query
        self.named: list[Step] = [Step("", "")]  # NOT_A_ROOT
        steps = self.named
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
        self.nearness = [self._name_misses(slot) for slot in slots]
        groups = ", ".join(group.suffix.removeprefix("_") for group in query.groups)
        self.unfit = _code(steps, f"groups {groups}" if groups else "together", "groups do not fit together")
        self.unknown = _code(steps, "together", "too many combinations to try")
        self.passes = len(steps)

    def _name_misses(self, slot: Slot) -> list[int]:
        """The codes of a slot of an entangled root, by how near it came (see `tables`)."""
        for asked in self.asked if slot.suffix == UNNUMBERED else ():
            if asked.name in slot.resources:
                return [asked.none, asked.never, asked.unit, self.has, self.not_member, asked.full]
        name = f"group {slot.suffix.removeprefix('_')}"
        reasons = ("none here", "capacity too small", UNIT, "traits not met", "aggregates not met", "in use")
        return [_code(self.named, name, reason) for reason in reasons]

    def of_root_traits(self, traits: tuple[str, ...]) -> int:
        """What the root's own traits say."""
        for group, code in zip(self._query.root_required, self.root_lacks, strict=True):
            if not meets_any(traits, group):
                return code
        return self.root_has if meets_any(traits, self._query.root_forbidden) else self.passes

    def of_root_aggregates(self, own: tuple[str, ...]) -> int:
        """What the root's own aggregates say."""
        if not all(meets_any(own, group) for group in self._query.root_member_of):
            return self.root_not_member
        return self.root_bad_member if meets_any(own, self._query.root_forbidden_aggregates) else self.passes

    def of_flat_traits(self, traits: tuple[str, ...]) -> int:
        """What the traits of a provider that is a whole tree say."""
        code = self.of_root_traits(traits)
        if code != self.passes:
            return code
        if meets_any(traits, self._query.forbidden):
            return self.has
        for group, lacking in zip(self._query.required, self.lacks, strict=True):
            if not meets_any(traits, group):
                return lacking
        return self.passes

    def of_flat_aggregates(self, own: tuple[str, ...]) -> int:
        """What the aggregates of a provider that is a whole tree say."""
        code = self.of_root_aggregates(own)
        if code != self.passes:
            return code
        if not all(meets_any(own, group) for group in self._query.member_of):
            return self.not_member
        return self.bad_member if meets_any(own, self._query.forbidden_aggregates) else self.passes


def _code(steps: list[Step], step: str, reason: str) -> int:
    steps.append(Step(step, reason))
    return len(steps) - 1


def _any_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def meets_any(own: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether one of these is there."""
    return any(name in own for name in wanted)
