"""Hosts that die, are fenced, drained or doubled, gangs on full hosts, and cells of all kinds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock, new_uuid
from bus.contracts.actions import ActionKind, ActionState
from bus.contracts.build import BuildEvent, BuildRecord, BuildState
from bus.contracts.drains import DrainRecord, DrainState, DrainTarget
from cell_conductor.hosts.lease_table import LeaseTable
from cell_conductor.state.lease import Lease
from lab.simulation import rest
from lab.simulation.draw import plan_of
from lab.simulation.gang_watch import GangWatch
from lab.simulation.moves import DRAIN, FENCE
from lab.simulation.plan import Action, Cell, FaultEvent, FaultType, Order, Plan
from lab.simulation.run import Result, run
from lab.simulation.watch import Listener
from lab.simulation.widening import Widening
from lab.simulation.wiring import BUILD_TIMEOUT_S
from placement_worker.domain.report_group import ReportGroup
from placement_worker.domain.values import ConsumerState
from placement_worker.store.memory_table import ConsumerRow, MemoryPlacementTable
from scheduler_worker.records.action_record import RecordedAction
from tests.kit.cases import nightly
from tests.kit.virtual_time import on_virtual_time
from tests.sim.mutants_of_kinds import CELLS_FOUND_BY
from tests.sim.plans import builds_of, held, plan_of_case
from tests.sim.stage import Stage

# --- a service's hosts die, an operator fences them, and they come back: it holds


VERBS = tuple(kind.value for kind in ActionKind)


def hosts_are_fenced(seed: int) -> Plan:
    """The builds of this seed without any fault; one fence; and a third of the builds is deleted just after it."""
    plan = plan_of(seed).without_faults()
    service, _ = plan.cells[0].services[0]
    builds = builds_of(plan, before_s=20.0)
    uuid = "f0000000-0000-4000-8000-000000000001"
    fence = Order(at=20.0, action=Action.MOVE, verb=FENCE, service=service, seconds=10.0, uuid=uuid)
    deletes = [replace(order, at=20.2, action=Action.DELETE) for order in builds[::3]]
    return replace(plan, orders=(*builds, fence, *deletes), widenings=(Widening.FENCES,), load_s=50.0)


def hosts_burn_while_fenced(seed: int) -> Plan:
    """The same, and the fenced hosts do not come back."""
    plan = hosts_are_fenced(seed)
    service = next(order.service for order in plan.orders if order.action is Action.MOVE)
    return replace(plan, orders=(*plan.orders, Order(at=25.0, action=Action.DIE, service=service)))


def hosts_die_again(seed: int) -> Plan:
    """Moves of every kind while hosts die, are fenced, are back at once, die again, and are drained."""
    rng = random.Random(f"hosts die again {seed}")
    plan = plan_of(seed).without_faults()
    builds = builds_of(plan, before_s=14.0)
    (first, second), at = (rng.choices([name for _, name in plan.services], k=2)), rng.uniform(16.0, 20.0)
    gap = rng.choice((0.2, 1.0, 4.0, 12.0))

    def order(at: float, verb: str, service: str = "", host: int = 0, seconds: float = 0.0) -> Order:
        uuid = new_uuid(rng)
        return Order(at=at, action=Action.MOVE, verb=verb, service=service, host=host, seconds=seconds, uuid=uuid)

    fences = (
        order(at, FENCE, first, seconds=gap),
        order(at + gap + rng.uniform(0.3, 6.0), FENCE, first, seconds=rng.choice((0.5, 8.0))),
        order(at + rng.uniform(0.0, 5.0), FENCE, second, seconds=rng.choice((0.2, 3.0, 10.0))),
    )
    moves = [order(at + rng.uniform(-3.0, 8.0), rng.choice(VERBS), host=rng.randrange(1000)) for _ in range(50)]
    drains = [order(at + rng.uniform(-4.0, 4.0), DRAIN, name, seconds=5.0) for _, name in plan.services]
    return replace(
        plan,
        orders=(*builds, *fences, *moves, *drains),
        widenings=(Widening.FENCES,),
        drains_by_schedulers=True,
        load_s=50.0,
    )


@pytest.mark.parametrize(
    ("plan", "seed"),
    [
        (hosts_are_fenced, 1),
        (hosts_burn_while_fenced, 1),
        (hosts_die_again, 15),
        *nightly((hosts_are_fenced, 4), (hosts_burn_while_fenced, 4), (hosts_die_again, 7)),
    ],
)
def test_it_holds(plan: Callable[[int], Plan], seed: int) -> None:
    held(plan(seed))


# --- schedulers empty hosts in the simulation: it holds. Its defects: `test_mutants_of_cases.py`


DRAINS = frozenset({Widening.DRAINS})
SEED = 25


def test_the_plan_has_schedulers_empty_hosts() -> None:
    assert plan_of(SEED, DRAINS).drains_by_schedulers
    held(plan_of(SEED, DRAINS))


@pytest.mark.parametrize(
    ("begun", "burnt", "breaks"),
    [
        pytest.param(True, True, False, id="its move waits for a fence"),  # seed 1795407114
        pytest.param(True, False, True, id="its move goes on"),
        pytest.param(False, True, True, id="its move has not begun"),
    ],
)
@on_virtual_time
async def test_a_drain_waits_for_the_fence_of_a_host_that_its_move_has_begun_on(
    monkeypatch: pytest.MonkeyPatch, *, begun: bool, burnt: bool, breaks: bool
) -> None:
    world = Stage().world
    made = {"target": DrainTarget.HOST, "kind": ActionKind.LIVE_MIGRATE, "by": "operator", "started_at": 1.0}
    record = DrainRecord(name="h", state=DrainState.RUNNING, **made)
    monkeypatch.setattr(rest, "drains_of", lambda _objects: {"d": record})
    move = RecordedAction(
        request_id="r", instance_uuid="i", project_id="p", kind=ActionKind.LIVE_MIGRATE, digest=b"",
        state=ActionState.SCHEDULED, sequence=2, drain="d",
    )  # fmt: skip
    world.builds.actions.update({"r": (move, 1.0)} if begun else {})
    assert bool(list(rest._drains_have_ended(world, {"i"} if burnt else set()))) is breaks


# --- the rules of gangs as the simulation judges them: a part of a gang, and members that were deleted


HOST = "00000000-0000-4000-8000-000000000000"
MEMBERS = [f"00000000-0000-4000-9000-00000000000{n}" for n in range(5)]
STARTED = BuildRecord(
    instance_uuid=MEMBERS[1], project_id="red", flavor="m1.tiny", state=BuildState.ACTIVE, cell="cell0"
)


@pytest.mark.parametrize(("deletes", "breaks"), [((), True), (MEMBERS[:1], False), (MEMBERS[3:4], True)])
def test_a_member_that_was_deleted_after_its_claim_was_started(deletes: list[str], *, breaks: bool) -> None:
    """Two of five were claimed, and the client deleted one of them before it was sent to a cell (seed 1795404029)."""
    placement = MemoryPlacementTable(SystemClock())
    watch = GangWatch(placement, ())
    watch.requested(MEMBERS, 2)
    for uuid in MEMBERS[:2]:
        consumer = ConsumerState(1, 1, "red", "u", "INSTANCE", {HOST: {"VCPU": 1}})
        placement.consumers[uuid] = ConsumerRow(consumer, None, 0.0, 0.0)
    watch()
    for uuid in deletes:
        watch.deleted(uuid)
    assert any(watch.unsettled({MEMBERS[1]: STARTED})) is breaks


# --- two compute services with hosts of the same uuids: the second one builds nothing; a host is re-homed all the same


def builds(count: int, at: float, apart_s: float, first: str) -> tuple[Order, ...]:
    uuids = [f"{first}-0000-4000-8000-{number:012d}" for number in range(count)]
    build = Order(at=0.0, action=Action.BUILD, flavor="m1.tiny", project="red")
    return tuple(replace(build, at=at + number * apart_s, uuid=uuid) for number, uuid in enumerate(uuids))


BUILDS = builds(24, 2.0, 1.0, "a0000000")
LATE = tuple(replace(one, at=one.at + 26.0, uuid=one.uuid.replace("a", "b", 1)) for one in BUILDS)
SECOND = Order(at=4.0, action=Action.SECOND_SERVICE, service="s00", seconds=40.0)


def plan(*orders: Order, faults: tuple[FaultEvent, ...] = ()) -> Plan:
    """Two services of two hosts each; a build a second."""
    return plan_of_case(
        7,
        (Cell(name="cell0", conductors=2, services=(("s00", 2), ("s01", 2))),),
        tuple(sorted((*BUILDS, *orders), key=lambda order: order.at)),
        faults,
        builds_s=1.0,
    )


def test_a_second_service_builds_nothing_and_changes_no_inventory() -> None:
    held(plan(SECOND))


def test_it_builds_nothing_when_the_schedulers_and_conductors_start_again_beside_it() -> None:
    names = ("scheduler0", "conductor-cell0-0", "conductor-cell0-1", "compute-s00")
    crashes = tuple(
        FaultEvent(at=12.0 + at, kind=FaultType.CRASH, target=name, seconds=2.0) for at, name in enumerate(names)
    )
    held(plan(SECOND, faults=crashes))


DOWN = (FaultEvent(at=8.0, kind=FaultType.CRASH, target="compute-s00", seconds=36.0),)
LATER = replace(SECOND, seconds=50.0)


def test_it_builds_nothing_while_the_first_is_down_for_a_while() -> None:
    held(plan(LATER, *LATE, faults=DOWN))


def test_without_the_books_refusal_it_is_built_on() -> None:
    with patch.object(ReportGroup, "refuse_owned", lambda _self: None):
        result = run(plan(LATER, *LATE, faults=DOWN))
    assert result.breach in {"lost_was_lost", "host_has_one_service"}, result.detail


@pytest.mark.parametrize("at", [3.0, 20.0])
def test_a_host_is_given_to_another_service_which_is_up(at: float) -> None:
    """Its former service is up, and does not list it any more: placement lets the next one take it over."""
    held(plan(Order(at=at, action=Action.REHOME, service="s00", host=0)))


# --- a compute service that falls silent while it builds: its builds end elsewhere within a bound, and none is doubled


SILENT_AT = 10.0
LEASE_S = 5 * 2.0  # missed_heartbeats, of a heartbeat every two seconds
BUILDS_S = 2.0  # a build takes so long at most


def services_plan(seed: int, kind: FaultType, seconds: float, *, target: str = "compute-s00") -> Plan:
    """Two services; twelve builds around the moment when one of them falls silent."""
    return plan_of_case(
        seed,
        (Cell(name="cell0", conductors=2, services=(("s00", 3), ("s01", 3))),),
        builds(12, SILENT_AT - 2.0, 0.25, f"{seed:08x}"),
        (FaultEvent(at=SILENT_AT, kind=kind, target=target, seconds=seconds),),
        builds_s=BUILDS_S,
    )


def ends_of(planned: Plan) -> tuple[Result, dict[str, float]]:
    """The run, and how long each build took to its end: active, or failed because its other hosts are full."""
    requested = {order.uuid: order.at for order in planned.orders}
    took: dict[str, float] = {}
    listen = Listener.event

    def event(self: Listener, announced: BuildEvent) -> None:
        if announced.terminal and announced.state is not BuildState.DELETED and announced.instance_uuid in requested:
            took.setdefault(
                announced.instance_uuid, asyncio.get_running_loop().time() - requested[announced.instance_uuid]
            )
        listen(self, announced)

    with patch.object(Listener, "event", event):
        return run(planned), took


CASES = [
    (FaultType.PAUSE, 60.0),  # it stands still, and comes back with the same epoch
    (FaultType.CRASH, 60.0),  # it is killed, and starts again with what it remembers
    (FaultType.MUTE, 25.0),  # it works on, and its heartbeats do not arrive
]
# The time of a lease, a claim and a build elsewhere, and looks in between; far below an attempt's own deadline.
BOUND_S = LEASE_S + BUILDS_S + 5.0


@pytest.mark.parametrize(("kind", "seconds"), CASES)
@pytest.mark.parametrize("seed", [1, *nightly(2)])
def test_builds_of_a_silent_service_end_elsewhere_within_a_bound(seed: int, kind: FaultType, seconds: float) -> None:
    result, took = ends_of(services_plan(seed, kind, seconds))
    assert result.breach == "", result.detail
    assert len(took) == 12 and max(took.values()) < BOUND_S < BUILD_TIMEOUT_S, took


def test_without_failing_over_they_wait_for_the_deadline() -> None:
    """So the bound above is not met by chance."""

    def none_down(_: LeaseTable) -> dict[str, Lease]:
        return {}

    with (
        patch.object(LeaseTable, "abandoned", property(none_down)),
        patch.object(LeaseTable, "down", property(none_down)),
    ):
        result, took = ends_of(services_plan(1, FaultType.PAUSE, 60.0))
    assert result.breach == "", result.detail
    assert len(took) == 12 and max(took.values()) > BUILD_TIMEOUT_S, took


@pytest.mark.parametrize("target", ["conductor-cell0-0", "conductor-cell0-1"])
def test_a_conductor_that_stands_still_suspects_no_service(target: str) -> None:
    result, took = ends_of(services_plan(3, FaultType.PAUSE, 30.0, target=target))
    assert result.breach == "", result.detail
    assert len(took) == 12


# --- cells are added and removed at run time: it holds. Its defects and other seeds: `test_mutants.py`


KINDS = frozenset({Widening.DECIDED_CELLS})


def test_it_holds_with_cells() -> None:
    held(plan_of(min(CELLS_FOUND_BY.values()), KINDS))
