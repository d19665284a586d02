"""The world that berth did not make: other tenants, other clients, operators, restored databases.

Each kind is drawn from a generator of its own and can be left out: a plan without any of them is the plan it was
before there were any, and one kind more or less moves nothing of the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from uuid import UUID, uuid5

from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.placement import INSTANCES, GroupPolicy, ServerGroup
from lab.simulation.orders import (
    NONE_ALLOWED,
    builds_forgotten,
    requests_forgotten,
    restored_twice,
    service_away,
    set_backs,
    taken_over,
    transfers,
    without_losses,
)
from lab.simulation.plan import LOAD_S, Action, FaultEvent, FaultType, Order, Plan


class Widening(StrEnum):
    """One kind of thing that others do."""

    FOREIGN_MACHINES = "foreign-machines"  # machines on our hypervisors that berth never built
    FOREIGN_NODES = "foreign-nodes"  # Ironic's nodes that others have, take and free, also just before berth takes one
    NODE_STATES = "node-states"  # operators rescue, service and rebuild nodes, for longer than two reports
    NODE_OWNERS = "node-owners"  # operators set, clear and exchange instance_uuid, and undeploy
    NODES_AGAIN = "nodes-again"  # nodes are deleted and created again under their uuid within milliseconds
    CELLS = "cells"  # cells are added to the settings, and taken out for a while
    NODE_POWER = (
        "node-power"  # clients stop and start nodes, and Ironic takes each order up late, after others' failures
    )
    SHARES = "shares"  # services of bare metal come and go, and with them every other one's share
    CELL_EMPTIED = "cell-emptied"  # a conductor's database is empty; its conductors go on or start anew
    CELL_RESTORED = "cell-restored"  # ... or as it was up to a minute earlier
    BOOK_RESTORED = "book-restored"  # placement's
    REQUESTS_RESTORED = "requests-restored"  # the schedulers'
    POSITIONS_RESTORED = "positions-restored"  # ironic_sync's
    HOSTS_RESTORED = "hosts-restored"  # a stopped service's hosts are set back, with its records or without
    SAME_HOSTS = "same-hosts"  # a second service of another name has hosts of the same uuids
    SAME_NAME = "same-name"  # a second compute service starts under a name that is taken
    CLIENTS = "clients"  # other clients' messages: bodies and properties at their edges
    BREAKER = "breaker"  # machines are lost many at once; an operator resets the breaker 12 s later
    MOVES = "moves"  # every kind of move, with faults in every step; hosts die, are fenced and come back
    DRAINS = "drains"  # operators disable hosts, move away what they run, and enable them again
    FENCES = "fences"  # hosts die, an operator fences them, their instances are evacuated by policy, they come back
    GANGS = "gangs"  # several machines that start together, on hosts that are nearly full; some repeated or deleted
    TREES = "trees"  # another source's hosts: devices that move within one batch, roots removed and made again
    REST = "rest"  # another client of Placement's REST API: providers of its own, reservations, also on berth's hosts
    REST_OPERATOR = "rest-operator"  # an operator of that API: names made, renamed and removed, a tree that is reshaped
    DECIDED_CELLS = "decided-cells"  # operators add and remove cells while everything runs
    TRANSFERS = "transfers"  # instances are unshelved in another cell, and moved there with their machines
    HOSTS_DIE_AGAIN = "hosts-die-again"  # hosts are fenced, back at once and die again, amid moves and drains
    TRANSFERS_RESTORED = (
        "transfers-restored"  # as transfers, and the database of a cell or of the schedulers is set back
    )
    BUILDS_FORGOTTEN = "builds-forgotten"  # a cell forgets all builds; each comes again or is deleted, and is judged
    REQUESTS_FORGOTTEN = "requests-forgotten"  # the schedulers forget all requests; clients publish each again
    BUSES_APART = "buses-apart"  # queues of one bus are full while another bus is away, again and again
    RESTORED_TWICE = "restored-twice"  # a cell's database is set back, and again while it recovers, or after it
    SERVICE_AWAY = "service-away"  # as cell-restored, and a compute service is stopped meanwhile, and comes back
    TAKEN_OVER = "taken-over"  # another server takes a cell's database over, and lacks nothing: no recovery begins
    DEADLINES = "deadlines"  # clients wait 50 ms to 10 s for an answer; then they request the same again, or give up


# The kinds that are drawn unless they are named: every kind but those that come by their name alone.
WIDENED = frozenset(Widening) - {Widening.SAME_HOSTS, Widening.TRANSFERS, Widening.TRANSFERS_RESTORED}
WIDENED -= {Widening.BUILDS_FORGOTTEN, Widening.REQUESTS_FORGOTTEN, Widening.NODE_POWER, Widening.BUSES_APART}
WIDENED -= {Widening.RESTORED_TWICE, Widening.SERVICE_AWAY, Widening.TAKEN_OVER}
NONE: frozenset[Widening] = frozenset()

# How often a kind is in a run that could have it: few at a time, so that each is also seen alone.
SHARE = 0.3
METAL_SHARE = 0.5  # of the runs with bare metal, which are two in five
BEGIN_S, END_S = 2.0, LOAD_S - 2.0
METAL = "metal"  # in place of a service: an order is about an instance on a node
NODE_STATES = ("rescue", "service", "rebuild")
NODE_OWNERS = ("set", "clear", "clear", "swap", "undeploy")
MAX_MALFORMED, TREES = 12, 8  # acts of these kinds in one run, at most


def widen(plan: Plan, kinds: Collection[Widening]) -> Plan:
    """The same plan among others."""
    for kind in Widening:
        if kind not in kinds:
            continue
        rng = random.Random(f"berth.sim.{kind} {plan.seed}")
        on_metal = kind in OF_METAL
        if on_metal and plan.metal is None:
            continue
        if rng.random() < (METAL_SHARE if on_metal else SHARE):
            drawn = DRAWS[kind](rng, plan)
            plan = plan if drawn is plan else replace(drawn, widenings=(*plan.widenings, kind))
    return replace(plan, orders=tuple(sorted(plan.orders, key=lambda order: order.at)))


def _also(plan: Plan, *orders: Order) -> Plan:
    return replace(plan, orders=(*plan.orders, *orders))


def _some(rng: random.Random) -> float:
    return rng.uniform(BEGIN_S, END_S)


def _foreign_machines(rng: random.Random, plan: Plan) -> Plan:
    orders = []
    for _ in range(rng.randint(1, 6)):
        service, hosts = rng.choice([one for cell in plan.cells for one in cell.services])
        began = rng.choice((0.0, _some(rng)))
        boot = Order(at=began, action=Action.FOREIGN, verb="boot", service=service, host=rng.randrange(hosts))
        boot = replace(boot, uuid=new_uuid(rng))
        orders.append(boot)
        if rng.random() < 0.3:
            orders.append(replace(boot, at=rng.uniform(began, LOAD_S), verb="end"))
    return _also(plan, *orders)


def _foreign_nodes(rng: random.Random, plan: Plan) -> Plan:
    assert plan.metal is not None
    orders = []
    for _ in range(rng.randint(1, 6)):
        verb = rng.choice(("take", "take", "ambush"))
        take = Order(at=_some(rng), action=Action.IRONIC, verb=verb, host=rng.randrange(1000), uuid=new_uuid(rng))
        orders.append(take)
        if rng.random() < 0.5:
            orders.append(replace(take, at=rng.uniform(take.at, LOAD_S), verb="free"))
    plan = replace(plan, metal=replace(plan.metal, foreign=tuple(new_uuid(rng) for _ in range(rng.randint(0, 3)))))
    return _also(plan, *orders)


def _of_nodes(verbs: tuple[str, ...], most: int) -> Callable[[random.Random, Plan], Plan]:
    def draw(rng: random.Random, plan: Plan) -> Plan:
        return _also(
            plan,
            *(
                Order(
                    at=_some(rng),
                    action=Action.IRONIC,
                    verb=rng.choice(verbs),
                    host=rng.randrange(1000),
                    seconds=rng.choice((0.5, 8.0, 70.0)),  # 70: longer than two reports
                    uuid=new_uuid(rng),
                )
                for _ in range(rng.randint(1, most))
            ),
        )

    return draw


MAX_POWER_ORDERS = 12


def _node_power(rng: random.Random, plan: Plan) -> Plan:
    """Power orders of clients, beside operators' that fail: Ironic keeps their error until it takes the next one up."""
    assert plan.metal is not None
    behaviour = replace(plan.metal.behaviour, power_s=rng.uniform(0.2, 8.0))
    orders = []
    for _ in range(rng.randint(4, MAX_POWER_ORDERS)):
        at, host = rng.uniform(10.0, END_S), rng.randrange(1000)
        orders.append(Order(at=at - rng.uniform(0.1, 5.0), action=Action.IRONIC, verb="fault", host=host))
        verb = rng.choice(("stop", "start"))
        orders.append(Order(at=at, action=Action.MOVE, verb=verb, service=METAL, host=host, uuid=new_uuid(rng)))
    return _also(replace(plan, metal=replace(plan.metal, behaviour=behaviour)), *orders)


