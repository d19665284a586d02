"""The codes of verdicts: the steps at which a root can be rejected, in order, with the code and the text of each
reason.

A root's code is the smallest of the codes that apply to it; `passes` is larger than all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from placement_worker.replica.predicates import GIVES, LEVELS, meets_all, meets_any
from placement_worker.replica.request import UNNUMBERED, CandidatesRequest, Group, Slot

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
        self.unexplained = self._code("together", "not looked into")
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
