"""Databases that forget, transfers they forget in the middle, and clients that wait for an answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionKind
from compute_sim.faults import Faults
from lab.simulation.draw import plan_of
from lab.simulation.event_log import EventLog
from lab.simulation.moves import FENCE
from lab.simulation.plan import Action, Cell, FaultEvent, FaultType, Order, Plan
from lab.simulation.widening import Widening
from tests.kit.cases import nightly
from tests.sim.mutants_of_kinds import TRANSFERS_FOUND_BY
from tests.sim.plans import backups, builds_of, held, in_order, moves_of, plan_of_case, set_back, staggered, widened

# --- what is drawn in each kind of world, in plans that have it: each holds


def builds_forgotten(seed: int) -> Plan:
    """The builds of this seed, in one cell that forgets them: its database is set back to before all of them."""
    return replace(widened(Widening.BUILDS_FORGOTTEN, seed), widenings=(Widening.BUILDS_FORGOTTEN,))


def requests_forgotten(seed: int) -> Plan:
    """The builds of this seed, in one cell whose schedulers forget them. Their clients publish them again."""
    return replace(widened(Widening.REQUESTS_FORGOTTEN, seed), widenings=(Widening.REQUESTS_FORGOTTEN,))


def service_away(seed: int) -> Plan:
    """The plan of this seed, and a cell whose database is set back while one of its services is stopped."""
    return replace(widened(Widening.SERVICE_AWAY, seed), widenings=(*plan_of(seed).widenings, Widening.SERVICE_AWAY))


def transfers(seed: int, kind: Widening = Widening.TRANSFERS) -> Plan:
    """The plan of this seed, and instances that move to another cell, or are unshelved there, while all fails."""
    return replace(widened(kind, seed), widenings=(*plan_of(seed).widenings, kind))


def unshelvings_forgotten(seed: int) -> Plan:
    """The builds of this seed in one cell. Its database and the schedulers' are set back amid unshelvings that each try
    several hosts. Clients request the same once more just before, while their broker is away: schedulers have these
    requests when the cell has recovered.
    """
    plan = plan_of(seed).without_faults()
    cell = replace(plan.cells[0], metal=())
    builds = staggered(builds_of(plan), 5.0)
    copied = backups(26.0, f"cell_{cell.name}", "scheduler")
    requests = ((ActionKind.SHELVE, 18.0), (ActionKind.UNSHELVE, 25.0), (ActionKind.UNSHELVE, 29.2))
    moves = [move for n, (verb, at) in enumerate(requests, 1) for move in moves_of(builds, verb, at, n)]
    return in_order(
        plan, *builds, *moves, *copied, *set_back(copied, 30.0),
        cells=(cell,),
        metal=None,
        computes=Faults(delay_min_s=0.2, delay_max_s=2.0, fail_rate=0.5, change_max_s=0.5),
        fault_events=(FaultEvent(at=29.0, kind=FaultType.BROKER, target="api", seconds=36.0),),
        widenings=(Widening.TRANSFERS_RESTORED,),
        load_s=80.0,
    )  # fmt: skip


def returns_forgotten(seed: int) -> Plan:
    """Builds of this seed in two cells. Instances are moved to the other cell, back, and once more; meanwhile the first
    cell's database is set back to between the first two moves. Half of them are deleted in the end.
    """
    plan = plan_of(seed).without_faults()
    cells = tuple(replace(cell, metal=()) for cell in plan.cells[:2])
    alone = {"group": None, "apart_from": (), "together_with": (), "count": 1, "min_count": None}
    builds = staggered(builds_of(plan)[:12], 5.0, **alone)
    requests = ((1, 15.0), (2, 20.0), (3, 23.5))
    moves = [
        move
        for kind, at in requests
        for move in moves_of(builds, ActionKind.MIGRATE, at, f"f000000{seed}-000{kind}", apart_s=0.05)
    ]
    copied = backups(18.6, f"cell_{cells[0].name}", first=1)
    deletes = [replace(one, at=60.0, action=Action.DELETE) for one in builds[::2]]
    return in_order(
        plan, *builds, *copied, *moves, *set_back(copied, 25.0), *deletes,
        cells=cells,
        metal=None,
        computes=Faults(delay_min_s=0.1, delay_max_s=0.8, change_max_s=0.4),
        widenings=(Widening.TRANSFERS_RESTORED,),
        load_s=80.0,
    )  # fmt: skip


def moved_since_the_backup(seed: int, verb: ActionKind) -> Plan:
    """The builds of this seed in one cell. They are unshelved, or moved and not confirmed yet, between a backup and the
    restore of the cell and of the schedulers. When the cell has recovered the same is requested, three times.
    """
    plan = plan_of(seed).without_faults()
    cell = replace(plan.cells[0], metal=())
    builds = staggered(builds_of(plan), 5.0)
    requests = [(at, verb) for at in (27.0, 70.0, 78.0, 86.0)]
    if verb is ActionKind.UNSHELVE:
        requests = [(14.0, ActionKind.SHELVE), (20.0, ActionKind.OFFLOAD), *requests]
    moves = [move for n, (at, kind) in enumerate(requests) for move in moves_of(builds, kind, at, n)]
    copied = backups(26.0, f"cell_{cell.name}", "scheduler")
    return in_order(
        plan, *builds, *moves, *copied, *set_back(copied, 31.0),
        cells=(cell,),
        metal=None,
        computes=Faults(delay_min_s=0.2, delay_max_s=1.0, change_max_s=0.5),
        widenings=(Widening.TRANSFERS_RESTORED,),
        load_s=100.0,
    )  # fmt: skip


UNSHELVED, MIGRATED = (partial(moved_since_the_backup, verb=verb) for verb in (ActionKind.UNSHELVE, ActionKind.MIGRATE))
RESTORED = partial(transfers, kind=Widening.TRANSFERS_RESTORED)
CELL_RESTORED = partial(plan_of, kinds={Widening.CELL_RESTORED})
DRAINED = partial(plan_of, kinds={Widening.MOVES, Widening.DRAINS})
# An unshelving is given up while the instance runs on a host which its record does not have.
OFFLOADED_BESIDE = 12


@pytest.mark.parametrize(
    ("plan", "seed"),
    [
        pytest.param(builds_forgotten, 7, id="a command came between the set-back and the sweep that noticed it"),
        # For longer than a request is retried: it ends as claim.unlocatable.
        # A delete that waited in the queue released what a listed machine held, which no record had.
        pytest.param(service_away, 7, id="a service is away while its cell recovers"),
        pytest.param(requests_forgotten, 18, id="a host is unannounced"),
        pytest.param(transfers, min(TRANSFERS_FOUND_BY.values()), id="moves between cells"),
        # It was ignored, and the instance was in no cell.
        pytest.param(RESTORED, 11, id="a departure below the numbers that schedulers had had"),
        pytest.param(unshelvings_forgotten, OFFLOADED_BESIDE, id="unshelvings are forgotten"),
        # By its record it was at rest, and the first request after the restore was begun.
        pytest.param(UNSHELVED, 2, id="what was unshelved since the backup gets no second machine"),
        pytest.param(MIGRATED, 2, id="what was migrated since the backup gets no second machine"),
        *nightly((UNSHELVED, 5)),
        # By its record it had left, and a delete was answered with that departure for ever.
        pytest.param(returns_forgotten, 1, id="what has come back to a cell that has forgotten it is deleted"),
        *nightly((returns_forgotten, 2)),
        # A backup had a machine in quarantine that had been taken off the list since: it stayed.
        pytest.param(partial(plan_of, kinds={Widening.TRANSFERS_RESTORED}), 71008, id="taken off the list since"),
        pytest.param(plan_of, 5402033, id="what a forgotten build has left complete is kept for its operator"),
        # Found when a restored database was no excuse for no end: builds (7, 20) and deletes (20, 25) waited for ever.
        pytest.param(CELL_RESTORED, 20, id="builds and deletes that a cell has forgotten have an end"),
        *nightly((CELL_RESTORED, 7), (CELL_RESTORED, 25)),
        pytest.param(DRAINED, 245, id="a lost record's claim is given back after an unknown delete"),
        *nightly((DRAINED, 249)),
    ],
)
def test_it_holds(plan: Callable[[int], Plan], seed: int) -> None:
    held(plan(seed))


# --- clients wait for an answer for a time only, while a server is away for longer: every request on record has its end


def requesters_give_up(seed: int) -> Plan:
    """The builds of this seed; all clients give up while placement's database is unavailable. Half of the builds are
    deleted later by a client that repeats its request.
    """
    plan = plan_of(seed).without_faults()
    builds = staggered(builds_of(plan), 20.0, 0.01, waits_s=2.0, gives_up=True)
    deletes = [replace(one, at=36.0, action=Action.DELETE, waits_s=0.5, gives_up=False) for one in builds[::2]]
    outage = FaultEvent(at=19.9, kind=FaultType.DATABASE, target="placement", seconds=8.0)
    return replace(
        plan, orders=(*builds, *deletes), fault_events=(outage,), widenings=(Widening.DEADLINES,), load_s=50.0
    )


@pytest.mark.parametrize("seed", [1, *nightly(3)])
def test_every_request_on_record_has_its_end(seed: int) -> None:
    result = held(requesters_give_up(seed))
    assert result.states.get("active", 0) > 0, "requests that were begun are carried out"


# --- a cell's database is set back while its instances are moved: every request has its end


MOVES = (ActionKind.STOP, ActionKind.MIGRATE, ActionKind.LIVE_MIGRATE, ActionKind.REBUILD)


def a_cell_forgets(seed: int) -> Plan:
    """The builds of this seed without any fault; moves; and the first cell's database is what it was before them."""
    plan = plan_of(seed).without_faults()
    builds = builds_of(plan, before_s=20.0)
    moves = [
        Order(
            at=30.0 + number * 0.05,
            action=Action.MOVE,
            verb=MOVES[number % len(MOVES)],
            host=number,
            uuid=f"f0000000-0000-4000-8000-0000000000{number:02}",
        )
        for number in range(8)
    ]
    copied = backups(29.9, f"cell_{plan.cells[0].name}", first=1)
    return in_order(
        plan,
        *(*builds, *copied, *moves, *set_back(copied, 30.7, 1.0)),
        computes=Faults(delay_min_s=1.0, delay_max_s=3.0),  # the moves are under way when their cell forgets them
        widenings=(Widening.CELL_RESTORED, Widening.FENCES),
        load_s=50.0,
    )


