"""Deliberate defects are found in plans made for them: of deadlines, drains, fences, others' actions and forgotten
requests, and those that need two rare things at once.

Those of moves: each by the seed on record, or another of the first with moves in it, or by a test of the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from bus.consuming import consumer, in_flight
from cell_conductor.rules import action_events as move_events
from cell_conductor.rules import cell_transfer_rules as departure_rules
from cell_conductor.state.instance import State
from cell_conductor.state.step import Step
from lab.simulation import drain_watch
from lab.simulation.draw import plan_of
from lab.simulation.moves import DRAIN
from lab.simulation.plan import Action, Cell, Order, Plan
from lab.simulation.run import run, simulate
from lab.simulation.widening import Widening
from scheduler_worker.drain import drain_controller as drains
from scheduler_worker.drain.drain_steps import NextMoves
from scheduler_worker.drain.host_emptier import HostEmptier
from scheduler_worker.records.drain_record import BegunMoves
from scheduler_worker.store.memory_units import MemoryUnit
from scheduler_worker.upkeep.silent_requests import SilentRequests
from tests.contract.cell_conductor import test_instances as cell_stores
from tests.sim import mutants_of_cases as defects
from tests.sim import mutants_of_recoveries as recoveries
from tests.sim.mutants import Mutant
from tests.sim.mutants_of_disks import unwatched
from tests.sim.mutants_of_moves import FOUND_BY, FOUND_BY_THE_TABLE, MUTANTS_OF_MOVES
from tests.sim.plans import held, plan_of_case
from tests.sim.test_fences import DRAINS, SEED, hosts_are_fenced, hosts_burn_while_fenced
from tests.sim.test_forgotten_builds import (
    a_cell_forgets,
    a_cell_forgets_losses,
    requesters_give_up,
    returns_forgotten,
    service_away,
)
from tests.sim.test_other_tenants import hosts_come_back, machines_are_lost_at_once, nodes_come_again
from tests.unit.cell_conductor import test_moves as moves
from tests.unit.cell_conductor import test_reconcile as reconciled
from tests.unit.cell_conductor import test_recovery as recovering
from tests.unit.compute_agent import test_outdated_orders as outdated_orders


def requests_end_with_their_requesters() -> AbstractContextManager[Any]:
    """A request that was begun is acknowledged as done when its client has stopped waiting.

    Without the watch of builds, which carries it on, and so mends this.
    """
    patches = ExitStack()
    for place in (in_flight, consumer):  # as it comes, and as it is handed over once more
        patches.enter_context(patch.object(place, "ON_RECORD", frozenset()))
    patches.enter_context(patch.object(SilentRequests, "_open_builds", unwatched))
    return patches


def moves_of_drains_are_not_followed() -> AbstractContextManager[Any]:
    """The end of a move that a drain has begun is never read."""

    async def begun(self: MemoryUnit, drain: str | None, now: float) -> BegunMoves:
        made = [one for one, _ in self._table.actions.values() if one.drain is not None and drain in (None, one.drain)]
        return BegunMoves(len(made), max((one.created_at for one in made), default=0.0))

    return patch.object(MemoryUnit, "begun", begun)


def drains_never_end() -> AbstractContextManager[Any]:
    """A drain of which nothing is left stays as it is."""
    return patch.object(drains, "end_of", lambda *_, **__: None)


def drains_end_without_a_look_at_their_hosts() -> AbstractContextManager[Any]:
    """A drain is done as soon as nothing is left that it can move."""
    step = HostEmptier.step

    async def seen(self: HostEmptier, *arguments: Any, **named: Any) -> NextMoves:
        return NextMoves((await step(self, *arguments, **named)).moves)

    return patch.object(HostEmptier, "step", seen)


def moves_of_drains_have_no_bound() -> AbstractContextManager[Any]:
    """Requests are put on record without a look at those that are there."""

    async def begun(self: MemoryUnit, drain: str | None, now: float) -> BegunMoves:
        return BegunMoves()

    return patch.object(MemoryUnit, "begun", begun)


def cells_are_not_queried() -> AbstractContextManager[Any]:
    """A scheduler waits for the end of a request however long.

    Where a recovery ends none, which mends this.
    """

    async def look(self: SilentRequests) -> None:
        return None

    patches = ExitStack()
    patches.enter_context(recoveries.requests_not_ended())
    patches.enter_context(patch.object(SilentRequests, "look", look))
    return patches


def lost_requests_are_not_ended() -> AbstractContextManager[Any]:
    """A cell that has no record of a request does not answer.

    Where a recovery ends none, which mends this.
    """
    right = departure_rules.answer_query

    def answer(instance: Any, event: Any, context: Any) -> Step:
        answered = right(instance, event, context)
        is_lost = any(getattr(one, "code", "") == move_events.ACTION_LOST for one in answered.commands)
        return Step(instance) if is_lost else answered

    patches = ExitStack()
    patches.enter_context(recoveries.requests_not_ended())
    patches.enter_context(patch.object(departure_rules, "answer_query", answer))
    return patches


AGREE = "hosts_instances_allocations_agree"
DRAINED = partial(plan_of, SEED, DRAINS)
DEFECTS: list[tuple[Callable[[], Plan], Mutant, str]] = [
    (partial(requesters_give_up, 1), requests_end_with_their_requesters, "liveness"),
    (DRAINED, drains_never_end, "drains_end"),
    (DRAINED, moves_of_drains_are_not_followed, "drains_end"),
    (partial(hosts_are_fenced, 1), defects.fence_never_lifted, "fences_are_lifted"),
    (partial(hosts_are_fenced, 1), defects.a_host_never_shown_to_be_empty, "fences_are_lifted"),
    (partial(hosts_are_fenced, 1), defects.delete_on_a_fenced_host_keeps_its_claim, AGREE),
    (partial(hosts_are_fenced, 9), defects.choice_never_released, "replica_agrees"),
    # Where a host comes back soon, nothing else shows it; one that has burnt down stays fenced.
    (partial(hosts_burn_while_fenced, 1), defects.fence_acknowledged_and_not_recorded, "fences_are_on_record"),
    (partial(hosts_come_back, lost=True), defects.failed_machine_left_running, AGREE),
    (partial(hosts_come_back, lost=False), defects.survived_machine_kept_for_good, AGREE),
    (machines_are_lost_at_once, defects.breaker_never_trips, "breaker_holds"),
    (nodes_come_again, defects.overtaken_404_accepted, "removed_on_fresh_word"),
    (partial(a_cell_forgets, 2), cells_are_not_queried, "one_terminal_event"),
    (partial(a_cell_forgets, 2), lost_requests_are_not_ended, "one_terminal_event"),
]


AWAY = partial(service_away, 7)
DEFECTS += [
    (AWAY, recoveries.barrier_opens_one_service_early, "lost_was_lost"),
    (AWAY, recoveries.absent_hosts_have_nothing, "lost_was_lost"),
    (AWAY, recoveries.blocked_for_good, "liveness"),
    (a_cell_forgets_losses, recoveries.losses_need_no_word, "breaker_holds"),
    (partial(a_cell_forgets, 2), recoveries.allocations_not_restated, "claims_have_owners"),
    (partial(returns_forgotten, 1), recoveries.the_top_is_not_heard, "built_once"),
]


@pytest.mark.parametrize(("plan", "mutant", "breach"), DEFECTS, ids=[one.__name__ for _, one, _ in DEFECTS])
def test_a_defect_is_found(plan: Callable[[], Plan], mutant: Mutant, breach: str) -> None:
    with mutant():
        assert run(plan()).breach == breach


def a_build_comes_to_a_host_that_is_being_drained(builds_s: float = 0.5) -> Plan:
    """Builds every millisecond before a drain: of some, the claim comes after its plan. builds_s: a build takes."""
    cell = Cell(name="cell0", conductors=1, services=(("s00", 1), ("s01", 6)), metal=())
    uuids = [f"a0000000-0000-4000-8000-0000000000{number:02}" for number in range(34)]
    build = Order(at=5.0, action=Action.BUILD, flavor="m1.tiny", project="red")
    early = [replace(build, uuid=uuid) for uuid in uuids[:14]]
    late = [replace(build, uuid=uuid, at=40.0 + number * 0.001) for number, uuid in enumerate(uuids[14:])]
    uuid = "d0000000-0000-4000-8000-000000000001"
    drain = Order(at=40.03, action=Action.MOVE, verb=DRAIN, service="s00", uuid=uuid, seconds=60.0)
    plan = plan_of_case(1, (cell,), (*early, *late, drain), (), builds_s=builds_s)
    return replace(plan, widenings=(Widening.DRAINS,), drains_by_schedulers=True, load_s=110.0)


def test_a_drain_that_does_not_look_at_its_hosts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch grants a move that was dispatched before ten seconds; nothing moves here but by the drain."""
    monkeypatch.setattr(drain_watch, "LOOKED_S", 0.1)
    held(a_build_comes_to_a_host_that_is_being_drained())
    are_built = a_build_comes_to_a_host_that_is_being_drained(builds_s=30.0)
    held(are_built)
    with drains_end_without_a_look_at_their_hosts():
        assert run(are_built).breach == "drained_hosts_hold_nothing"


