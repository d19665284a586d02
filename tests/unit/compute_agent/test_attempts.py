"""Whether an order to destroy that spares a complete machine ends at the record, looks at the host, or destroys."""

from __future__ import annotations

from typing import Any

import pytest

from compute_agent.records.attempt import AttemptPhase, DestroyAction, HostAttempt, lost, on_destroy_if_incomplete

OWN, FOREIGN = "database-1", "database-2"
RUNS = HostAttempt(3, AttemptPhase.RUNNING, max_ended_attempt=0, database_id=OWN)
LOOK, BUILT = DestroyAction.VERIFY, DestroyAction.BUILT


@pytest.mark.parametrize(
    ("entry", "attempt", "database_id", "action"),
    [
        (None, 3, OWN, LOOK),
        (RUNS, 3, OWN, BUILT),
        (RUNS, 2, OWN, None),
        (RUNS, 4, OWN, LOOK),  # the record is older than the machine that is meant
        (RUNS, 4, FOREIGN, None),
        (RUNS, 3, FOREIGN, None),
        (HostAttempt(3, AttemptPhase.RUNNING, max_ended_attempt=3, database_id=OWN), 3, OWN, None),
        (lost(RUNS), 3, OWN, LOOK),
        (lost(RUNS), 3, FOREIGN, LOOK),  # what is over was nobody's: the machine itself says whose it is
        (lost(RUNS), 2, OWN, None),
        (HostAttempt(3, AttemptPhase.BUILDING, max_ended_attempt=0, database_id=OWN), 3, OWN, None),
        (HostAttempt(3, AttemptPhase.BUILDING, max_ended_attempt=0, database_id=OWN), 4, OWN, None),
        (HostAttempt(3, AttemptPhase.GONE, max_ended_attempt=3, database_id=OWN), 4, OWN, LOOK),
        (HostAttempt(3, AttemptPhase.GONE, max_ended_attempt=3, database_id=OWN), 4, FOREIGN, LOOK),
        (HostAttempt(3, AttemptPhase.GONE, max_ended_attempt=5, database_id=OWN), 4, OWN, None),
    ],
)
def test_what_an_order_that_spares_a_complete_machine_does(
    entry: Any, attempt: int, database_id: str, action: DestroyAction | None
) -> None:
    assert on_destroy_if_incomplete(entry, attempt, database_id) is action
