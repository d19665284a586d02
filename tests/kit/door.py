"""A gateway between memory brokers: what a project's clients see, and what a scheduler gets."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Message
from bus.contracts.build import BuildAccepted, BuildRequest
from bus.contracts.queues import COMMANDS, EVENTS, REPLY, project_bus
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from bus.topology import QueuePlan
from bus.transport import Delivery, Outgoing
from gateway.app import build
from gateway.config import GatewayConfig
from tests.kit.waiting import until

ANSWER_TO = "client.reply.me"


def request(project: str = "demo", **more: Any) -> dict[str, Any]:
    return {"instance_uuid": str(uuid.uuid4()), "project_id": project, "flavor": "m1.small", **more}


class Door:
    """One system: an API bus with a scheduler that accepts, and the virtual hosts of some projects."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.brokers: dict[str, MemoryBroker] = defaultdict(lambda: MemoryBroker(self.clock))
        self.api = self.bus(API, "scheduler-1")
        self.got: list[Received] = []
        self.answer: Callable[[Received], Outcome] = accepted
        self.projects: Sequence[str] = ()

    def bus(self, name: str, process: str) -> Bus:
        transport = MemoryTransport(self.brokers[name], name)
        return Bus(name, transport, process=process, clock=self.clock, rng=random.Random(1))

    def environment(self, process: str = "gateway-1") -> Environment:
        return Environment(
            process,
            transports=lambda name: MemoryTransport(self.brokers[name], name),
            clock=self.clock,
            rng=random.Random(2),
        )

    async def handle(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        self.got += batch
        return [self.answer(one) for one in batch]

    @asynccontextmanager
    async def scheduler(self, *queues: str) -> AsyncIterator[None]:
        """A scheduler's consumers."""
        await self.api.open()
        names = queues or ("scheduler.door", "scheduler.records")
        consumers = [Consumer(self.api, name, self.handle) for name in names]
        for consumer in consumers:
            await consumer.start()
        running = [asyncio.create_task(consumer.run()) for consumer in consumers]
        try:
            yield
        finally:
            await asyncio.gather(*(consumer.drain(0) for consumer in consumers))
            await asyncio.gather(*running)
            await self.api.close()

    @asynccontextmanager
    async def gateway(self, *projects: str, process: str = "gateway-1") -> AsyncIterator[None]:
        """One gateway process."""
        self.projects = projects
        service = build(self.environment(process), GatewayConfig(projects=projects), lambda: self.projects)
        stop = asyncio.Event()
        running = asyncio.create_task(service.run(stop))
        try:
            await service.ready.wait()
            for project in projects:
                await until(partial(self.is_open, project))
            yield
        finally:
            stop.set()
            await running

    def is_open(self, project: str) -> bool:
        """Whether the gateway has what it needs for a project; of one whose virtual host is away, on the API bus."""
        host = self.brokers[project_bus(project)]
        there = self.brokers[API]._queues
        return f"gateway.events.{project}" in there and (
            not host.up or {"gateway.requests", "gateway.queries"} <= {*host._queues}
        )

    @asynccontextmanager
    async def client(self, project: str = "demo") -> AsyncIterator[Client]:
        """A program of a project, in its virtual host."""
        made = Client(self, project)
        await made.open()
        try:
            yield made
        finally:
            await made.transport.close()


class Client:
    """What a project's program sends and gets."""

    def __init__(self, door: Door, project: str) -> None:
        self.project = project
        self.broker = door.brokers[project_bus(project)]
        self.transport = MemoryTransport(self.broker, project_bus(project))
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.replies: list[tuple[str | None, dict[str, Any]]] = []

    async def open(self) -> None:
        await self.transport.open()
        await self.transport.declare_shared()
        self.broker.declare(
            QueuePlan(name="events", durable=False, exclusive=False, max_length=1000, bindings=((EVENTS, "#"),)), None
        )
        await self.transport.declare_reply_queue(ANSWER_TO)
        await self.transport.consume("events", self._on_event, prefetch=100)
        await self.transport.consume(ANSWER_TO, self._on_reply, prefetch=100)

    async def publish(
        self, body: dict[str, Any] | bytes, key: str | None = None, *, exchange: str = COMMANDS, **properties: Any
    ) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        key = key or f"build.request.{self.project}"
        await self.transport.publish(Outgoing(exchange=exchange, routing_key=key, body=raw, **properties))

    async def ask(self, body: dict[str, Any], key: str, **properties: Any) -> None:
        await self.publish(body, key, reply_to=ANSWER_TO, **{"correlation_id": "mine", **properties})

    def _on_event(self, delivery: Delivery) -> None:
        self.events.append((delivery.routing_key, json.loads(delivery.body)))
        delivery.ack()

    def _on_reply(self, delivery: Delivery) -> None:
        assert delivery.exchange == REPLY
        self.replies.append((delivery.correlation_id, json.loads(delivery.body)))
        delivery.ack()


def accepted(received: Received) -> Outcome:
    message: Message = received.message
    if isinstance(message, BuildRequest):
        return Done(reply=BuildAccepted(instance_uuid=message.instance_uuid))
    return Done()
