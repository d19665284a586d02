"""What passes on channels: publishes, each with its confirm; and deliveries, whose acknowledgements gather so that one
frame acknowledges many. What a channel writes is made here, as AMQP 0-9-1 bytes: pamqp builds a publish in six times
the time, which every message would pay.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import struct
from collections.abc import Callable, Mapping

from aiormq import Channel
from aiormq.abc import AbstractChannel, ChannelFrame, DeliveredMessage
from msgspec import structs

from bus.clock import shared_delay_s
from bus.rabbitmq.errors import translated
from bus.rabbitmq.patches import confirm_of, has_ended
from bus.topology import QueueNames
from bus.transport import DELIVERY_FIELDS, BusError, BusUnavailable, NotSent, Outgoing, PublishRefused

# A quorum queue writes an acknowledgement to its log and flushes it, as it does a message. Sent at once it would make
# the message that its handler has just published wait for two flushes. No task waits for them, so they gather;
# and all processes of a machine send them at the same times (`shared_delay_s`): one flush for all of them.
LINGER_S = 0.5
WRITE_TIMEOUT_S = 1.0  # a connection that accepts nothing for this long is closed without a further write
MAX_EXPIRATION_MS = 2**32 - 1  # RabbitMQ refuses more
GATHERED_SHARE = 4  # ... but no longer than until this part of what may be delivered ahead is waiting


CONFIRM_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0
# A channel that is this old and was refused something is replaced. Refusals of a full queue cost one channel in this
# time; a refusal that would be permanent, because of a leader that is gone, lasts no longer.
REPLACE_REFUSED_S = 5.0


class Acks:
    """The deliveries of one channel that are not settled yet. prefetch: so much may be delivered ahead. gathers:
    acknowledgements wait for others.
    """

    def __init__(self, channel: AbstractChannel, *, prefetch: int, gathers: bool = True) -> None:
        self.channel = channel
        self._prefetch = prefetch
        self._at_most = max(1, prefetch // GATHERED_SHARE) if gathers else 1
        self._open: dict[int, None] = {}  # in the order of their tags
        self._acked: set[int] = set()
        self._frames = FrameWriter(channel)
        self._timer: asyncio.TimerHandle | None = None
        self._once_acknowledged: Callable[[], None] | None = None

    def register(self, tag: int) -> None:
        """Record a delivery that was handed out."""
        self._open[tag] = None

    def ack(self, tag: int, *, now: bool = False) -> None:
        """Acknowledge a delivery. now: do not wait for others."""
        if tag in self._open:
            self._acked.add(tag)
            if now or len(self._acked) >= self._at_most:
                self._send()
            elif self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(shared_delay_s(loop.time(), LINGER_S), self._send)

    def nack(self, tag: int, *, requeue: bool) -> None:
        """Reject a delivery, to be requeued or dead-lettered."""
        if tag in self._open and tag not in self._acked:
            del self._open[tag]
            # Not basic.nack: what that gives back RabbitMQ 4.3 does not count towards the delivery limit.
            self._frames.write(answer_frame(self.channel.number, REJECT, tag, requeue))
            self._send()

    def once_acknowledged(self, call: Callable[[], None]) -> None:
        """Call this when nothing is open any more: no further delivery comes."""
        self._once_acknowledged = call
        self._send()

    async def acknowledged(self, tag: int) -> None:
        """Acknowledge a delivery, and wait until the broker has done so. Raises BusUnavailable: it may have, or not."""
        self.ack(tag, now=True)
        try:
            with translated():  # the broker does what comes on a channel in its order, and answers the second
                async with asyncio.timeout(CONFIRM_TIMEOUT_S):
                    await self._frames.drain()
                    await self.channel.basic_qos(prefetch_count=self._prefetch)
        except BusError as error:  # the channel was closed, whyever: for being silent for long, for one
            raise BusUnavailable(str(error)) from error

    async def flush(self) -> None:
        """Write all acknowledgements to the connection, and wait for it: what only waits is dropped when it closes."""
        self._send()
        with contextlib.suppress(BusError), translated():  # closed meanwhile
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._frames.drain()

    async def close(self) -> None:
        """Close the channel: what is not settled goes back to its queue."""
        await self.flush()
        await _close(self.channel)

    def _send(self) -> None:
        """All up to a tag as one frame where nothing before it is open; the others one by one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        acked, self._acked = self._acked, set()
        last = count = 0
        for tag in self._open:
            if tag not in acked:
                break
            last, count = tag, count + 1
        if last:
            self._frames.write(answer_frame(self.channel.number, ACK, last, count > 1))
        for tag in sorted(acked):
            del self._open[tag]
            if tag > last:
                self._frames.write(answer_frame(self.channel.number, ACK, tag, False))
        if self._once_acknowledged is not None and not self._open:
            call, self._once_acknowledged = self._once_acknowledged, None
            call()


