"""A front without a scheduler behind it: the RPC server on a real broker, and a dispatcher that a test instructs."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from bus.clock import SystemClock
from bus.rabbitmq.transport import RabbitTransport
from nova_scheduler.rpc.dispatcher import CallDispatcher
from nova_scheduler.rpc.server import RpcServer
from nova_scheduler.stock.comparison import AnswerComparison
from nova_scheduler.stock.forwarder import Fallback, StockForwarder
from nova_scheduler.stock.shadow import ShadowingForwarder, UpstreamDecides
from nova_scheduler.wire.envelope import Call
from nova_scheduler.wire.queues import RabbitOptions
from placement_worker.replica.replica import Replica

EXCHANGE = "nova"


def selection(host: str) -> dict[str, Any]:
    """A Selection 1.1 as Nova serialises it."""
    return {
        "nova_object.name": "Selection",
        "nova_object.namespace": "nova",
        "nova_object.version": "1.1",
        "nova_object.data": {
            "compute_node_uuid": str(uuid.uuid4()),
            "service_host": host,
            "nodename": host,
            "cell_uuid": str(uuid.uuid4()),
            "limits": None,
            "allocation_request": "{}",
            "allocation_request_version": "1.36",
            "availability_zone": "nova",
        },
        "nova_object.changes": ["service_host"],
    }


async def chosen(call: Call) -> object:
    return [[selection("h1"), selection("h2")] for _ in call.arguments["instance_uuids"]]


class Instructed:
    """A dispatcher that remembers the calls, and answers as it is told."""

    def __init__(self, answer: Callable[[Call], Awaitable[object]] = chosen) -> None:
        self.calls: list[Call] = []
        self.answer = answer

    async def call(self, call: Call) -> object:
        self.calls.append(call)
        return await self.answer(call) if call.is_answered else None

    async def broken_rule(self, _call: Call, _hosts: object) -> str:
        return ""

    def methods(self) -> list[str]:
        return [call.method for call in self.calls]


@contextlib.asynccontextmanager
async def front(
    url: str, dispatcher: Instructed, *, stock: str = "", name: str = "front", **options: Any
) -> AsyncIterator[RpcServer]:
    """A server of the topic. stock: the URL of the fallback's virtual host."""
    fallback = stock_relay(stock) if stock else None
    async with _served(url, dispatcher, fallback, name, **options) as server:
        yield server


def stock_relay(url: str) -> StockForwarder:
    """To the stock scheduler of a virtual host."""
    transport = RabbitTransport(url, name="stock")
    return StockForwarder(transport, control_exchange=EXCHANGE, unique=uuid.uuid4().hex, clock=SystemClock())


@contextlib.asynccontextmanager
async def shadow(url: str, stock: str, dispatcher: Instructed) -> AsyncIterator[AnswerComparison]:
    """A server whose calls the stock scheduler decides, and the dispatcher beside it."""
    comparison = AnswerComparison(dispatcher, Replica(), SystemClock())
    fallback = ShadowingForwarder(comparison, stock_relay(stock), SystemClock())
    async with _served(url, UpstreamDecides(dispatcher), fallback, "shadow"):
        yield comparison


@contextlib.asynccontextmanager
async def _served(
    url: str, dispatcher: CallDispatcher, fallback: Fallback | None, name: str, **options: Any
) -> AsyncIterator[RpcServer]:
    server = RpcServer(
        RabbitTransport(url, name="nova"),
        dispatcher,
        host=name,
        unique=uuid.uuid4().hex,
        options=RabbitOptions(**options),
        control_exchange=EXCHANGE,
        clock=SystemClock(),
        rng=random.Random(),
        fallback=fallback,
    )
    await server.open()
    await server.start()
    running = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.close()
