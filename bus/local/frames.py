"""The content of the socket's stream: frames, and a delivery on its way.

The protocol is the `Transport` port, call by call: a frame is a 4-byte length and a msgpack array [number, what, ...].
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from msgspec import Struct

# The most that one side sends in one call; and the most that the other reads, which is a little more than was sent to
# it.
MAX_CALL = 32 * 1024 * 1024
MAX_FRAME = MAX_CALL + 64 * 1024

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


class DeliveryFrame(Struct, array_like=True):
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


def frame(*parts: object) -> bytes:
    """The bytes to send for these parts."""
    body = _pack(parts)
    return len(body).to_bytes(4, "big") + body


async def read(reader: asyncio.StreamReader) -> list[Any]:
    """The parts of the next frame, at least two. Raises ConnectionError for bytes that are no frame of ours."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_FRAME:
        raise ConnectionError(f"a frame of {size} bytes")
    parts = _unpack(await reader.readexactly(size))
    if not isinstance(parts, list) or len(parts) < 2:
        raise ConnectionError("not a frame of ours")
    return parts
