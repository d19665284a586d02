"""All ways in which one tree satisfies a request, lazily: never a dead end, never more than the budget of them.

Before a member is taken, a look ahead says whether the rest can still be satisfied. It asks once per kind of member,
not once per member: like members in like condition are one kind, and what was found out about a situation holds for
every situation that differs only in which of the like members were taken. Eight like devices for eight groups cost
as much as eight steps, not as 8^8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct, structs

from placement_worker.replica.matching import can_match
from placement_worker.replica.patience import Patience
from placement_worker.replica.turns import in_turn

Way = tuple[int, ...]  # per slot, the member that gives it

# Bits of a set of ancestors before anything was chosen: all of them.
ANYWHERE = -1

# Dead ends after which it pays to prove that slots cannot all be apart before trying.
MATCH_AFTER = 32

# More tries than anybody makes.
ENDLESS = 1 << 62


class Site(Struct, frozen=True):
    """One tree (with what is shared with it) as a walk sees it. Members are numbered from 0, best first.

    eligible: per slot the members that can give it alone. needs and limits: amounts of the classes that several slots
    ask for, per slot and per member. kinds: members of one kind are alike in all that is said here. apart: slots that
    must be on different members (isolate). covers: per member the required traits it has, as bits, which count when
    it gives one of the `covering` slots; together they must be `everything`. above: per member the bits of itself and
    its ancestors; subtrees: sets of slots. trees: where given, at most one member of each tree gives `giving` slots.
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
    """What the choices so far mean for the rest."""

    left: dict[int, tuple[int, ...]]  # of members that were taken: what they have left of the contended classes
    taken: int  # members that no further `apart` slot may have
    common: tuple[int, ...]  # per subtree: ancestors (or self) of all chosen so far
    tops: tuple[int, ...]  # per subtree: those of them that are chosen
    cover: int
    givers: dict[int, int]  # per tree, the member that gives


class OutOfBudget(Exception):
    """So many steps led nowhere that the search stops without knowing."""