@pytest.mark.parametrize("seed", [1, *nightly(3)])
def test_every_request_has_its_end(seed: int) -> None:
    assert held(a_cell_forgets(seed)).counts


def a_cell_forgets_what_burnt_down(*, fenced: bool) -> Plan:
    """Builds on two services; one burns down, and the cell's database is set back to before it had any of them."""
    cell = Cell(name="cell0", conductors=1, services=(("s00", 1), ("s01", 1)), metal=())
    uuids = [f"a0000000-0000-4000-8000-00000000000{number}" for number in range(4)]
    builds = [Order(at=5.0, action=Action.BUILD, uuid=uuid, flavor="m1.tiny", project="red") for uuid in uuids]
    copied = backups(4.9, "cell_cell0", first=1)
    burns = Order(at=7.0 if fenced else 5.5, action=Action.DIE, service="s00")
    uuid = "f0000000-0000-4000-8000-000000000001"
    fence = Order(at=5.5, action=Action.MOVE, verb=FENCE, service="s00", seconds=10.0, uuid=uuid)
    orders = (*copied, *builds, *([fence] if fenced else []), burns, *set_back(copied, 6.0))
    plan = plan_of_case(1, (cell,), in_order(plan_of(1), *orders).orders, (), builds_s=8.0)
    return replace(plan, widenings=(Widening.CELL_RESTORED, Widening.FENCES), load_s=40.0)


