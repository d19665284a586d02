"""Publishes on one channel, each with its confirm."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from aiormq import Channel
from pamqp.commands import Basic

from bus.port import CC, BusError, BusUnavailable, Outgoing, PublishRefused
from bus.rabbitmq.errors import translated
from bus.topology import QueueNames

CONFIRM_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0
# A channel that is this old and was refused something is replaced. Refusals of a full queue cost one channel in this
# time; a refusal that would be permanent, because of a leader that is gone, lasts no longer.
REPLACE_REFUSED_S = 5.0
MAX_PROPERTY_BYTES = 255


class PublishChannel:
    """A channel in confirm mode."""

    def __init__(self, channel: Channel, names: QueueNames) -> None:
        self.channel = channel
        self._names = names
        self._waiting: set[asyncio.Future[None]] = set()
        self._opened_at = asyncio.get_running_loop().time()
        self._refused = False

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
