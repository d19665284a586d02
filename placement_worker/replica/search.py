"""Finds the roots that can take a request, and the allocations on one root.

`search` is complete: it finds every root that can take the request, except roots that the funnel counts as "too many
combinations to try". `options` lists the allocations on one root, best first, up to its limit. Both use the same
tables: `compiled` evaluates providers and trees, and `results` keeps the results between calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from bus.contracts.build import FunnelStep
from bus.contracts.placement import ClaimOption
from placement_worker.replica.columns import Amounts, Recent, Rows
from placement_worker.replica.compiled import CompiledRequest
from placement_worker.replica.predicates import GIVES, IN_USE, NOT_A_ROOT, MemberRows
from placement_worker.replica.replica import Replica
from placement_worker.replica.request import (
    UNNUMBERED,
    Found,
    Group,
    Query,
    RejectedRoots,
    Slot,
    rejected_roots,
    request_of,
)
from placement_worker.replica.sharing import Sharing, sharing_of

# The bound of options, whatever limit the caller requests.
MAX_OPTIONS = 64
PROVIDERS = "providers"  # the first step of a funnel
_ALL = 2**45  # more than any inventory has


def search(replica: Replica, query: Query, *, explain: bool = False) -> Found:
    """Return all roots that can take the request now, ascending by row. Raises QueryTooWide."""
    results = results_of(replica, query)
    pinned = _pinned(replica, query)
    roots = results.roots if pinned is None else pinned[results.results[pinned] == results.passes]
    roots = _without_ignored(replica, query, roots)
    if not explain:
        return Found(roots)
    results.explain()
    among = _without_ignored(replica, query, replica.rows_of_roots() if pinned is None else pinned)
    reason = "ignored" if pinned is None else "not among those requested"
    pins = np.setdiff1d(replica.rows_of_roots(), among, assume_unique=True)
    named = [rejected_roots(PROVIDERS, reason, pins)] if len(pins) else []
    return Found(roots, _funnel(results, among, {reason: len(pins)}), (*named, *_rejected(results, among)))


def options(replica: Replica, query: Query, root_row: int, *, limit: int = 4) -> list[ClaimOption]:
    """Return the possible allocations on one root, best first; empty when the request does not fit. Raises
    QueryTooWide.

    Allocations from few providers come first, then those from the providers with the most free. From option to option
    the slot with the most possible providers changes first, so that the second option is a real alternative to the
    first.
    """
    results = cached_results(replica, query)
    slots = results.compiled.slots
    return [_option(replica, slots, rows) for rows in results.assignments(root_row, min(limit, MAX_OPTIONS))]


def matching_option(
    replica: Replica, query: Query, root_row: int, allocations: Mapping[str, Mapping[str, int]], *, key: str
) -> ClaimOption | None:
    """The way in which what a consumer holds satisfies a request on this root; None: it does not, or not any more.
    Raises QueryTooWide.

    key: of the consumer's assumption, which is dropped. The search sees what is held as free, and nothing else.
    """
    members = replica.members(np.array([root_row], dtype=np.intp))[0].tolist()
    others = {
        replica.uuid_of(row): replica.inventory_of(row) for row in members if replica.uuid_of(row) not in allocations
    }
    taken = {uuid: dict.fromkeys(inventory, _ALL) for uuid, inventory in others.items() if inventory}
    freed = {uuid: {name: -amount for name, amount in amounts.items()} for uuid, amounts in allocations.items()}
    replica.assume(key, {**taken, **freed})
    try:
        return next(
            (one for one in options(replica, query, root_row, limit=MAX_OPTIONS) if one.allocations == allocations),
            None,
        )
    finally:
        replica.drop_assumed(key)


def _option(replica: Replica, slots: Sequence[Slot], rows: Sequence[int]) -> ClaimOption:
    """Return an assignment as an option: the amounts that several slots take from one provider are added up."""
    allocations: dict[str, dict[str, int]] = {}
    spec_generations: dict[str, int] = {}
    mappings: dict[str, dict[str, None]] = {}
    for slot, row in zip(slots, rows, strict=True):
        uuid = replica.uuid_of(row)
        mappings.setdefault(slot.suffix, {})[uuid] = None
        for name, amount in slot.resources.items():
            given = allocations.setdefault(uuid, {})
            given[name] = given.get(name, 0) + amount
            spec_generations[uuid] = replica.spec_generation_of(row)
    if mappings.keys() <= {UNNUMBERED}:
        return ClaimOption(allocations=allocations, spec_generations=spec_generations)
    return ClaimOption(
        allocations=allocations,
        spec_generations=spec_generations,
        mappings={suffix: tuple(uuids) for suffix, uuids in mappings.items()},
    )


def _rejected(results: RootResults, roots: Rows) -> list[RejectedRoots]:
    """Some of these roots by the reason for which they were rejected."""
    codes, named = results.results[roots], results.reasons.named
    found = [code for code in np.unique(codes).tolist() if 0 < code < results.passes]
    return [rejected_roots(named[code].step, named[code].reason, roots[codes == code]) for code in found]


# --- pins


def _pinned(replica: Replica, query: Query) -> Rows | None:
    """Return the roots that the query's pins allow; None when the query does not pin roots."""
    pinned: Rows | None = _rows_of(replica, query.only_roots) if query.only_roots else None
    if query.in_tree is not None:
        row = replica.row_of(query.in_tree)
        tree = np.array([] if row is None else [replica.root_of(row)], dtype=np.intp)
        pinned = tree if pinned is None else np.intersect1d(pinned, tree)
        pinned = pinned[replica.is_root[pinned]]
    return pinned


