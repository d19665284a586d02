"""Finds the roots that can take a request, and the allocations on one root.

`search` is complete: it finds every root that can take the request, except roots that the funnel counts as "too many
combinations to try". `options` lists the allocations on one root, best first, up to its limit. Both use the same
tables: `compiled` evaluates providers and trees, and `verdicts` keeps the results between calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from bus.contracts.build import FunnelStep
from bus.contracts.placement import ClaimOption, ProviderState
from placement_worker.replica.book import Book
from placement_worker.replica.columns import Rows
from placement_worker.replica.request import UNNUMBERED, Found, Query, Slot
from placement_worker.replica.verdicts import RootVerdicts, cached_verdicts, verdicts_of

__all__ = ["Found", "Query", "option_held", "options", "search"]

# The bound of options, whatever limit the caller requests.
MAX_OPTIONS = 64
_ALL = 2**45  # more than any inventory has


def search(book: Book, query: Query, *, explain: bool = False) -> Found:
    """Return all roots that can take the request now, ascending by row. Raises QueryTooWide."""
    verdicts = verdicts_of(book, query)
    pinned = _pinned(book, query)
    roots = verdicts.roots if pinned is None else pinned[verdicts.verdicts[pinned] == verdicts.passes]
    roots = _unless_ignored(book, query, roots)
    if not explain:
        return Found(roots)
    verdicts.explain()
    among = _unless_ignored(book, query, book.rows_of_roots() if pinned is None else pinned)
    why = "ignored" if pinned is None else "not among those requested"
    return Found(roots, _funnel(verdicts, among, {why: len(book.rows_of_roots()) - len(among)}))


def options(book: Book, query: Query, root_row: int, *, limit: int = 4) -> list[ClaimOption]:
    """Return the possible allocations on one root, best first; empty when the request does not fit. Raises
    QueryTooWide.

    Allocations from few providers come first, then those from the providers with the most free. From option to option
    the slot with the most possible providers changes first, so that the second option is a real alternative to the
    first.
    """
    verdicts = cached_verdicts(book, query)
    slots = verdicts.compiled.slots
    return [_option(book, slots, rows) for rows in verdicts.assignments(root_row, min(limit, MAX_OPTIONS))]


def option_held(
    book: Book, query: Query, root_row: int, held: Mapping[str, Mapping[str, int]], *, key: str
) -> ClaimOption | None:
    """The way in which what a consumer holds satisfies a request on this root; None: it does not, or not any more.
    Raises QueryTooWide.

    key: of the consumer's assumption, which is dropped. The search sees what is held as free, and nothing else.
    """
    members = book.members(np.array([root_row], dtype=np.intp))[0].tolist()
    others = {book.uuid_of(row): book.inventory_of(row) for row in members if book.uuid_of(row) not in held}
    taken = {uuid: dict.fromkeys(inventory, _ALL) for uuid, inventory in others.items() if inventory}
    freed = {uuid: {name: -amount for name, amount in amounts.items()} for uuid, amounts in held.items()}
    book.assume(key, {**taken, **freed})
    try:
        return next((one for one in options(book, query, root_row, limit=MAX_OPTIONS) if one.allocations == held), None)
    finally:
        book.forget(key)


def _option(book: Book, slots: Sequence[Slot], rows: Sequence[int]) -> ClaimOption:
    """Return an assignment as an option: the amounts that several slots take from one provider are added up."""
    allocations: dict[str, dict[str, int]] = {}
    shapes: dict[str, int] = {}
    mappings: dict[str, dict[str, None]] = {}
    for slot, row in zip(slots, rows, strict=True):
        uuid = book.uuid_of(row)
        mappings.setdefault(slot.suffix, {})[uuid] = None
        for name, amount in slot.resources.items():
            given = allocations.setdefault(uuid, {})
            given[name] = given.get(name, 0) + amount
            shapes[uuid] = book.shape_of(row)
    if mappings.keys() <= {UNNUMBERED}:
        return ClaimOption(allocations=allocations, shapes=shapes)
    return ClaimOption(
        allocations=allocations,
        shapes=shapes,
        mappings={suffix: tuple(uuids) for suffix, uuids in mappings.items()},
    )


# --- the first search of a process

_HOST = "00000000-0000-0000-0000-000000000001"
_INVENTORY = (1.0, 1, 1, 1, 1, 0, 1.0)


@cache
def warm_up_search() -> Book:
    """Search a book of one host, once in a process, before the process is ready. Returns the book.

    The first call of a function takes longer than the next one; those of a search are 0.3 ms together.
    """
    book = Book()
    host = ProviderState(
        uuid=_HOST,
        name=_HOST,
        parent_uuid=None,
        root_uuid=_HOST,
        generation=1,
        shape=1,
        inventories={"VCPU": _INVENTORY, "MEMORY_MB": _INVENTORY},
        used={},
        traits=("CUSTOM_WARM_UP",),
        aggregates=(),
    )
    book.load([host], 1)
    query = Query(resources={"VCPU": 1}, required=(("CUSTOM_WARM_UP",),))
    for root in search(book, query).roots.tolist():
        options(book, query, root)
    return book


# --- pins


def _pinned(book: Book, query: Query) -> Rows | None:
    """Return the roots that the query's pins allow; None when the query does not pin roots."""
    pinned: Rows | None = _rows_of(book, query.only_roots) if query.only_roots else None
    if query.in_tree is not None:
        row = book.row_of(query.in_tree)
        tree = np.array([] if row is None else [book.root_of(row)], dtype=np.intp)
        pinned = tree if pinned is None else np.intersect1d(pinned, tree)
        pinned = pinned[book.is_root[pinned]]
    return pinned


def _unless_ignored(book: Book, query: Query, roots: Rows) -> Rows:
    return roots[~np.isin(roots, _rows_of(book, query.ignore_roots))] if query.ignore_roots else roots


def _rows_of(book: Book, uuids: Sequence[str]) -> Rows:
    rows = {row for uuid in uuids if (row := book.row_of(uuid)) is not None and book.is_root[row]}
    return np.array(sorted(rows), dtype=np.intp)


# --- the funnel


def _funnel(verdicts: RootVerdicts, roots: Rows, pins: dict[str, int]) -> tuple[FunnelStep, ...]:
    """Return the steps of the funnel: how many of these roots each leaves, and why it rejects the others."""
    counts, left = np.bincount(verdicts.verdicts[roots], minlength=verdicts.passes + 1), len(roots)
    funnel = [FunnelStep(step="providers", remaining=left, rejected={why: many for why, many in pins.items() if many})]
    rejected: dict[str, dict[str, int]] = {step: {} for step in verdicts.reasons.steps()}
    for code in range(1, verdicts.passes):
        if many := int(counts[code]):
            reason = verdicts.reasons.named[code]
            of_step = rejected.setdefault(reason.step, {})
            of_step[reason.reason] = of_step.get(reason.reason, 0) + many  # of the root, and of the whole group
    for name, reasons in rejected.items():
        left -= sum(reasons.values())
        funnel.append(FunnelStep(step=name, remaining=left, rejected=reasons))
    return tuple(funnel)
