"""Which roots can take a request, and with which allocations.

`search` is complete: it leaves out no root that can take the request, and "none" is true. `options` is lazy: it
walks the ways to satisfy the request on one root best first and stops at its limit; every step leads to an answer.

Numbered groups and sharing providers (P-45) are judged by `entangled`, tree patterns at a time; the rest here and in
`plan`, which is what most requests and hosts need and costs less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from bus.contracts.build import FunnelStep
from bus.contracts.placement import ClaimOption
from placement_worker.replica.book import Book
from placement_worker.replica.columns import Rows
from placement_worker.replica.covers import unions
from placement_worker.replica.plan import Codes, Plan
from placement_worker.replica.plans import kept_plan, plan_of
from placement_worker.replica.query import Found, Query
from placement_worker.replica.request import Slot
from placement_worker.replica.rows import NOBODY
from placement_worker.replica.turns import in_turn

__all__ = ["Found", "Query", "options", "search"]

# At most this many options are looked for, whatever the caller asks.
MAX_OPTIONS = 64


def search(book: Book, query: Query, *, explain: bool = False) -> Found:
    """All roots that can take the request now, ascending by row; none only when that is true."""
    plan = plan_of(book, query)
    if not (query.only_roots or query.ignore_roots or query.in_tree):
        return Found(plan.roots, _funnel(plan, _counts(plan, plan.explained()), {}) if explain else ())
    pinned = _pinned(book, query)
    if pinned is None:
        ignored = _rows_of(book, query.ignore_roots)
        kept = np.delete(plan.roots, np.flatnonzero(np.isin(plan.roots, ignored)))
        if not explain:
            return Found(kept)
        verdicts = plan.explained()
        counts = _counts(plan, verdicts) - np.bincount(verdicts[ignored], minlength=plan.passes + 1)
        return Found(kept, _funnel(plan, counts, {"ignored": len(ignored)}))
    found = pinned[plan.verdicts[pinned] == plan.passes]
    if not explain:
        return Found(found)
    verdicts = plan.explained()[pinned]
    others = len(book.rows_of_roots()) - len(pinned)
    counts = np.bincount(verdicts, minlength=plan.passes + 1)
    return Found(found, _funnel(plan, counts, {"not among those asked for": others}))


def options(book: Book, query: Query, root_row: int, *, limit: int = 4) -> list[ClaimOption]:
    """The claimable allocations on one root, best first; empty when it does not fit.

    Best: from few providers, then from those with most room. The provider with the widest choice changes first from
    option to option, so that the second option is a real alternative to the first.
    """
    plan = kept_plan(book, query)
    ways = plan.ways(root_row, min(limit, MAX_OPTIONS))
    if ways is not None:
        return [_merged(book, plan.entangled.search.slots, way) for way in ways.tolist()]
    plan.refresh()
    if plan.verdicts[root_row] != plan.passes:
        return []
    if book.first_member[root_row] == NOBODY:
        return [_option(book, plan, [root_row] * len(plan.asked))]
    found = []
    for chosen in _ways(book, plan, root_row):
        found.append(_option(book, plan, chosen))
        if len(found) >= min(limit, MAX_OPTIONS):
            break
    return found


def _merged(book: Book, slots: Sequence[Slot], rows: Sequence[int]) -> ClaimOption:
    """One way, with the amounts that several groups have from one provider added up."""
    allocations: dict[str, dict[str, int]] = {}
    shapes: dict[str, int] = {}
    for slot, row in zip(slots, rows, strict=True):
        for name, amount in slot.resources.items():
            uuid = book.uuid_of(row)
            given = allocations.setdefault(uuid, {})
            given[name] = given.get(name, 0) + amount
            shapes[uuid] = book.shape_of(row)
    return ClaimOption(allocations=allocations, shapes=shapes)


# --- pins


def _pinned(book: Book, query: Query) -> Rows | None:
    """The roots that the query's pins leave; None when it has none that name roots."""
    pinned: Rows | None = _rows_of(book, query.only_roots) if query.only_roots else None
    if query.in_tree is not None:
        row = book.row_of(query.in_tree)
        tree = np.array([] if row is None else [book.root_of(row)], dtype=np.intp)
        pinned = tree if pinned is None else np.intersect1d(pinned, tree)
        pinned = pinned[book.is_root[pinned]]
    if pinned is None:
        return None
    return np.setdiff1d(pinned, _rows_of(book, query.ignore_roots))


