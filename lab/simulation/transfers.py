"""Instances that leave their cells, and databases that are set back in the middle of that (drawn in `widening`)."""

from __future__ import annotations

import random

from msgspec.structs import replace

from bus.clock import new_uuid
from lab.simulation.plan import LOAD_S, Action, Order, Plan

MAX_TRANSFERS = 25
END_S = LOAD_S - 2.0
# A set-back is as old as a step or two of a move, or as a whole one; longer after it than all of it takes.
SET_BACK_S = (0.5, 1.0, 3.0, 8.0, 20.0)
MAX_SET_BACKS = 3
# The operators' acts that end no machine: of the others an instance may lose its last one.
HARMLESS = frozenset({Action.BUILD, Action.REPEAT, Action.DELETE, Action.ENABLE, Action.DISABLE})


def transfers(rng: random.Random, plan: Plan) -> tuple[Order, ...]:
    """Offloaded instances are unshelved, mostly in another cell, and running ones are migrated and resized to one."""
    orders: list[Order] = []
    for _ in range(rng.randint(5, MAX_TRANSFERS)):
        at = rng.uniform(8.0, END_S - 4.0)
        shelve = Order(at=at, action=Action.MOVE, verb="shelve", host=rng.randrange(1000), uuid=new_uuid(rng))
        orders.append(shelve)
        orders += [
            replace(shelve, at=at + rng.uniform(0.5, 12.0), verb="unshelve", uuid=new_uuid(rng)) for _ in range(2)
        ]
    for _ in range(rng.randint(5, MAX_TRANSFERS)):
        at, verb = rng.uniform(8.0, END_S - 4.0), rng.choice(("migrate", "migrate", "resize"))
        move = Order(at=at, action=Action.MOVE, verb=verb, host=rng.randrange(1000), uuid=new_uuid(rng))
        orders.append(move)
        for _ in range(rng.randint(0, 2)):
            ending = rng.choice(("confirm", "revert", "revert", "abort"))
            orders.append(replace(move, at=at + rng.uniform(0.5, 14.0), verb=ending, uuid=new_uuid(rng)))
    builds = [one for one in plan.orders if one.action is Action.BUILD]
    for built in rng.sample(builds, min(len(builds), rng.randint(0, 6))):
        orders.append(replace(built, at=rng.uniform(12.0, END_S), action=Action.DELETE))
    return tuple(orders)


def set_backs(rng: random.Random, plan: Plan, moves: tuple[Order, ...]) -> tuple[Order, ...]:
    """One database after the other, of a cell or of the schedulers, is set back to the middle of a move."""
    orders: list[Order] = []
    cells = [f"cell_{cell.name}" for cell in plan.cells]
    begun = [one.at for one in moves if one.verb in ("migrate", "resize")]
    for _ in range(rng.randint(1, MAX_SET_BACKS)):
        since = rng.choice(begun) + rng.uniform(0.0, 3.0)
        at = min(since + rng.uniform(0.2, 1.0) * rng.choice(SET_BACK_S), LOAD_S - 1.0)
        schema, uuid = rng.choice((*cells, *cells, "scheduler")), new_uuid(rng)
        copied = Order(at=since, action=Action.BACKUP, service=schema, uuid=uuid)
        back = replace(copied, at=at, action=Action.RESTORE, seconds=rng.uniform(0.1, 4.0), size=rng.randrange(2))
        orders += [copied, back]
    return tuple(orders)


def without_losses(plan: Plan) -> Plan:
    """The same plan without the acts of operators that end machines, so that each end has another reason."""
    return replace(plan, orders=tuple(one for one in plan.orders if one.action in HARMLESS))