def _cells(rng: random.Random, plan: Plan) -> Plan:
    if len(plan.cells) == 1:
        return plan
    cell = rng.choice(plan.cells).name
    if rng.random() < 0.5:
        return _also(plan, Order(at=rng.uniform(5.0, 30.0), action=Action.CELL, verb="join", service=cell))
    at = rng.uniform(5.0, 40.0)
    return _also(plan, Order(at=at, action=Action.CELL, verb="away", service=cell, seconds=rng.uniform(2.0, 15.0)))


def _decided_cells(rng: random.Random, plan: Plan) -> Plan:
    """A cell that no settings name is added; or one is removed, with all that it has, and added again."""
    if len(plan.cells) == 1 or {Widening.CELLS, Widening.REQUESTS_RESTORED} & {Widening(one) for one in plan.widenings}:
        return plan
    cell = rng.choice(plan.cells).name
    if rng.random() < 0.5:
        return _also(plan, Order(at=rng.uniform(2.0, 30.0), action=Action.CELL, verb="add", service=cell))
    at = rng.uniform(2.0, 40.0)
    return _also(plan, Order(at=at, action=Action.CELL, verb="remove", service=cell, seconds=rng.uniform(0.1, 20.0)))


def _shares(rng: random.Random, plan: Plan) -> Plan:
    """A service of bare metal joins, in a cell of its own choice, or is unavailable for a while."""
    services = [service for _, service in plan.metal_services]
    if len(services) > 1 and rng.random() < 0.5:
        at, absent_s = rng.uniform(5.0, 30.0), rng.uniform(2.0, 20.0)
        return _also(
            plan, Order(at=at, action=Action.SHARES, verb="away", service=rng.choice(services), seconds=absent_s)
        )
    name, home = f"m{len(services)}", rng.randrange(len(plan.cells))
    cells = tuple(
        replace(cell, metal=(*cell.metal, name)) if number == home else cell for number, cell in enumerate(plan.cells)
    )
    return _also(
        replace(plan, cells=cells), Order(at=rng.uniform(5.0, 45.0), action=Action.SHARES, verb="join", service=name)
    )


