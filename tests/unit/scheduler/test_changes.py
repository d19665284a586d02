"""The handler of operators' commands while its database is unavailable: each is retried or answered."""

from __future__ import annotations

from typing import Any, cast

import pytest

from bus.clock import SystemClock
from bus.consuming.outcome import Outcome, Received, Refuse, Retry
from bus.contracts.base import Message, Meta
from bus.contracts.objects import ObjectsChange
from bus.contracts.operations import AdminState, SetAdminState
from bus.faults import DatabaseUnavailable
from scheduler_worker.changes import RETRIES, ChangeHandler

CODE, REASON = "database.unavailable", "connection refused"
FENCE = SetAdminState(host="h1", state=AdminState.FENCED, by="ann")


class UnavailableRecord:
    """Refused commands, of a database that does not answer."""

    async def has(self, message_id: str) -> bool:
        raise DatabaseUnavailable(REASON)


@pytest.mark.parametrize(
    ("message", "attempt", "outcome"),
    [
        (FENCE, 0, Retry(CODE, REASON)),
        (FENCE, RETRIES, Refuse(CODE, REASON)),
        (ObjectsChange(who="ann", changes=()), 0, Refuse(CODE, REASON)),
    ],
)
async def test_a_command_is_retried_within_bounds_or_refused(message: Message, attempt: int, outcome: Outcome) -> None:
    unused = cast("Any", None)
    handler = ChangeHandler(
        *[unused] * 5,
        refused=cast("Any", UnavailableRecord()),
        finder=unused,
        clock=SystemClock(),
        warmup_s=0.0,
    )
    meta = Meta(id="m", cause="m", sent_at=1.0, attempt=attempt)
    received = Received(message=message, meta=meta, bus="api", queue="scheduler.changes")
    assert await handler([received]) == [outcome]
