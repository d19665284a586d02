"""Advice of the commands about drains, where instances are left."""

from __future__ import annotations

import pytest

from berth.commands.common import Stop
from berth.commands.drain import _ended
from bus.contracts.drains import DrainProgress, DrainState, DrainTarget
from bus.contracts.moves import MoveKind

DRAIN, INSTANCE = (f"{letter}0000000-0000-4000-8000-000000000000" for letter in "da")


def test_a_drain_that_was_stopped_is_resumed() -> None:
    seen = DrainProgress(
        id=DRAIN, host="h", target=DrainTarget.HOST, kind=MoveKind.MIGRATE, by="ann", reason="fan",
        state=DrainState.ENDED, code="drain.stopped", started_at=0.0, deadline_at=None, per_minute=None, at_once=4,
        hosts=1, planned=3,
        counts={"waiting": 1}, not_begun=(INSTANCE,),
    )  # fmt: skip
    with pytest.raises(Stop, match=f"1 instance not moved; see berth drains resume {DRAIN}"):
        _ended(seen, as_json=False)
