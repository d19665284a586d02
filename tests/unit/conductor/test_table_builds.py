"""The instance state machine: builds, their alternates, how they end, and queries about them."""

from __future__ import annotations

from msgspec.structs import replace

from cell_conductor.domain.instance import State
from tests.unit.conductor.scenario import (
    RELEASED,
    announced,
    failed,
    host,
    queried,
    run,
    spawns,
)

# --- The instance state machine: builds, their alternates, and how they end.


def test_what_failed_and_was_forgotten_above_is_built_when_it_is_requested_anew() -> None:
    """Schedulers forget a failed build a day before its cell does: the new one stayed scheduled, and held its claim."""
    over = run(queried(hosts=1), failed(), RELEASED).instance
    copy = run(queried(), start=over)
    assert (copy.instance, spawns(copy)) == (over, []), "a copy of the same request"
    anew = run(replace(queried(), requested_at=9e5, at=9e5), start=over)
    assert spawns(anew) == [(1, host(1))] and anew.instance.state is State.BUILDING
    assert not anew.instance.history and not anew.instance.answered and not anew.instance.code
    (event,) = announced(anew)
    assert event.sequence == over.sequence, "higher than all that was announced of it"
