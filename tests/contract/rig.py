"""The operations that contract tests need of any broker: connections, ways to cut them, queues, handlers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from yarl import URL

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Handler, Outcome, Received
from bus.contracts.build import BuildAccepted, BuildRequest
from bus.contracts.queues import BY_QUEUE, COMMANDS, DEAD_LETTERS, QueueKind, QueueRow, Where
from bus.local import LocalServer, LocalTransport
from bus.memory import MemoryBroker, MemoryTransport
from bus.publishing import BusLimits
from bus.rabbitmq.transport import RabbitTransport
from bus.transport import Delivery, Outgoing, Transport
from tests.kit.waiting import PATIENCE_S, until


class Collector:
    """Collects deliveries and lets a test wait for a number of them."""

    def __init__(self, *, ack: bool = True) -> None:
        self.got: list[Delivery] = []
        self._ack = ack
        self._changed = asyncio.Event()

    def __call__(self, delivery: Delivery) -> None:
        self.got.append(delivery)
        if self._ack:
            delivery.ack()
        self._changed.set()

    @property
    def bodies(self) -> list[bytes]:
        return [delivery.body for delivery in self.got]

    async def wait(self, count: int) -> list[Delivery]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.got) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.got


async def collect(transport: Transport, queue: str, prefetch: int, *, ack: bool = True) -> Collector:
    """What is delivered from this queue."""
    collector = Collector(ack=ack)
    await transport.consume(queue, collector, prefetch=prefetch)
    return collector


class Proxy:
    """A TCP proxy before the broker, whose connections a test can cut and whose door it can shut."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def shut(self) -> None:
        """No new connections, and the old ones cut."""
        assert self._server is not None
        self._server.close()
        self.cut()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self._server.wait_closed()

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        await self.shut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, there_writer}
        for one, other in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.get_running_loop().create_task(self._copy(one, other))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
        self._writers.discard(writer)


class Rig:
    """One broker under test."""

    kind: str

    def __init__(self) -> None:
        self._open: list[Transport] = []

    def make(self, name: str, prefix: str = "") -> Transport:
        raise NotImplementedError

    async def transport(self, name: str = "test", prefix: str = "") -> Transport:
        transport = self.make(name, prefix)
        self._open.append(transport)
        await transport.open()
        await transport.declare_shared()
        return transport

    async def close(self) -> None:
        for transport in self._open:
            await transport.close()

    async def cut(self) -> None:
        """Every connection is lost; the broker is still there."""
        raise NotImplementedError

    async def shut(self) -> None:
        """The broker cannot be reached."""
        raise NotImplementedError

    async def part(self, transport: Transport) -> None:
        """This connection is lost, and does not come back before `rejoin`."""
        raise NotImplementedError

    async def rejoin(self, transport: Transport) -> None:
        """It can come back."""
        raise NotImplementedError

    def outside(self, name: str) -> Transport:
        """A connection that reaches the broker while others are parted from it; its user closes it."""
        raise NotImplementedError

    async def reopen(self) -> None:
        """It can again."""
        raise NotImplementedError


class MemoryRig(Rig):
    kind = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.broker = MemoryBroker(SystemClock())

    def make(self, name: str, prefix: str = "") -> Transport:
        return MemoryTransport(self.broker, name, prefix=prefix)

    async def foreign_exchange(self, name: str) -> None:
        self.broker.declare_exchange(name)

    async def cut(self) -> None:
        self.broker.drop_connections()

    async def shut(self) -> None:
        self.broker.stop()

    async def reopen(self) -> None:
        self.broker.start()

    async def part(self, transport: Transport) -> None:
        assert isinstance(transport, MemoryTransport)
        transport.lose()

    async def rejoin(self, transport: Transport) -> None:
        assert isinstance(transport, MemoryTransport)
        transport.reconnect_soon()

    def outside(self, name: str) -> Transport:
        return self.make(name)


class LocalRig(MemoryRig):
    """A memory broker behind the socket that `berth up` serves it at. Its clients do not reconnect."""

    kind = "local"

    def __init__(self) -> None:
        super().__init__()
        # A socket's name is short, and a test's own directory is not.
        self._directory = tempfile.TemporaryDirectory(prefix="berth-bus-")
        self.socket = Path(self._directory.name) / "bus.sock"
        self.server = LocalServer(self.socket, lambda name, prefix: MemoryTransport(self.broker, name, prefix=prefix))

    async def open(self) -> None:
        await self.server.open()

    def make(self, name: str, prefix: str = "") -> Transport:
        return LocalTransport(self.socket, name=name, prefix=prefix)

    async def close(self) -> None:
        await super().close()
        await self.server.close()
        self._directory.cleanup()


