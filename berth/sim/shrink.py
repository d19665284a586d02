"""Make a failing plan smaller while it still fails: fewer faults, fewer requests, a smaller world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import structs
from msgspec.structs import replace

from berth.sim.plan import Plan, Rates
from compute_sim.domain.faults import Faults

T = TypeVar("T")

MAX_RUNS = 60


class Shrinker:
    """`fails` says whether a plan still breaks the same invariant."""

    def __init__(self, fails: Callable[[Plan], bool], *, max_runs: int = MAX_RUNS) -> None:
        self._fails = fails
        self._left = max_runs

    def shrink(self, plan: Plan) -> Plan:
        """The smallest plan found within the bound."""
        plan = self._try(plan, replace(plan, rates=Rates()))
        plan = self._try(plan, replace(plan, computes=Faults()))
        plan = self._try(plan, replace(plan, skew_s=0.0))
        for field in structs.fields(Rates):
            plan = self._try(plan, replace(plan, rates=replace(plan.rates, **{field.name: 0.0})))
        for field in structs.fields(Faults):
            plan = self._try(plan, replace(plan, computes=replace(plan.computes, **{field.name: field.default})))
        plan = self._fewer(plan, plan.blows, lambda one, blows: replace(one, blows=tuple(blows)))
        plan = self._fewer(plan, plan.orders, lambda one, orders: replace(one, orders=tuple(orders)))
        plan = self._try(plan, replace(plan, schedulers=1))
        return self._try(plan, replace(plan, placements=1))

    def _try(self, plan: Plan, smaller: Plan) -> Plan:
        if self._left <= 0 or smaller == plan:
            return plan
        self._left -= 1
        return smaller if self._fails(smaller) else plan

    def _fewer(self, plan: Plan, parts: Sequence[T], put: Callable[[Plan, Sequence[T]], Plan]) -> Plan:
        """Leave out ever smaller pieces (delta debugging)."""
        kept = list(parts)
        size = max(1, len(kept) // 2)
        while kept and self._left > 0:
            at = 0
            while at < len(kept) and self._left > 0:
                rest = kept[:at] + kept[at + size :]
                smaller = self._try(plan, put(plan, rest))
                if smaller is plan:
                    at += size
                else:
                    plan, kept = smaller, rest
            if size == 1:
                break
            size //= 2
        return plan
