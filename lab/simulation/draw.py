"""From a seed to its plan: every choice is drawn here, before the run begins."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import TypeVar

from msgspec.structs import replace

from bus.clock import new_uuid
from compute_sim.faults import Faults
from compute_sim.ironic_stand_in.node_pool import Behaviour
from lab.simulation.orders import with_peers
from lab.simulation.plan import (
    KEEP_ALL,
    LOAD_S,
    MAX_FAULT_S,
    SIZES,
    Action,
    Cell,
    FaultEvent,
    FaultType,
    Metal,
    Order,
    Plan,
    Rates,
)
from lab.simulation.widening import NONE, Widening, widen
from placement_worker.replica.catch_up import PAGE

T = TypeVar("T")

PROJECTS = ("red", "blue")
FLAVORS = ("m1.tiny", "m1.small", "m1.medium", "m1.large", "gpu.small", "no.such")
FLAVOR_WEIGHTS = (4, 6, 4, 2, 2, 0.2)
METAL_SHARE, METAL_BUILDS = 0.4, 0.3
METAL_FLAVORS = ("bm.gold", "bm.silver")
FLAT_SHARE = 0.12
HARDER = {
    FaultType.FULL: MAX_FAULT_S,
    FaultType.CLOCK: MAX_FAULT_S,
}  # faults that came later, and how long they last at most
IRONIC_VERBS = (
    *("maintain", "return", "return", "clean") * 2,
    "blink",
    "blink",
    "power",
    "traits",
    "class",
    "remove",
    "add",
)


def plan_of(seed: int, kinds: Collection[Widening] = NONE) -> Plan:
    """The plan of one seed; kinds: what others may do in it."""
    rng = random.Random(f"berth.sim {seed}")
    cells = tuple(_cell(rng, n) for n in range(_pick(rng, (1, 1, 2, 3))))
    plan = Plan(
        seed=seed,
        cells=cells,
        placements=_pick(rng, (1, 2, 2, 3)),
        schedulers=_pick(rng, (1, 2, 2, 3)),
        subset=_pick(rng, (1, 1, 4)),
        numa_share=_pick(rng, (0.0, 0.0, 0.3)),
        skew_s=_pick(rng, (0.0, 0.2, 1.0, 30.0, 240.0)),
        computes=_computes(rng),
        orders=(),
        fault_events=(),
        rates=_rates(rng),
    )
    plan = with_metal(rng, plan) if rng.random() < METAL_SHARE else plan
    plan = replace(plan, flat=tuple(service for _, service in plan.services if rng.random() < FLAT_SHARE))
    plan = replace(plan, orders=_orders(rng, plan))
    plan = replace(plan, fault_events=_fault_events(rng, plan))
    plan = _later_faults(random.Random(f"berth.sim.harder {seed}"), plan)
    plan = _silences(random.Random(f"berth.sim.silent {seed}"), plan)
    plan = replace(plan, page=_pick(random.Random(f"berth.sim.pages {seed}"), (PAGE, 3)))
    return widen(with_peers(random.Random(f"berth.sim.peers {seed}"), plan), kinds)


def with_metal(rng: random.Random, plan: Plan) -> Plan:
    """The same plan with bare metal: services in one or two of its cells."""
    services = ["m0", "m1"][: rng.randint(1, 2)]
    homes = {service: rng.randrange(len(plan.cells)) for service in services}
    cells = tuple(
        replace(cell, metal=tuple(service for service, home in homes.items() if home == number))
        for number, cell in enumerate(plan.cells)
    )
    some = _sometimes(rng)
    behaviour = Behaviour(
        verify_s=0.2,
        deploy_s=rng.uniform(0.1, 6.0),
        undeploy_s=rng.uniform(0.1, 1.0),
        clean_s=rng.uniform(0.1, 8.0),
        deploy_fails=some(0.4),
    )
    rates = replace(plan.rates, notice_lost=some(0.5), ironic_lost=some(0.1), ironic_busy=some(0.1))
    metal = Metal(nodes=rng.randint(1, 5), syncs=_pick(rng, (1, 2, 2)), behaviour=behaviour)
    return replace(plan, cells=cells, metal=metal, rates=rates)


def _cell(rng: random.Random, number: int) -> Cell:
    services = tuple((f"s{number}{n}", rng.randint(1, 3)) for n in range(rng.randint(1, 3)))
    return Cell(name=f"cell{number}", conductors=_pick(rng, (1, 2, 2)), services=services)


def _computes(rng: random.Random) -> Faults:
    if rng.random() < 0.2:
        return Faults(delay_max_s=rng.uniform(0.01, 2.0))
    some = _sometimes(rng)
    return Faults(
        delay_min_s=0.0,
        delay_max_s=rng.uniform(0.01, 8.0),
        destroy_delay_s=rng.uniform(0.0, 2.0),
        fail_rate=some(0.4),
        abort_rate=some(0.1),
        leftover_rate=some(0.8),
        hang_rate=some(0.15),
        late_rate=some(0.3),
        late_s=rng.choice((8.0, 21.0, 25.0, 45.0)),  # before and after a build's deadline
        duplicate_rate=some(0.3),
    )


def _rates(rng: random.Random) -> Rates:
    some = _sometimes(rng)
    return Rates(
        delay=some(0.2),
        delay_s=rng.choice((0.01, 0.3, 2.0)),
        duplicate=some(0.1),
        lost_before=some(0.01),
        lost_after=some(0.01),
        conflict=some(0.01),
        store_lost=some(0.01),
        commit_lost_before=some(0.02),
        commit_lost_after=some(0.02),
        crash=some(0.002),
    )


def _orders(rng: random.Random, plan: Plan) -> tuple[Order, ...]:
    orders: list[Order] = []
    bursts = [rng.uniform(0.0, LOAD_S * 0.8) for _ in range(rng.randint(3, 30))]
    for _ in range(rng.randint(10, 60)):
        at = _pick(rng, bursts) + _pick(rng, (0.0, 0.001, 0.5))
        uuid, project = new_uuid(rng), _pick(rng, PROJECTS)
        flavor = rng.choices(FLAVORS, FLAVOR_WEIGHTS)[0]
        if plan.metal and rng.random() < METAL_BUILDS:
            flavor = _pick(rng, METAL_FLAVORS)
        attempts = _pick(rng, (None, None, None, 1, 5))
        build = Order(at=at, action=Action.BUILD, uuid=uuid, flavor=flavor, project=project, max_attempts=attempts)
        orders.append(build)
        if rng.random() < 0.05:
            orders.append(replace(build, action=Action.REPEAT, at=at + rng.uniform(0.0, 5.0)))
        if rng.random() < 0.4:
            orders.append(Order(at=at + rng.expovariate(0.2), action=Action.DELETE, uuid=uuid, project=project))
    orders += [_host_order(rng, plan) for _ in range(rng.randint(0, 8))]
    for _, service in plan.services:
        if rng.random() < 0.15:
            orders.append(Order(at=rng.uniform(5.0, 20.0), action=Action.LATE, service=service))
        elif rng.random() < 0.1:
            absent_s = rng.uniform(2.0, 20.0)
            orders.append(Order(at=rng.uniform(5.0, 40.0), action=Action.LEAVE, service=service, seconds=absent_s))
    orders += _departures(rng, plan)
    if plan.metal:
        orders += [_node_order(rng) for _ in range(rng.randint(2, 14))]
    return tuple(sorted(orders, key=lambda order: order.at))


def _host_order(rng: random.Random, plan: Plan) -> Order:
    cell = _pick(rng, plan.cells)
    service, hosts = _pick(rng, cell.services)
    action = _pick(rng, (Action.RESIZE, Action.RESIZE, Action.DISABLE, Action.ENABLE, Action.LOSE))
    at = rng.uniform(2.0, LOAD_S)
    return Order(at=at, action=action, service=service, host=rng.randrange(hosts), size=rng.randrange(len(SIZES)))


def _departures(rng: random.Random, plan: Plan) -> list[Order]:
    """Hosts and services that go, are given away, or come back as something else: each service in one way only."""
    orders: list[Order] = []
    for cell in plan.cells:
        for service, hosts in cell.services:
            at, chance = rng.uniform(10.0, LOAD_S * 0.7), rng.random()
            if service in plan.flat:
                orders.append(Order(at=at, action=Action.UPGRADE, service=service, seconds=rng.uniform(0.0, 5.0)))
            elif chance < 0.08 and len(plan.services) > 1:
                orders.append(Order(at=at, action=Action.DIE, service=service))
            elif chance < 0.2:
                orders.append(Order(at=at, action=Action.DRAIN, service=service, host=rng.randrange(hosts)))
            elif chance < 0.32 and len(cell.services) > 1:
                orders.append(Order(at=at, action=Action.REHOME, service=service, host=rng.randrange(hosts)))
    return orders


def _node_order(rng: random.Random) -> Order:
    at, verb = rng.uniform(2.0, LOAD_S), _pick(rng, IRONIC_VERBS)
    return Order(at=at, action=Action.IRONIC, verb=verb, host=rng.randrange(1000))


def _fault_events(rng: random.Random, plan: Plan) -> tuple[FaultEvent, ...]:
    kinds = [kind for kind in FaultType if kind not in HARDER and kind is not FaultType.MUTE and rng.random() < 0.6]
    kinds = [kind for kind in kinds if plan.metal or kind is not FaultType.IRONIC]
    if not kinds:
        return ()
    buses = ["api", *(cell.name for cell in plan.cells)]
    schemas = ["placement", "scheduler", *(f"cell_{cell.name}" for cell in plan.cells)]
    schemas += ["ironic_sync"] if plan.metal else []
    targets = {FaultType.BROKER: buses, FaultType.DATABASE: schemas, FaultType.IRONIC: ["ironic"]}
    fault_events = []
    for _ in range(rng.randint(0, 20)):
        kind = _pick(rng, kinds)
        target = _pick(rng, targets.get(kind, plan.processes))
        seconds = rng.uniform(0.0, 25.0 if kind is FaultType.PAUSE else MAX_FAULT_S)
        fault_events.append(FaultEvent(at=rng.uniform(0.5, LOAD_S), kind=kind, target=target, seconds=seconds))
    return tuple(sorted(fault_events, key=lambda fault: fault.at))


def _later_faults(rng: random.Random, plan: Plan) -> Plan:
    """Later additions, drawn from a source of their own: the seeds that found a defect go on to find it."""
    rates = replace(plan.rates, store_crash=_sometimes(rng)(0.004))
    plan = replace(plan, rates=rates, feed_retention=_pick(rng, (KEEP_ALL, KEEP_ALL, 30)))
    plan = replace(plan, keep_s=_pick(rng, (0.0, 0.0, 50.0)), batch=_pick(rng, (0, 0, 2)))
    targets = {FaultType.FULL: ["api", *(cell.name for cell in plan.cells)], FaultType.CLOCK: plan.processes}
    fault_events = [
        FaultEvent(
            at=rng.uniform(0.5, LOAD_S), kind=kind, target=_pick(rng, targets[kind]), seconds=rng.uniform(0.0, most)
        )
        for kind, most in HARDER.items()
        if rng.random() < 0.4
        for _ in range(rng.randint(1, 5))
    ]
    return replace(plan, fault_events=tuple(sorted((*plan.fault_events, *fault_events), key=lambda fault: fault.at)))


def _silences(rng: random.Random, plan: Plan) -> Plan:
    """Compute services that fall silent for longer than a lease: their heartbeats are lost, or they stand still."""
    services = [f"compute-{service}" for _, service in plan.services]
    faults = [
        FaultEvent(
            at=rng.uniform(2.0, LOAD_S),
            kind=_pick(rng, (FaultType.MUTE, FaultType.MUTE, FaultType.PAUSE)),
            target=_pick(rng, services),
            seconds=rng.uniform(5.0, 40.0),
        )
        for _ in range(rng.randint(1, 4) if rng.random() < 0.5 else 0)
    ]
    return replace(plan, fault_events=tuple(sorted((*plan.fault_events, *faults), key=lambda fault: fault.at)))


def _sometimes(rng: random.Random) -> Callable[[float], float]:
    """Each rate is off in half of the runs, so that faults are also seen one at a time."""
    return lambda most: rng.uniform(0.0, most) if rng.random() < 0.5 else 0.0


def _pick(rng: random.Random, choices: tuple[T, ...] | list[T]) -> T:
    return choices[rng.randrange(len(choices))]
