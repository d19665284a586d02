"""One run: start everything, load and break it, stop breaking it, and see that it comes to rest within a bound."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from unittest.mock import patch

from msgspec import Struct

from bus.clock import new_uuid
from bus.contracts.queues import RETRY_S
from compute_agent.hosts.inventory_reporter import INVENTORY_EVERY
from compute_agent.hosts.pending_reports import JITTER
from lab.simulation import loop as virtual
from lab.simulation.draw import PROJECTS, plan_of
from lab.simulation.event_log import EventLog
from lab.simulation.load import Chaos, Client
from lab.simulation.loop import MAX_TURN_CPU_S, EndlessTurn
from lab.simulation.message_watch import no_message_is_lost
from lab.simulation.moves import Mover
from lab.simulation.operator import GO_S, Operator
from lab.simulation.orders import NONE_ALLOWED
from lab.simulation.other_tenants import OTHERS, OtherTenants
from lab.simulation.pairs import Seen, observed
from lab.simulation.plan import Action, FaultType, Order, Plan
from lab.simulation.rest import check_quota_refusals, given_back, unsettled
from lab.simulation.watch import Breach
from lab.simulation.widening import NONE, Widening
from lab.simulation.wiring import REPORT_S
from lab.simulation.world import World
from placement_worker.replica import catch_up

BLOCKED_S = 240.0
# Liveness: when faults have stopped, everything has to be settled within this. The longest honest chain: an attempt
# that hangs, times out (20 s), is claimed elsewhere, hangs again ... five hosts, and a redelivery through all retries.
REST_S = 6 * 20.0 + 60.0 + sum(RETRY_S)
# A book that was set back to before a host was reported learns of it when its service next reports its whole inventory.
INVENTORIES_S = INVENTORY_EVERY * REPORT_S * (1 + JITTER)
POLL_S = 1.0
MAX_TRIPS = 4  # of one breaker after the load, each seen with another report
# Rest must last: reconciliation goes on, and must find nothing to do.
STILL_S = 45.0
STANDSTILLS: Mapping[type[Exception], str] = {
    virtual.Deadlock: "deadlock",
    virtual.Livelock: "livelock",
    EndlessTurn: "endless_turn",
}
LAST_FLAVORS = ("m1.tiny", "m1.small", "m1.tiny")


class Result(Struct, frozen=True, kw_only=True):
    """How one run ended. breach: the invariant's name, "" when all hold. rest_s: from the last fault to rest."""

    seed: int
    breach: str
    detail: str
    digest: str
    virtual_s: float
    rest_s: float
    turns: int
    requests: int
    counts: Mapping[str, int]
    lines: tuple[str, ...] = ()
    states: Mapping[str, int] = {}
    widenings: tuple[str, ...] = ()
    seen: Seen


def simulate(seed: int, kinds: Collection[Widening] = NONE) -> Result:
    """Run one seed; kinds: what others may do in it."""
    return run(plan_of(seed, kinds))


def run(plan: Plan, *, event_log: EventLog | None = None, max_turn_cpu_s: float = MAX_TURN_CPU_S) -> Result:
    """Run one plan to its end or to the first breach. max_turn_cpu_s: CPU seconds of one turn of the loop."""
    event_log = EventLog() if event_log is None else event_log
    runner = _Runner(plan, event_log)
    # Random numbers that libraries draw from the process's own generator (tenacity's waits) are part of the seed too.
    random.seed(f"berth.sim.global {plan.seed}")
    breach: Breach | None = None
    try:
        with observed() as seen, patch.object(catch_up, "PAGE", plan.page):
            done = virtual.run(
                runner.main, on_unseen=lambda words: event_log.log("unseen", words), max_turn_cpu_s=max_turn_cpu_s
            )
        turns, now = done.turns, done.now
    except Breach as found:
        breach, turns, now = found, 0, runner.now
    except (virtual.Deadlock, virtual.Livelock, EndlessTurn) as found:
        breach, turns, now = Breach(STANDSTILLS[type(found)], str(found)), 0, runner.now
    except Exception as error:
        error.add_note(f"in the simulation of seed {plan.seed}")
        raise
    return Result(
        seed=plan.seed,
        breach=breach.name if breach else "",
        detail=breach.detail if breach else "",
        digest=event_log.digest,
        virtual_s=now,
        rest_s=runner.rest_s,
        turns=turns,
        requests=sum(order.action is Action.BUILD for order in plan.orders),
        counts=dict(sorted(event_log.counts.items())),
        lines=tuple(event_log.lines),
        states=runner.states,
        widenings=plan.widenings,
        seen=seen,
    )


