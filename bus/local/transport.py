"""The side of a command in another terminal: a transport to the brokers that a `LocalServer` holds.

A client whose connection is lost is done; its private declarations are gone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bus import port
from bus.contracts.catalogue import QueueRow
from bus.local.frames import MAX_CALL, DeliveryFrame, frame, read
from bus.port import BusError, BusUnavailable, Delivery, Outgoing, PublishRefused, Subscription

_FAULTS: dict[str, type[BusError]] = {
    fault.code: fault
    for fault in (
        BusUnavailable,
        port.Unroutable,
        PublishRefused,
        port.QueueLocked,
        port.QueueMissing,
        port.BusMarked,
        port.BusForbidden,
    )
}


class _Held:
    """A delivery on the client's side of the socket."""

    def __init__(self, delivered: DeliveryFrame, send: Callable[..., None]) -> None:
        self.body = delivered.body
        self.exchange = delivered.exchange
        self.routing_key = delivered.routing_key
        self.content_type = delivered.content_type
        self.message_id = delivered.message_id
        self.type = delivered.type
        self.correlation_id = delivered.correlation_id
        self.reply_to = delivered.reply_to
        self.headers: Mapping[str, object] = delivered.headers
        self.redelivered = delivered.redelivered
        self.delivery_count = delivered.delivery_count
        self.timestamp = delivered.timestamp
        self._tag = delivered.tag
        self._send = send

    @property
    def is_lost(self) -> bool:
        """Never answered with yes: this transport does not reconnect, so nothing of it comes again."""
        return False

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

    def pause(self) -> None:
        """No new deliveries until `resume`."""
        self._transport.send("pause", self._number)

    def resume(self) -> None:
        """Deliver again."""
        self._transport.send("resume", self._number)

    async def cancel(self) -> None:
        """No new deliveries after this returns."""
        self._transport.unsubscribe(self._number)
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

    async def gone(self) -> None:
        """Return once the serving process has gone: nothing comes of this transport any more."""
        if self._listening is not None:
            await asyncio.wait({self._listening})

    @property
    def blocked(self) -> str:
        """A broker in a process's memory raises no alarms."""
        return ""

    @property
    def connected(self) -> bool:
        """Whether the serving process is still there."""
        return self._writer is not None and not self._writer.is_closing()

    async def declare_shared(self) -> None:
        """Declare the shared topology of the bus."""
        await self.call("declare_shared")

    async def mark(self, name: str, owner: str) -> None:
        """Leave a mark, or find it there."""
        await self.call("mark", name, owner)

    async def owner_of(self, name: str) -> str:
        """The owner of a mark."""
        return str(await self.call("owner_of", name))

    async def unmark(self, name: str) -> None:
        """Take a mark away."""
        await self.call("unmark", name)

    async def declare_queue(self, row: QueueRow, name: str, bindings: Sequence[tuple[str, str]]) -> None:
        """Declare a queue as its row describes it."""
        await self.call("declare_queue", row, name, list(bindings))

    async def declare_reply_queue(self, name: str) -> None:
        """Declare a private queue for replies."""
        await self.call("declare_reply_queue", name)

    async def bind_foreign(self, queue: str, exchange: str, keys: Sequence[str]) -> None:
        """Bind a durable queue to an exchange of another system."""
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
        return None if parts is None else _Held(msgspec.convert(parts, DeliveryFrame), self._send)

    async def depth(self, queue: str) -> int:
        """Messages ready in a queue."""
        return int(await self.call("depth", queue))

    async def purge(self, queue: str) -> int:
        """Drop the ready messages of a queue."""
        return int(await self.call("purge", queue))

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Never called: this transport does not reconnect."""

    def on_locked(self, callback: Callable[[], None]) -> None:
        """Never called: this transport does not reconnect."""

    def unsubscribe(self, subscription: int) -> None:
        """Take no deliveries of a subscription from now on; messages on their way go back."""
        self._callbacks.pop(subscription, None)

    async def call(self, what: str, *arguments: object) -> Any:
        """One call to the server and its answer. Raises the same as the server's transport."""
        if not self.connected:
            raise BusUnavailable(f"the berth at {self._path} has gone")
        self._number += 1
        call = frame(self._number, what, *arguments)
        if len(call) > MAX_CALL:
            raise PublishRefused(f"{len(call)} bytes are too many for one call, {MAX_CALL} are allowed")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = answer
        assert self._writer is not None
        self._writer.write(call)
        return await answer

    def send(self, what: str, *arguments: object) -> None:
        """One call to the server whose answer does not matter."""
        self._send(0, what, *arguments)

    def _send(self, *parts: object) -> None:
        if self.connected:
            assert self._writer is not None
            self._writer.write(frame(*parts))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, what, *rest = await read(reader)
                if what == "deliver":
                    self._deliver(rest[0], _Held(msgspec.convert(rest[1], DeliveryFrame), self._send))
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