def _without_ignored(replica: Replica, query: Query, roots: Rows) -> Rows:
    return roots[~np.isin(roots, _rows_of(replica, query.ignore_roots))] if query.ignore_roots else roots


def _rows_of(replica: Replica, uuids: Sequence[str]) -> Rows:
    rows = {row for uuid in uuids if (row := replica.row_of(uuid)) is not None and replica.is_root[row]}
    return np.array(sorted(rows), dtype=np.intp)


# --- the funnel


def _funnel(results: RootResults, roots: Rows, pins: dict[str, int]) -> tuple[FunnelStep, ...]:
    """Return the steps of the funnel: how many of these roots each leaves, and why it rejects the others."""
    counts, left = np.bincount(results.results[roots], minlength=results.passes + 1), len(roots)
    funnel = [
        FunnelStep(step=PROVIDERS, remaining=left, rejected={reason: many for reason, many in pins.items() if many})
    ]
    rejected: dict[str, dict[str, int]] = {step: {} for step in results.reasons.steps()}
    for code in range(1, results.passes):
        if many := int(counts[code]):
            reason = results.reasons.named[code]
            of_step = rejected.setdefault(reason.step, {})
            of_step[reason.reason] = of_step.get(reason.reason, 0) + many  # of the root, and of the whole group
    for name, reasons in rejected.items():
        left -= sum(reasons.values())
        funnel.append(FunnelStep(step=name, remaining=left, rejected=reasons))
    return tuple(funnel)


Codes = NDArray[np.uint16]

# The queries whose results are cached. A query takes about 12 bytes for
# each row.
QUERIES_KEPT = 64