def _rows_of(book: Book, uuids: Sequence[str]) -> Rows:
    rows = {row for uuid in uuids if (row := book.row_of(uuid)) is not None and book.is_root[row]}
    return np.array(sorted(rows), dtype=np.intp)


# --- the funnel


def _counts(plan: Plan, verdicts: Codes) -> Rows:
    """How many roots have each verdict."""
    if verdicts is plan.verdicts:
        return plan.counts
    return np.bincount(verdicts[plan.book.rows_of_roots()], minlength=plan.passes + 1)


def _funnel(plan: Plan, counts: Rows, pins: dict[str, int]) -> tuple[FunnelStep, ...]:
    """Step by step: how many roots are left, and why the others were rejected."""
    left = int(counts[1:].sum())
    funnel = [FunnelStep(step="providers", left=left, rejected={why: many for why, many in pins.items() if many})]
    rejected: dict[str, dict[str, int]] = {step: {} for step in _steps(plan)}
    for code in range(1, plan.passes):
        if many := int(counts[code]):
            step = plan.steps.named[code]
            rejected.setdefault(step.step, {})[step.reason] = many
    for name, reasons in rejected.items():
        left -= sum(reasons.values())
        funnel.append(FunnelStep(step=name, left=left, rejected=reasons))
    return tuple(funnel)


def _steps(plan: Plan) -> list[str]:
    """The steps this query has, in order."""
    query = plan.query
    steps = ["traits"] if query.required or query.forbidden or query.root_required or query.root_forbidden else []
    aggregates = query.member_of or query.forbidden_aggregates
    steps += ["aggregates"] if aggregates or query.root_member_of or query.root_forbidden_aggregates else []
    groups = [f"group {group.suffix.removeprefix('_')}" for group in query.groups]
    return steps + [asked.name for asked in plan.asked] + groups


# --- ways to satisfy a request on one nested root


def _ways(book: Book, plan: Plan, root: int) -> Iterator[list[int]]:
    """One provider per asked class, best first, spread over the class with the widest choice."""
    givers = _givers(book, plan, root)
    pivot = max(range(len(givers)), key=lambda number: (len(givers[number]), -number))
    order = [pivot, *(number for number in range(len(givers)) if number != pivot)]
    cover = plan.cover
    masks = {row: cover.masks[cover.number_of(book.traits_of(row))] for rows in givers for row in rows}
    choices = [[masks[row] for row in givers[number]] for number in order]
    # What the classes from each place on can still meet together: no step is taken that cannot end well.
    rest = [unions(choices[place:]) for place in range(len(order) + 1)]
    return in_turn(_walk(givers, order, giver, masks, rest) for giver in givers[pivot])


def _givers(book: Book, plan: Plan, root: int) -> list[list[int]]:
    """Per asked class, the members that can give it, most room first, then by name."""
    roots = np.array([root], dtype=np.intp)
    rows, owners = book.members(roots)
    usable = plan.usable(rows, owners, roots)[-1]
    givers = []
    for asked in plan.asked:
        able = rows[usable & (asked.static(rows) == plan.passes) & ~asked.lacks_room(rows)]
        column = asked.column
        assert column is not None, "a passing root has every class"
        free = column.free
        givers.append(sorted(able.tolist(), key=lambda row: (-int(free[row]), book.name_of(row), book.uuid_of(row))))
    return givers


def _walk(
    givers: list[list[int]], order: list[int], first: int, masks: dict[int, int], rest: list[list[int]]
) -> Iterator[list[int]]:
    """All ways in which `first` gives the first class in `order`, fewest providers first, never a dead end."""
    chosen = [first] * len(order)
    everything = max(rest[0], default=0)  # the root passes, so all of it can be met

    def onward(place: int, have: int) -> Iterator[list[int]]:
        if not any(have | more == everything for more in rest[place]):
            return
        if place == len(order):
            yield list(chosen)
            return
        number = order[place]
        used = {chosen[order[before]] for before in range(place)}
        for row in sorted(givers[number], key=lambda row: row not in used) if place else [first]:
            chosen[number] = row
            yield from onward(place + 1, have | masks[row])

    return onward(0, 0)


def _option(book: Book, plan: Plan, chosen: Sequence[int]) -> ClaimOption:
    allocations: dict[str, dict[str, int]] = {}
    shapes: dict[str, int] = {}
    for asked, row in zip(plan.asked, chosen, strict=True):
        uuid = book.uuid_of(row)
        allocations.setdefault(uuid, {})[asked.name] = asked.amount
        shapes[uuid] = book.shape_of(row)
    return ClaimOption(allocations=allocations, shapes=shapes)