class _Runner:
    def __init__(self, plan: Plan, event_log: EventLog) -> None:
        self._plan = plan
        self._event_log = event_log
        self.rest_s = 0.0
        self._rest_s = REST_S + INVENTORIES_S * (Widening.BOOK_RESTORED in plan.widenings)
        if plan.sets_cells_back:
            # What is blocked is looked at again the later, the longer that lasts.
            self._rest_s += BLOCKED_S
        self._rest_s += MAX_TRIPS * (REPORT_S + GO_S) * bool(plan.breaker_limit)
        # A deadline is in the time of the conductor that set it: it comes later by as much as that clock is set back or
        # behind another conductor's. A command is repeated the later, the longer its state seems to last.
        is_set = any(one.kind is FaultType.CLOCK and one.target.startswith("conductor") for one in plan.fault_events)
        are_apart = any(cell.conductors > 1 for cell in plan.cells)
        # So does a scheduler's look after a build that is on record with another scheduler's time (seed 4100847).
        is_read = any(one.action is Action.RESTORE and one.service == "scheduler" for one in plan.orders)
        # And the next look at what is blocked.
        self._rest_s += 2 * plan.skew_s * (is_set or are_apart or is_read or plan.sets_cells_back)
        self.now = 0.0
        self.states: dict[str, int] = {}
        self._last = random.Random(f"berth.sim.last {plan.seed}")

    async def main(self) -> None:
        running = asyncio.get_running_loop()
        self._event_log.now = running.time
        self._world = world = World(self._plan, self._event_log)
        self._client = Client(world)
        work = asyncio.create_task(self._work(), name="the run")
        try:
            with no_message_is_lost(world):
                await asyncio.wait([work, world.breach], return_when=asyncio.FIRST_COMPLETED)
            if world.breach.done():
                await world.breach
            await work
        finally:
            self.now = running.time()
            world.over = True  # what ends from now on is being unwound
            work.cancel()

    async def _work(self) -> None:
        plan, world = self._plan, self._world
        late = set(plan.late)
        for name in plan.processes:
            if name not in late:
                world.start(name)
        await self._client.open()
        mover = Mover(world)
        are_ordered = any(order.action is Action.MOVE for order in plan.orders)  # a plan made smaller may keep them
        if are_ordered or {Widening.MOVES, Widening.DRAINS, Widening.FENCES} & set(plan.widenings):
            await mover.open()
        operator, others, chaos = Operator(world, self._client), OtherTenants(world, self._client), Chaos(world)
        self._deciding = [asyncio.create_task(operator.release_quarantine(), name="quarantine")]
        if plan.breaker_limit:
            self._deciding.append(asyncio.create_task(operator.reset_breakers(), name="breakers"))
            self._deciding.append(asyncio.create_task(operator.accept_losses(), name="losses"))
        doing: list[tuple[float, Callable[[], asyncio.Task[None]]]] = []
        for order in plan.orders:
            doer: Client | OtherTenants | Operator | Mover = others if order.action in OTHERS else operator
            doer = mover if order.action is Action.MOVE else doer
            doer = self._client if order.action in (Action.BUILD, Action.REPEAT, Action.DELETE) else doer
            doing.append((order.at, partial(doer.order, order)))
        doing += [(fault.at, partial(chaos.inject, fault)) for fault in plan.fault_events]
        tasks: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        for at, begin in sorted(doing, key=lambda one: one[0]):
            await asyncio.sleep(max(0.0, at - loop.time()))
            tasks.append(begin())
        await asyncio.sleep(max(0.0, plan.load_s - loop.time()))
        world.network_faults.calm()
        self._event_log.record("calm")
        await self._rest(tasks)

    async def _rest(self, tasks: list[asyncio.Task[None]]) -> None:
        """All settled within the bound, and still so after a while."""
        self.rest_s = await self._settled(tasks)
        Chaos(self._world).one_last_change_unannounced()
        tasks += self._last_orders(LAST_FLAVORS, "red")
        await asyncio.sleep(POLL_S)
        await self._settled(tasks, still_s=STILL_S)
        self._final_report()
        if self._plan.with_peers:
            await self._final_checks(tasks)

    async def _final_checks(self, tasks: list[asyncio.Task[None]]) -> None:
        """All is deleted and given back; what then comes finds quotas unused, and a project that may hold nothing is
        refused.
        """
        for uuid in self._client.confirmed | self._client.unanswered:
            if uuid not in self._client.deleted:
                self._client.delete(uuid)
        await self._settled(tasks)
        if left := given_back(self._world):
            raise Breach("given_back", "; ".join(left[:6]))
        # First, while there is room: beside the others it could find none left, and get that answer instead (seed 78).
        for projects in ((NONE_ALLOWED,), PROJECTS):
            for project in projects:
                tasks += self._last_orders(LAST_FLAVORS[:1], project)
            await asyncio.sleep(POLL_S)
            await self._settled(tasks)
        if words := check_quota_refusals(self._world):
            raise Breach("quota_told", words)

    async def _settled(self, tasks: list[asyncio.Task[None]], *, still_s: float = 0.0) -> float:
        """Wait until all has been settled for so long; how long it took to come to that. Raises Breach."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        quiet_since: float | None = None
        while True:
            found = self._open(tasks)
            now = loop.time()
            if found:
                quiet_since = None
                if now - begun > self._rest_s:
                    name, _, detail = found[0].partition(": ")
                    raise Breach(name, "; ".join([detail, *found[1:6]]))
            else:
                quiet_since = now if quiet_since is None else quiet_since
                if now - quiet_since >= still_s:
                    return quiet_since - begun
            await asyncio.sleep(POLL_S)

    def _open(self, tasks: list[asyncio.Task[None]]) -> list[str]:
        """The differences that are not settled yet, one line each: the first word names the invariant."""
        for task in tasks:
            if task.done():
                task.result()
        under_way = [task for task in tasks if not task.done()] + self._client.busy
        found = [f"liveness: {task.get_name()} is under way" for task in under_way]
        return found + unsettled(self._world, self._client)

    def _last_orders(self, flavors: Sequence[str], project: str) -> list[asyncio.Task[None]]:
        """The system goes on: it still takes requests, and leads none of them to what has left."""
        self._world.probing = True
        orders = [
            Order(at=0.0, action=Action.BUILD, uuid=new_uuid(self._last), flavor=flavor, project=project)
            for flavor in flavors
        ]
        return [self._client.order(order) for order in orders]

    def _final_report(self) -> None:
        for standing in self._world.builds.recorded.values():
            self.states[standing.state.value] = self.states.get(standing.state.value, 0) + 1
        self._event_log.record("rest", " ".join(f"{state}={count}" for state, count in sorted(self.states.items())))
