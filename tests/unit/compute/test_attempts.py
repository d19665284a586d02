"""Whether an order to destroy that spares a complete machine ends at the record, looks at the host, or destroys."""

from __future__ import annotations

from typing import Any

import pytest

from compute_sim.domain.attempts import DestroyVerdict, Entry, Phase, lost, on_destroy_unless_built

OURS, ANOTHERS = "deployment-1", "deployment-2"
RUNS = Entry(3, Phase.RUNNING, fence=0, deployment=OURS)
LOOK, BUILT = DestroyVerdict.LOOK, DestroyVerdict.BUILT


@pytest.mark.parametrize(
    ("entry", "attempt", "deployment", "verdict"),
    [
        (None, 3, OURS, LOOK),
        (RUNS, 3, OURS, BUILT),
        (RUNS, 2, OURS, None),
        (RUNS, 4, OURS, LOOK),  # the record is older than the machine that is meant
        (RUNS, 4, ANOTHERS, None),
        (RUNS, 3, ANOTHERS, None),
        (Entry(3, Phase.RUNNING, fence=3, deployment=OURS), 3, OURS, None),
        (lost(RUNS), 3, OURS, LOOK),
        (lost(RUNS), 3, ANOTHERS, LOOK),  # what is over was nobody's: the machine itself says whose it is
        (lost(RUNS), 2, OURS, None),
        (Entry(3, Phase.BUILDING, fence=0, deployment=OURS), 3, OURS, None),
        (Entry(3, Phase.BUILDING, fence=0, deployment=OURS), 4, OURS, None),
        (Entry(3, Phase.GONE, fence=3, deployment=OURS), 4, OURS, LOOK),
        (Entry(3, Phase.GONE, fence=3, deployment=OURS), 4, ANOTHERS, LOOK),
        (Entry(3, Phase.GONE, fence=5, deployment=OURS), 4, OURS, None),
    ],
)
def test_what_an_order_that_spares_a_complete_machine_does(
    entry: Any, attempt: int, deployment: str, verdict: DestroyVerdict | None
) -> None:
    assert on_destroy_unless_built(entry, attempt, deployment) is verdict