class RootResults:
    """The results of one query, regardless of its pins (in_tree, only_roots, ignore_roots)."""

    def __init__(self, replica: Replica, query: Query) -> None:
        self.replica = replica
        self.compiled = CompiledRequest(replica, request_of(query))
        self.reasons = self.compiled.reasons
        self.passes = self.reasons.passes
        self._tree = self.passes + 1
        self._of_tree = np.array([self.reasons.not_examined, self.passes, self.reasons.unknown])  # by NO, YES, UNKNOWN
        self._sharing: Sharing | None = None
        self._given = np.zeros((0, 0), dtype=np.int64)
        # the results by spec_generations alone; `_tree` where the tree must be evaluated
        self._spec_results: Codes = np.zeros(0, dtype=np.uint16)
        self.results: Codes = np.zeros(0, dtype=np.uint16)
        self._changed_at = self._spec_changed_at = -1
        self._roots: Rows | None = None

    @property
    def roots(self) -> Rows:
        """The rows of the roots that pass, ascending. The array is shared and read-only."""
        if self._roots is None:
            self._roots = np.flatnonzero(self.results == self.passes)
            self._roots.flags.writeable = False
        return self._roots

    def refresh(self) -> None:
        """Bring the results up to date with the replica."""
        replica = self.replica
        if self._changed_at == replica.changes.end:
            return
        changed = self._affected(replica.changes.since(self._changed_at))
        shaped = replica.spec_changes.since(self._spec_changed_at)
        if changed is None or shaped is None or 2 * len(changed) > replica.top:
            changed = shaped = replica.rows_of_roots()
            self._spec_results, self.results, self._roots = self._spec_results[:0], self.results[:0], None
        self._evaluate_changed(changed, shaped)
        self._changed_at, self._spec_changed_at = replica.changes.end, replica.spec_changes.end

    def explain(self) -> None:
        """Replace each rejection without a reason by the reason why the root is rejected."""
        not_examined = np.flatnonzero(self.results == self.reasons.not_examined)
        if len(not_examined):
            self.results[not_examined] = explain(self.compiled, not_examined)

    def assignments(self, root: int, limit: int) -> list[list[int]]:
        """Return up to this many assignments on one root, best first, as the replica is now. An assignment has a row
        for each slot.

        Only this tree is solved. Changes of other trees are left to the next refresh.
        """
        if not self.compiled.stands_alone(root):
            found: list[list[int]] = self.compiled.assignments(root, limit).tolist()
            return found
        if self._spec_changed_at != self.replica.spec_changes.end:
            self.refresh()
        fits = self._spec_results[root] == self.passes and self.compiled.has_capacity(root)
        return [[root] * len(self.compiled.slots)][:limit] if fits else []

    def _affected(self, roots: Rows | None) -> Rows | None:
        """Return the roots to evaluate again when these have changed; None: all roots. A sharing provider that has
        changed affects the trees that it serves. Its usage changes with every claim, but no result changes as long as
        the provider can give the same as before to one more such request.
        """
        sharing = sharing_of(self.replica)
        if sharing is self._sharing and not len(sharing.donors):
            return roots
        given = self.compiled.given_by(sharing.donors)
        before, self._given = self._given, given
        if sharing is not self._sharing:
            known, self._sharing = self._sharing, sharing
            if known is None or not sharing.same_pairs(known):
                return None
        if roots is None or not len(sharing.donors) or not (changed := (given != before).any(axis=0)).any():
            return roots
        return np.union1d(roots, sharing.served_by(sharing.donors[changed]))

    def _evaluate_changed(self, changed: Rows, shaped: Rows) -> None:
        if more := self.replica.size - self.results.size:
            self._spec_results = np.concatenate([self._spec_results, np.zeros(more, dtype=np.uint16)])
            self.results = np.concatenate([self.results, np.zeros(more, dtype=np.uint16)])
        if len(shaped):
            self._spec_results[shaped] = NOT_A_ROOT
            self._evaluate_specs(shaped[self.replica.is_root[shaped]])
        before, after = self.results[changed], self._evaluate(changed)
        self.results[changed] = after
        if ((before == self.passes) != (after == self.passes)).any():
            self._roots = None

    def _evaluate_specs(self, roots: Rows) -> None:
        """Return the results on lone roots by inventory, traits and aggregates alone. Trees are evaluated as a whole
        each time.
        """
        flat = self.compiled.stand_alone(roots)
        self._spec_results[roots] = np.where(flat, self.reasons.not_examined, self._tree)
        fit = self.compiled.flat_by_spec(roots[flat])
        self._spec_results[fit[self.compiled.anchor_codes(fit) == self.passes]] = self.passes

    def _evaluate(self, rows: Rows) -> Codes:
        """Return the results on rows that are, or were, roots."""
        codes = self._spec_results[rows]
        codes[~self.compiled.flat_has_capacity(rows) & (codes == self.passes)] = self.reasons.not_examined
        trees = codes == self._tree
        if trees.any():
            codes[trees] = self._evaluate_trees(rows[trees])
        return codes

    def _evaluate_trees(self, roots: Rows) -> Codes:
        """Return the results on trees: on the root itself, then on the resources of the tree."""
        codes = self.compiled.anchor_codes(roots)
        open_ones = np.flatnonzero(codes == self.passes)
        codes[open_ones] = self._of_tree[self.compiled.tree_results(roots[open_ones])]
        return codes.astype(np.uint16)


class ResultsCache(Recent[bytes, RootResults]):
    """The results that a replica caches by query, so that a repeated query finds them nearly up to date."""

    MOST = QUERIES_KEPT


