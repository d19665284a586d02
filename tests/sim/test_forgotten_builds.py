"""Databases that forget, transfers they forget in the middle, and clients that wait for an answer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from bus.contracts.moves import MoveKind
from cell_conductor import engine
from cell_conductor.domain.events import InstanceEvent
from cell_conductor.domain.rules import OUTCOME_UNKNOWN
from cell_conductor.search import MachineSearch, Searched
from compute_sim.domain.faults import Faults
from lab.simulation.draw import plan_of
from lab.simulation.event_log import EventLog
from lab.simulation.plan import Action, Cell, FaultEvent, FaultType, Order, Plan
from lab.simulation.run import run, simulate
from lab.simulation.widening import DRAWS, Widening
from tests.kit.cases import nightly
from tests.sim.mutants_of_kinds import TRANSFERS_FOUND_BY
from tests.sim.plans import plan_of_case

# --- a cell's database is set back to before all its builds, which are judged as all others are


def builds_forgotten(seed: int) -> Plan:
    """The builds of this seed, in one cell that forgets them."""
    drawn = DRAWS[Widening.BUILDS_FORGOTTEN](random.Random(seed), plan_of(seed))
    orders = tuple(sorted(drawn.orders, key=lambda order: order.at))
    return replace(drawn, orders=orders, widenings=(Widening.BUILDS_FORGOTTEN,))


BEFORE_THE_SWEEP = 7  # a command came between the set-back and the sweep that noticed it


def test_it_holds() -> None:
    held = run(builds_forgotten(BEFORE_THE_SWEEP))
    assert held.breach == "", held.detail


# --- the schedulers' database is set back to before all requests, and their clients publish these again; what runs is


def requests_forgotten(seed: int) -> Plan:
    """The builds of this seed, in one cell whose schedulers forget them."""
    drawn = DRAWS[Widening.REQUESTS_FORGOTTEN](random.Random(seed), plan_of(seed))
    orders = tuple(sorted(drawn.orders, key=lambda order: order.at))
    return replace(drawn, orders=orders, widenings=(Widening.REQUESTS_FORGOTTEN,))


HOST_UNANNOUNCED = 18  # for longer than a request is retried: it ends as claim.stranded


def test_it_holds_with_forgotten_requests() -> None:
    held = run(requests_forgotten(HOST_UNANNOUNCED))
    assert held.breach == "", held.detail


# --- instances leave their cell for another one while everything fails: it holds


def transfers(seed: int) -> Plan:
    """The plan of this seed, and instances that move to another cell, or are unshelved there."""
    plan = plan_of(seed)
    drawn = DRAWS[Widening.TRANSFERS](random.Random(seed), plan)
    assert drawn is not plan, "it has one cell"
    orders = tuple(sorted(drawn.orders, key=lambda order: order.at))
    return replace(drawn, widenings=(*plan.widenings, Widening.TRANSFERS), orders=orders)


def test_it_holds_with_transfers() -> None:
    held = run(transfers(min(TRANSFERS_FOUND_BY.values())))
    assert held.breach == "", held.detail


# --- a database is set back to the middle of a move between cells: a cell's, or the schedulers'; all machines hold


# A departure below the numbers that schedulers had had was ignored, and the instance was in no cell.
NUMBERED_BELOW = 11
# `unshelvings_forgotten`. An unshelving is given up while the instance runs on a host which its record does not have.
OFFLOADED_BESIDE = 12
# `--only transfers-restored`. A backup had a machine in quarantine that had been taken off the list since: it stayed.
TAKEN_OFF_SINCE = 71008


def transfers_restored(seed: int) -> Plan:
    """The plan of this seed, with moves between cells, and set-backs."""
    plan = plan_of(seed)
    drawn = DRAWS[Widening.TRANSFERS_RESTORED](random.Random(seed), plan)
    assert drawn is not plan, "it has one cell"
    orders = tuple(sorted(drawn.orders, key=lambda order: order.at))
    return replace(drawn, widenings=(*plan.widenings, Widening.TRANSFERS_RESTORED), orders=orders)


def unshelvings_forgotten(seed: int) -> Plan:
    """The builds of this seed in one cell. Its database and the schedulers' are set back amid unshelvings that each try
    several hosts. Clients request the same once more just before, while their broker is away: schedulers have these
    requests when the unshelvings in doubt have been given up, and new ones are in doubt no more.
    """
    plan = plan_of(seed).without_faults()
    cell = replace(plan.cells[0], metal=())
    builds = [
        replace(one, at=5.0 + number * 0.1)
        for number, one in enumerate(order for order in plan.orders if order.action is Action.BUILD)
    ]

    def moves(verb: MoveKind, at: float, kind: int) -> list[Order]:
        move = Order(at=at, action=Action.MOVE, verb=verb)
        return [
            replace(move, at=at + n * 0.02, instance=one.uuid, uuid=f"f000000{kind}-0000-4000-8000-0000000000{n:02}")
            for n, one in enumerate(builds)
        ]

    copied = [
        Order(at=26.0, action=Action.BACKUP, service=schema, uuid=f"e0000000-0000-4000-8000-00000000000{n}")
        for n, schema in enumerate((f"cell_{cell.name}", "scheduler"))
    ]
    orders = (
        *builds,
        *moves(MoveKind.SHELVE, 18.0, 1),
        *moves(MoveKind.UNSHELVE, 25.0, 2),
        *moves(MoveKind.UNSHELVE, 29.2, 3),
        *copied,
        *(replace(one, at=30.0, action=Action.RESTORE, seconds=0.5) for one in copied),
    )
    return replace(
        plan,
        cells=(cell,),
        metal=None,
        computes=Faults(delay_min_s=0.2, delay_max_s=2.0, fail_rate=0.5, change_max_s=0.5),
        orders=tuple(sorted(orders, key=lambda order: order.at)),
        fault_events=(FaultEvent(at=29.0, kind=FaultType.BROKER, target="api", seconds=36.0),),
        widenings=(Widening.TRANSFERS_RESTORED,),
        load_s=80.0,
    )


def returns_forgotten(seed: int) -> Plan:
    """Builds of this seed in two cells. Instances are moved to the other cell, back, and once more; meanwhile the first
    cell's database is set back to between the first two moves. Half of them are deleted in the end.
    """
    plan = plan_of(seed).without_faults()
    cells = tuple(replace(cell, metal=()) for cell in plan.cells[:2])
    drawn = [order for order in plan.orders if order.action is Action.BUILD][:12]
    alone = {"group": None, "apart_from": (), "together_with": (), "count": 1, "min_count": None}
    builds = [replace(one, at=5.0 + number * 0.1, **alone) for number, one in enumerate(drawn)]
    moves = [
        Order(
            at=at + number * 0.05,
            action=Action.MOVE,
            verb=MoveKind.MIGRATE,
            instance=one.uuid,
            uuid=f"f000000{seed}-000{kind}-4000-8000-0000000000{number:02}",
        )
        for kind, at in ((1, 15.0), (2, 20.0), (3, 23.5))
        for number, one in enumerate(builds)
    ]
    uuid = "e0000000-0000-4000-8000-000000000001"
    copied = Order(at=18.6, action=Action.BACKUP, service=f"cell_{cells[0].name}", uuid=uuid)
    set_back = replace(copied, at=25.0, action=Action.RESTORE, seconds=0.5)
    deletes = [replace(one, at=60.0, action=Action.DELETE) for one in builds[::2]]
    return replace(
        plan,
        cells=cells,
        metal=None,
        computes=Faults(delay_min_s=0.1, delay_max_s=0.8, change_max_s=0.4),
        orders=tuple(sorted((*builds, copied, *moves, set_back, *deletes), key=lambda order: order.at)),
        widenings=(Widening.TRANSFERS_RESTORED,),
        load_s=80.0,
    )


def moved_since_the_backup(seed: int, verb: MoveKind) -> Plan:
    """The builds of this seed in one cell. They are unshelved, or moved and not confirmed yet, between a backup and the
    restore of the cell and of the schedulers. When nothing is in doubt any more the same is requested, three times.
    """
    plan = plan_of(seed).without_faults()
    cell = replace(plan.cells[0], metal=())
    drawn = [order for order in plan.orders if order.action is Action.BUILD]
    builds = [replace(one, at=5.0 + number * 0.1) for number, one in enumerate(drawn)]
    requests = [(27.0, verb), *((at, verb) for at in (70.0, 78.0, 86.0))]
    if verb is MoveKind.UNSHELVE:
        requests = [(14.0, MoveKind.SHELVE), (20.0, MoveKind.OFFLOAD), *requests]
    moves = [
        Order(
            at=at + n * 0.02,
            action=Action.MOVE,
            verb=kind,
            instance=one.uuid,
            uuid=f"f000000{number}-0000-4000-8000-0000000000{n:02}",
        )
        for number, (at, kind) in enumerate(requests)
        for n, one in enumerate(builds)
    ]
    copied = [
        Order(at=26.0, action=Action.BACKUP, service=schema, uuid=f"e0000000-0000-4000-8000-00000000000{n}")
        for n, schema in enumerate((f"cell_{cell.name}", "scheduler"))
    ]
    restored = [replace(one, at=31.0, action=Action.RESTORE, seconds=0.5) for one in copied]
    return replace(
        plan,
        cells=(cell,),
        metal=None,
        computes=Faults(delay_min_s=0.2, delay_max_s=1.0, change_max_s=0.5),
        orders=tuple(sorted((*builds, *moves, *copied, *restored), key=lambda order: order.at)),
        widenings=(Widening.TRANSFERS_RESTORED,),
        load_s=100.0,
    )


MOVED_SINCE = [(2, MoveKind.UNSHELVE), (2, MoveKind.MIGRATE), *nightly((5, MoveKind.UNSHELVE))]


@pytest.mark.parametrize(("seed", "verb"), MOVED_SINCE)
def test_what_was_moved_since_the_backup_gets_no_second_machine(seed: int, verb: MoveKind) -> None:
    """By its record it was at rest, and the first request after the restore was begun without a search."""
    held = run(moved_since_the_backup(seed, verb))
    assert held.breach == "", held.detail


@contextmanager
def moves_unsearched() -> Iterator[None]:
    """Moves are begun after a restore as if nothing had been forgotten."""

    async def before(_search: MachineSearch, requests: Sequence[InstanceEvent]) -> dict[str, Searched]:
        return {one.uuid: Searched() for one in requests}

    with patch.object(MachineSearch, "before", before):
        yield


def test_a_move_after_a_restore_without_a_search_is_found() -> None:
    with moves_unsearched():
        assert run(moved_since_the_backup(2, MoveKind.UNSHELVE)).breach == "never_two_running"


@pytest.mark.parametrize("seed", [1, *nightly(2)])
def test_what_has_come_back_to_a_cell_that_has_forgotten_it_is_deleted(seed: int) -> None:
    """By its record it had left, and a delete was answered with that departure for ever."""
    held = run(returns_forgotten(seed))
    assert held.breach == "", held.detail


def test_it_holds_with_restored_transfers() -> None:
    held = run(transfers_restored(NUMBERED_BELOW))
    assert held.breach == "", held.detail


def test_it_holds_with_forgotten_unshelvings() -> None:
    held = run(unshelvings_forgotten(OFFLOADED_BESIDE))
    assert held.breach == "", held.detail


def test_machines_in_quarantine_are_read_again_after_a_set_back() -> None:
    held = run(plan_of(TAKEN_OFF_SINCE, {Widening.TRANSFERS_RESTORED}))
    assert held.breach == "", held.detail


def test_an_offload_without_a_search_is_found() -> None:
    """The next request would find the machine."""
    with moves_unsearched(), patch.object(engine, "is_searched", lambda _instance: False):
        assert run(unshelvings_forgotten(OFFLOADED_BESIDE)).breach == "never_two_running"


# --- clients wait for an answer for a time only, while a server is away for longer: every request on record has its end


def requesters_give_up(seed: int) -> Plan:
    """The builds of this seed; all clients give up while placement's database is unavailable. Half of the builds are
    deleted later by a client that repeats its request.
    """
    plan = plan_of(seed).without_faults()
    builds = [
        replace(one, at=20.0 + number * 0.01, waits_s=2.0, gives_up=True)
        for number, one in enumerate(order for order in plan.orders if order.action is Action.BUILD)
    ]
    deletes = [replace(one, at=36.0, action=Action.DELETE, waits_s=0.5, gives_up=False) for one in builds[::2]]
    outage = FaultEvent(at=19.9, kind=FaultType.DATABASE, target="placement", seconds=8.0)
    return replace(
        plan, orders=(*builds, *deletes), fault_events=(outage,), widenings=(Widening.DEADLINES,), load_s=50.0
    )


@pytest.mark.parametrize("seed", [1, *nightly(3)])
def test_every_request_on_record_has_its_end(seed: int) -> None:
    held = run(requesters_give_up(seed))
    assert held.breach == "", held.detail
    assert held.states.get("active", 0) > 0, "requests that were begun are carried out"


# --- a cell's database is set back while its instances are moved: every request has its end


MOVES = (MoveKind.STOP, MoveKind.MIGRATE, MoveKind.LIVE_MIGRATE, MoveKind.REBUILD)


def a_cell_forgets(seed: int) -> Plan:
    """The builds of this seed without any fault; moves; and the first cell's database is what it was before them."""
    plan = plan_of(seed).without_faults()
    builds = [order for order in plan.orders if order.action is Action.BUILD and order.at < 20.0]
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
    schema, uuid = f"cell_{plan.cells[0].name}", "e0000000-0000-4000-8000-000000000001"
    copied = Order(at=29.9, action=Action.BACKUP, service=schema, uuid=uuid)
    set_back = Order(at=30.7, action=Action.RESTORE, service=schema, uuid=uuid, seconds=1.0)
    orders = (*builds, copied, *moves, set_back)
    return replace(
        plan,
        computes=Faults(delay_min_s=1.0, delay_max_s=3.0),  # the moves are under way when their cell forgets them
        orders=tuple(sorted(orders, key=lambda order: order.at)),
        widenings=(Widening.CELL_RESTORED, Widening.FENCES),
        load_s=50.0,
    )


