"""A publisher that sends any bytes as properties, headers and keys, as a foreign client may."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiormq
from aiormq.abc import AbstractChannel, ChannelFrame

RPC_TIMEOUT_S = 30.0
# Property flags of class basic, in the order in which the values follow.
FLAGS = {
    "content_type": 15,
    "content_encoding": 14,
    "headers": 13,
    "delivery_mode": 12,
    "priority": 11,
    "correlation_id": 10,
    "reply_to": 9,
    "expiration": 8,
    "message_id": 7,
    "timestamp": 6,
    "type": 5,
    "user_id": 4,
    "app_id": 3,
    "cluster_id": 2,
}
_AS_THEY_ARE = ("headers", "delivery_mode", "priority", "timestamp")  # given with their lengths, or of a fixed length


def short(raw: bytes) -> bytes:
    """A short string."""
    return bytes((len(raw),)) + raw


def long(raw: bytes) -> bytes:
    """A length of four bytes, and what it is the length of."""
    return struct.pack(">I", len(raw)) + raw


def table(fields: Mapping[bytes, bytes]) -> bytes:
    """A table; each value begins with the letter of its type."""
    return long(b"".join([short(name) + value for name, value in fields.items()]))


def publish_frames(  # noqa: PLR0917  (in the order of the protocol)
    channel: int, exchange: str, key: bytes, properties: Mapping[str, bytes], body: bytes, frame_max: int = 131_072
) -> bytes:
    """One publish. `headers`: a table; `delivery_mode`, `priority`: one byte; `timestamp`: eight; the others: text."""
    method = struct.pack(">HHH", 60, 40, 0) + short(exchange.encode()) + short(key) + b"\0"
    flags = 0
    values = b""
    for name, bit in FLAGS.items():
        if name in properties:
            flags |= 1 << bit
            values += properties[name] if name in _AS_THEY_ARE else short(properties[name])
    header = struct.pack(">HHQH", 60, 0, len(body), flags) + values
    room = frame_max - 8
    pieces = [body[start : start + room] for start in range(0, len(body), room)]
    payloads = [(1, method), (2, header), *((3, piece) for piece in pieces)]
    return b"".join([struct.pack(">BHI", kind, channel, len(raw)) + raw + b"\xce" for kind, raw in payloads])


class RawPublisher:
    """One connection that publishes as it is instructed."""

    def __init__(self, channel: AbstractChannel) -> None:
        self._channel = channel

    async def publish(self, exchange: str, key: bytes | str, body: bytes, **properties: bytes) -> None:
        """Publish; returns when the broker has taken it."""
        raw = key.encode() if isinstance(key, str) else key
        await self.send(publish_frames(self._channel.number, exchange, raw, properties, body))
        await self.taken()

    async def send(self, frames: bytes) -> None:
        """Frames as they are."""
        await self._channel.write_queue.put(ChannelFrame(payload=frames, should_close=False))  # type: ignore[attr-defined]

    async def taken(self) -> None:
        """Until the broker has taken all that was sent: it answers in order. Raises what closed the channel."""
        await self._channel.basic_qos(prefetch_count=1, timeout=RPC_TIMEOUT_S)

    @property
    def number(self) -> int:
        """The channel's number, for frames made beforehand."""
        return self._channel.number


@asynccontextmanager
async def raw_publisher(url: str) -> AsyncIterator[RawPublisher]:
    """A publisher on a connection of its own."""
    connection = await aiormq.connect(url)
    try:
        yield RawPublisher(await connection.channel(publisher_confirms=False))
    finally:
        await connection.close()
