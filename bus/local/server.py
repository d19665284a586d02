"""The serving side: `berth up` lets other processes in to the brokers it holds in its memory."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bus.contracts.catalogue import QueueRow
from bus.contracts.patterns import reason_of
from bus.local.frames import DeliveryFrame, frame, read
from bus.port import BusError, Delivery, Outgoing, Subscription, Transport

MAX_CALLS_IN_FLIGHT = 10_000
MAX_CONNECTIONS = 64
CLOSE_TIMEOUT_S = 5.0


class LocalServer:
    """Serves brokers at a socket that only this user may open."""

    def __init__(self, path: Path, connect: Callable[[str, str], Transport]) -> None:
        """`connect(name, prefix)` makes a transport to the broker that holds that bus."""
        self.path = path
        self._connect = connect
        self._server: asyncio.Server | None = None
        self._sessions: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def open(self) -> None:
        """Listen, and replace the socket of a process that has ended. Raises BusError: a live one serves there."""
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
            hello = await read(reader)
            transport = self._connect(str(hello[2]), str(hello[3]))
            await transport.open()
            try:
                await _Session(transport, reader, writer).serve()
            finally:
                await transport.close()
        except (ConnectionError, asyncio.IncompleteReadError, msgspec.DecodeError, UnicodeDecodeError, IndexError):
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
                number, what, *arguments = await read(self._reader)
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
            self._writer.write(frame(number, "fault", fault.code, str(fault)))
        except (TypeError, ValueError, msgspec.ValidationError, IndexError) as fault:
            self._writer.write(frame(number, "fault", "bus.error", reason_of(fault)))
        else:
            self._writer.write(frame(number, "result", result))

    async def _call(self, what: str, a: list[Any]) -> Any:
        transport = self._transport
        if what == "publish":
            return await transport.publish(msgspec.convert(a[0], Outgoing))
        if what == "consume":
            return await self._consume(a[0], a[1], a[2])
        if what == "cancel":
            return await self._subscriptions.pop(a[0]).cancel()
        if what in ("pause", "resume"):
            subscription = self._subscriptions[a[0]]
            return subscription.pause() if what == "pause" else subscription.resume()
        if what == "get":
            delivery = await transport.get(a[0])
            return None if delivery is None else self._delivery_frame(delivery)
        if what == "declare_queue":
            bindings = [(str(exchange), str(key)) for exchange, key in a[2]]
            return await transport.declare_queue(msgspec.convert(a[0], QueueRow), a[1], bindings)
        plain: Mapping[str, Callable[..., Awaitable[object]]] = {
            "declare_shared": transport.declare_shared,
            "mark": transport.mark,
            "owner_of": transport.owner_of,
            "unmark": transport.unmark,
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
            self._writer.write(frame(0, "deliver", subscription, self._delivery_frame(delivery)))

        self._subscriptions[subscription] = await self._transport.consume(queue, deliver, prefetch=prefetch)

    def _delivery_frame(self, d: Delivery) -> DeliveryFrame:
        tag = self._next
        self._next += 1
        self._held[tag] = d
        return DeliveryFrame(
            tag, d.body, d.exchange, d.routing_key, d.content_type, d.message_id, d.type, d.correlation_id,
            d.reply_to, dict(d.headers), d.redelivered, d.delivery_count, d.timestamp,
        )  # fmt: skip


def _done(held: Delivery) -> None:
    held.ack()


def _give_back(held: Delivery, *, requeue: bool) -> None:
    held.nack(requeue=requeue)