def test_a_drain_that_begins_more_moves_than_it_may_is_found() -> None:
    with moves_of_drains_have_no_bound():
        assert run(a_build_comes_to_a_host_that_is_being_drained(builds_s=30.0)).breach == "drains_keep_their_bound"


MOVES = frozenset({Widening.MOVES})
NODE_POWER = frozenset({Widening.NODE_POWER})


# {defect: the kind of the world, and a seed that finds it}
RARE_FOUND_BY: dict[Mutant, tuple[frozenset[Widening], int]] = {
    defects.old_error_ends_a_power_order: (NODE_POWER, 3),
}


@pytest.mark.parametrize("mutant", RARE_FOUND_BY, ids=lambda mutant: mutant.__name__)
def test_a_defect_of_a_rare_pair_is_found(mutant: Mutant) -> None:
    kinds, seed = RARE_FOUND_BY[mutant]
    held(plan_of(seed, kinds))
    with mutant():
        assert simulate(seed, kinds).breach


# --- defects of a recovery that no plan shows, as another part mends what they do: each by a test of its part


IS_LATER = recovering.test_what_has_come_later_than_the_record_is_recorded_and_placement_follows
BY_ONE_TEST: list[tuple[Mutant, Callable[[], Any]]] = [
    (recoveries.blocked_taken, recovering.test_what_is_blocked_is_judged_by_no_report_and_begins_nothing),
    (recoveries.busy_ignored, partial(reconciled.test_what_is_being_changed_is_waited_for, None)),
    (recoveries.incarnation_not_raised, IS_LATER),
    (recoveries.numbers_not_raised, IS_LATER),
    (
        recoveries.older_machine_chosen,
        recovering.test_the_older_of_two_machines_stays_and_is_quarantined_when_it_is_reported,
    ),
    (recoveries.requests_not_ended, recovering.test_a_request_of_which_the_end_is_lost_ends),
    (recoveries.fences_not_told, recovering.test_a_fenced_host_counts_as_empty),
]