def _restored(schemas: Callable[[Plan], list[str]], *, empty: bool = False) -> Callable[[random.Random, Plan], Plan]:
    def draw(rng: random.Random, plan: Plan) -> Plan:
        chosen = schemas(plan)
        if not chosen:
            return plan
        at = rng.uniform(10.0, LOAD_S - 5.0)
        # Empty, a moment old, or as old as anything in the run.
        since = 0.0 if empty else rng.choice((0.0, rng.uniform(1.0, at), at - rng.uniform(0.5, 5.0)))
        schema, uuid = rng.choice(chosen), new_uuid(rng)
        absent_s = rng.uniform(0.1, 5.0)
        anew = rng.randrange(2)  # whether its workers start anew
        return _also(
            plan,
            Order(at=since, action=Action.BACKUP, service=schema, uuid=uuid),
            Order(at=at, action=Action.RESTORE, service=schema, uuid=uuid, seconds=absent_s, size=anew),
        )

    return draw


def _hosts_restored(rng: random.Random, plan: Plan) -> Plan:
    """size: whether the service's own records are set back with its hosts.

    In half of them a host loses all it runs right after it was copied: what is failed by then runs again.
    """
    service, hosts = rng.choice([one for cell in plan.cells for one in cell.services])
    since, at = rng.uniform(10.0, 20.0), rng.uniform(50.0, LOAD_S - 2.0)  # longer than a report
    copied = Order(at=since, action=Action.COPY, service=service, uuid=new_uuid(rng))
    lost = Order(at=since + 0.1, action=Action.LOSE, service=service, host=rng.randrange(hosts))
    back = replace(copied, at=at, action=Action.BRING_BACK, size=rng.randrange(2), seconds=rng.uniform(0.1, 10.0))
    return _also(plan, copied, back, *((lost,) if rng.random() < 0.5 else ()))


