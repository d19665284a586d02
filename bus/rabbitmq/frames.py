"""What a channel writes, as AMQP 0-9-1 bytes. pamqp builds a publish in six times the time, which every message would
pay.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping

from aiormq.abc import AbstractChannel, ChannelFrame

from bus.port import CC, Outgoing

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
            if not self._channel.is_closed:
                self._channel.write_queue.put_nowait(frame)  # type: ignore[attr-defined]
            self._sending = False
        except asyncio.QueueFull:
            self._channel.create_task(self._wait_to_send(frame))  # ends with the channel

    async def _wait_to_send(self, frame: ChannelFrame) -> None:
        await self._channel.write_queue.put(frame)  # type: ignore[attr-defined]
        if self._out:
            self._send()
        else:
            self._sending = False


def answer(channel: int, method: int, tag: int, bit: bool) -> bytes:
    """ACK or REJECT of a delivery. bit: also all before it (ACK); give it back to its queue (REJECT)."""
    return _ANSWER.pack(1, channel, 13, 60, method, tag, bit, 0xCE)


def publish(
    message: Outgoing, exchange: str, key: str, reply_to: str | None, also: str, *, channel: int, frame_max: int
) -> bytes:
    """The frames of one publish. frame_max: bytes, 0 for no bound. ValueError: a name is longer than AMQP allows."""
    body = message.body
    most = frame_max - FRAME_OVERHEAD_BYTES if frame_max else max(1, len(body))
    method = _PUBLISH + _name(exchange) + _name(key) + (b"\1" if message.mandatory else b"\0")
    header = _HEADER.pack(60, 0, len(body)) + properties(message, reply_to, also)
    frames = [(_METHOD_FRAME, method), (_HEADER_FRAME, header)]
    frames += [(_BODY_FRAME, body[start : start + most]) for start in range(0, len(body), most)]
    return b"".join([_HEAD.pack(kind, channel, len(payload)) + payload + _END for kind, payload in frames])


def properties(message: Outgoing, reply_to: str | None, also: str = "") -> bytes:
    """The flags of a message's properties, and the properties.

    One that is longer than AMQP allows is cut: some repeat values of a client, ours or another's, and one message's
    property must not stop its consumer.
    """
    flags = _CONTENT_TYPE | _DELIVERY_MODE
    parts = [_short(message.content_type)]
    if message.headers or also:
        flags |= _HEADERS
        parts.append(_table(message.headers, also))
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


def cut(text: str) -> str:
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


def _table(headers: Mapping[str, str | int | float], also: str) -> bytes:
    values = [_short(name) + _value(value) for name, value in headers.items()]
    if also:
        values.append(_short(CC) + b"A" + _long(_value(also)))
    return _long(b"".join(values))


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return b"S" + _long(_raw(value))
    if isinstance(value, bool):
        return b"t" + (b"\1" if value else b"\0")
    return b"l" + struct.pack(">q", value) if isinstance(value, int) else b"d" + struct.pack(">d", value)