class RabbitRig(Rig):
    kind = "rabbitmq"

    def __init__(self, url: str, prefix: str) -> None:
        super().__init__()
        parsed = URL(url)
        self._prefix = prefix
        self._direct = url
        self._proxy = Proxy(parsed.host or "localhost", parsed.port or 5672)
        self._url = parsed

    async def open(self) -> None:
        await self._proxy.open()
        self._url = self._url.with_host("127.0.0.1").with_port(self._proxy.port)

    def make(self, name: str, prefix: str = "") -> Transport:
        return RabbitTransport(str(self._url), name=name, prefix=self._prefix + prefix)

    async def foreign_exchange(self, name: str) -> None:
        import aio_pika  # noqa: PLC0415

        async with await aio_pika.connect(self._direct) as connection:
            channel = await connection.channel()
            await channel.declare_exchange(name, "topic", auto_delete=True, durable=False)
            queue = await channel.declare_queue(durable=True, arguments={"x-expires": 60_000})
            await queue.bind(name, "keeps.it.alive")

    async def close(self) -> None:
        await super().close()
        await self._proxy.close()

    async def cut(self) -> None:
        self._proxy.cut()

    async def shut(self) -> None:
        await self._proxy.shut()

    async def reopen(self) -> None:
        await self._proxy.open()

    async def part(self, transport: Transport) -> None:
        await self.shut()

    async def rejoin(self, transport: Transport) -> None:
        await self.reopen()

    def outside(self, name: str) -> Transport:
        return RabbitTransport(self._direct, name=name, prefix=self._prefix)


@contextlib.asynccontextmanager
async def rig_for(kind: str, amqp: Callable[[], tuple[str, str]]) -> AsyncIterator[Rig]:
    """A rig of the kind asked for, closed afterwards."""
    rig: Rig
    if kind == "memory":
        rig = MemoryRig()
    elif kind == "local":
        rig = LocalRig()
        await rig.open()
    else:
        rig = RabbitRig(*amqp())
        await rig.open()
    try:
        yield rig
    finally:
        await rig.close()


LASTING = ["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)]
EVERY_ADAPTER = pytest.mark.parametrize("kind", ["local", *LASTING])
# The socket's broker goes with its process, so there is nothing to come back to.
EVERY_ADAPTER_THAT_RECONNECTS = pytest.mark.parametrize("kind", LASTING)


def row(kind: QueueKind = QueueKind.DURABLE, **fields: object) -> QueueRow:
    given = {"name": "work", "where": Where.BOTH, "kind": kind, "consumer": "tests", "bindings": (), **fields}
    return QueueRow(**given)  # type: ignore[arg-type]


async def declare(transport: Transport, kind: QueueKind = QueueKind.DURABLE, **fields: object) -> str:
    template = row(kind, **{"bindings": ((COMMANDS, "work.#"),), **fields})
    await transport.declare_queue(template, template.name, template.bindings)
    return template.name


async def with_queue(rig: Rig) -> tuple[Transport, str]:
    """A connection, and a queue of commands."""
    transport = await rig.transport()
    return transport, await declare(transport)


def command(body: bytes, key: str = "work.do", **fields: object) -> Outgoing:
    return Outgoing(exchange=COMMANDS, routing_key=key, body=body, mandatory=True, **fields)  # type: ignore[arg-type]


KINDS = pytest.mark.parametrize("kind", ["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
REQUESTS = "scheduler.requests"


async def closed(bus: Bus) -> None:
    """Close it. Whatever was published on it, nothing of that counts as under way then."""
    await bus.close()
    assert (bus.publisher.waiting, bus.publisher._in_flight) == (0, 0)


class House:
    """Buses and consumers of one test, put away at its end."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._closing: list[Callable[[], Awaitable[None]]] = []
        self._count = 0

    async def bus(self, name: str = "api", **limits: float) -> Bus:
        self._count += 1
        transport = self.rig.make(f"{name}-{self._count}")
        bus = Bus(
            name,
            transport,
            process=f"p{self._count}",
            clock=SystemClock(),
            rng=random.Random(self._count),
            limits=BusLimits(**limits),  # type: ignore[arg-type]
        )
        await bus.open()
        self._closing.append(lambda: closed(bus))
        return bus

    async def consume(self, bus: Bus, queue: str, handler: Handler, **options: object) -> Consumer:
        """Also that of its retries, where they come back to another."""
        for name in filter(None, (BY_QUEUE[queue].retries_to, queue)):
            consumer = Consumer(bus, name, handler, **options)  # type: ignore[arg-type]
            await consumer.start()
            self._closing.append(partial(consumer.drain, 0.1))
        return consumer

    async def answer(
        self, bus: Bus, queue: str, answer: Callable[[Received], Outcome] = lambda _: Done(), **options: object
    ) -> Answering:
        """What a consumer of this queue got, which answers as it is instructed."""
        handler = Answering(answer)
        await self.consume(bus, queue, handler, **options)
        return handler

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


async def depth_is(at: Bus | Transport, queue: str, count: int) -> bool:
    return await _waiting(at, queue) == count


async def _waiting(at: Bus | Transport, queue: str) -> int:
    return await (at.transport if isinstance(at, Bus) else at).depth(queue)


def watched(transport: Transport) -> list[Outgoing]:
    """The messages that leave on this transport from now on."""
    sent: list[Outgoing] = []
    publish = transport.publish

    async def watch(message: Outgoing) -> None:
        sent.append(message)
        await publish(message)

    transport.publish = watch  # type: ignore[method-assign]
    return sent
