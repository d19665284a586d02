"""The requirements of a request on a single provider (resources, traits, aggregates), evaluated once for each distinct
value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
from msgspec import Struct, structs

from placement_worker.domain.values import is_in_units
from placement_worker.replica.columns import (
    CAPACITY,
    MAX_UNIT,
    MIN_UNIT,
    STEP_SIZE,
    TOTAL,
    UNRESERVED,
    Amounts,
    Flags,
    LookupTable,
    Recent,
    Rows,
    lookup_table,
)
from placement_worker.replica.replica import Replica
from placement_worker.replica.request import UNNUMBERED, CandidatesRequest, Group, Slot
from placement_worker.replica.trees import NO_ROW

# The bound of distinct sums of the amounts that several slots require of one class. Above it, amounts are not rounded
# to these sums.
MAX_SUMS = 64

# The fit levels: how close a provider comes to giving a slot, ascending.
(
    NOTHING,  # no inventory of the class
    TOO_SMALL,
    RESERVED,  # large enough, but reserved
    WRONG_UNIT,  # min_unit, max_unit, step_size
    WRONG_TRAITS,  # a forbidden trait; for a numbered group also a required one that is missing
    WRONG_AGGREGATES,
    FORBIDDEN_AGGREGATES,
    WRONG_TREE,
    IN_USE,
    GIVES,
) = LEVELS = range(10)


class _OfClass:
    """A requirement of one class, with a figure for each distinct inventory of it."""

    def __init__(self, replica: Replica, name: str) -> None:
        self.name = name
        self.column = column = replica.column(name)
        if column is not None:
            self._of_kind = LookupTable(column.kinds, lambda known: self._figures(column.kinds.columns()[:, known:]))

    def _figures(self, kinds: Amounts) -> Amounts:
        """The figure of each kind of inventory."""
        raise NotImplementedError

    def _of_rows(self, rows: Rows) -> Amounts:
        """Per row, the figure of its inventory; 0 while no provider has the class."""
        if self.column is None:
            return np.zeros(len(rows), dtype=np.int64)
        return self._of_kind(self.column.kind[rows])


class ResourceFit(_OfClass):
    """Decides which rows can give an amount of one class."""

    def __init__(self, replica: Replica, name: str, amount: int) -> None:
        super().__init__(replica, name)
        self.amount = amount

    def _figures(self, kinds: Amounts) -> Amounts:
        """The fit level of each kind of inventory, if it were unused."""
        capacity, amount = kinds[CAPACITY], self.amount
        able = is_in_units(amount, kinds[MIN_UNIT], kinds[MAX_UNIT], kinds[STEP_SIZE])
        # A bare-metal node that is in use, in maintenance or being cleaned is not too small: its unit is reserved.
        small = np.where(kinds[UNRESERVED] >= amount, RESERVED, TOO_SMALL)
        levels = np.where(capacity < amount, small, np.where(able, GIVES, WRONG_UNIT))
        return np.where((capacity <= 0) & (kinds[TOTAL] == 0), NOTHING, levels)

    def by_inventory(self, rows: Rows) -> Flags:
        """Per row, whether it could give the amount if it were unused."""
        able: Flags = self._of_rows(rows) == GIVES
        return able

    def now(self, rows: Rows) -> Flags:
        """Per row, whether it can give the amount now."""
        able = self.by_inventory(rows)
        if self.column is not None:
            able &= self.column.free[rows] >= self.amount
        return able

    def levels(self, rows: Rows) -> Amounts:
        """Per row, its fit level by inventory and by free amounts."""
        levels = self._of_rows(rows)
        if self.column is None:
            return levels
        return np.where((levels == GIVES) & (self.column.free[rows] < self.amount), IN_USE, levels)


class ContendedClass(_OfClass):
    """A class that several slots require: how much one provider can give to all of them, in steps that make a
    difference.
    """

    def __init__(self, replica: Replica, name: str, amounts: Sequence[int]) -> None:
        super().__init__(replica, name)
        sums = {0}
        for amount in amounts:
            sums |= {have + amount for have in sums}
            if len(sums) > MAX_SUMS:
                break
        self.total = sum(amounts)
        self.sums = np.array(sorted(sums), dtype=np.int64) if len(sums) <= MAX_SUMS else None

    def _figures(self, kinds: Amounts) -> Amounts:
        """The most that one allocation may have of each kind of inventory."""
        most: Amounts = kinds[MAX_UNIT]
        return most

    def limit(self, rows: Rows) -> Amounts:
        """Per row, the most that it can give to all slots together, rounded down to a sum that can be required."""
        limit = self._of_rows(rows)
        if self.column is not None:
            limit = np.clip(np.minimum(self.column.free[rows], limit), 0, self.total)
        if self.sums is None:
            return limit
        rounded: Amounts = self.sums[np.searchsorted(self.sums, limit, side="right") - 1]
        return rounded

    def by_inventory(self, rows: Rows) -> Flags:
        """Per row, whether it could give the sum of all slots if it were unused. ResourceFit checks the amount of each
        slot.
        """
        able: Flags = self._of_rows(rows) >= self.total
        return able


class MemberRows(Struct, frozen=True):
    """All members of some trees, and the providers that share with them.

    roots: the trees. rows: the members; `rows[:own]` are in the trees, the others share with them from elsewhere.
    owners: per member, the position of its tree among the roots.
    """

    roots: Rows
    rows: Rows
    owners: Rows
    own: int

    def have(self, which: Flags) -> Flags:
        """Per tree, whether any of its members is marked."""
        marked = np.zeros(len(self.roots), dtype=np.bool_)
        marked[self.owners[which]] = True
        return marked

    def greatest(self, values: Amounts) -> Amounts:
        """Per tree, the greatest value of its members, at least 0."""
        greatest = np.zeros(len(self.roots), dtype=np.int64)
        np.maximum.at(greatest, self.owners, values)
        return greatest


class GroupRules:
    """The requirements of a group on a provider besides resources, evaluated for each distinct set of traits and of
    aggregates.
    """

    def __init__(self, replica: Replica, group: Group) -> None:
        # These are sets, because a query may name thousands of traits and is compared with every distinct set of traits
        # in the replica.
        every = [frozenset(names) for names in group.required]
        self._unnumbered = group.suffix == UNNUMBERED
        required = [] if self._unnumbered else every
        forbidden = frozenset(group.forbidden)
        members = [frozenset(names) for names in group.member_of]
        excluded = frozenset(group.forbidden_aggregates)
        self._replica = replica
        self._group = group
        self._any_traits = bool(required or forbidden)
        self._everything = (1 << len(every)) - 1
        self._traits = lookup_table(
            replica.trait_sets, lambda own: meets_all(own, required) and not meets_any(own, forbidden)
        )
        self._member = lookup_table(replica.aggregate_sets, lambda own: meets_all(own, members))
        self._is_excluded = lookup_table(replica.aggregate_sets, lambda own: meets_any(own, excluded))
        self._covers = lookup_table(
            replica.trait_sets,
            lambda own: sum(1 << bit for bit, names in enumerate(every) if meets_any(own, names)),
        )

    def flat(self, rows: Rows) -> Rows:
        """Those of these providers, each a tree by itself, that meet all requirements."""
        allowed = self.allowed(MemberRows(rows, rows, np.arange(len(rows)), len(rows)))
        if self._everything:
            allowed &= self.covers(rows) == self._everything
        return rows[allowed]

    def allowed(self, members: MemberRows) -> Flags:
        """Per member, whether it meets all requirements, except the required traits of the un-numbered group, which
        members meet together (`covers`).
        """
        rejected = np.zeros(len(members.rows), dtype=np.bool_)
        for _, wrong in self.unmet(members):
            rejected |= wrong
        return ~rejected

    def unmet(self, members: MemberRows) -> Iterator[tuple[int, Flags]]:
        """For each kind of requirement that the group has, the fit level of a member that does not meet it, and which
        members do not.
        """
        if self._any_traits:
            yield WRONG_TRAITS, ~self.clean(members)
        if self._group.in_tree is not None:
            yield WRONG_TREE, ~self._in_tree(members)
        if self._group.member_of:
            yield WRONG_AGGREGATES, ~self.in_aggregates(members)
        if self._group.forbidden_aggregates:
            yield FORBIDDEN_AGGREGATES, self.in_forbidden_aggregates(members)

    def clean(self, members: MemberRows) -> Flags:
        """Per member, whether its traits meet the group's rules: all of them for a numbered group, the forbidden traits
        alone for the un-numbered one.
        """
        clean: Flags = self._traits(self._replica.traits[members.rows]) == 1
        return clean

    def _in_tree(self, members: MemberRows) -> Flags:
        if self._unnumbered:  # its tree restricts the roots
            return np.arange(len(members.rows)) < members.own
        inside: Flags = self._replica.root[members.rows] == self.tree()
        return inside

    def in_aggregates(self, members: MemberRows) -> Flags:
        """Per member, whether it is in the requested aggregates: itself or, for the un-numbered group, by its root."""
        member: Flags = self._member(self._replica.aggregates[members.rows]) == 1
        if self._unnumbered:
            of_root = self._member(self._replica.aggregates[members.roots]) == 1
            member[: members.own] |= of_root[members.owners[: members.own]]
        return member

    def in_forbidden_aggregates(self, members: MemberRows) -> Flags:
        """Per member, whether it is in a forbidden aggregate: itself or, for the un-numbered group, by the
        tree's root.
        """
        is_excluded: Flags = self._is_excluded(self._replica.aggregates[members.rows]) == 1
        if self._unnumbered:
            is_excluded |= (self._is_excluded(self._replica.aggregates[members.roots]) == 1)[members.owners]
        return is_excluded

    def covers(self, rows: Rows) -> Amounts:
        """Per row, the required any-of groups that its traits meet, as bits."""
        return self._covers(self._replica.traits[rows])

    def tree(self) -> int:
        """The row of the root of the requested tree; NO_ROW when the tree does not exist."""
        row = None if self._group.in_tree is None else self._replica.row_of(self._group.in_tree)
        return NO_ROW if row is None else self._replica.root_of(row)


def meets_all(own: Sequence[str], groups: Iterable[frozenset[str]]) -> bool:
    """Whether each group contains one of these names."""
    return all(not group.isdisjoint(own) for group in groups)


def meets_any(own: Sequence[str], names: frozenset[str]) -> bool:
    """Whether one of the names is in this set."""
    return not names.isdisjoint(own)


class RulesCache(Recent[bytes, GroupRules]):
    """The group rules that a replica caches. Requests that differ only in amounts share them."""

    MOST = 256


def rules_of(replica: Replica, group: Group) -> GroupRules:
    """Return the group's rules."""
    key = msgspec.msgpack.encode(structs.replace(group, resources={}))
    return replica.cache(RulesCache).value(key, lambda: GroupRules(replica, group))