# The faults that leave a compute service running, with all its hosts.
LEAVING_THERE = frozenset({Action.RESIZE, Action.DISABLE, Action.ENABLE, Action.LOSE, Action.FOREIGN})


def _same_hosts(rng: random.Random, plan: Plan) -> Plan:
    """Of a service that no operator stops: from one that is gone the second may take the hosts over."""
    stopped = {order.service for order in plan.orders if order.action not in LEAVING_THERE}
    services = [service for _, service in plan.services if service not in stopped]
    if not services:
        return plan
    at = rng.uniform(1.0, 40.0)
    return _also(
        plan,
        Order(at=at, action=Action.SECOND_SERVICE, service=rng.choice(services), seconds=rng.uniform(5.0, LOAD_S - at)),
    )


def _same_name(rng: random.Random, plan: Plan) -> Plan:
    _, service = rng.choice(plan.services)
    at = rng.uniform(1.0, 40.0)
    return _also(
        plan, Order(at=at, action=Action.DUPLICATE_NAME, service=service, seconds=rng.uniform(1.0, LOAD_S - at))
    )


def _breaker(rng: random.Random, plan: Plan) -> Plan:
    """Conductors with a low limit; some services lose all that their hosts run, at once."""
    orders = []
    for _ in range(rng.randint(1, 3)):
        service, hosts = rng.choice([one for cell in plan.cells for one in cell.services])
        lost = Order(at=rng.uniform(20.0, LOAD_S - 2.0), action=Action.LOSE, service=service)
        orders += [replace(lost, host=host) for host in range(hosts)]
    return _also(replace(plan, breaker_limit=rng.choice((1, 1, 3))), *orders)


def _clients(rng: random.Random, plan: Plan) -> Plan:
    buses = ["api", "api", *(cell.name for cell in plan.cells)]
    return _also(
        plan,
        *(
            Order(at=_some(rng), action=Action.MALFORMED, service=rng.choice(buses), host=rng.randrange(10**6))
            for _ in range(rng.randint(1, MAX_MALFORMED))
        ),
    )


def _trees(rng: random.Random, plan: Plan) -> Plan:
    verbs = ("move", "move", "again", "claim", "claim", "release")
    return _also(
        plan,
        Order(at=1.0, action=Action.TREE, verb="report"),
        *(
            Order(
                at=_some(rng), action=Action.TREE, verb=rng.choice(verbs), host=rng.randrange(1000), uuid=new_uuid(rng)
            )
            for _ in range(rng.randint(2, TREES))
        ),
    )


REST_VERBS = (
    *("reserve", "reserve-host") * 3,
    *("change", "swap", "release", "release") * 2,
    *("traits", "aggregates", "inventories", "host-aggregates"),
)
MAX_REST = 20


def _rest(rng: random.Random, plan: Plan) -> Plan:
    return _also(
        plan,
        *(Order(at=1.0 + number, action=Action.REST, verb="provider", host=number) for number in range(2)),
        *(
            Order(
                at=_some(rng),
                action=Action.REST,
                verb=rng.choice(REST_VERBS),
                host=rng.randrange(1000),
                uuid=new_uuid(rng),
            )
            for _ in range(rng.randint(6, MAX_REST))
        ),
        *(
            Order(at=order.at, action=Action.REST, verb="reserve-upgraded", service=order.service, uuid=new_uuid(rng))
            for order in plan.orders
            if order.action is Action.UPGRADE
        ),
    )


OPERATOR_VERBS = (
    *("tree", "hold", "reshape", "reshape", "equip", "race") * 2,
    *("name", "unname", "rename-class", "rename-provider", "fell", "lists", "move-provider", "reshape-stale"),
)