class Ways:
    """The ways found so far, and the rest on demand. `done`: there are no others; `cut`: the budget ended it.

    dead_ends: steps of looking ahead that led nowhere; the budget is for them alone. tries: all steps, for those who
    want to stop early.
    """

    def __init__(self, site: Site) -> None:
        self.site = site = _told_apart(site)
        self.found: list[Way] = []
        self.done = False
        self.cut = False
        self.dead_ends = 0
        self.tries = 0
        self._allowed = 0
        self._patience: Patience | None = None
        self._known: dict[tuple[object, ...], bool] = {}
        self._bits = [sum(1 << member for member in members) for members in site.eligible]
        self._by_kind = [_by_kind(site, slot) for slot in _order(site)]
        self._order = _order(site)
        self._tracked = [_is_tracked(site, slot) for slot in self._order]
        self._open = _open_subtrees(site, self._order)
        self._reach = _reach(site, self._order)
        self._loose = not (any(self._tracked) or site.subtrees or site.everything or site.trees is not None)
        self._source = self._spread()

    def look(self, count: int, budget: int, tries: int = ENDLESS, patience: Patience | None = None) -> int:
        """Find up to `count` in all, at no more than `budget` further dead ends; how many are found.

        No further way is looked for after so many `tries`; there may be more then. Raises TooLong when the patience
        is at its end: what is found stays found, and nothing more can be.
        """
        self._patience = patience
        self._allowed = self.dead_ends + budget
        last_try = self.tries + tries
        if not self.found and not self._can_match(0, 0):
            self.done = True
        try:
            while len(self.found) < count and not (self.done or self.cut) and self.tries < last_try:
                way = next(self._source, None)
                if way is None:
                    self.done = True
                else:
                    self.found.append(way)
        except OutOfBudget:
            self.cut = True
        return min(count, len(self.found))

    def _spread(self) -> Iterator[Way]:
        """In turn by the member that gives the slot with the widest choice: the second way is a real alternative."""
        yield from in_turn(self._walk(member) for member in self.site.eligible[self._order[0]])

    def _walk(self, first: int) -> Iterator[Way]:
        """All ways in which `first` gives the first slot in order; members already in use come first."""
        start = _State({}, 0, (ANYWHERE,) * len(self.site.subtrees), (0,) * len(self.site.subtrees), 0, {})
        state = self._take(start, 0, first)
        if state is None or not self._can_end(1, state):
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
        """The members that this slot can have so that all the others can be satisfied too."""
        if self._patience is not None:
            self._patience.check()
        promise: dict[object, bool] = {}
        for member in self._ranked(place, state, chosen):
            after = self._take(state, place, member)
            if after is None:
                continue
            if not self._loose and place + 1 < len(self._order):
                condition = self._condition(state, after, place, member)
                able = promise.get(condition)
                if able is None:
                    able = promise[condition] = self._can_end(place + 1, after)
                if not able:
                    continue
            yield member, after

    def _ranked(self, place: int, state: _State, chosen: list[int]) -> Iterator[int]:
        """The members that can give this slot, those already in use first; none that may not be used again."""
        slot = self._order[place]
        if slot in self.site.apart:
            free = self._bits[slot] & ~state.taken
            while free:  # ends: each round takes a bit away
                first = free & -free
                free ^= first
                yield first.bit_length() - 1
            return
        used = set(chosen)
        yield from sorted(member for member in used if self._bits[slot] >> member & 1)
        for member in self.site.eligible[slot]:
            if member not in used:
                yield member

    def _in_slot_order(self, chosen: list[int]) -> Way:
        way = [0] * len(chosen)
        for slot, member in zip(self._order, chosen, strict=True):
            way[slot] = member
        return tuple(way)

    # --- rules

    def _take(self, state: _State, place: int, member: int) -> _State | None:
        """The state after the slot at this place takes the member; None when a rule forbids it."""
        site, slot = self.site, self._order[place]
        self.tries += 1
        if self._loose:
            return state
        left, taken, common, tops, cover, givers = state
        if self._tracked[place]:
            bit = 1 << member
            if slot in site.apart:
                if taken & bit:
                    return None
                taken |= bit
            remaining = left.get(member)
            if site.needs:
                limits = site.limits[member] if remaining is None else remaining
                remaining = tuple(limit - need for limit, need in zip(limits, site.needs[slot], strict=True))
                # Only what this slot asks for counts: a member may have none of a class that it does not give.
                if any(rest < 0 < need for rest, need in zip(remaining, site.needs[slot], strict=True)):
                    return None
            left = {**left, member: remaining or ()}
        if site.subtrees:
            within = self._within(state, place, member)
            if within is None:
                return None
            common, tops = within
        if slot in site.covering:
            cover |= site.covers[member]
        if cover | self._reach[place + 1] != site.everything:
            return None
        if site.trees is not None and slot in site.giving:
            if givers.get(site.trees[member], member) != member:
                return None
            givers = {**givers, site.trees[member]: member}
        return _State(left, taken, common, tops, cover, givers)

    def _within(self, state: _State, place: int, member: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Each subtree after this choice: one of the chosen, or of those still to choose, must be above the rest."""
        site, slot = self.site, self._order[place]
        common, tops = list(state.common), list(state.tops)
        for number, slots in enumerate(site.subtrees):
            if slot not in slots:
                continue
            common[number] &= site.above[member]
            tops[number] = (tops[number] | 1 << member) & common[number]
            if not tops[number] and not common[number] & self._open[place + 1][number]:
                return None
        return tuple(common), tuple(tops)

    # --- looking ahead

    def _can_end(self, place: int, state: _State) -> bool:
        """Whether the slots from this place on can be satisfied; asked once per kind of situation."""
        if self._loose or place == len(self._order):
            return True
        if self._patience is not None:
            self._patience.check()
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
        for member in self._one_of_each(place, state):
            after = self._take(state, place, member)
            if after is None:
                continue
            condition = self._condition(state, after, place, member)
            if condition in seen:
                continue
            seen.add(condition)
            if self._can_end(place + 1, after):
                known = True
                break
        self._known[situation] = known
        if not known:
            self.dead_ends += 1 + len(seen)
            if self.dead_ends > self._allowed:
                raise OutOfBudget
        return known

    def _can_match(self, place: int, taken: int) -> bool:
        """Whether the slots that must be apart can be, if nothing else stood in the way."""
        return can_match([self._bits[slot] & ~taken for slot in self._order[place:] if slot in self.site.apart])

    def _one_of_each(self, place: int, state: _State) -> Iterator[int]:
        """The members to try: all that were touched by a choice, and of the others one of each kind."""
        touched = 0
        for member in (*state.left, *state.givers.values()):
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
        """Equal for members whose choice leaves the rest in like situations."""
        bits = (state.taken >> member & 1, *(common >> member & 1 for common in state.common))
        giving = member in state.givers.values()
        return self.site.kinds[member], state.left.get(member), bits, after.common, after.tops, giving

    def _situation(self, place: int, state: _State) -> tuple[object, ...]:
        """Equal for situations that differ only in which of the like members were taken."""
        if not self.site.needs and not self.site.subtrees:  # all that is known of a member is that it was taken
            kinds = tuple(sorted(map(self.site.kinds.__getitem__, state.left)))
            return place, kinds, state.cover, tuple(sorted(state.givers.items()))
        taken = sorted(
            (self.site.kinds[member], left, state.taken >> member & 1, tuple(c >> member & 1 for c in state.common))
            for member, left in state.left.items()
        )
        still = self._open[place]
        common = tuple(c if still[number] else 0 for number, c in enumerate(state.common))
        tops = tuple(t if still[number] else 0 for number, t in enumerate(state.tops))
        return place, tuple(taken), common, tops, state.cover, tuple(sorted(state.givers.items()))


def _told_apart(site: Site) -> Site:
    """The same site, with amounts that no member has twice said as slots that must be apart, which is cheaper to walk.

    Only where all the slots that contend ask for one class: then any two of them on one member would be too much, and
    each alone is what `eligible` says.
    """
    asking = frozenset(slot for slot, needs in enumerate(site.needs) if any(needs))
    if len(asking) < 2 or not site.apart <= asking:
        return site
    for number, needs in enumerate(zip(*(site.needs[slot] for slot in sorted(asking)), strict=True)):
        least, next_least = sorted(needs)[:2]
        if least > 0 and max(limits[number] for limits in site.limits) < least + next_least:
            return structs.replace(site, apart=asking, needs=[], limits=[])
    return site


def _order(site: Site) -> list[int]:
    """The slot with the widest choice first, then those with the least choice, where dead ends show early."""
    slots = range(len(site.eligible))
    pivot = max(slots, key=lambda slot: (len(site.eligible[slot]), -slot))
    return [pivot, *sorted((s for s in slots if s != pivot), key=lambda slot: (len(site.eligible[slot]), slot))]


def _by_kind(site: Site, slot: int) -> list[list[int]]:
    """The members that can give the slot, like ones together."""
    kinds: dict[int, list[int]] = {}
    for member in site.eligible[slot]:
        kinds.setdefault(site.kinds[member], []).append(member)
    return list(kinds.values())


def _is_tracked(site: Site, slot: int) -> bool:
    """Whether what a member gave to this slot matters to other slots."""
    return slot in site.apart or bool(site.needs and any(site.needs[slot]))


def _open_subtrees(site: Site, order: list[int]) -> list[list[int]]:
    """Per place and subtree, the members that slots from there on could still bring into it, as bits."""
    still = [[0] * len(site.subtrees)]
    for slot in reversed(order):
        bits = sum(1 << member for member in site.eligible[slot]) if site.subtrees else 0
        before = zip(site.subtrees, still[-1], strict=True)
        still.append([known | bits if slot in slots else known for slots, known in before])
    return still[::-1]


def _reach(site: Site, order: list[int]) -> list[int]:
    """Per place, the required traits that slots from there on could still meet, as bits."""
    reach = [0] * (len(order) + 1)
    for place in range(len(order) - 1, -1, -1):
        reach[place] = reach[place + 1]
        if order[place] in site.covering:
            for member in site.eligible[order[place]]:
                reach[place] |= site.covers[member]
    return reach
