"""The handler of operators' commands while its database is unavailable: a change is refused, a decision waits."""

from __future__ import annotations

from typing import Any, cast

import pytest

from bus.clock import SystemClock
from bus.consuming.outcome import Received, Refuse
from bus.contracts.base import Message, Meta
from bus.contracts.objects import ObjectsChange
from bus.contracts.operations import AdminState, SetAdminState
from bus.faults import DatabaseUnavailable
from scheduler_worker.changes import ChangeHandler
from scheduler_worker.fleet import Warmup
from tests.unit.scheduler.hosts import Hosts

REASON = "connection refused"


class UnavailableRecord:
    """Refused commands, of a database that does not answer."""

    async def find(self, message_id: str) -> Refuse | None:
        raise DatabaseUnavailable(REASON)


def handler() -> ChangeHandler:
    """A handler that reaches nothing but that record."""
    return ChangeHandler(
        *cast("Any", [None] * 5),
        refused=cast("Any", UnavailableRecord()),
        finder=cast("Any", None),
        warmup=Warmup(Hosts([]).selector, clock=SystemClock()),
    )


def received(message: Message) -> Received:
    return Received(message=message, meta=Meta(id="m", cause="m", sent_at=1.0), bus="api", queue="scheduler.changes")


async def test_a_change_of_objects_is_refused_at_once() -> None:
    change = received(ObjectsChange(who="ann", changes=()))
    assert await handler()([change]) == [Refuse(DatabaseUnavailable.code, REASON)]


async def test_a_decision_about_a_host_waits() -> None:
    with pytest.raises(DatabaseUnavailable):
        await handler()([received(SetAdminState(host="h1", state=AdminState.FENCED, by="ann"))])
