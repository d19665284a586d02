"""A memory broker shared with other processes of this machine, over a Unix socket.

`berth up` serves the brokers it holds in its memory, so that `berth boot` in another terminal reaches them without
RabbitMQ. The protocol is the `Transport` port, call by call: a frame is a 4-byte length and a msgpack array
[number, what, ...]. A client whose connection is lost is done; what it had declared privately is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from bus import port
from bus.contracts.catalogue import QueueRow
from bus.port import BusError, BusUnavailable, Delivery, Outgoing, PublishRefused, Subscription, Transport

# What one side sends in one call; and what the other reads at most, which is a little more than was sent to it.
MAX_CALL = 32 * 1024 * 1024
MAX_FRAME = MAX_CALL + 64 * 1024
MAX_CALLS_IN_FLIGHT = 10_000
MAX_CONNECTIONS = 64
CLOSE_TIMEOUT_S = 5.0

_FAULTS: dict[str, type[BusError]] = {
    fault.code: fault
    for fault in (BusUnavailable, port.Unroutable, PublishRefused, port.QueueMissing, port.BusForbidden)
}


class Parcel(Struct, array_like=True):
    """A delivery on its way through the socket. `tag` names it in ack and nack."""

    tag: int
    body: bytes
    exchange: str
    routing_key: str
    content_type: str | None
    message_id: str | None
    type: str | None
    correlation_id: str | None
    reply_to: str | None
    headers: dict[str, Any]
    redelivered: bool
    delivery_count: int
    timestamp: float | None


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def _frame(*parts: object) -> bytes:
    body = _pack(parts)
    return len(body).to_bytes(4, "big") + body


async def _read(reader: asyncio.StreamReader) -> list[Any]:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_FRAME:
        raise ConnectionError(f"a frame of {size} bytes")
    parts = _unpack(await reader.readexactly(size))
    if not isinstance(parts, list) or len(parts) < 2:
        raise ConnectionError("not a frame of ours")
    return parts


def _done(held: Delivery) -> None:
    held.ack()


def _give_back(held: Delivery, *, requeue: bool) -> None:
    held.nack(requeue=requeue)


class LocalServer:
    """Serves brokers at a socket that only this user may open."""

    def __init__(self, path: Path, connect: Callable[[str, str], Transport]) -> None:
        """`connect(name, prefix)` makes a transport to the broker that holds that bus."""
        self.path = path
        self._connect = connect
        self._server: asyncio.Server | None = None
        self._sessions: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def open(self) -> None:
        """Listen. A socket left by a process that is no more is replaced; a live one is an error."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            if await _answers(self.path):
                raise BusError(f"another berth is up and serves {self.path}")
            self.path.unlink()
        self._server = await asyncio.start_unix_server(self._session, str(self.path))
        self.path.chmod(stat.S_IRUSR | stat.S_IWUSR)

    async def close(self) -> None:
        """Stop listening and end every session."""
        if self._server is not None:
            self._server.close()
        for writer in self._sessions.values():
            writer.close()  # its session reads the end
        if self._sessions:
            await asyncio.wait(list(self._sessions), timeout=CLOSE_TIMEOUT_S)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    async def _session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._sessions) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._sessions[task] = writer
        try:
            hello = await _read(reader)
            transport = self._connect(str(hello[2]), str(hello[3]))
            await transport.open()
            try:
                await _Session(transport, reader, writer).serve()
            finally:
                await transport.close()
        except (ConnectionError, asyncio.IncompleteReadError, msgspec.DecodeError, IndexError):
            pass  # the client has gone, or is no client of ours
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self._sessions.pop(task, None)


async def _answers(path: Path) -> bool:
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except (ConnectionError, FileNotFoundError):
        return False
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            writer.write_eof()
            await reader.read()  # until it has seen us go
    writer.close()
    return True


