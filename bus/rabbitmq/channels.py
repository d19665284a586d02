"""What passes on channels: publishes, each with its confirm; and deliveries, whose acknowledgements gather so that one
frame acknowledges many.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Mapping
from typing import Any

from aiormq import Channel
from aiormq.abc import AbstractChannel, ChannelFrame, DeliveredMessage
from pamqp.commands import Basic

from bus.clock import shared_delay_s
from bus.port import CC, DELIVERY_FIELDS, BusError, BusUnavailable, Outgoing, PublishRefused
from bus.rabbitmq.errors import translated
from bus.topology import QueueNames

# Method frames of AMQP 0-9-1 in one go: type 1, channel, size 13, class 60, method, delivery tag, bits, end.
_FRAME = struct.Struct(">BHIHHQBB")
_ACK, _REJECT = 80, 90
_MULTIPLE, _REQUEUE = 1, 1

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
MAX_PROPERTY_BYTES = 255


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
        self._given_up: list[bytes] = []
        self._flushing = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def register(self, tag: int) -> None:
        """Record a delivery that was handed out."""
        self._open[tag] = None

    def ack(self, tag: int, *, now: bool = False) -> None:
        """Acknowledge a delivery. now: do not wait for others."""
        if tag in self._open:
            self._acked.add(tag)
            if now or len(self._acked) >= self._at_most:
                self._flush_soon()
            elif self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(shared_delay_s(loop.time(), LINGER_S), self._send)

    def nack(self, tag: int, *, requeue: bool) -> None:
        """Reject a delivery, to be requeued or dead-lettered."""
        if tag in self._open and tag not in self._acked:
            del self._open[tag]
            # Not basic.nack: what that gives back RabbitMQ 4.3 does not count towards the delivery limit.
            self._given_up.append(self._frame(_REJECT, tag, _REQUEUE if requeue else 0))
            self._flush_soon()

    async def acknowledged(self, tag: int) -> None:
        """Acknowledge a delivery, and wait until the broker has done so. Raises BusUnavailable: it may have, or not."""
        self.ack(tag, now=True)
        await self._hand_over()
        with translated():  # the broker does what comes on a channel in its order, and answers this
            await self.channel.basic_qos(prefetch_count=self._prefetch, timeout=CONFIRM_TIMEOUT_S)

    async def flush(self) -> None:
        """Write all acknowledgements to the connection, and wait for it: what only waits is dropped when it closes."""
        await self._hand_over()
        if self.channel.is_closed:
            return
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._wait_to_send(ChannelFrame(payload=b"", should_close=False, drain_future=written))
                await written

    async def _hand_over(self) -> None:
        """Put all acknowledgements before what this task writes next."""
        self._send()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._flushing = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        payload = self._payload()
        if not payload or self.channel.is_closed:
            return
        frame = ChannelFrame(payload=payload, should_close=False)
        try:
            self.channel.write_queue.put_nowait(frame)  # type: ignore[attr-defined]
        except asyncio.QueueFull:
            task = asyncio.get_running_loop().create_task(self._wait_to_send(frame))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _wait_to_send(self, frame: ChannelFrame) -> None:
        await self.channel.write_queue.put(frame)  # type: ignore[attr-defined]

    def _payload(self) -> bytes:
        frames, self._given_up = self._given_up, []
        if self._acked:
            frames += self._ack_frames()
        return b"".join(frames)

    def _ack_frames(self) -> list[bytes]:
        """All up to a tag as one frame where nothing before it is open; the others one by one."""
        acked, self._acked = self._acked, set()
        last = count = 0
        for tag in self._open:
            if tag not in acked:
                break
            last, count = tag, count + 1
        frames = [self._frame(_ACK, last, _MULTIPLE if count > 1 else 0)] if last else []
        frames += [self._frame(_ACK, tag, 0) for tag in sorted(acked) if tag > last]
        for tag in acked:
            del self._open[tag]
        return frames

    def _frame(self, method: int, tag: int, bits: int) -> bytes:
        return _FRAME.pack(1, self.channel.number, 13, 60, method, tag, bits, 0xCE)


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
        return self._acks.channel.is_closed

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
        self._waiting: set[asyncio.Future[None]] = set()
        self._opened_at = asyncio.get_running_loop().time()
        self._refused = False

    @property
    def usable(self) -> bool:
        """Whether it is open, and the broker takes here what it would take on a new channel.

        A channel remembers the leader of each quorum queue that it published to. One that first publishes after the
        leader's node went down, and before the nodes left have recorded another, keeps the dead one: everything for
        that queue is refused on it until it closes (RabbitMQ 3.10, `rabbit_fifo_client:enqueue`, `nodedown`).
        """
        is_suspect = self._refused and asyncio.get_running_loop().time() - self._opened_at >= REPLACE_REFUSED_S
        return not (self.channel.is_closed or is_suspect)

    async def close(self) -> None:
        """Close once each publish under way has ended, within its own time limit."""
        if self._waiting:
            await asyncio.wait(self._waiting)
        with contextlib.suppress(BusError), translated():  # closed meanwhile
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.channel.close()

    async def publish(self, message: Outgoing) -> None:
        """Publish and wait for the confirm, or raise as the port specifies."""
        exchange = self._names.exchange(message.exchange)
        also = self._names.key(message.exchange, message.also) if message.also else ""
        reply_to = None if message.reply_to is None else self._names.queue(message.reply_to)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(ended)
        try:
            with translated(exchange or "amq.default"):
                await self.channel.basic_publish(
                    message.body,
                    exchange=exchange,
                    routing_key=self._names.key(message.exchange, message.routing_key),
                    properties=properties_of(message, reply_to, also),
                    mandatory=message.mandatory,
                    timeout=CONFIRM_TIMEOUT_S,
                    wait=False,
                )
        except BusUnavailable as error:
            if isinstance(error.__cause__, TimeoutError):
                raise BusUnavailable(f"no confirm within {CONFIRM_TIMEOUT_S:g} s") from error.__cause__
            raise
        except PublishRefused:
            self._refused = True
            raise
        finally:
            self._waiting.discard(ended)
            ended.set_result(None)


def properties_of(message: Outgoing, reply_to: str | None, also: str = "") -> Basic.Properties:
    """The properties of a message, its headers among them.

    A property that is longer than AMQP allows is cut: some repeat values of a client, ours or another's, and one
    message's property must not stop its consumer.
    """
    headers: dict[str, Any] = {**message.headers, CC: [also]} if also else dict(message.headers)
    return Basic.Properties(
        content_type=cut(message.content_type),
        headers=headers or None,
        delivery_mode=2 if message.persistent else 1,
        correlation_id=cut(message.correlation_id or ""),
        reply_to=cut(reply_to or ""),
        expiration=None if message.expiration_s is None else str(max(0, int(message.expiration_s * 1000))),
        message_id=cut(message.message_id),
        message_type=cut(message.type),
    )


def cut(text: str) -> str:
    """A property as it arrives, and comes back."""
    if len(text) * 4 <= MAX_PROPERTY_BYTES:
        return text
    return text.encode("utf-8", "surrogateescape")[:MAX_PROPERTY_BYTES].decode("utf-8", "surrogateescape")
