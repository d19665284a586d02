"""Deliberate defects of moves are found: each by the seed on record, or another of the first with moves in it.

The defects that no seed has found are found by a test of the table of states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from cell_conductor.domain.instance import State
from lab.simulation.draw import plan_of
from lab.simulation.run import simulate
from lab.simulation.widening import Widening
from tests.sim.mutants_of_moves import FOUND_BY, FOUND_BY_THE_TABLE, MUTANTS_OF_MOVES
from tests.unit.conductor import test_moves as moves

MOVES = frozenset({Widening.MOVES})
MAX_SEEDS = 30
MUTANTS = {mutant.__name__: mutant for mutant in MUTANTS_OF_MOVES}
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


def test_each_of_twenty_six_defects_is_found() -> None:
    assert len(FOUND_BY) + len(TESTS) == len(MUTANTS) + len(OF_THE_TABLE) == 26
    assert (set(FOUND_BY), set(TESTS)) == (set(MUTANTS), set(OF_THE_TABLE))