def _rest_operator(rng: random.Random, plan: Plan) -> Plan:
    first = Order(at=1.0, action=Action.REST, verb="tree")
    verbs = [rng.choice(OPERATOR_VERBS) for _ in range(rng.randint(6, MAX_REST))]
    orders = [replace(first, at=_some(rng), verb=verb, host=rng.randrange(1000), uuid=new_uuid(rng)) for verb in verbs]
    return _also(plan, first, *orders)


def _cell_schemas(plan: Plan) -> list[str]:
    return [f"cell_{cell.name}" for cell in plan.cells]


# A project's quota and a group's rule are kept by placement; one that has forgotten who holds what cannot keep them.
def _book(plan: Plan) -> list[str]:
    return [] if plan.with_peers else ["placement"]


MOVE_VERBS = (
    *("migrate", "live-migrate", "resize") * 4,
    *("confirm", "revert", "shelve", "unshelve") * 3,
    *("stop", "stop", "start", "rebuild", "offload", "abort", "evacuate"),
)


def _moves(rng: random.Random, plan: Plan) -> Plan:
    """Moves with faults at every step, and sometimes a service whose hosts die, are fenced and come back."""
    some = _sometimes(rng)
    computes = replace(
        plan.computes,
        change_max_s=rng.uniform(0.01, 4.0),
        change_fail_rate=some(0.3),
        change_break_rate=some(0.2),
        change_hang_rate=some(0.1),
    )
    orders = [
        Order(
            at=rng.uniform(10.0, END_S),
            action=Action.MOVE,
            verb=rng.choice(MOVE_VERBS),
            host=rng.randrange(1000),
            uuid=new_uuid(rng),
        )
        for _ in range(rng.randint(5, 50))
    ]
    if rng.random() < 0.4:
        _, service = rng.choice(plan.services)
        at, paused_apart = rng.uniform(15.0, 35.0), rng.uniform(1.0, 15.0)
        orders.append(
            Order(at=at, action=Action.MOVE, verb="fence", service=service, seconds=paused_apart, uuid=new_uuid(rng))
        )
    return _also(replace(plan, computes=computes), *orders)


def _drains(rng: random.Random, plan: Plan) -> Plan:
    """Schedulers empty hosts; where a database is set back, which may forget a drain, the simulation does."""
    orders = []
    for _ in range(rng.randint(1, 3)):
        service, hosts = rng.choice([one for cell in plan.cells for one in cell.services])
        at, host, seconds = rng.uniform(10.0, 45.0), rng.randrange(hosts), rng.uniform(5.0, 20.0)
        drain = Order(at=at, action=Action.MOVE, verb="drain", service=service, host=host, seconds=seconds)
        orders.append(replace(drain, uuid=new_uuid(rng)))
    is_kept = not FORGETFUL & {Widening(one) for one in plan.widenings}
    return _also(replace(plan, drains_by_schedulers=is_kept), *orders)


# A database that is set back may not know a fence, or an evacuation; then a person has to decide again.
FORGETFUL = frozenset(
    {
        Widening.CELL_EMPTIED,
        Widening.CELL_RESTORED,
        Widening.BOOK_RESTORED,
        Widening.REQUESTS_RESTORED,
        Widening.HOSTS_RESTORED,
        Widening.SAME_NAME,
        Widening.TRANSFERS_RESTORED,
    }
)


def _fences(rng: random.Random, plan: Plan) -> Plan:
    """A service's hosts die. Requests about instances go through schedulers, as a client's do."""
    if FORGETFUL & {Widening(one) for one in plan.widenings}:
        return plan
    _, service = rng.choice(plan.services)
    at, seconds = rng.uniform(12.0, 40.0), rng.uniform(10.0, 30.0)
    fence = Order(at=at, action=Action.MOVE, verb="fence", service=service, seconds=seconds, uuid=new_uuid(rng))
    others = [one for one in plan.orders if one.action is not Action.MOVE or one.verb != "fence"]
    return _also(replace(plan, orders=tuple(others)), fence)


MAX_APART = 8


