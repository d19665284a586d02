"""A memory broker shared with other processes of this computer, over a Unix socket: `berth up` serves the brokers of
its memory, so that `berth boot` in another terminal reaches them without RabbitMQ (decision 0006).
"""

from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import Callable, Iterable, Sequence
from inspect import isfunction
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgspec

from bus import transport as port
from bus.contracts.base import reason_of
from bus.transport import (
    DELIVERY_FIELDS,
    BusError,
    BusUnavailable,
    Delivery,
    NotSent,
    Outgoing,
    PublishRefused,
    Subscription,
    Transport,
    call_back,
)

# The most that one side sends in one call; and the most that the other reads, which is a little more than was sent to
# it.
MAX_CALL = 32 * 1024 * 1024
MAX_FRAME = MAX_CALL + 64 * 1024
MAX_CALLS_IN_FLIGHT = 10_000
MAX_CONNECTIONS = 64
CLOSE_TIMEOUT_S = 5.0

_TRANSPORT = 0  # its number as an object
_RESULT, _DELIVERY = "result", "delivery"
_ENDS = frozenset({"ack", "nack", "cancel"})  # calls after which their object takes no other
# Of the port, what each side does for itself; and the calls, with the types of their arguments by name.
_OWN = frozenset({"open", "close", "consume", "on_reconnect", "on_locked"})
_CALLS: dict[str, dict[str, Any]] = {
    name: {argument: kind for argument, kind in get_type_hints(method).items() if argument != "return"}
    for owner in (Transport, Subscription, Delivery)
    for name, method in vars(owner).items()
    if isfunction(method) and not name.startswith("_") and name not in _OWN
}
_FAULTS: dict[str, type[BusError]] = {
    fault.code: fault
    for fault in vars(port).values()
    if isinstance(fault, type) and issubclass(fault, BusError) and "code" in vars(fault)
}

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[Any]).decode


def _frame(*parts: object) -> bytes:
    # A frame is a 4-byte length and a msgpack array. A client's first one is (bus, prefix), the others are calls of the
    # port's methods: (number, object, method, arguments...). Object 0 is the transport; a subscription has the number
    # of the call that began it, a delivery a negative one. Number 0: no answer is awaited. The server's are (number,
    # "result", value), (number, a fault's code, its text) and (subscription, "delivery", a delivery).
    body = _pack(parts)
    return len(body).to_bytes(4, "big") + body


