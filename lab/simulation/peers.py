"""The requests that depend on each other: some plans get server groups, hints and quotas, from a source of their own.

So what a seed drew before there were any is drawn as ever, and a plan without them is the same run.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import INSTANCES
from lab.simulation.plan import LOAD_S, Action, Order, Plan

# Last digits of seeds with peers: two in five, and none of those then on record as finding deliberate defects.
DIGITS = (0, 5, 8, 9)
NONE_ALLOWED = "none"  # a project that may hold nothing
HARD = (GroupPolicy.ANTI_AFFINITY, GroupPolicy.AFFINITY)
SOFT = (GroupPolicy.SOFT_ANTI_AFFINITY, GroupPolicy.SOFT_AFFINITY)
MAX_GROUPS_PER_PROJECT = 3  # of each project
MAX_RUSH = 8
MEMBER_SHARE, HINT_SHARE, RUSH_SHARE = 0.6, 0.15, 0.7


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