@pytest.mark.parametrize("seed", [1, *nightly(3)])
def test_every_request_has_its_end(seed: int) -> None:
    held = run(a_cell_forgets(seed))
    assert held.breach == "", held.detail
    assert held.counts


@pytest.mark.parametrize("seed", [20, *nightly(7, 25)])
def test_builds_and_deletes_that_a_cell_has_forgotten_have_an_end(seed: int) -> None:
    """Found when a restored database was no excuse for no end: builds (7, 20) and deletes (20, 25) waited for ever."""
    held = simulate(seed, {Widening.CELL_RESTORED})
    assert held.breach == "", held.detail


def a_cell_forgets_what_burnt_down() -> Plan:
    """Builds on two services; one burns down, and the cell's database is set back to before it had any of them."""
    cell = Cell(name="cell0", conductors=1, services=(("s00", 1), ("s01", 1)), metal=())
    uuids = [f"a0000000-0000-4000-8000-00000000000{number}" for number in range(4)]
    builds = [Order(at=5.0, action=Action.BUILD, uuid=uuid, flavor="m1.tiny", project="red") for uuid in uuids]
    uuid = "e0000000-0000-4000-8000-000000000001"
    copied = Order(at=4.9, action=Action.BACKUP, service="cell_cell0", uuid=uuid)
    burns = Order(at=5.5, action=Action.DIE, service="s00")
    set_back = replace(copied, at=6.0, action=Action.RESTORE, seconds=0.5)
    plan = plan_of_case(1, (cell,), (copied, *builds, burns, set_back), (), builds_s=8.0)
    return replace(plan, widenings=(Widening.CELL_RESTORED,), load_s=40.0)


def test_a_forgotten_build_ends_though_a_service_never_answers_about_it() -> None:
    """Seed 71: it waited for a service that had burnt down, for longer than a run lasted."""
    held = run(a_cell_forgets_what_burnt_down(), event_log=EventLog(keep=True))
    assert held.breach == "", held.detail
    assert any(OUTCOME_UNKNOWN in line for line in held.lines), "none was on the service that burnt down"


@pytest.mark.parametrize("seed", [245, *nightly(249)])
def test_what_was_claimed_for_a_lost_record_is_given_back_after_an_unknown_delete(seed: int) -> None:
    held = simulate(seed, {Widening.MOVES, Widening.DRAINS})
    assert held.breach == "", held.detail
