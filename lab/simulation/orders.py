"""Further orders of a plan: transfers, databases set back, requests forgotten, and builds that keep peers."""

from __future__ import annotations

import random

from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.placement import INSTANCES, GroupPolicy, ServerGroup
from compute_sim.faults import Faults
from lab.simulation.plan import LOAD_S, Action, Order, Plan, Rates

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


def _copied(rng: random.Random, plan: Plan, at: float) -> tuple[Order, Order]:
    """A copy of a cell's database, of which it is what it was then."""
    schema, since = f"cell_{rng.choice(plan.cells).name}", rng.choice((0.0, rng.uniform(0.3 * at, at - 1.0)))
    copied = Order(at=since, action=Action.BACKUP, service=schema, uuid=new_uuid(rng))
    anew, absent_s = rng.randrange(2), rng.uniform(0.1, 2.0)
    return copied, replace(copied, at=at, action=Action.RESTORE, seconds=absent_s, size=anew)


def restored_twice(rng: random.Random, plan: Plan) -> Plan:
    """From one copy, or another one that is made in between."""
    copied, back = _copied(rng, plan, rng.uniform(12.0, 30.0))
    again = replace(back, at=back.at + rng.choice((rng.uniform(3.0, 10.0), rng.uniform(15.0, 25.0))))
    other = replace(copied, at=back.at + back.seconds + 0.1, uuid=new_uuid(rng))
    if rng.random() < 0.5:
        again = replace(again, uuid=other.uuid)
    return replace(plan, orders=(*plan.orders, copied, back, other, again))


def service_away(rng: random.Random, plan: Plan) -> Plan:
    """It has machines of which the cell's record knows nothing, or an old truth."""
    copied, back = _copied(rng, plan, rng.uniform(15.0, 40.0))
    cell = next(one for one in plan.cells if copied.service == f"cell_{one.name}")
    service, _ = rng.choice(cell.services)
    away = Order(
        at=back.at - rng.uniform(0.0, 4.0), action=Action.LEAVE, service=service, seconds=rng.uniform(10.0, 60.0)
    )
    others = [one for one in plan.orders if one.action is not Action.LEAVE]
    return replace(plan, orders=(*others, copied, back, away))


TAKES_OVER = "take-over"


def taken_over(rng: random.Random, plan: Plan) -> Plan:
    """A stand-by that has every commit; all services are heard, so that nothing is missing by what they state."""
    schema, at = f"cell_{rng.choice(plan.cells).name}", rng.uniform(10.0, LOAD_S - 5.0)
    order = Order(at=at, action=Action.RESTORE, verb=TAKES_OVER, service=schema, seconds=rng.uniform(0.1, 5.0))
    plan = without_losses(plan.without_faults())
    return replace(plan, orders=(*plan.orders, order))


# Last digits of seeds with peers: two in five, and none of those then on record as finding deliberate defects.
DIGITS = (0, 5, 8, 9)
NONE_ALLOWED = "none"  # a project that may hold nothing
HARD = (GroupPolicy.ANTI_AFFINITY, GroupPolicy.AFFINITY)
SOFT = (GroupPolicy.SOFT_ANTI_AFFINITY, GroupPolicy.SOFT_AFFINITY)
MAX_GROUPS_PER_PROJECT = 3  # of each project
MAX_RUSH = 8
MEMBER_SHARE, HINT_SHARE, RUSH_SHARE = 0.6, 0.15, 0.7


# Requests that depend on each other: some plans get server groups, hints and quotas, from a source of their own. So
# what a seed drew before there were any is drawn as ever, and a plan without them is the same run.
def with_peers(rng: random.Random, plan: Plan) -> Plan:
    """The same plan, or one in which builds name others and projects have quotas."""
    if plan.seed % 10 not in DIGITS:
        return plan
    projects = sorted({order.project for order in plan.orders if order.action is Action.BUILD})
    groups = {project: _groups(rng) for project in projects}
    plan = replace(plan, orders=tuple(sorted((*plan.orders, *_bursts(rng, groups)), key=lambda order: order.at)))
    builds = [order for order in plan.orders if order.action is Action.BUILD]
    keeping: dict[str, Order] = {}
    for at, order in enumerate(builds):
        earlier = [one.uuid for one in builds[:at] if one.project == order.project]
        keeping[order.uuid] = order if order.group else _keep(rng, order, groups[order.project], earlier)
    orders = tuple(_as_requested(order, keeping) for order in plan.orders)
    quota = _quota(rng) if rng.random() < 0.6 else {}
    own = {"red": _quota(rng)} if rng.random() < 0.4 else {}
    return replace(plan, orders=orders, quota=quota, quotas={**own, NONE_ALLOWED: {INSTANCES: 0}})


def _groups(rng: random.Random) -> list[ServerGroup]:
    """At least one that is held to: the wishes only change weights."""
    policies = [rng.choice(HARD), *(rng.choice(HARD + SOFT) for _ in range(rng.randrange(MAX_GROUPS_PER_PROJECT)))]
    return [ServerGroup(uuid=new_uuid(rng), policy=policy, max_per_host=rng.choice((1, 1, 2))) for policy in policies]


def _bursts(rng: random.Random, groups: dict[str, list[ServerGroup]]) -> list[Order]:
    """Small builds that come all at once, several schedulers having some of them: of one group, or of one project."""
    orders = []
    for project, group in [(owner, group) for owner in groups for group in groups[owner]]:
        if rng.random() < RUSH_SHARE:
            at, together = rng.uniform(1.0, LOAD_S * 0.8), rng.choice((group, None))
            orders += [
                Order(at=at, action=Action.BUILD, uuid=new_uuid(rng), flavor="m1.tiny", project=project, group=together)
                for _ in range(rng.randint(2, MAX_RUSH))
            ]
    return orders


def _keep(rng: random.Random, order: Order, groups: list[ServerGroup], earlier: list[str]) -> Order:
    """The peers of one build."""
    group = rng.choice(groups) if rng.random() < MEMBER_SHARE else None
    named = tuple(rng.sample(earlier, min(len(earlier), rng.randint(1, 3))))
    hint = rng.random()
    if hint < HINT_SHARE / 3:
        return replace(order, group=group, together_with=named)
    return replace(order, group=group, apart_from=named if hint < HINT_SHARE else ())


def _as_requested(order: Order, keeping: dict[str, Order]) -> Order:
    """A build or its repeat as its client publishes it."""
    if order.action not in (Action.BUILD, Action.REPEAT):
        return order
    kept = keeping[order.uuid]
    return replace(order, group=kept.group, apart_from=kept.apart_from, together_with=kept.together_with)


def _quota(rng: random.Random) -> dict[str, int]:
    bounds = {INSTANCES: rng.randint(2, 15), "VCPU": rng.randint(4, 30), "MEMORY_MB": 1024 * rng.randint(8, 60)}
    return {name: bounds[name] for name in sorted(rng.sample(sorted(bounds), rng.randint(1, 3)))}
