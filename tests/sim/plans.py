"""Plans of the simulation for one case: cells, orders and faults as given, and nothing else that a seed would draw."""

from __future__ import annotations

from msgspec.structs import replace

from compute_sim.domain.faults import Faults
from lab.simulation.draw import plan_of
from lab.simulation.plan import Cell, FaultEvent, Order, Plan, Rates


def plan_of_case(
    seed: int, cells: tuple[Cell, ...], orders: tuple[Order, ...], faults: tuple[FaultEvent, ...], *, builds_s: float
) -> Plan:
    """builds_s: a build takes this long at most."""
    return replace(
        plan_of(seed),
        cells=cells,
        computes=Faults(delay_max_s=builds_s),
        orders=orders,
        fault_events=faults,
        rates=Rates(),
        metal=None,
        flat=(),
        skew_s=0.0,
        quota={},
        quotas={},
        keep_s=0.0,
        batch=0,
    )