NOT_A_ROOT = 0

UNIT = "amount not allowed (min_unit, max_unit, step_size)"


class Reason(Struct, frozen=True):
    """One reason for a rejection: the step of the funnel, and the text."""

    step: str
    reason: str


class Reasons:
    """The codes of one request, ascending in the order of the steps."""

    def __init__(self, request: CandidatesRequest, slots: Sequence[Slot]) -> None:
        self._request = request
        self._own = own = next((group for group in request.groups if group.suffix == UNNUMBERED), Group())
        self.named: list[Reason] = [Reason("", "")]  # NOT_A_ROOT
        self.root_lacks = [self._code("traits", f"root lacks {_any_of(group)}") for group in request.root_required]
        self.root_has = self._code("traits", f"root has {_any_of(request.root_forbidden)}")
        self.has = self._code("traits", f"has {_any_of(own.forbidden)}")
        self.lacks = [self._code("traits", f"lacks {_any_of(group)}") for group in own.required]
        self.root_not_member = self._code("aggregates", f"not in {_all_of(request.root_member_of)}")
        self.root_bad_member = self._code("aggregates", f"in {_any_of(request.root_forbidden_aggregates)}")
        self.not_member = self._code("aggregates", f"not in {_all_of(own.member_of)}")
        self.bad_member = self._code("aggregates", f"in {_any_of(own.forbidden_aggregates)}")
        # For each slot, the code of each fit level.
        self.of_level = [np.array(self._of_levels(slot), dtype=np.int64) for slot in slots]
        self.apart = self._code("together", "traits and resources not on the same providers")
        self.nothing = self._code("resources", "nothing is requested")
        suffixes = ", ".join(_short(group.suffix) for group in request.groups if group.suffix != UNNUMBERED)
        where = f"groups {suffixes}" if suffixes else "together"
        self.unfit = self._code(where, "groups do not fit together") if suffixes else self.apart
        self.unknown = self._code("together", "too many combinations to try")
        self.not_examined = self._code("together", "not looked into")
        self.passes = len(self.named)
        for codes in self.of_level:
            codes[GIVES] = self.passes

    def steps(self) -> list[str]:
        """The steps that this request has, in order."""
        own, request = self._own, self._request
        traits = own.required or own.forbidden or request.root_required or request.root_forbidden
        aggregates = own.member_of or own.forbidden_aggregates
        aggregates = aggregates or request.root_member_of or request.root_forbidden_aggregates
        found = dict.fromkeys(self.named[int(codes[0])].step for codes in self.of_level)
        return [*(["traits"] if traits else []), *(["aggregates"] if aggregates else []), *found]

    def of_root_traits(self, traits: tuple[str, ...]) -> int:
        """The codes of the root's own traits."""
        for group, code in zip(self._request.root_required, self.root_lacks, strict=True):
            if not meets_any(traits, frozenset(group)):
                return code
        return self.root_has if meets_any(traits, frozenset(self._request.root_forbidden)) else self.passes

    def of_root_aggregates(self, own: tuple[str, ...]) -> int:
        """The codes of the root's own aggregates."""
        if not meets_all(own, map(frozenset, self._request.root_member_of)):
            return self.root_not_member
        excluded = frozenset(self._request.root_forbidden_aggregates)
        return self.root_bad_member if meets_any(own, excluded) else self.passes

    def _of_levels(self, slot: Slot) -> list[int]:
        """The codes of a slot's fit levels, ascending, without GIVES."""
        name = f"group {_short(slot.suffix)}"
        if slot.suffix == UNNUMBERED:
            (name,) = slot.resources
        codes = [self._code(name, reason) for reason in ("none here", "capacity too small", "reserved", UNIT)]
        if slot.suffix == UNNUMBERED:
            codes += [self.has, self.not_member, self.bad_member]
        else:
            aggregates = self._code(name, "aggregates not met")
            codes += [self._code(name, "traits not met"), aggregates, aggregates]
        codes += [self._code(name, "not in the requested tree"), self._code(name, "in use"), 0]
        assert len(codes) == len(LEVELS)
        return codes

    def _code(self, step: str, reason: str) -> int:
        self.named.append(Reason(step, reason))
        return len(self.named) - 1


def _short(suffix: str) -> str:
    return suffix.removeprefix("_")


def _any_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def _all_of(groups: Sequence[Sequence[str]]) -> str:
    return " and ".join(map(_any_of, groups))
