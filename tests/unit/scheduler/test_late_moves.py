"""Moves that come late, and moves whose instance changes between the choice and the write."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Retry
from bus.contracts.base import Refusal, encode
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.catalogue import routing_key
from bus.contracts.moves import MoveAccepted, MoveEvent, MoveKind, MoveRequest, MoveState
from bus.contracts.queues import COMMANDS
from bus.faults import DatabaseUnavailable, RequestTimeout
from bus.memory import MemoryBroker, MemoryTransport
from bus.port import Outgoing
from lab.simulation.loop import SimClock
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.builds import NewBuild, RecordedBuild
from scheduler_worker.domain.moves import CHANGED, accepted
from scheduler_worker.domain.recorded_moves import InstanceRecord, PendingMove
from scheduler_worker.domain.requests import RETRIES, RequestDelivery
from scheduler_worker.fleet import Warmup
from scheduler_worker.handlers import RequestHandler
from scheduler_worker.moves import MoveEngine
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.contract.rig import REQUESTS
from tests.kit.claims import BookClaims
from tests.kit.sent import Sent
from tests.kit.virtual_time import on_virtual_time
from tests.unit.scheduler.hosts import PLENTY, Hosts

# --- A move that is tried again is not dropped as late while its requester waits, and is never begun after that.


MOVE = MoveRequest(
    request_id="d0000000-0000-4000-8000-000000000000",
    instance_uuid="a0000000-0000-4000-8000-000000000000",
    project_id="p",
    kind=MoveKind.STOP,
)
UNLOCATED = Retry("instance.unlocated", "placement does not know where the instance is (yet)")


class NoBuilds:
    """Stands for SchedulingEngine."""


class Moves:
    """Stands for MoveEngine: its database is away until a time; then placement does not know the instance yet, once."""

    def __init__(self, clock: SimClock, back_at_s: float) -> None:
        self._clock = clock
        self._back_at_s = back_at_s
        self.begun_at_s: list[float] = []
        self.ended: list[str] = []  # the codes of events

    async def process(self, moves: Sequence[PendingMove]) -> dict[int, Outcome]:
        if moves and self._clock.monotonic() < self._back_at_s:
            raise DatabaseUnavailable("away")
        return {one.position: self._outcome(one) for one in moves}

    def _outcome(self, one: PendingMove) -> Outcome:
        why = one.delivery.ends_with()
        if why is not None and not one.delivery.is_left:
            self.ended.append(why.code)
        if why is not None:
            return Done()
        if one.delivery.attempt == 0:
            return UNLOCATED
        self.begun_at_s.append(self._clock.monotonic())
        return accepted(one.request)


async def keep_up() -> None:
    pass


@pytest.mark.parametrize(
    ("patience_s", "away_s"), [(10.0, 3.0), (120.0, 20.0), (120.0, 70.0), (120.0, 80.0), (60.0, 50.0), (600.0, 330.0)]
)
def test_a_move_is_answered_while_its_requester_waits(patience_s: float, away_s: float) -> None:
    moves, answer = requested(patience_s, away_s)
    assert isinstance(answer, MoveAccepted), f"no answer; begun: {moves.begun_at_s}"


@pytest.mark.parametrize(("patience_s", "away_s"), [(10.0, 11.0), (60.0, 100.0)])
def test_a_move_is_not_begun_when_its_requester_has_stopped_waiting(patience_s: float, away_s: float) -> None:
    moves, answer = requested(patience_s, away_s)
    assert (answer, moves.begun_at_s, moves.ended) == (None, [], [])


def test_a_move_ends_with_an_event_when_its_expiration_is_over_and_nobody_waits_for_an_answer() -> None:
    moves, _ = requested(10.0, 11.0, waits=False)
    assert (moves.begun_at_s, moves.ended) == ([], ["broker.expired"])


def test_an_expiration_counts_while_a_scheduler_has_the_move() -> None:
    moves, _ = requested(60.0, 20.0, waits=False)
    assert len(moves.begun_at_s) == 1 and not moves.ended


def requested(patience_s: float, away_s: float, *, waits: bool = True) -> tuple[Moves, MoveAccepted | None]:
    """A client requests a move of a scheduler whose database is away for some seconds. Its answer, if there is one.

    waits: for the answer; otherwise it publishes the move with an expiration of `patience_s`.
    """
    ended: list[tuple[Moves, MoveAccepted | None]] = []

    @on_virtual_time
    async def run() -> None:
        clock = SimClock()
        broker = MemoryBroker(clock)
        client, scheduler = await opened(broker, "client"), await opened(broker, "s1")
        selector = Hosts([]).selector
        moves = Moves(clock, clock.monotonic() + away_s)
        handler = RequestHandler(
            NoBuilds(),  # type: ignore[arg-type]
            moves,  # type: ignore[arg-type]
            selector,
            clock=clock,
            config=SchedulerConfig(),
            warmup=Warmup(selector, clock=clock),
            keep_up=keep_up,
        )
        consumer = Consumer(scheduler, REQUESTS, handler, concurrency=2)
        await consumer.start()
        running = asyncio.create_task(consumer.run())
        answer = None
        if waits:
            with suppress(RequestTimeout):
                answer = await client.request(MOVE, MoveAccepted, timeout_s=patience_s)
        else:
            key, body = routing_key(MOVE), encode(MOVE)
            expiring = Outgoing(exchange=COMMANDS, routing_key=key, body=body, expiration_s=patience_s)
            await client.transport.publish(expiring)
        if answer is None:
            await clock.sleep(away_s + 60.0)
        ended.append((moves, answer))
        await consumer.drain(1.0)
        await running
        for one in (client, scheduler):
            await one.close()

    run()
    return ended[0]


async def opened(broker: MemoryBroker, process: str) -> Bus:
    transport = MemoryTransport(broker, process)
    made = Bus(API, transport, process=process, clock=broker.clock, rng=random.Random(process))
    await made.open()
    return made


# --- A request whose instance changes between the choice and the write: tried again, and in the end refused.


INSTANCE = "a0000000-0000-4000-8000-000000000000"
OVERTAKEN = "d0000000-0000-4000-8000-000000000000"
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
    move = MoveRequest(request_id=OVERTAKEN, instance_uuid=INSTANCE, project_id="p", kind=MoveKind.STOP)
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
        known = (await unit.known({OVERTAKEN: INSTANCE}))[OVERTAKEN]
    assert known.move is not None and known.move.state is MoveState.REFUSED and known.now.under_way is None
    assert await outcome_of(store, 0) == Done(reply=refusal), "a repeat is answered from the record"
