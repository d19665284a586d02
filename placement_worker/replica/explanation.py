"""Explains why roots cannot take a request: the first step of `reasons` at which each root is rejected."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placement_worker.replica.columns import Amounts, Rows
from placement_worker.replica.compiled import CompiledRequest
from placement_worker.replica.predicates import (
    FORBIDDEN_AGGREGATES,
    GIVES,
    IN_USE,
    WRONG_AGGREGATES,
    WRONG_TRAITS,
    WRONG_TREE,
    MemberRows,
)
from placement_worker.replica.request import UNNUMBERED, Group

Codes = NDArray[np.int64]


def explain(compiled: CompiledRequest, roots: Rows) -> Codes:
    """Return the code of each of these roots, none of which can take the request. A root that is rejected for several
    reasons has the code of the first.
    """
    reasons = compiled.reasons
    codes = compiled.anchor_codes(roots)
    if not compiled.possible:
        return np.minimum(codes, reasons.nothing)
    members = compiled.members(roots)
    groups = {group.suffix: group for group in compiled.request.groups}
    best = np.zeros(len(members.rows), dtype=np.int64)
    for slot, requested in enumerate(compiled.slots):
        levels = _levels(compiled, slot, groups[requested.suffix], members)
        codes = np.minimum(codes, reasons.of_level[slot][members.greatest(levels)])
        if requested.suffix == UNNUMBERED:
            best = np.maximum(best, _ranked(levels, slot, len(compiled.slots)))
    if compiled.unnumbered is not None:
        codes = np.minimum(codes, _no_member_left(compiled, compiled.unnumbered, members))
        codes = np.minimum(codes, _traits_out_of_reach(compiled, members, best))
    return np.minimum(codes, reasons.unfit)


def _levels(compiled: CompiledRequest, slot: int, group: Group, members: MemberRows) -> Amounts:
    """Return the fit level of each member: how close it comes to giving the slot."""
    levels = np.full(len(members.rows), GIVES, dtype=np.int64)
    rules = compiled.rules[group.suffix]
    levels[~rules.in_tree(members)] = WRONG_TREE
    if group.forbidden_aggregates:
        levels[rules.in_forbidden_aggregates(members)] = FORBIDDEN_AGGREGATES
    if group.member_of:
        levels[~rules.in_aggregates(members)] = WRONG_AGGREGATES
    levels[~rules.clean(members)] = WRONG_TRAITS
    for fit in compiled.fits[slot]:
        levels = np.minimum(levels, fit.levels(members.rows))
    return levels


def _ranked(levels: Amounts, slot: int, slots: int) -> Amounts:
    """Return levels and slots in one number each: a higher level is a larger number, and among equal levels an earlier
    slot.
    """
    return levels * slots + slots - 1 - slot


def _no_member_left(compiled: CompiledRequest, group: Group, members: MemberRows) -> Codes:
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


def _unless(left: NDArray[np.bool_], code: int, compiled: CompiledRequest, members: MemberRows) -> Codes:
    return np.where(members.have(left), compiled.reasons.passes, code)


def _traits_out_of_reach(compiled: CompiledRequest, members: MemberRows, best: Amounts) -> Codes:
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
