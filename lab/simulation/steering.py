"""Runs steered to what no run has seen yet (lab/simulation/pairs.py).

Acts (a delete, a request, a loss, a fault) are added to a plan, each amid a stay of an instance in a state where that
act was tried least often so far, and the plan runs again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.actions import ActionKind
from bus.contracts.build import member_uuids
from lab.simulation.draw import plan_of
from lab.simulation.load import request_of
from lab.simulation.pairs import Pair, Stay
from lab.simulation.plan import Action, FaultEvent, FaultType, Order, Plan
from lab.simulation.run import Result, run
from lab.simulation.widening import Widening

Act: TypeAlias = Callable[[Plan, Stay, float, random.Random], Plan]
ACTS = 8  # more than the plan before has
# The acts that come to an instance itself; the others come to its compute service and to its cell's conductors.
FAULTS = (FaultType.MUTE, FaultType.PAUSE, FaultType.CUT, FaultType.CRASH)
HELD_S, BEFORE_S = 3.0, 0.002
FAULT_S = (0.5, 4.0, 12.0, 30.0)


class Steering:
    """Chooses what comes next by what has been seen so far, in a sequence that its first seed determines."""

    def __init__(self, first: int, kinds: Collection[Widening]) -> None:
        self.pairs: Counter[Pair] = Counter()
        self._kinds = kinds
        self._tried: Counter[Pair] = Counter()  # (state, act)
        self._runs_with: dict[str, tuple[Plan, Sequence[Stay]]] = {}  # the last run that saw each state
        self._rng = random.Random(f"berth.sim.steering {first}")

    def runs(self, seed: int, rounds: int) -> Iterator[tuple[Plan, Result]]:
        """The plan of a seed, and so many plans that are steered from this or an earlier one."""
        yield self._ran(plan_of(seed, self._kinds))
        for _ in range(rounds if self._runs_with else 0):
            yield self._ran(self._with_acts())

    def _ran(self, plan: Plan) -> tuple[Plan, Result]:
        result = run(plan)
        self.pairs.update(result.seen.pairs)
        for stay in result.seen.stays:
            self._runs_with[stay.state] = plan, result.seen.stays
        return plan, result

    def _with_acts(self) -> Plan:
        """A plan with more acts: what was tried least often in any state, then the same of its later states."""
        least = [
            (self._tried[state, act], self._rng.random(), state)
            for state, (plan, _) in self._runs_with.items()
            for act in acts_in(plan)
        ]
        *_, first = min(least)
        plan, stays = self._runs_with[first]
        by_state = {stay.state: stay for stay in sorted(stays, key=lambda _: self._rng.random())}
        since = by_state[first].since
        acts = acts_in(plan)
        tries = sorted(
            (state != first, self._tried[state, act], self._rng.random(), state, act)
            for state, stay in by_state.items()
            for act in acts
            if stay.since >= since
        )
        for *_, state, act in (tries[0], *[one for one in tries if one[0]][: ACTS - 1]):
            self._tried[state, act] += 1
            plan = with_act(plan, by_state[state], acts[act], self._rng)
        return plan


def with_act(plan: Plan, stay: Stay, act: Act, rng: random.Random) -> Plan:
    """An act amid a stay. Most stays are short, so in half of them what is awaited stands still meanwhile."""
    until = min(stay.until, plan.load_s)
    if rng.random() < 0.5:
        until = max(until, stay.since + HELD_S)
        awaited = [f"compute-{stay.service}"] if stay.service else []
        awaited = rng.choice((awaited, [f"placement{number}" for number in range(plan.placements)]))
        for target in awaited:
            plan = _faulty(
                plan, FaultEvent(at=stay.since - BEFORE_S, kind=FaultType.PAUSE, target=target, seconds=HELD_S)
            )
    return act(plan, stay, rng.uniform(stay.since, until), rng)


def acts_in(plan: Plan) -> dict[str, Act]:
    """By name, those that the judges of this plan can tell from a defect."""
    acts: dict[str, Act] = {"delete": _delete}
    acts |= {kind.value: _moved(kind) for kind in ActionKind if kind is not ActionKind.EVACUATE}
    acts |= {f"{kind.value} {who}": _fault(kind, who) for kind in FAULTS for who in ("service", "conductor")}
    return acts if plan.judges_machines or plan.judges_forgotten else acts | {"lose": _lose}


def _ordered(plan: Plan, *orders: Order) -> Plan:
    return replace(plan, orders=tuple(sorted((*plan.orders, *orders), key=lambda one: one.at)))


def _faulty(plan: Plan, fault: FaultEvent) -> Plan:
    return replace(plan, fault_events=tuple(sorted((*plan.fault_events, fault), key=lambda one: one.at)))


def _delete(plan: Plan, stay: Stay, at: float, _: random.Random) -> Plan:
    builds = [one for one in plan.orders if one.action is Action.BUILD and stay.uuid in member_uuids(request_of(one))]
    return _ordered(plan, *(Order(at=at, action=Action.DELETE, uuid=stay.uuid, project=one.project) for one in builds))


def _moved(kind: ActionKind) -> Act:
    def add(plan: Plan, stay: Stay, at: float, rng: random.Random) -> Plan:
        order = Order(at=at, action=Action.MOVE, verb=kind.value, uuid=new_uuid(rng), instance=stay.uuid)
        return _ordered(plan, order)

    return add


def _lose(plan: Plan, stay: Stay, at: float, rng: random.Random) -> Plan:
    hosts = {service: hosts for cell in plan.cells for service, hosts in cell.services}
    if stay.service not in hosts:
        return plan
    order = Order(at=at, action=Action.LOSE, service=stay.service, host=rng.randrange(hosts[stay.service]))
    return _ordered(plan, order)


def _fault(kind: FaultType, who: str) -> Act:
    def add(plan: Plan, stay: Stay, at: float, rng: random.Random) -> Plan:
        cell = next((cell for cell, service in plan.services if service == stay.service), plan.cells[0].name)
        conductors = [one for one in plan.processes_of(cell) if one.startswith("conductor")]
        target = f"compute-{stay.service}" if who == "service" and stay.service else rng.choice(conductors)
        fault = FaultEvent(at=at, kind=kind, target=target, seconds=rng.choice(FAULT_S))
        return _faulty(plan, fault)

    return add
