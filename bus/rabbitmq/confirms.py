"""Publishes on one channel: frames are written together, and aiormq matches the confirms."""

from __future__ import annotations

import asyncio

from aiormq import Channel
from aiormq.abc import ChannelFrame
from msgspec import structs

from bus.port import BusUnavailable, Outgoing, PublishRefused
from bus.rabbitmq import frames
from bus.rabbitmq.errors import translated
from bus.topology import QueueNames

CONFIRM_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0
# A channel that is this old and was refused something is replaced. Refusals of a full queue cost one channel in this
# time; a refusal that would be permanent, because of a leader that is gone, lasts no longer.
REPLACE_REFUSED_S = 5.0


class PublishChannel:
    """A channel in confirm mode. It has one publisher, so its delivery tags are counted here."""

    def __init__(self, channel: Channel, names: QueueNames) -> None:
        self.channel = channel
        self._names = names
        self._frame_max = channel.connection.connection_tune.frame_max
        self._waiting: set[asyncio.Future[object]] = set()
        self._out: list[bytes] = []
        self._sending = False
        self._sender: asyncio.Task[None] | None = None
        self._opened_at = asyncio.get_running_loop().time()
        self._refused = False
        channel.closing.add_done_callback(self._closed)

    @property
    def suspect(self) -> bool:
        """Whether the broker may refuse here a message that it would take on a new channel.

        A channel remembers the leader of each quorum queue that it published to. One that first publishes after the
        leader's node went down, and before the nodes left have recorded another, keeps the dead one: everything for
        that queue is refused on it until it closes (RabbitMQ 3.10, `rabbit_fifo_client:enqueue`, `nodedown`).
        """
        return self._refused and asyncio.get_running_loop().time() - self._opened_at >= REPLACE_REFUSED_S

    async def close(self) -> None:
        """Close once each publish under way has ended, within its own time limit."""
        if self._waiting:
            await asyncio.wait(set(self._waiting), timeout=CONFIRM_TIMEOUT_S)
        with translated():
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.channel.close()

    async def publish(self, message: Outgoing) -> None:
        """Publish and wait for the confirm, or raise as the port specifies."""
        exchange = self._names.exchange(message.exchange)
        # A returned message names itself by its id.
        name = frames.cut(message.message_id) or f"{self.channel.number}.{self.channel.delivery_tag + 1}"
        if name != message.message_id:
            message = structs.replace(message, message_id=name)
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
            self.channel.message_id_delivery_tag.pop(message.message_id, None)

    def _send(self, message: Outgoing, exchange: str) -> asyncio.Future[object]:
        """Count the tag and queue the frames in one step, so that tags and frames have the same order."""
        if self.channel.is_closed:
            raise BusUnavailable("the channel is closed")
        payload = frames.publish(
            message,
            exchange,
            self._names.key(message.exchange, message.routing_key),
            None if message.reply_to is None else self._names.queue(message.reply_to),
            channel=self.channel.number,
            frame_max=self._frame_max,
            also=self._names.key(message.exchange, message.also) if message.also else "",
        )
        loop = asyncio.get_running_loop()
        confirmed: asyncio.Future[object] = loop.create_future()
        self.channel.delivery_tag += 1
        self.channel.confirmations[self.channel.delivery_tag] = confirmed
        self.channel.message_id_delivery_tag[message.message_id] = self.channel.delivery_tag
        self._waiting.add(confirmed)
        self._out.append(payload)
        if not self._sending:
            self._sending = True
            loop.call_soon(self._flush)
        return confirmed

    def _flush(self) -> None:
        frame = ChannelFrame(payload=b"".join(self._out), should_close=False)
        self._out.clear()
        try:
            self.channel.write_queue.put_nowait(frame)
            self._sending = False
        except asyncio.QueueFull:
            # One sender at a time: later messages follow it, so the order stands.
            self._sender = asyncio.get_running_loop().create_task(self._wait_to_send(frame))

    async def _wait_to_send(self, frame: ChannelFrame) -> None:
        await self.channel.write_queue.put(frame)
        self._sending = False
        if self._out:
            self._sending = True
            self._flush()

    def _closed(self, closing: asyncio.Future[object]) -> None:
        """Each publish that still waits fails with the cause; aiormq only ends the futures that it made."""
        reason = None if closing.cancelled() else closing.exception()
        for confirmed in self._waiting:
            if not confirmed.done():
                confirmed.set_exception(reason if isinstance(reason, Exception) else BusUnavailable("closed"))
        if self._sender is not None:
            self._sender.cancel()


def _late(confirmed: asyncio.Future[object]) -> None:
    if not confirmed.done():
        confirmed.set_exception(BusUnavailable(f"no confirm within {CONFIRM_TIMEOUT_S} s"))