def _buses_apart(rng: random.Random, plan: Plan) -> Plan:
    """The messages of one transaction go to both: one is refused, again and again, while the other has to wait."""
    cells, faults = [cell.name for cell in plan.cells], list(plan.fault_events)
    requested = [order.at for order in plan.orders if order.action is Action.BUILD]
    for _ in range(rng.randint(3, MAX_APART)):
        full, away = rng.sample(("api", rng.choice(cells)), 2)
        at = max(1.0, rng.choice(requested) + rng.uniform(-0.3, 0.5))
        faults.append(
            FaultEvent(at=max(0.5, at - 0.5), kind=FaultType.FULL, target=full, seconds=rng.uniform(6.0, 20.0))
        )
        faults.append(FaultEvent(at=at, kind=FaultType.BROKER, target=away, seconds=rng.uniform(4.0, 10.0)))
    return replace(plan, fault_events=tuple(sorted(faults, key=lambda fault: fault.at)))


def _transfers(rng: random.Random, plan: Plan) -> Plan:
    """Instances leave their cells."""
    if len(plan.cells) == 1 or FORGETFUL & {Widening(one) for one in plan.widenings}:
        return plan
    return _also(plan, *transfers(rng, plan))


def _transfers_restored(rng: random.Random, plan: Plan) -> Plan:
    """Instances leave their cells, and a database is set back in the middle of that: of a cell, or the schedulers'."""
    if len(plan.cells) == 1 or FORGETFUL & {Widening(one) for one in plan.widenings}:
        return plan
    moves = transfers(rng, plan)
    return _also(without_losses(plan), *moves, *set_backs(rng, plan, moves))


BACK_AFTER_S = (0.2, 1.0, 4.0, 12.0)
MAX_MOVES_AMID = 50


def _hosts_die_again(rng: random.Random, plan: Plan) -> Plan:
    """Two services' hosts die and are fenced; one is back soon and dies again. Requests and drains are under way."""
    if FORGETFUL & {Widening(one) for one in plan.widenings}:
        return plan
    first, second = rng.choices([name for _, name in plan.services], k=2)
    at, gap = rng.uniform(16.0, 24.0), rng.choice(BACK_AFTER_S)

    def order(at: float, verb: str, service: str = "", host: int = 0, seconds: float = 0.0) -> Order:
        uuid = new_uuid(rng)
        return Order(at=at, action=Action.MOVE, verb=verb, service=service, host=host, seconds=seconds, uuid=uuid)

    fences = (
        order(at, "fence", first, seconds=gap),
        order(at + gap + rng.uniform(0.3, 6.0), "fence", first, seconds=rng.choice((0.5, 8.0))),
        order(at + rng.uniform(0.0, 5.0), "fence", second, seconds=rng.choice((0.2, 3.0, 10.0))),
    )
    moves = (
        order(at + rng.uniform(-3.0, 8.0), rng.choice(MOVE_VERBS), host=rng.randrange(1000))
        for _ in range(rng.randint(10, MAX_MOVES_AMID))
    )
    drains = (order(at + rng.uniform(-4.0, 4.0), "drain", name, seconds=5.0) for _, name in plan.services)
    others = [one for one in plan.orders if one.action is not Action.MOVE or one.verb != "fence"]
    return _also(replace(plan, orders=tuple(others), drains_by_schedulers=True), *fences, *moves, *drains)


MAX_GANGS, LARGEST_GANG = 8, 6
RUSH_S = 1.5  # many gangs come at once, when hosts have room


def _gangs(rng: random.Random, plan: Plan) -> Plan:
    """Several at a time, some of them repeated, and some of their members deleted."""
    if FORGETFUL & {Widening(one) for one in plan.widenings}:
        return plan
    orders: list[Order] = []
    for _ in range(rng.randint(2, MAX_GANGS)):
        count, at = rng.randint(2, LARGEST_GANG), rng.choice((RUSH_S, RUSH_S, rng.uniform(1.0, END_S)))
        policy = rng.choice((None, None, *GroupPolicy))
        order = Order(
            at=at,
            action=Action.BUILD,
            uuid=new_uuid(rng),
            flavor=rng.choice(("m1.tiny", "m1.tiny", "m1.small", "m1.medium")),
            project=rng.choice(("red", "blue")),
            group=None if policy is None else ServerGroup(uuid=new_uuid(rng), policy=policy),
            count=count,
            min_count=rng.choice((None, None, rng.randint(1, count))),
        )
        orders.append(order)
        if rng.random() < 0.2:
            orders.append(replace(order, at=at + rng.uniform(0.0, 5.0), action=Action.REPEAT))
        for number in range(count):
            if rng.random() < 0.15:
                member = str(uuid5(UUID(order.uuid), str(number))) if number else order.uuid
                gone = Order(at=at + rng.uniform(0.0, 20.0), action=Action.DELETE, uuid=member, project=order.project)
                orders.append(gone)
    return _also(replace(plan, quotas={**plan.quotas, NONE_ALLOWED: {INSTANCES: 0}}), *orders)


