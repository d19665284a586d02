"""Make a failing plan smaller while it still fails: fewer faults, fewer requests, a smaller world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import structs
from msgspec.structs import replace

from compute_sim.faults import Faults
from lab.simulation.ironic import OF_OTHERS
from lab.simulation.other_tenants import OTHERS
from lab.simulation.plan import KEEP_ALL, Action, FaultType, Plan, Rates
from placement_worker.replica.catch_up import PAGE

T = TypeVar("T")

MAX_RUNS = 200
OF_METAL = (Action.IRONIC, Action.SHARES)
METAL = ("ironic", "compute-m")  # processes of bare metal
METAL_SCHEMA = "ironic_sync"
CALM_S = 1.0  # faults go on for this long after the last order
FIRST_S = 2.0  # until then everything has started


class Shrinker:
    """`fails` returns whether a plan still breaks the same invariant."""

    def __init__(self, fails: Callable[[Plan], bool], *, max_runs: int = MAX_RUNS) -> None:
        self._fails = fails
        self._left = max_runs

    def shrink(self, plan: Plan) -> Plan:
        """The smallest plan found within the bound."""
        plan = self._try(plan, replace(plan, rates=Rates()))
        plan = self._try(plan, replace(plan, computes=Faults()))
        plan = self._try(plan, _without_others(plan))
        plan = self._try(plan, _without_metal(plan))
        plan = self._try(plan, replace(plan, skew_s=0.0))
        plan = self._try(plan, replace(plan, quota={}, quotas={}))
        plan = self._try(plan, _without_peers(plan))
        plan = self._try(plan, replace(plan, feed_retention=KEEP_ALL, keep_s=0.0, page=PAGE, batch=0))
        for field in structs.fields(Rates):
            plan = self._try(plan, replace(plan, rates=replace(plan.rates, **{field.name: 0.0})))
        for field in structs.fields(Faults):
            plan = self._try(plan, replace(plan, computes=replace(plan.computes, **{field.name: field.default})))
        plan = self._fewer(
            plan, plan.fault_events, lambda one, fault_events: replace(one, fault_events=tuple(fault_events))
        )
        plan = self._shorter(plan)
        plan = self._fewer(plan, plan.orders, lambda one, orders: replace(one, orders=tuple(orders)))
        plan = self._try(plan, replace(plan, schedulers=1))
        plan = self._try(plan, replace(plan, placements=1))
        plan = self._try(plan, replace(plan, flat=()))
        plan = self._try(plan, _smaller_world(plan))
        return self._shorter(plan)

    def _shorter(self, plan: Plan) -> Plan:
        """A run that ends soon after the last thing that happens in it; then one that begins with the first."""
        times = [order.at for order in plan.orders] + [fault.at for fault in plan.fault_events]
        ends = max([0.0, *(fault.at + fault.seconds for fault in plan.fault_events), *times])
        plan = self._try(plan, replace(plan, load_s=min(plan.load_s, ends + CALM_S)))
        first = min(times, default=0.0) - FIRST_S
        if first <= 0:
            return plan
        earlier = replace(
            plan,
            orders=tuple(replace(order, at=order.at - first) for order in plan.orders),
            fault_events=tuple(replace(fault, at=fault.at - first) for fault in plan.fault_events),
            load_s=max(plan.load_s - first, CALM_S),
        )
        return self._try(plan, earlier)

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


def _without_peers(plan: Plan) -> Plan:
    """No build depends on where others are."""
    alone = (replace(order, group=None, apart_from=(), together_with=()) for order in plan.orders)
    return replace(plan, orders=tuple(alone))


def _without_others(plan: Plan) -> Plan:
    """berth alone in its world."""
    kept = (
        o for o in plan.orders if o.action not in OTHERS and not (o.action is Action.IRONIC and o.verb in OF_OTHERS)
    )
    metal = plan.metal and replace(plan.metal, foreign=())
    return replace(plan, orders=tuple(kept), metal=metal, widenings=())


def _without_metal(plan: Plan) -> Plan:
    """No bare metal: nothing about Ironic happens, and no build requests a node."""
    return replace(
        plan,
        metal=None,
        cells=tuple(replace(cell, metal=()) for cell in plan.cells),
        orders=tuple(
            o
            for o in plan.orders
            if o.action not in OF_METAL and o.service != METAL_SCHEMA and not o.flavor.startswith("bm.")
        ),
        fault_events=tuple(
            b for b in plan.fault_events if b.kind is not FaultType.IRONIC and not b.target.startswith(METAL)
        ),
    )


def _smaller_world(plan: Plan) -> Plan:
    """One conductor a cell, and only the services that something is to happen to; at least one."""
    named = {order.service for order in plan.orders} | {fault.target.partition("-")[2] for fault in plan.fault_events}
    cells = []
    for number, cell in enumerate(plan.cells):
        kept = tuple(one for one in cell.services if one[0] in named) or (cell.services[:1] if number == 0 else ())
        if kept or cell.metal or cell.name in named:
            cells.append(replace(cell, services=kept, conductors=1))
    names = {name for cell in cells for name in (cell.name, *dict(cell.services), *cell.metal)}
    gone = [cell.name for cell in plan.cells if cell.name not in names]
    fault_events = tuple(fault for fault in plan.fault_events if not any(name in fault.target for name in gone))
    return replace(plan, cells=tuple(cells), fault_events=fault_events)