def results_of(replica: Replica, query: Query) -> RootResults:
    """Return the query's results, refreshed."""
    results = cached_results(replica, query)
    results.refresh()
    return results


def cached_results(replica: Replica, query: Query) -> RootResults:
    """Return the query's results as of their last refresh."""
    without_pins = replace(query, only_roots=(), ignore_roots=())
    key = msgspec.msgpack.encode(without_pins, order="deterministic")
    return replica.cache(ResultsCache).value(key, lambda: RootResults(replica, query))


def explain(compiled: CompiledRequest, roots: Rows) -> Amounts:
    """Return the code of each of these roots, none of which can take the request. A root that is rejected for several
    reasons has the code of the first.
    """
    reasons = compiled.reasons
    codes = compiled.anchor_codes(roots)
    if not compiled.possible:
        return np.minimum(codes, reasons.nothing)
    members = compiled.members(roots)
    best = np.zeros(len(members.rows), dtype=np.int64)
    for slot, requested in enumerate(compiled.slots):
        levels = _levels(compiled, slot, requested.suffix, members)
        codes = np.minimum(codes, reasons.of_level[slot][members.greatest(levels)])
        if requested.suffix == UNNUMBERED:
            best = np.maximum(best, _ranked(levels, slot, len(compiled.slots)))
    if compiled.unnumbered is not None:
        codes = np.minimum(codes, _all_members_rejected(compiled, compiled.unnumbered, members))
        codes = np.minimum(codes, _unreachable_traits(compiled, members, best))
    return np.minimum(codes, reasons.unfit)


def _levels(compiled: CompiledRequest, slot: int, suffix: str, members: MemberRows) -> Amounts:
    """Return the fit level of each member: how close it comes to giving the slot."""
    levels = np.full(len(members.rows), GIVES, dtype=np.int64)
    for level, wrong in compiled.rules[suffix].unmet(members):
        levels[wrong] = np.minimum(levels[wrong], level)
    for fit in compiled.fits[slot]:
        levels = np.minimum(levels, fit.levels(members.rows))
    return levels


def _ranked(levels: Amounts, slot: int, slots: int) -> Amounts:
    """Return levels and slots in one number each: a higher level is a larger number, and among equal levels an earlier
    slot.
    """
    return levels * slots + slots - 1 - slot


def _all_members_rejected(compiled: CompiledRequest, group: Group, members: MemberRows) -> Amounts:
    """Return the codes of roots for which a rule of the un-numbered group rejects all members of the tree, whatever
    resources they have.
    """
    reasons, rules = compiled.reasons, compiled.rules[UNNUMBERED]
    left = rules.clean(members)
    codes = _unless(left, reasons.has, compiled, members)
    covers = rules.covers(members.rows)
    for bit, code in enumerate(reasons.lacks):
        codes = np.minimum(codes, _unless(left & (covers >> bit & 1 == 1), code, compiled, members))
    if group.member_of:
        left &= rules.in_aggregates(members)
        codes = np.minimum(codes, _unless(left, reasons.not_member, compiled, members))
    if group.forbidden_aggregates:
        left &= ~rules.in_forbidden_aggregates(members)
        codes = np.minimum(codes, _unless(left, reasons.bad_member, compiled, members))
    return codes


def _unless(passing: NDArray[np.bool_], code: int, compiled: CompiledRequest, members: MemberRows) -> Amounts:
    return np.where(members.have(passing), compiled.reasons.passes, code)


def _unreachable_traits(compiled: CompiledRequest, members: MemberRows, best: Amounts) -> Amounts:
    """Return the codes of roots where a required trait is only on members that give no resources, or that would give
    them if they were not in use.

    best: the highest level of each member over the un-numbered group's slots (see _ranked).
    """
    reasons, slots = compiled.reasons, len(compiled.slots)
    in_use = np.array([codes[IN_USE] for codes in reasons.of_level])
    covers = compiled.rules[UNNUMBERED].covers(members.rows)
    codes = np.full(len(members.roots), reasons.passes, dtype=np.int64)
    for bit in range(len(compiled.required)):
        nearest = members.greatest(np.where(covers >> bit & 1 == 1, best, 0))
        level, slot = nearest // slots, slots - 1 - nearest % slots
        code = np.where(level == GIVES, reasons.passes, np.where(level == IN_USE, in_use[slot], reasons.apart))
        codes = np.minimum(codes, code)
    return codes