def _seconds(expiration: str | None) -> float | None:
    """An expiration as the broker takes it, in whole milliseconds; None for any other text."""
    ms = int(expiration) if expiration and expiration.isdecimal() else MAX_EXPIRATION_MS + 1
    return ms / 1000 if ms <= MAX_EXPIRATION_MS else None


class RabbitDelivery:
    """One broker message received."""

    __slots__ = ("_acks", "_tag", *DELIVERY_FIELDS)

    def __init__(self, message: DeliveredMessage, acks: Acks, names: QueueNames) -> None:
        properties = message.header.properties
        self._acks = acks
        self._tag = message.delivery_tag or 0
        self.body = message.body
        self.exchange = names.local(message.exchange or "")
        self.routing_key = names.local_key(self.exchange, message.routing_key or "")
        self.content_type: str | None = properties.content_type
        self.message_id: str | None = properties.message_id
        self.type: str | None = properties.message_type
        self.correlation_id: str | None = properties.correlation_id
        self.reply_to: str | None = names.local_reply(properties.reply_to)
        self.headers: Mapping[str, object] = properties.headers or {}
        self.redelivered = bool(message.redelivered)
        # At the first delivery the broker writes none: one that is there is its publisher's.
        count = self.headers.get("x-delivery-count", 0) if self.redelivered else 0
        self.delivery_count = count if isinstance(count, int) else 0
        self.expiration_s = _seconds(properties.expiration)

    @property
    def is_lost(self) -> bool:
        """Whether its connection, or its channel, is gone."""
        return has_ended(self._acks.channel)

    def ack(self) -> None:
        """Acknowledge it. Earlier deliveries are acknowledged at once: the next delivery may end this process."""
        self._acks.ack(self._tag, now=self.delivery_count > 0)

    async def acknowledged(self) -> None:
        """Acknowledge it, and wait until the broker has done so: it does not deliver it again. Raises BusUnavailable:
        it may.
        """
        await self._acks.acknowledged(self._tag)

    def nack(self, *, requeue: bool) -> None:
        """Give it back, or let the broker dead-letter it."""
        self._acks.nack(self._tag, requeue=requeue)


