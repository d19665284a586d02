"""What passes on channels: publishes, each with its confirm; and deliveries, whose acknowledgements gather so that one
frame acknowledges many.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping

from aiormq import Channel
from aiormq.abc import AbstractChannel, DeliveredMessage
from msgspec import structs

from bus.clock import shared_delay_s
from bus.port import DELIVERY_FIELDS, BusError, BusUnavailable, Outgoing, PublishRefused
from bus.rabbitmq import frames
from bus.rabbitmq.errors import translated
from bus.rabbitmq.patches import confirm_of
from bus.topology import QueueNames

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
        self._frames = frames.FrameWriter(channel)
        self._timer: asyncio.TimerHandle | None = None

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
            self._frames.write(frames.answer(self.channel.number, frames.REJECT, tag, requeue))
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
            self._frames.write(frames.answer(self.channel.number, frames.ACK, last, count > 1))
        for tag in sorted(acked):
            del self._open[tag]
            if tag > last:
                self._frames.write(frames.answer(self.channel.number, frames.ACK, tag, False))


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
        self._frames = frames.FrameWriter(channel)
        self._waiting: set[asyncio.Future[object]] = set()
        self._name = secrets.token_hex(8)  # consumers know a message by its id, also one of another publisher
        self._opened_at = asyncio.get_running_loop().time()
        self._refused = False
        channel.closing.add_done_callback(self._closed)

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
        if self.channel.is_closed:
            raise BusUnavailable("the channel is closed")
        names = self._names
        payload = frames.publish(
            message,
            exchange,
            names.key(message.exchange, message.routing_key),
            None if message.reply_to is None else names.queue(message.reply_to),
            names.key(message.exchange, message.also) if message.also else "",
            channel=self.channel.number,
            frame_max=self.channel.connection.connection_tune.frame_max,
        )
        confirmed = confirm_of(self.channel, frames.cut(message.message_id))
        self._waiting.add(confirmed)
        self._frames.write(payload)
        return confirmed

    def _closed(self, closing: asyncio.Future[object]) -> None:
        """Each publish that still waits fails with the cause."""
        reason = None if closing.cancelled() else closing.exception()
        for confirmed in self._waiting:
            if not confirmed.done():
                confirmed.set_exception(reason if isinstance(reason, Exception) else BusUnavailable("closed"))


def _late(confirmed: asyncio.Future[object]) -> None:
    if not confirmed.done():
        confirmed.set_exception(BusUnavailable(f"no confirm within {CONFIRM_TIMEOUT_S:g} s"))