WAITS_S = (0.05, 0.5, 3.0, 10.0)
REQUESTS = frozenset({Action.BUILD, Action.REPEAT, Action.DELETE, Action.MOVE})


def _deadlines(rng: random.Random, plan: Plan) -> Plan:
    """Some requests have a deadline."""

    def with_deadline(order: Order) -> Order:
        share, waits_s, gives_up = rng.random(), rng.choice(WAITS_S), rng.random() < 0.3  # drawn for every order
        if order.action not in REQUESTS or share > 0.6:
            return order
        return replace(order, waits_s=waits_s, gives_up=gives_up)

    return replace(plan, orders=tuple(with_deadline(order) for order in plan.orders))


def _sometimes(rng: random.Random) -> Callable[[float], float]:
    """Each rate is off in half of the runs, so that faults are also seen one at a time."""
    return lambda most: rng.uniform(0.0, most) if rng.random() < 0.5 else 0.0


OF_METAL = frozenset(
    {
        Widening.FOREIGN_NODES,
        Widening.NODE_STATES,
        Widening.NODE_OWNERS,
        Widening.NODES_AGAIN,
        Widening.NODE_POWER,
        Widening.SHARES,
        Widening.POSITIONS_RESTORED,
    }
)
DRAWS: Mapping[Widening, Callable[[random.Random, Plan], Plan]] = {
    Widening.FOREIGN_MACHINES: _foreign_machines,
    Widening.FOREIGN_NODES: _foreign_nodes,
    Widening.NODE_STATES: _of_nodes(NODE_STATES, 6),
    Widening.NODE_OWNERS: _of_nodes(NODE_OWNERS, 4),
    Widening.NODES_AGAIN: _of_nodes(("again",), 4),
    Widening.NODE_POWER: _node_power,
    Widening.CELLS: _cells,
    Widening.SHARES: _shares,
    Widening.CELL_EMPTIED: _restored(_cell_schemas, empty=True),
    Widening.CELL_RESTORED: _restored(_cell_schemas),
    Widening.BOOK_RESTORED: _restored(_book),
    Widening.REQUESTS_RESTORED: _restored(lambda plan: ["scheduler"]),
    Widening.POSITIONS_RESTORED: _restored(lambda plan: ["ironic_sync"]),
    Widening.HOSTS_RESTORED: _hosts_restored,
    Widening.SAME_HOSTS: _same_hosts,
    Widening.SAME_NAME: _same_name,
    Widening.CLIENTS: _clients,
    Widening.BREAKER: _breaker,
    Widening.MOVES: _moves,
    Widening.DRAINS: _drains,
    Widening.FENCES: _fences,
    Widening.BUSES_APART: _buses_apart,
    Widening.GANGS: _gangs,
    Widening.TREES: _trees,
    Widening.REST: _rest,
    Widening.REST_OPERATOR: _rest_operator,
    Widening.DECIDED_CELLS: _decided_cells,
    Widening.TRANSFERS: _transfers,
    Widening.TRANSFERS_RESTORED: _transfers_restored,
    Widening.HOSTS_DIE_AGAIN: _hosts_die_again,
    Widening.BUILDS_FORGOTTEN: builds_forgotten,
    Widening.REQUESTS_FORGOTTEN: requests_forgotten,
    Widening.RESTORED_TWICE: restored_twice,
    Widening.SERVICE_AWAY: service_away,
    Widening.TAKEN_OVER: taken_over,
    Widening.DEADLINES: _deadlines,
}
