"""Finds the assignments of one tree's members to a request's slots, lazily and within a budget of dead ends.

Before the solver takes a member, it checks whether the remaining slots can still be satisfied. Members that are alike,
and of which the same was taken, count as one kind: the result of the check holds for all situations that differ only in
which members of a kind were taken. So eight equal devices for eight groups take eight steps, not 8^8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from msgspec import Struct, structs

T = TypeVar("T")


def round_robin(iterators: Iterable[Iterator[T]]) -> Iterator[T]:
    """Yield one item of each iterator in turn, until all have ended."""
    open_ones = list(iterators)
    while open_ones:  # ends: every round takes an item or drops an iterator
        still_open = []
        for iterator in open_ones:
            for item in iterator:
                yield item
                still_open.append(iterator)
                break
        open_ones = still_open


def can_match(choices: Sequence[int]) -> bool:
    """Whether each slot can be given one of its choices (members as bits) and no member is used twice."""
    holders: dict[int, int] = {}  # member's bit -> the choices of the slot that has it
    taken = seen = 0

    def give(members: int) -> bool:
        """Give a slot one of these members: a free one, or one whose slot can be given another one."""
        nonlocal taken, seen
        if free := members & ~taken:
            taken |= free & -free
            holders[free & -free] = members
            return True
        while fresh := members & ~seen:  # ends: each member is tried once
            bit = fresh & -fresh
            seen |= bit
            if give(holders[bit]):
                holders[bit] = members
                return True
        return False

    for members in choices:
        seen = 0
        if not give(members):
            return False
    return True


class TooLong(Exception):
    """The time budget is used up."""

    code = "search.too_long"


class TimeBudget:
    """The time until which a search may run. clock: monotonic seconds.

    keeps_partial: when the budget is used up, the search returns its results so far, as with a budget of steps.
    Otherwise it raises TooLong and returns nothing, so that the caller can start it again elsewhere.
    """

    __slots__ = ("_clock", "_until", "keeps_partial")

    def __init__(self, clock: Callable[[], float], seconds: float, *, keeps_partial: bool) -> None:
        self._clock = clock
        self._until = clock() + seconds
        self.keeps_partial = keeps_partial

    def check(self) -> None:
        """Raise TooLong when the budget is used up."""
        if self._clock() >= self._until:
            raise TooLong


Assignment = tuple[int, ...]  # per slot, the member that gives it

# The set of common ancestors before a member is chosen: all bits.
ANYWHERE = -1

# The number of dead ends after which the solver first checks by a matching whether all slots can be apart.
MATCH_AFTER = 32


class TreeProblem(Struct, frozen=True):
    """One tree, with the providers that share with it, as the solver's input. Members are numbered from 0, best first.

    eligible: per slot the members that can give it alone. needs and limits: amounts of the classes that several slots
    require, per slot and per member. kinds: members of one kind are alike in all of this. apart: slots that must be on
    different members (isolate). covers: per member the required traits it has, as bits, which count when it gives one
    of the `covering` slots; together they must be `everything`. above: per member the bits of itself and its ancestors;
    subtrees: sets of slots. trees: where given, at most one member of each tree gives `giving` slots.
    """

    eligible: list[list[int]]
    kinds: list[int]
    apart: frozenset[int] = frozenset()
    needs: Sequence[tuple[int, ...]] = []
    limits: Sequence[tuple[int, ...]] = []
    covering: frozenset[int] = frozenset()
    covers: list[int] = []
    everything: int = 0
    above: list[int] = []
    subtrees: tuple[tuple[int, ...], ...] = ()
    trees: list[int] | None = None
    giving: frozenset[int] = frozenset()


class _State(NamedTuple):
    """The state after the choices so far."""

    left: dict[int, tuple[int, ...]]  # by member that was taken: the remaining amounts of the contended classes
    taken: int  # the members that no further `apart` slot may take, as bits
    common: tuple[int, ...]  # per subtree: the common ancestors (or self) of all chosen members, as bits
    tops: tuple[int, ...]  # per subtree: those of the common ancestors that are chosen
    cover: int
    donors: dict[int, int]  # per tree, the member that gives


class OutOfBudget(Exception):
    """The budget of dead ends is used up, so it is not known whether there are further assignments."""


class TreeSolver:
    """The assignments found so far; `find` searches further ones. done: there are no others. cut: the budget has ended
    the search.

    dead_ends: checks ahead that have failed, which the budget counts.
    """

    def __init__(self, problem: TreeProblem) -> None:
        self.problem = problem = _apart_by_amounts(problem)
        self.found: list[Assignment] = []
        self.done = False
        self.cut = False
        self.dead_ends = 0
        self._allowed = 0
        self._time_budget: TimeBudget | None = None
        self._known: dict[tuple[object, ...], bool] = {}
        self._bits = [sum(1 << member for member in members) for members in problem.eligible]
        self._by_kind = [_by_kind(problem, slot) for slot in _order(problem)]
        self._order = _order(problem)
        # Whether a member's allocation for a slot matters to other slots
        self._tracked = [at in problem.apart or bool(problem.needs and any(problem.needs[at])) for at in self._order]
        self._open = _open_subtrees(problem, self._order)
        self._reach = _reach(problem, self._order)
        self._loose = not (any(self._tracked) or problem.subtrees or problem.everything or problem.trees is not None)
        self._source = self._spread()

    def find(self, count: int, budget: int, time_budget: TimeBudget | None = None) -> int:
        """Search until `count` assignments are found in all, with at most `budget` further dead ends. Returns the
        number found.

        Raises TooLong when the time budget is used up; the found assignments are kept, and no further search is
        possible.
        """
        self._time_budget = time_budget
        self._allowed = self.dead_ends + budget
        if not self.found and not self._can_match(0, 0):
            self.done = True
        try:
            while len(self.found) < count and not (self.done or self.cut):
                assignment = next(self._source, None)
                if assignment is None:
                    self.done = True
                else:
                    self.found.append(assignment)
        except OutOfBudget:
            self.cut = True
        return min(count, len(self.found))

    def _spread(self) -> Iterator[Assignment]:
        """Yield assignments with another member for the slot with the most choices each time, so that the second one is
        a real alternative.
        """
        yield from round_robin(self._search(member) for member in self.problem.eligible[self._order[0]])

    def _search(self, first: int) -> Iterator[Assignment]:
        """Yield all assignments in which `first` gives the first slot in order; members already in use come first."""
        start = _State({}, 0, (ANYWHERE,) * len(self.problem.subtrees), (0,) * len(self.problem.subtrees), 0, {})
        state = self._take(start, 0, first)
        if state is None or not self._is_completable(1, state):
            return
        chosen = [first]
        if len(self._order) == 1:
            yield self._in_slot_order(chosen)
            return
        stack = [self._choices(1, state, chosen)]
        while stack:  # ends: each choice is offered once
            step = next(stack[-1], None)
            if step is None:
                stack.pop()
                chosen.pop()
                continue
            chosen.append(step[0])
            if len(chosen) == len(self._order):
                yield self._in_slot_order(chosen)
                chosen.pop()
            else:
                stack.append(self._choices(len(chosen), step[1], chosen))

    def _choices(self, place: int, state: _State, chosen: list[int]) -> Iterator[tuple[int, _State]]:
        """The members that can give this slot so that all remaining slots can still be satisfied."""
        if self._time_budget is not None:
            self._time_budget.check()
        promise: dict[object, bool] = {}
        for member in self._ranked(place, state, chosen):
            after = self._take(state, place, member)
            if after is None:
                continue
            if not self._loose and place + 1 < len(self._order):
                condition = self._condition(state, after, place, member)
                able = promise.get(condition)
                if able is None:
                    able = promise[condition] = self._is_completable(place + 1, after)
                if not able:
                    continue
            yield member, after

    def _ranked(self, place: int, state: _State, chosen: list[int]) -> Iterator[int]:
        """The members that can give this slot, those already in use first, without those that may not be used again."""
        slot = self._order[place]
        if slot in self.problem.apart:
            free = self._bits[slot] & ~state.taken
            while free:  # ends: each round clears a bit
                first = free & -free
                free ^= first
                yield first.bit_length() - 1
            return
        used = set(chosen)
        yield from sorted(member for member in used if self._bits[slot] >> member & 1)
        for member in self.problem.eligible[slot]:
            if member not in used:
                yield member

    def _in_slot_order(self, chosen: list[int]) -> Assignment:
        assignment = [0] * len(chosen)
        for slot, member in zip(self._order, chosen, strict=True):
            assignment[slot] = member
        return tuple(assignment)

    # --- rules

    def _take(self, state: _State, place: int, member: int) -> _State | None:
        """The state after the slot at this place takes the member; None when a rule forbids it."""
        problem, slot = self.problem, self._order[place]
        if self._loose:
            return state
        left, taken, common, tops, cover, donors = state
        if self._tracked[place]:
            bit = 1 << member
            if slot in problem.apart:
                if taken & bit:
                    return None
                taken |= bit
            remaining = left.get(member)
            if problem.needs:
                limits = problem.limits[member] if remaining is None else remaining
                remaining = tuple(limit - need for limit, need in zip(limits, problem.needs[slot], strict=True))
                # Only the classes that this slot requires count: the member may have none of another class.
                if any(rest < 0 < need for rest, need in zip(remaining, problem.needs[slot], strict=True)):
                    return None
            left = {**left, member: remaining or ()}
        if problem.subtrees:
            within = self._within(state, place, member)
            if within is None:
                return None
            common, tops = within
        if slot in problem.covering:
            cover |= problem.covers[member]
        if cover | self._reach[place + 1] != problem.everything:
            return None
        if problem.trees is not None and slot in problem.giving:
            if donors.get(problem.trees[member], member) != member:
                return None
            donors = {**donors, problem.trees[member]: member}
        return _State(left, taken, common, tops, cover, donors)

    def _within(self, state: _State, place: int, member: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Update the subtrees for this choice: one of the members that are chosen, or can still be chosen, must be an
        ancestor of the rest.
        """
        problem, slot = self.problem, self._order[place]
        common, tops = list(state.common), list(state.tops)
        for number, slots in enumerate(problem.subtrees):
            if slot not in slots:
                continue
            common[number] &= problem.above[member]
            tops[number] = (tops[number] | 1 << member) & common[number]
            if not tops[number] and not common[number] & self._open[place + 1][number]:
                return None
        return tuple(common), tuple(tops)

    # --- looking ahead

    def _is_completable(self, place: int, state: _State) -> bool:
        """Whether the slots from this place on can be satisfied. The result is computed once for equal situations."""
        if self._loose or place == len(self._order):
            return True
        if self._time_budget is not None:
            self._time_budget.check()
        situation = self._situation(place, state)
        known = self._known.get(situation)
        if known is not None:
            return known
        known = False
        seen: set[object] = set()
        if self.dead_ends > MATCH_AFTER and not self._can_match(place, state.taken):
            self._known[situation] = False
            self.dead_ends += 1
            return False
        for member in self._distinct_members(place, state):
            after = self._take(state, place, member)
            if after is None:
                continue
            condition = self._condition(state, after, place, member)
            if condition in seen:
                continue
            seen.add(condition)
            if self._is_completable(place + 1, after):
                known = True
                break
        self._known[situation] = known
        if not known:
            self.dead_ends += 1 + len(seen)
            if self.dead_ends > self._allowed:
                raise OutOfBudget
        return known

    def _can_match(self, place: int, taken: int) -> bool:
        """Whether the slots that must be apart can have different members, by this rule alone."""
        return can_match([self._bits[slot] & ~taken for slot in self._order[place:] if slot in self.problem.apart])

    def _distinct_members(self, place: int, state: _State) -> Iterator[int]:
        """The members to try: all that a choice has changed, and one of each kind of the others."""
        touched = 0
        for member in (*state.left, *state.donors.values()):
            touched |= 1 << member
        for common in state.common:
            if common != ANYWHERE:
                touched |= common
        for members in self._by_kind[place]:
            fresh = False
            for member in members:
                if touched >> member & 1:
                    yield member
                elif not fresh:
                    fresh = True
                    yield member

    def _condition(self, state: _State, after: _State, place: int, member: int) -> object:
        """Return a key that is equal for members whose choice leads to equal situations."""
        bits = (state.taken >> member & 1, *(common >> member & 1 for common in state.common))
        giving = member in state.donors.values()
        return self.problem.kinds[member], state.left.get(member), bits, after.common, after.tops, giving

    def _situation(self, place: int, state: _State) -> tuple[object, ...]:
        """Return a key that is equal for situations that differ only in which members of a kind were taken."""
        if not self.problem.needs and not self.problem.subtrees:  # the only state of a member is whether it was taken
            kinds = tuple(sorted(map(self.problem.kinds.__getitem__, state.left)))
            return place, kinds, state.cover, tuple(sorted(state.donors.items()))
        taken = sorted(
            (self.problem.kinds[member], left, state.taken >> member & 1, tuple(c >> member & 1 for c in state.common))
            for member, left in state.left.items()
        )
        still = self._open[place]
        common = tuple(c if still[number] else 0 for number, c in enumerate(state.common))
        tops = tuple(t if still[number] else 0 for number, t in enumerate(state.tops))
        return place, tuple(taken), common, tops, state.cover, tuple(sorted(state.donors.items()))