@pytest.mark.parametrize(("mutant", "test"), BY_ONE_TEST, ids=[one.__name__ for one, _ in BY_ONE_TEST])
def test_a_defect_of_a_recovery_is_found_by_a_test_of_its_part(mutant: Mutant, test: Callable[[], Any]) -> None:
    def tried() -> None:
        if (running := test()) is not None:
            asyncio.run(running)

    tried()
    with mutant(), pytest.raises((AssertionError, IndexError, ValueError)):
        tried()


def test_each_defect_of_a_recovery_is_found() -> None:
    found = {one for _, one, _ in DEFECTS} | {one for one, _ in BY_ONE_TEST}
    assert found >= set(recoveries.MUTANTS_OF_RECOVERIES)


# --- defects of moves: each by the seed on record, or another of the first with moves in it


MAX_SEEDS = 30
MUTANTS = {mutant.__name__: mutant for mutant in MUTANTS_OF_MOVES}


async def an_old_conductor_commands_nothing() -> None:
    """With a command, after another conductor has queried by a later incarnation."""
    order = outdated_orders.DESTROY
    await outdated_orders.test_an_order_is_taken_unless_it_is_by_a_lower_incarnation(order, 2, 1, is_taken=False)


OF_THE_TABLE = {mutant.__name__: mutant for mutant in FOUND_BY_THE_TABLE}
TESTS: dict[str, Callable[[], None]] = {
    "migration_of_a_deleted_instance_forgotten": partial(
        moves.test_a_delete_in_every_state_destroys_both_and_releases_both, "resized"
    ),
    "migration_released_only_if_its_claim_was_answered": partial(
        moves.test_a_delete_after_a_refused_claim_releases_both_because_a_copy_may_have_succeeded, deleted_first=False
    ),
    "delete_does_not_await_the_destination": partial(
        moves.test_a_delete_in_every_state_destroys_both_and_releases_both, "finishing"
    ),
    "machine_under_change_not_wanted": partial(
        moves.test_a_machine_that_is_being_changed_is_wanted_where_it_is, State.RESTARTING
    ),
    "late_answers_accepted": moves.test_a_source_that_does_not_hand_over_is_started_again,
    "undone_in_place_keeps_the_new_size": partial(
        moves.test_a_resize_that_failed_in_place_is_taken_back_before_the_next_host_is_commanded, answered=False
    ),
    "reverted_without_its_source": moves.test_a_revert_queries_for_its_source_first_and_gives_nothing_up,
    "stopped_machine_started_by_its_move": moves.test_a_stopped_machine_is_stopped_where_it_has_been_moved_to,
    "old_incarnation_accepted": lambda: asyncio.run(an_old_conductor_commands_nothing()),
    "mark_on_an_unflushed_message": lambda: asyncio.run(
        cell_stores.test_a_crash_of_the_database_never_leaves_it_behind_what_was_stated((True, False))
    ),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_defect_of_moves_is_found(name: str) -> None:
    with_moves = [seed for seed in range(1, 4 * MAX_SEEDS) if Widening.MOVES in plan_of(seed, MOVES).widenings]
    breach = ""
    for seed in (FOUND_BY[name], *with_moves[:MAX_SEEDS]):
        with MUTANTS[name]():
            breach = simulate(seed, MOVES).breach
        if breach:
            break
    assert breach, f"{name} was not found in {MAX_SEEDS} seeds"


@pytest.mark.parametrize("seed", sorted(set(FOUND_BY.values())))
def test_without_a_defect_the_same_seeds_find_nothing(seed: int) -> None:
    result = simulate(seed, MOVES)
    assert result.breach == "", result.detail


@pytest.mark.parametrize("name", sorted(OF_THE_TABLE))
def test_a_defect_that_no_seed_finds_is_found_by_a_test_of_the_table(name: str) -> None:
    TESTS[name]()
    with OF_THE_TABLE[name](), pytest.raises(AssertionError):
        TESTS[name]()


def test_each_of_twenty_eight_defects_is_found() -> None:
    assert len(FOUND_BY) + len(TESTS) == len(MUTANTS) + len(OF_THE_TABLE) == 28
    assert (set(FOUND_BY), set(TESTS)) == (set(MUTANTS), set(OF_THE_TABLE))
