"""Databases that are set back to before all builds: of a cell, or of the schedulers; each build is judged as ever."""

from __future__ import annotations

import random

from msgspec.structs import replace

from bus.clock import new_uuid
from compute_sim.domain.faults import Faults
from lab.simulation.plan import Action, Order, Plan, Rates

FORGOTTEN_AT_S = 23.0
REQUESTS_FORGOTTEN_AT_S = 48.0


def builds_forgotten(rng: random.Random, plan: Plan) -> Plan:
    """One cell whose database is set back to before its builds, while the commands to build come a second time.

    Every instance is deleted in the end: each of the forgotten builds has a message after which it is judged as ever.
    """
    builds = [
        replace(one, at=rng.uniform(FORGOTTEN_AT_S - 5.0, FORGOTTEN_AT_S))
        for one in plan.orders
        if one.action is Action.BUILD
    ]
    copied = Order(at=10.0, action=Action.BACKUP, service=f"cell_{plan.cells[0].name}", uuid=new_uuid(rng))
    back = replace(copied, at=FORGOTTEN_AT_S, action=Action.RESTORE, seconds=rng.uniform(0.1, 1.0))
    deletes = [replace(one, at=rng.uniform(36.0, 42.0), action=Action.DELETE) for one in builds]
    return replace(
        plan.without_faults(),
        cells=(replace(plan.cells[0], metal=()),),
        metal=None,
        rates=Rates(duplicate=1.0),
        computes=Faults(delay_min_s=0.1, delay_max_s=0.5, fail_rate=rng.uniform(0.1, 0.4)),
        orders=(*builds, copied, back, *deletes),
        load_s=45.0,
        widenings=(),
    )


def requests_forgotten(rng: random.Random, plan: Plan) -> Plan:
    """The schedulers' database is set back to before all requests, and each client publishes its request again; some
    delete it in the same moment. The instances' allocations are older than these requests. A compute service is stopped
    for a while in half of the runs, so that hosts of instances are not announced.
    """
    builds = [replace(one, at=rng.uniform(1.0, 8.0)) for one in plan.orders if one.action is Action.BUILD]
    copied = Order(at=0.5, action=Action.BACKUP, service="scheduler", uuid=new_uuid(rng))
    back = replace(copied, at=REQUESTS_FORGOTTEN_AT_S, action=Action.RESTORE, seconds=rng.uniform(0.1, 1.0), size=1)
    again = [replace(one, at=REQUESTS_FORGOTTEN_AT_S + rng.uniform(2.0, 8.0), action=Action.REPEAT) for one in builds]
    deletes = [
        replace(one, at=one.at + rng.choice((0.0, 0.0, 30.0)), action=Action.DELETE)
        for one in again
        if rng.random() < 0.5
    ]
    cell = replace(plan.cells[0], metal=())
    service, _ = rng.choice(cell.services)
    leave = Order(
        at=REQUESTS_FORGOTTEN_AT_S - 3.0, action=Action.LEAVE, service=service, seconds=rng.uniform(8.0, 40.0)
    )
    return replace(
        plan.without_faults(),
        cells=(cell,),
        metal=None,
        rates=Rates(duplicate=rng.choice((0.0, 0.3))),
        orders=(*builds, copied, back, *again, *deletes, *([leave] if rng.random() < 0.5 else [])),
        load_s=REQUESTS_FORGOTTEN_AT_S + 45.0,
        widenings=(),
    )