async def _read(reader: asyncio.StreamReader) -> list[Any]:
    """The parts of the next frame. Raises ConnectionError or DecodeError for bytes that are no frame of ours."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_FRAME:
        raise ConnectionError(f"a frame of {size} bytes")
    return _unpack(await reader.readexactly(size))


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
            name, prefix = msgspec.convert(await _read(reader), tuple[str, str])
            transport = self._connect(name, prefix)
            await transport.open()
            try:
                await _Session(transport, reader, writer).serve()
            finally:
                await transport.close()
        except (BusError, ConnectionError, asyncio.IncompleteReadError, msgspec.DecodeError, ValueError):
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
    """One client's calls on its own transport to the broker, its subscriptions and deliveries."""

    def __init__(self, transport: Transport, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._transport = transport
        self._reader = reader
        self._writer = writer
        self._objects: dict[int, Any] = {_TRANSPORT: transport}
        self._calls: set[asyncio.Task[None]] = set()
        self._deliveries = 0

    async def serve(self) -> None:
        """Answer calls until the client goes."""
        try:
            while True:
                number, target, what, *arguments = await _read(self._reader)
                if not number:
                    self._start(number, target, what, arguments)
                    continue
                while len(self._calls) >= MAX_CALLS_IN_FLIGHT:
                    await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
                call = asyncio.create_task(self._answer(number, target, what, arguments))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
                await self._writer.drain()
        finally:
            for call in self._calls:
                call.cancel()

    def _start(self, number: int, target: int, what: str, arguments: Sequence[object]) -> Any:
        """Call a method of the port. None where its object has ended. Raises BusError: there is no such call."""
        try:
            if what == "consume":
                return self._consume(number, *msgspec.convert(arguments, tuple[str, int]))
            found = self._objects.pop(target, None) if what in _ENDS else self._objects.get(target)
            if found is None:
                return None
            given = zip(_CALLS[what].items(), arguments, strict=True)
            return getattr(found, what)(**{name: msgspec.convert(value, kind) for (name, kind), value in given})
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # ValueError: msgspec's, too
            raise BusError(f"no such call: {what}: {reason_of(error)}") from error

    async def _answer(self, number: int, target: int, what: str, arguments: Sequence[Any]) -> None:
        try:
            begun = self._start(number, target, what, arguments)
            result = await begun if asyncio.iscoroutine(begun) else begun
            self._writer.write(_frame(number, _RESULT, self._sent(result) if what == "get" and result else result))
        except BusError as fault:
            self._writer.write(_frame(number, fault.code, str(fault)))

    async def _consume(self, number: int, queue: str, prefetch: int) -> None:
        def deliver(delivery: Delivery) -> None:
            self._writer.write(_frame(number, _DELIVERY, self._sent(delivery)))

        self._objects[number] = await self._transport.consume(queue, deliver, prefetch=prefetch)

    def _sent(self, delivery: Delivery) -> list[object]:
        self._deliveries -= 1
        self._objects[self._deliveries] = delivery
        return [self._deliveries, *(getattr(delivery, field) for field in DELIVERY_FIELDS)]


class _Remote:
    """A subscription or a delivery of the server's, on the client's side of the socket. values: a delivery's fields."""

    is_lost = False  # this transport does not reconnect, so nothing of it comes again

    def __init__(self, transport: LocalTransport, number: int, values: Iterable[object] = ()) -> None:
        self._transport = transport
        self._number = number
        self.__dict__.update(zip(DELIVERY_FIELDS, values, strict=False))

    def ack(self) -> None:
        """Done with it."""
        self._transport.send(self._number, "ack")

    def nack(self, *, requeue: bool) -> None:
        """Give it back, or let the broker dead-letter it."""
        self._transport.send(self._number, "nack", requeue)

    def pause(self) -> None:
        """No new deliveries until `resume`."""
        self._transport.send(self._number, "pause")

    def resume(self) -> None:
        """Deliver again."""
        self._transport.send(self._number, "resume")

    async def cancel(self) -> None:
        """No new deliveries after this returns."""
        self._transport.unsubscribe(self._number)
        if self._transport.connected:
            await self._transport.call(self._number, "cancel")


def _forwarded(name: str) -> Any:
    """A method of the port, which the server's transport carries out."""

    async def forward(self: LocalTransport, *arguments: object) -> Any:
        return await self.call(_TRANSPORT, name, *arguments)

    return forward


class LocalTransport:
    """A transport to a `LocalServer`. Does not reconnect: the broker's memory went with its process, and a client's
    private declarations with its connection.
    """

    declare_shared = _forwarded("declare_shared")
    check_publishes = _forwarded("check_publishes")
    set_owner = _forwarded("set_owner")
    owner_of = _forwarded("owner_of")
    clear_owner = _forwarded("clear_owner")
    declare_queue = _forwarded("declare_queue")
    declare_reply_queue = _forwarded("declare_reply_queue")
    bind_external = _forwarded("bind_external")
    depth = _forwarded("depth")
    purge = _forwarded("purge")

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
        self._writer.write(_frame(self.name, self._prefix))
        self._listening = asyncio.create_task(self._listen(reader), name=f"local bus {self.name}")

    async def close(self) -> None:
        """Disconnect; unacknowledged deliveries go back to their queues."""
        if self._writer is not None:
            self._writer.close()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._lost()

    async def closed_by_peer(self) -> None:
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

    async def publish(self, message: Outgoing) -> None:
        """Publish and wait for the broker's confirm."""
        await self.call(_TRANSPORT, "publish", message)

    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], *, prefetch: int) -> Subscription:
        """Deliver messages of a queue to a callback."""
        number = self._number + 1
        self._callbacks[number] = on_delivery
        await self.call(_TRANSPORT, "consume", queue, prefetch)
        return _Remote(self, number)

    async def get(self, queue: str) -> Delivery | None:
        """Take one message, or None."""
        sent = await self.call(_TRANSPORT, "get", queue)
        return None if sent is None else self._held(sent)

    def _held(self, sent: Sequence[Any]) -> Delivery:
        return cast(Delivery, _Remote(self, sent[0], sent[1:]))  # its fields are set by name

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Never called: this transport does not reconnect."""

    def on_locked(self, callback: Callable[[], None]) -> None:
        """Never called: this transport does not reconnect."""

    def unsubscribe(self, subscription: int) -> None:
        """Take no deliveries of a subscription from now on; messages on their way go back."""
        self._callbacks.pop(subscription, None)

    async def call(self, target: int, what: str, *arguments: object) -> Any:
        """One call to the server and its answer. Raises the same as the server's transport."""
        if self._writer is None or not self.connected:
            raise NotSent(f"the berth at {self._path} has gone")
        self._number += 1
        call = _frame(self._number, target, what, *arguments)
        if len(call) > MAX_CALL:
            raise PublishRefused(f"{len(call)} bytes are too many for one call, {MAX_CALL} are allowed")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = answer
        self._writer.write(call)
        return await answer

    def send(self, target: int, what: str, *arguments: object) -> None:
        """One call to the server whose answer does not matter."""
        if self._writer is not None and self.connected:
            self._writer.write(_frame(0, target, what, *arguments))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, what, value = await _read(reader)
                if what == _DELIVERY:
                    self._deliver(number, self._held(value))
                elif (answer := self._waiting.pop(number, None)) is None or answer.done():
                    if what == _RESULT and isinstance(value, list):  # of a `get` that was cancelled
                        self._held(value).nack(requeue=True)
                elif what == _RESULT:
                    answer.set_result(value)
                else:
                    answer.set_exception(_FAULTS.get(what, BusError)(value))
        except (ConnectionError, asyncio.IncompleteReadError):
            if self._writer is not None:
                self._writer.close()
        finally:
            self._lost()

    def _deliver(self, subscription: int, delivery: Delivery) -> None:
        callback = self._callbacks.get(subscription)
        if callback is None:
            delivery.nack(requeue=True)  # it was on its way when its subscription was cancelled
        elif not call_back(callback, delivery):
            delivery.nack(requeue=False)

    def _lost(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(BusUnavailable(f"the berth at {self._path} has gone"))