def _apart_by_amounts(problem: TreeProblem) -> TreeProblem:
    """Return an equal problem that is cheaper to solve: where no member can give two slots, the slots must be apart
    instead of having amounts.

    This is possible only where all contending slots require one class and no member can give any two of them;
    `eligible` then decides each slot alone.
    """
    requesting = frozenset(slot for slot, needs in enumerate(problem.needs) if any(needs))
    if len(requesting) < 2 or not problem.apart <= requesting:
        return problem
    for number, needs in enumerate(zip(*(problem.needs[slot] for slot in sorted(requesting)), strict=True)):
        least, next_least = sorted(needs)[:2]
        if least > 0 and max(limits[number] for limits in problem.limits) < least + next_least:
            return structs.replace(problem, apart=requesting, needs=[], limits=[])
    return problem


def _order(problem: TreeProblem) -> list[int]:
    """Return the order of the slots: the one with the most choices first, then those with the fewest, where dead ends
    show early.
    """
    slots = range(len(problem.eligible))
    pivot = max(slots, key=lambda slot: (len(problem.eligible[slot]), -slot))
    return [pivot, *sorted((s for s in slots if s != pivot), key=lambda slot: (len(problem.eligible[slot]), slot))]


def _by_kind(problem: TreeProblem, slot: int) -> list[list[int]]:
    """The members that can give the slot, grouped by kind."""
    kinds: dict[int, list[int]] = {}
    for member in problem.eligible[slot]:
        kinds.setdefault(problem.kinds[member], []).append(member)
    return list(kinds.values())


def _open_subtrees(problem: TreeProblem, order: list[int]) -> list[list[int]]:
    """Per place and subtree, the members that the slots from this place on can still add to the subtree, as bits."""
    still = [[0] * len(problem.subtrees)]
    for slot in reversed(order):
        bits = sum(1 << member for member in problem.eligible[slot]) if problem.subtrees else 0
        before = zip(problem.subtrees, still[-1], strict=True)
        still.append([known | bits if slot in slots else known for slots, known in before])
    return still[::-1]


def _reach(problem: TreeProblem, order: list[int]) -> list[int]:
    """Per place, the required traits that the slots from this place on can still meet, as bits."""
    reach = [0] * (len(order) + 1)
    for place in range(len(order) - 1, -1, -1):
        reach[place] = reach[place + 1]
        if order[place] in problem.covering:
            for member in problem.eligible[order[place]]:
                reach[place] |= problem.covers[member]
    return reach