class PublishChannel:
    """A channel in confirm mode."""

    def __init__(self, channel: Channel, names: QueueNames) -> None:
        self.channel = channel
        self._names = names
        self._frames = FrameWriter(channel)
        self._waiting: set[asyncio.Future[object]] = set()
        self._name = secrets.token_hex(8)  # consumers know a message by its id, also one of another publisher
        self._opened_at = asyncio.get_running_loop().time()
        self._refused = False
        channel.closing.add_done_callback(self._closed)

    @property
    def usable(self) -> bool:
        """Whether it is open, and the broker takes here what it would take on a new channel."""
        # A channel remembers the leader of each quorum queue that it published to. One that first publishes after the
        # leader's node went down, and before another is recorded, keeps the dead one: everything for that queue is
        # refused on it until it closes (RabbitMQ 3.10, `rabbit_fifo_client:enqueue`, `nodedown`).
        is_suspect = self._refused and asyncio.get_running_loop().time() - self._opened_at >= REPLACE_REFUSED_S
        return not (has_ended(self.channel) or is_suspect)

    async def close(self) -> None:
        """Close once each publish under way has ended, within its own time limit."""
        if self._waiting:
            await asyncio.wait(self._waiting)
        await _close(self.channel)

    async def publish(self, message: Outgoing) -> None:
        """Publish and wait for the confirm, or raise as the port specifies."""
        exchange = self._names.exchange(message.exchange)
        if not message.message_id:  # a returned message names itself by it
            message = structs.replace(message, message_id=f"{self._name}.{self.channel.delivery_tag + 1}")
        confirmed = self._send(message, exchange)
        timer = asyncio.get_running_loop().call_later(CONFIRM_TIMEOUT_S, _late, confirmed)
        try:
            with translated(exchange or "amq.default"):
                await confirmed
        except PublishRefused:
            self._refused = True
            raise
        finally:
            timer.cancel()
            self._waiting.discard(confirmed)

    def _send(self, message: Outgoing, exchange: str) -> asyncio.Future[object]:
        """Count the tag and queue the frames in one step, so that tags and frames have the same order."""
        if has_ended(self.channel):
            raise NotSent("the channel is closed")
        names = self._names
        payload = frames_of(
            message,
            exchange,
            names.key(message.exchange, message.routing_key),
            None if message.reply_to is None else names.queue(message.reply_to),
            channel=self.channel.number,
            frame_max=self.channel.connection.connection_tune.frame_max,
        )
        confirmed = confirm_of(self.channel, truncate_text(message.message_id))
        self._waiting.add(confirmed)
        self._frames.write(payload)
        return confirmed

    def _closed(self, closing: asyncio.Future[object]) -> None:
        """Each publish that still waits fails with the cause."""
        reason = None if closing.cancelled() else closing.exception()
        for confirmed in self._waiting:
            if not confirmed.done():
                confirmed.set_exception(reason if isinstance(reason, Exception) else BusUnavailable("closed"))


async def _close(channel: AbstractChannel) -> None:
    with contextlib.suppress(BusError), translated():  # closed meanwhile
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await channel.close()


def _late(confirmed: asyncio.Future[object]) -> None:
    if not confirmed.done():
        confirmed.set_exception(BusUnavailable(f"no confirm within {CONFIRM_TIMEOUT_S:g} s"))


_HEAD, _END = struct.Struct(">BHI"), b"\xce"
_METHOD_FRAME, _HEADER_FRAME, _BODY_FRAME = 1, 2, 3
_PUBLISH = struct.pack(">HHH", 60, 40, 0)
_HEADER = struct.Struct(">HHQ")  # class, weight, bytes of the body
_FLAGS, _LONG = struct.Struct(">H"), struct.Struct(">I")
# Flags of the properties, from the highest bit: the order in which they follow.
_CONTENT_TYPE, _HEADERS, _DELIVERY_MODE, _CORRELATION_ID = 1 << 15, 1 << 13, 1 << 12, 1 << 10
_REPLY_TO, _EXPIRATION, _MESSAGE_ID, _TYPE = 1 << 9, 1 << 8, 1 << 7, 1 << 5
# An answer to a delivery in one go: frame type, channel, size, class, method, delivery tag, bits, end.
_ANSWER = struct.Struct(">BHIHHQBB")
ACK, REJECT = 80, 90
MAX_SHORT_BYTES = 255
FRAME_OVERHEAD_BYTES = 8


class FrameWriter:
    """Writes the frames of one channel in their order; those of one turn of the loop leave together."""

    def __init__(self, channel: AbstractChannel) -> None:
        self._channel = channel
        self._out: list[bytes] = []
        self._written: asyncio.Future[None] | None = None
        self._sending = False

    def write(self, frames: bytes) -> None:
        """Send whole frames after those before them; they are dropped when the channel is closed."""
        self._out.append(frames)
        if not self._sending:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send)

    async def drain(self) -> None:
        """Wait until all frames are written to the connection. Raises as aiormq does: the channel is closed."""
        if self._written is None:
            self._written = self._channel.create_future()
        written = self._written
        self.write(b"")
        await asyncio.shield(written)  # of all who wait within one turn of the loop

    def _send(self) -> None:
        frame = ChannelFrame(payload=b"".join(self._out), should_close=False, drain_future=self._written)
        self._out.clear()
        self._written = None
        try:
            if not has_ended(self._channel):
                self._channel.write_queue.put_nowait(frame)  # type: ignore[attr-defined]
            self._sending = False
        except asyncio.QueueFull:
            self._channel.create_task(self._wait_to_send(frame))  # ends with the channel

    async def _wait_to_send(self, frame: ChannelFrame) -> None:
        await self._channel.write_queue.put(frame)  # type: ignore[attr-defined]
        self._send()


