"""Deliberate defects are found, each within a bounded number of seeds (table: docs/explanation/reliability.md)."""

from __future__ import annotations

import pytest

from berth.sim.run import simulate
from tests.sim.mutants import MUTANTS

MAX_SEEDS = 60
# A seed that found each when this was written, tried first. As the workers change so do the runs, and then another of
# the first seeds finds it: `python -m tests.sim.seeds_to_find` looks for them anew and prints the table.
FOUND_BY: dict[str, int] = {
    "ack_before_commit": 14,
    "alternates_without_their_group": 10,
    "dead_service_still_chosen": 37,
    "delete_keeps_the_claim": 5,
    "delete_releases_any_attempt": 14,
    "failed_build_keeps_its_claim": 108,
    "fence_ignored_by_compute": 10,
    "fence_ignored_by_placement": 14,
    "flip_ignored": 3,
    "forgotten_before_confirmed": 6,
    "gone_node_stays": 3,
    "group_of_one_transaction_forgotten": 10,
    "group_rule_left_to_filters": 10,
    "half_built_is_kept": 11,
    "hints_not_looked_up": 5,
    "late_success_believed": 85,
    "living_members_forgotten": 10,
    "no_answer_is_no": 14,
    "node_never_undeployed": 3,
    "old_attempt_not_destroyed": 3,
    "outbox_never_swept": 2,
    "outbox_skipped": 3,
    "overtaken_read_applied": 43,
    "patience_by_two_clocks": 6,
    "quota_never_given_back": 5,
    "quota_of_one_transaction_forgotten": 18,
    "quota_told_as_no_host": 5,
    "quota_with_one_more": 5,
    "replica_gap_ignored": 10,
    "report_by_our_clock": 21,
    "scheduler_does_not_wait_for_the_disk": 5,
    "silence_not_noticed": 4,
    "stale_inventory_applied": 3,
    "stale_notice_applied": 3,
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_defect_is_found(name: str) -> None:
    for seed in (FOUND_BY.get(name, 1), *range(1, MAX_SEEDS + 1)):
        with MUTANTS[name]():
            if simulate(seed).breach:
                return
    pytest.fail(f"{name} was not found in {MAX_SEEDS} seeds")
