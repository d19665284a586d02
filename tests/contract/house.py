"""Buses, consumers and handlers for the suites that both transports pass."""

from __future__ import annotations

import random
import uuid
from collections.abc import Awaitable, Callable, Sequence

import pytest

from bus.bus import Bus, BusLimits
from bus.clock import SystemClock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Handler, Outcome, Received
from bus.contracts.build import BuildAccepted, BuildRequest
from bus.contracts.catalogue import BY_QUEUE, DEAD_LETTERS
from bus.depths import waiting_in
from tests.contract.rig import Rig, until

KINDS = pytest.mark.parametrize("kind", ["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
REQUESTS = "scheduler.requests"
LANE = f"{REQUESTS}.17"  # of the project of all requests here, `p`


class House:
    """Buses and consumers of one test, put away at its end."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._closing: list[Callable[[], Awaitable[None]]] = []
        self._count = 0

    async def bus(self, name: str = "api", **limits: int) -> Bus:
        self._count += 1
        transport = self.rig.make(f"{name}-{self._count}")
        bus = Bus(
            name,
            transport,
            process=f"p{self._count}",
            clock=SystemClock(),
            rng=random.Random(self._count),
            limits=BusLimits(**limits),
        )
        await bus.open()
        self._closing.append(bus.close)
        return bus

    async def consume(self, bus: Bus, queue: str, handler: Handler, **options: object) -> Consumer:
        consumer = bus.consumer(queue, handler, **options)  # type: ignore[arg-type]
        await consumer.start()
        self._closing.append(lambda: consumer.drain(0.1))
        return consumer

    async def close(self) -> None:
        for closing in reversed(self._closing):
            await closing()


class Answering:
    """A handler that remembers what it got, and answers as it is instructed."""

    def __init__(self, answer: Callable[[Received], Outcome] = lambda _: Done()) -> None:
        self.got: list[Received] = []
        self.batches: list[int] = []
        self._answer = answer

    async def __call__(self, received: Sequence[Received]) -> Sequence[Outcome]:
        self.batches.append(len(received))
        outcomes = [self._answer(one) for one in received]
        self.got += received
        return outcomes

    @property
    def uuids(self) -> list[str]:
        return [one.message.instance_uuid for one in self.got]  # type: ignore[attr-defined]

    async def wait(self, count: int) -> list[Received]:
        await until(lambda: len(self.got) >= count)
        return self.got


def boot(number: int = 0, **fields: object) -> BuildRequest:
    return BuildRequest(instance_uuid=str(uuid.UUID(int=number)), flavor="m1.small", project_id="p", **fields)  # type: ignore[arg-type]


def accepted(received: Received) -> Outcome:
    assert isinstance(received.message, BuildRequest)
    return Done(BuildAccepted(instance_uuid=received.message.instance_uuid))


async def settled(bus: Bus, queue: str = REQUESTS, dead: int = 0) -> None:
    """Until the queue is empty and this many dead letters are parked."""

    async def as_instructed() -> bool:
        depths = await _waiting(bus, queue), await bus.transport.depth(DEAD_LETTERS)
        return depths == (0, dead)

    await until(as_instructed)


async def depth_is(bus: Bus, queue: str, count: int) -> bool:
    return await _waiting(bus, queue) == count


async def _waiting(bus: Bus, queue: str) -> int:
    row = BY_QUEUE.get(queue)
    return await bus.transport.depth(queue) if row is None else await waiting_in(bus.transport, row)
