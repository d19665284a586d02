"""A move that is tried again is not dropped as late while its requester waits, and is never begun after that."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress

import pytest

from bus.bus import API, Bus
from bus.consuming.outcome import Done, Outcome, Retry
from bus.contracts.base import encode
from bus.contracts.catalogue import COMMANDS, routing_key
from bus.contracts.moves import MoveAccepted, MoveKind, MoveRequest
from bus.faults import DatabaseUnavailable, RequestTimeout
from bus.memory import MemoryBroker, MemoryTransport
from bus.port import Outgoing
from lab.simulation.loop import SimClock
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.moves import accepted
from scheduler_worker.domain.recorded_moves import PendingMove
from scheduler_worker.fleet import Warmup
from scheduler_worker.handlers import RequestHandler
from tests.contract.rig import REQUESTS
from tests.kit.virtual_time import on_virtual_time
from tests.unit.scheduler.hosts import Hosts

MOVE = MoveRequest(
    request_id="d0000000-0000-4000-8000-000000000000",
    instance_uuid="a0000000-0000-4000-8000-000000000000",
    project_id="p",
    kind=MoveKind.STOP,
)
UNLOCATED = Retry("instance.unlocated", "placement does not know where the instance is (yet)")


class NoBuilds:
    async def not_left(self, requests: Sequence[object]) -> Sequence[object]:
        return requests


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
        consumer = scheduler.consumer(REQUESTS, handler, concurrency=2)
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
