"""Plans of the simulation for one case: cells, orders and faults as given, and nothing else that a seed would draw."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from compute_sim.faults import Faults
from lab.simulation.draw import plan_of
from lab.simulation.plan import Action, Cell, FaultEvent, Order, Plan, Rates
from lab.simulation.run import Result, run
from lab.simulation.widening import DRAWS, Widening


def held(plan: Plan, **more: Any) -> Result:
    """Its run, in which no invariant was broken."""
    result = run(plan, **more)
    assert result.breach == "", result.detail
    return result


def widened(kind: Widening, seed: int) -> Plan:
    """The plan of this seed with what this kind draws, whether or not the seed has the kind."""
    plan = plan_of(seed)
    drawn = DRAWS[kind](random.Random(seed), plan)
    assert drawn is not plan, "it has one cell"
    return in_order(drawn, *drawn.orders)


def in_order(plan: Plan, *orders: Order, **fields: Any) -> Plan:
    """The plan with these orders."""
    return replace(plan, orders=tuple(sorted(orders, key=lambda order: order.at)), **fields)


def builds_of(plan: Plan, before_s: float = float("inf")) -> list[Order]:
    """Those that are ordered before this time."""
    return [order for order in plan.orders if order.action is Action.BUILD and order.at < before_s]


def staggered(builds: Sequence[Order], at: float, apart_s: float = 0.1, **fields: Any) -> list[Order]:
    """These builds from this time on."""
    return [replace(one, at=at + number * apart_s, **fields) for number, one in enumerate(builds)]


def backups(at: float, *schemas: str, first: int = 0) -> list[Order]:
    """first: the number of the first one, in its id."""
    copied = Order(at=at, action=Action.BACKUP)
    return [
        replace(copied, service=schema, uuid=f"e0000000-0000-4000-8000-00000000000{number}")
        for number, schema in enumerate(schemas, first)
    ]


def set_back(copied: Sequence[Order], at: float, seconds: float = 0.5) -> list[Order]:
    """The schemas are what they were when they were copied."""
    return [replace(one, at=at, action=Action.RESTORE, seconds=seconds) for one in copied]


def moves_of(builds: Sequence[Order], verb: str, at: float, number: int | str, apart_s: float = 0.02) -> list[Order]:
    """A move of each, one after the other. number: of this request of theirs, in its id."""
    first = number if isinstance(number, str) else f"f000000{number}-0000"
    return [
        Order(
            at=at + n * apart_s, action=Action.MOVE, verb=verb, instance=one.uuid,
            uuid=f"{first}-4000-8000-0000000000{n:02}",
        )
        for n, one in enumerate(builds)
    ]  # fmt: skip


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