def answer_frame(channel: int, method: int, tag: int, bit: bool) -> bytes:
    """ACK or REJECT of a delivery. bit: also all before it (ACK); give it back to its queue (REJECT)."""
    return _ANSWER.pack(1, channel, 13, 60, method, tag, bit, 0xCE)


def frames_of(
    message: Outgoing, exchange: str, key: str, reply_to: str | None, *, channel: int, frame_max: int
) -> bytes:
    """The frames of one publish. frame_max: bytes, 0 for no bound. ValueError: a name is longer than AMQP allows."""
    body = message.body
    most = frame_max - FRAME_OVERHEAD_BYTES if frame_max else max(1, len(body))
    method = _PUBLISH + _name(exchange) + _name(key) + (b"\1" if message.mandatory else b"\0")
    header = _HEADER.pack(60, 0, len(body)) + properties_of(message, reply_to)
    frames = [(_METHOD_FRAME, method), (_HEADER_FRAME, header)]
    frames += [(_BODY_FRAME, body[start : start + most]) for start in range(0, len(body), most)]
    return b"".join([_HEAD.pack(kind, channel, len(payload)) + payload + _END for kind, payload in frames])


def properties_of(message: Outgoing, reply_to: str | None) -> bytes:
    """The flags of a message's properties, and the properties. One that is longer than AMQP allows is cut: some repeat
    values of a client, and one message's property must not stop its consumer.
    """
    flags = _CONTENT_TYPE | _DELIVERY_MODE
    parts = [_short(message.content_type)]
    if message.headers:
        flags |= _HEADERS
        parts.append(_table(message.headers))
    parts.append(b"\2" if message.persistent else b"\1")
    expiration = None if message.expiration_s is None else str(max(0, int(message.expiration_s * 1000)))
    for flag, value in (
        (_CORRELATION_ID, message.correlation_id),
        (_REPLY_TO, reply_to),
        (_EXPIRATION, expiration),
        (_MESSAGE_ID, message.message_id),
        (_TYPE, message.type),
    ):
        if value:
            flags |= flag
            parts.append(_short(value))
    return _FLAGS.pack(flags) + b"".join(parts)


def truncate_text(text: str) -> str:
    """A property as it arrives, and comes back."""
    return text if len(text) * 4 <= MAX_SHORT_BYTES else _raw(text)[:MAX_SHORT_BYTES].decode("utf-8", "surrogateescape")


def _raw(text: str) -> bytes:
    """The bytes of a text; those that were not UTF-8 when they arrived leave as they came."""
    return text.encode("utf-8", "surrogateescape")


def _name(text: str) -> bytes:
    raw = _raw(text)
    if len(raw) > MAX_SHORT_BYTES:
        raise ValueError(f"{text[:40]!r}... is longer than the {MAX_SHORT_BYTES} bytes that AMQP allows")
    return bytes((len(raw),)) + raw


def _short(text: str) -> bytes:
    raw = _raw(text)[:MAX_SHORT_BYTES]
    return bytes((len(raw),)) + raw


def _long(raw: bytes) -> bytes:
    return _LONG.pack(len(raw)) + raw


def _table(headers: Mapping[str, str | int | float]) -> bytes:
    values = [_short(name) + _value(value) for name, value in headers.items()]
    return _long(b"".join(values))


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return b"S" + _long(_raw(value))
    if isinstance(value, bool):
        return b"t" + (b"\1" if value else b"\0")
    return b"l" + struct.pack(">q", value) if isinstance(value, int) else b"d" + struct.pack(">d", value)
