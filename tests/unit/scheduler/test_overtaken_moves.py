"""A request whose instance changes between the choice and the write: tried again, and in the end refused."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Outcome
from bus.contracts.base import Refusal
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.moves import MoveEvent, MoveKind, MoveRequest, MoveState
from scheduler_worker.domain.builds import NewBuild, RecordedBuild
from scheduler_worker.domain.delivery import RETRIES, RequestDelivery
from scheduler_worker.domain.moves import CHANGED
from scheduler_worker.domain.recorded_moves import InstanceRecord, PendingMove
from scheduler_worker.moves import MoveEngine
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_table import MemoryBuildTable
from tests.kit.claims import BookClaims
from tests.kit.sent import Sent
from tests.unit.scheduler.hosts import PLENTY, Hosts

INSTANCE = "a0000000-0000-4000-8000-000000000000"
MOVE = "d0000000-0000-4000-8000-000000000000"
OTHER = "b0000000-0000-4000-8000-000000000000"  # another request about it, which ends meanwhile


class Contended(MemoryBuilds):
    """A store in which the other request ends after the engine has read the records, and before it locks them."""

    def __init__(self) -> None:
        super().__init__(MemoryBuildTable(SystemClock()).session())
        self.sent = Sent()
        self.publish_through(self.sent)  # type: ignore[arg-type]
        self.operations = 0

    def operation(self) -> Any:
        return self._after_another(super().operation())

    @asynccontextmanager
    async def _after_another(self, mine: Any) -> AsyncIterator[Any]:
        self.operations += 1
        if self.operations == 2:
            await self.put(InstanceRecord(instance_uuid=INSTANCE))
        async with mine as unit:
            yield unit

    async def put(self, record: InstanceRecord) -> None:
        async with super().operation() as unit:
            await unit.put_instances([record])


class Follower:
    """A replica that is as new as it gets."""

    async def refresh(self, *, timeout_s: float) -> bool:
        return True


@pytest.fixture
async def store() -> Contended:
    made = Contended()
    request = BuildRequest(instance_uuid=INSTANCE, flavor="m1.small", project_id="p")
    build = RecordedBuild(
        instance_uuid=INSTANCE, project_id="p", state=BuildState.ACTIVE, sequence=9, terminal=True, cell="c1", host="h0"
    )
    async with made.unit() as unit:
        await unit.insert([NewBuild(request=request, digest=b"1", build=build)], 1.0)
    await made.put(InstanceRecord(instance_uuid=INSTANCE, under_way=OTHER))
    return made


async def outcome_of(store: Contended, delivery: int) -> Outcome:
    hosts, clock = Hosts([PLENTY] * 2), SystemClock()
    engine = MoveEngine(store, BookClaims(), hosts.selector, Follower(), clock=clock, rng=random.Random(5))
    move = MoveRequest(request_id=MOVE, instance_uuid=INSTANCE, project_id="p", kind=MoveKind.STOP)
    pending = PendingMove(
        position=0,
        request=move,
        digest=b"2",
        taken_at=clock.time(),
        delivery=RequestDelivery(attempt=delivery, last=delivery >= RETRIES),
    )
    return (await engine.process([pending]))[0]


async def test_a_request_whose_instance_changed_meanwhile_is_tried_again_and_nothing_is_written(
    store: Contended,
) -> None:
    for delivery in range(RETRIES):
        store.operations = 0
        await store.put(InstanceRecord(instance_uuid=INSTANCE, under_way=OTHER))
        assert await outcome_of(store, delivery) == CHANGED
    assert store.sent.rows == []


async def test_the_last_delivery_of_a_request_whose_instance_changed_is_refused_and_no_dead_letter(
    store: Contended,
) -> None:
    """Seed 1795360297: it was found busy, and the other request ended before the records were locked."""
    refusal = Refusal(code=CHANGED.code, reason=CHANGED.reason)
    assert await outcome_of(store, RETRIES) == Done(reply=refusal)
    ((_, (row,)),) = store.sent.rows
    assert isinstance(row.message, MoveEvent)
    assert (row.message.state, row.message.terminal, row.message.code) == (MoveState.REFUSED, True, CHANGED.code)
    async with MemoryBuilds.operation(store) as unit:
        known = (await unit.known({MOVE: INSTANCE}))[MOVE]
    assert known.move is not None and known.move.state is MoveState.REFUSED and known.now.under_way is None
    assert await outcome_of(store, 0) == Done(reply=refusal), "a repeat is answered from the record"