class _Session:
    """One client's calls on its own transport to the broker."""

    def __init__(self, transport: Transport, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._transport = transport
        self._reader = reader
        self._writer = writer
        self._held: dict[int, Delivery] = {}
        self._subscriptions: dict[int, Subscription] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._next = 1

    async def serve(self) -> None:
        """Answer calls until the client goes."""
        try:
            while True:
                number, what, *arguments = await _read(self._reader)
                if what == "ack":
                    self._settle(arguments[0], _done)
                elif what == "nack":
                    self._settle(arguments[0], partial(_give_back, requeue=bool(arguments[1])))
                elif len(self._calls) < MAX_CALLS_IN_FLIGHT:
                    call = asyncio.create_task(self._answer(number, what, arguments))
                    self._calls.add(call)
                    call.add_done_callback(self._calls.discard)
                await self._writer.drain()
        finally:
            for call in self._calls:
                call.cancel()

    def _settle(self, tag: int, how: Callable[[Delivery], None]) -> None:
        held = self._held.pop(tag, None)
        if held is not None:
            how(held)

    async def _answer(self, number: int, what: str, arguments: list[Any]) -> None:
        try:
            result = await self._call(what, arguments)
        except BusError as fault:
            self._writer.write(_frame(number, "fault", fault.code, str(fault)))
        except (TypeError, ValueError, msgspec.ValidationError, IndexError) as fault:
            self._writer.write(_frame(number, "fault", "bus.error", str(fault)))
        else:
            self._writer.write(_frame(number, "result", result))

    async def _call(self, what: str, a: list[Any]) -> Any:
        transport = self._transport
        if what == "publish":
            return await transport.publish(msgspec.convert(a[0], Outgoing))
        if what == "consume":
            return await self._consume(a[0], a[1], a[2])
        if what == "cancel":
            return await self._subscriptions.pop(a[0]).cancel()
        if what == "get":
            delivery = await transport.get(a[0])
            return None if delivery is None else self._parcel(delivery)
        if what == "declare_queue":
            bindings = [(str(exchange), str(key)) for exchange, key in a[2]]
            return await transport.declare_queue(msgspec.convert(a[0], QueueRow), a[1], bindings)
        plain: Mapping[str, Callable[..., Awaitable[object]]] = {
            "declare_exchanges": transport.declare_exchanges,
            "declare_reply_queue": transport.declare_reply_queue,
            "bind_foreign": transport.bind_foreign,
            "depth": transport.depth,
            "purge": transport.purge,
        }
        if what not in plain:
            raise BusError(f"no such call: {what}")
        return await plain[what](*a)

    async def _consume(self, subscription: int, queue: str, prefetch: int) -> None:
        def deliver(delivery: Delivery) -> None:
            self._writer.write(_frame(0, "deliver", subscription, self._parcel(delivery)))

        self._subscriptions[subscription] = await self._transport.consume(queue, deliver, prefetch=prefetch)

    def _parcel(self, d: Delivery) -> Parcel:
        tag = self._next
        self._next += 1
        self._held[tag] = d
        return Parcel(
            tag, d.body, d.exchange, d.routing_key, d.content_type, d.message_id, d.type, d.correlation_id,
            d.reply_to, dict(d.headers), d.redelivered, d.delivery_count, d.timestamp,
        )  # fmt: skip


class _Held:
    """A delivery on the client's side of the socket."""

    def __init__(self, parcel: Parcel, send: Callable[..., None]) -> None:
        self.body = parcel.body
        self.exchange = parcel.exchange
        self.routing_key = parcel.routing_key
        self.content_type = parcel.content_type
        self.message_id = parcel.message_id
        self.type = parcel.type
        self.correlation_id = parcel.correlation_id
        self.reply_to = parcel.reply_to
        self.headers: Mapping[str, object] = parcel.headers
        self.redelivered = parcel.redelivered
        self.delivery_count = parcel.delivery_count
        self.timestamp = parcel.timestamp
        self._tag = parcel.tag
        self._send = send

    def ack(self) -> None:
        """Done with it."""
        self._send(0, "ack", self._tag)

    def nack(self, *, requeue: bool) -> None:
        """Give it back, or let the broker dead-letter it."""
        self._send(0, "nack", self._tag, requeue)


class _LocalSubscription:
    def __init__(self, transport: LocalTransport, number: int) -> None:
        self._transport = transport
        self._number = number

    async def cancel(self) -> None:
        """No new deliveries after this returns."""
        self._transport.forget(self._number)
        if self._transport.connected:
            await self._transport.call("cancel", self._number)


class LocalTransport:
    """A transport to a `LocalServer`. Does not reconnect: the broker's memory went with its process."""

    def __init__(self, path: Path, *, name: str, prefix: str = "") -> None:
        self.name = name
        self._path = path
        self._prefix = prefix
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._callbacks: dict[int, Callable[[Delivery], None]] = {}
        self._number = 0

    async def open(self) -> None:
        """Connect. Raises BusUnavailable when no berth is up here."""
        try:
            reader, self._writer = await asyncio.open_unix_connection(str(self._path))
        except (ConnectionError, FileNotFoundError, PermissionError) as fault:
            raise BusUnavailable(f"no berth is up at {self._path} ({fault.strerror or fault})") from fault
        self._send(0, "hello", self.name, self._prefix, os.getpid())
        self._listening = asyncio.create_task(self._listen(reader), name=f"local bus {self.name}")

    async def close(self) -> None:
        """Disconnect; unacknowledged deliveries go back to their queues."""
        if self._writer is not None:
            self._writer.close()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._lost()

    @property
    def connected(self) -> bool:
        """Whether the serving process is still there."""
        return self._writer is not None and not self._writer.is_closing()

    async def declare_exchanges(self) -> None:
        """Declare the exchanges of the catalogue."""
        await self.call("declare_exchanges")

    async def declare_queue(self, row: QueueRow, name: str, bindings: Sequence[tuple[str, str]]) -> None:
        """Declare a queue as its row says."""
        await self.call("declare_queue", row, name, list(bindings))

    async def declare_reply_queue(self, name: str) -> None:
        """Declare a private queue for replies."""
        await self.call("declare_reply_queue", name)

    async def bind_foreign(self, queue: str, exchange: str, keys: Sequence[str]) -> None:
        """Bind a durable queue to somebody else's exchange."""
        await self.call("bind_foreign", queue, exchange, list(keys))

    async def publish(self, message: Outgoing) -> None:
        """Publish and wait for the broker's confirm."""
        await self.call("publish", message)

    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], *, prefetch: int) -> Subscription:
        """Deliver messages of a queue to a callback."""
        self._number += 1
        number = self._number
        self._callbacks[number] = on_delivery
        await self.call("consume", number, queue, prefetch)
        return _LocalSubscription(self, number)

    async def get(self, queue: str) -> Delivery | None:
        """Take one message, or None."""
        parts = await self.call("get", queue)
        return None if parts is None else _Held(msgspec.convert(parts, Parcel), self._send)

    async def depth(self, queue: str) -> int:
        """Messages ready in a queue."""
        return int(await self.call("depth", queue))

    async def purge(self, queue: str) -> int:
        """Drop what is ready in a queue."""
        return int(await self.call("purge", queue))

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Never called: this transport does not reconnect."""

    def forget(self, subscription: int) -> None:
        """Take no deliveries of a subscription from now on; what is on its way goes back."""
        self._callbacks.pop(subscription, None)

    async def call(self, what: str, *arguments: object) -> Any:
        """One call to the server and its answer. Raises what the server's transport raised."""
        if not self.connected:
            raise BusUnavailable(f"the berth at {self._path} has gone")
        self._number += 1
        frame = _frame(self._number, what, *arguments)
        if len(frame) > MAX_CALL:
            raise PublishRefused(f"{len(frame)} bytes are too many for one call, {MAX_CALL} are allowed")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = answer
        assert self._writer is not None
        self._writer.write(frame)
        return await answer

    def _send(self, *parts: object) -> None:
        if self.connected:
            assert self._writer is not None
            self._writer.write(_frame(*parts))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, what, *rest = await _read(reader)
                if what == "deliver":
                    self._deliver(rest[0], _Held(msgspec.convert(rest[1], Parcel), self._send))
                    continue
                answer = self._waiting.pop(number, None)
                if answer is None or answer.done():
                    continue
                if what == "fault":
                    answer.set_exception(_FAULTS.get(rest[0], BusError)(rest[1]))
                else:
                    answer.set_result(rest[0])
        except (ConnectionError, asyncio.IncompleteReadError):
            if self._writer is not None:
                self._writer.close()
        finally:
            self._lost()

    def _deliver(self, subscription: int, delivery: Delivery) -> None:
        callback = self._callbacks.get(subscription)
        if callback is None:
            delivery.nack(requeue=True)  # it was on its way when its subscription was cancelled
        else:
            callback(delivery)

    def _lost(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(BusUnavailable(f"the berth at {self._path} has gone"))