@pytest.mark.parametrize("fenced", [False, True])
def test_a_forgotten_build_waits_for_the_fence_of_a_service_that_never_answers_about_it(*, fenced: bool) -> None:
    """Seed 71. Nothing else shows that its hosts do not run it."""
    result = held(a_cell_forgets_what_burnt_down(fenced=fenced))
    assert (result.states.get("building", 0) > 0) is not fenced, result.states


def a_cell_forgets_losses() -> Plan:
    """Hosts are reinstalled, and the cell's database is set back before their reports are judged."""
    cell = Cell(name="cell0", conductors=1, services=(("s00", 1), ("s01", 1)), metal=())
    uuids = [f"a0000000-0000-4000-8000-00000000000{number}" for number in range(4)]
    builds = [Order(at=5.0, action=Action.BUILD, uuid=uuid, flavor="m1.tiny", project="red") for uuid in uuids]
    copied = backups(15.0, "cell_cell0", first=1)
    later = replace(builds[0], at=15.1, uuid=builds[0].uuid.replace("a", "b"))  # whose order shows the set-back
    lost = [Order(at=15.4, action=Action.LOSE, service=service) for service in ("s00", "s01")]
    orders = (*builds, *copied, later, *lost, *set_back(copied, 15.5))
    plan = plan_of_case(1, (cell,), orders, (), builds_s=1.0)
    return replace(plan, widenings=(Widening.CELL_RESTORED,), load_s=40.0, breaker_limit=1)


def test_a_recovery_that_would_lose_more_than_the_limit_waits_for_an_operator() -> None:
    result = held(a_cell_forgets_losses(), event_log=EventLog(keep=True))
    assert any("accept cell0" in line for line in result.lines)
