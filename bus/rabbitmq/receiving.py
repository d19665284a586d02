"""Frames from the connection's bytes: all that one read has brought is cut without waiting again for each.

aiormq waits three times for each frame, under a lock, and pamqp reads a frame's head twice and a method's fields by the
names of their types; then it makes a task for each delivery, which is three frames. That was a third of a scheduler's
work at a low load. The first frame of a connection is still read by aiormq, which handles the answer of a broker of
another protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pamqp.frame
import structlog
from aiormq.abc import DeliveredMessage
from aiormq.connection import FrameReceiver
from aiormq.exceptions import AMQPConnectionError, InvalidFrameError
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.exceptions import PAMQPException
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

log = structlog.get_logger("bus.rabbitmq")

# A broker agrees to frames of 128 KiB; what claims to be much larger is no frame.
MAX_FRAME_BYTES = 16 * 2**20
READ_BYTES = 256 * 1024
_HEAD = struct.Struct(">BHI")  # type, channel, size
_METHOD, _HEADER, _BODY, _HEARTBEAT, _END = 1, 2, 3, 8, 0xCE
_DELIVER = struct.pack(">HH", 60, 60)
_ACK = struct.Struct(">4sQB")
_ACK_METHOD = struct.pack(">HH", 60, 80)
_TAG = struct.Struct(">QB")

Received = tuple[int, int, Any]  # bytes, channel, frame: as pamqp returns them


def install() -> None:
    """Make aiormq's connections receive by this. Doing it twice is fine."""
    if FrameReceiver.get_frame is not _get_frame:
        _First.get_frame = FrameReceiver.get_frame
        FrameReceiver.get_frame = _get_frame  # type: ignore[method-assign, assignment]


def hand_over_at_once(channel: Any, on_message: Callable[[DeliveredMessage], None], most_bytes: int) -> None:
    """Have a channel that has one consumer call it with each delivery, instead of making a task for each. most_bytes:
    the bound of a body, of which a longer one keeps one byte more.
    """

    async def on_deliver(frame: Basic.Deliver) -> None:
        header = await channel._get_frame()
        if not isinstance(header, ContentHeader):
            raise ValueError(f"{header!r} instead of a header")
        body = await _body(channel, header.body_size, most_bytes)
        try:
            on_message(DeliveredMessage(delivery=frame, header=header, body=body, channel=channel))
        except Exception:  # of one message, and not of its channel
            log.exception("bus.delivery_failed")

    assert hasattr(channel, "_on_deliver_frame"), "aiormq's channel"
    channel._on_deliver_frame = on_deliver


async def _body(channel: Any, size: int, most_bytes: int) -> bytes:
    """The body of a delivery; of one beyond the bound only so much that its reader sees that.

    A broker lets 128 MiB pass by default, and a scheduler has many lanes.
    """
    parts, seen, kept = [], 0, 0
    while seen < size:
        frame = await channel._get_frame()
        if not isinstance(frame, ContentBody):
            raise ValueError(f"{frame!r} instead of a body")
        seen += len(frame.value)
        if kept <= most_bytes:
            parts.append(frame.value[: most_bytes + 1 - kept])
            kept += len(parts[-1])
    return parts[0] if len(parts) == 1 else b"".join(parts)


class _First:
    """How aiormq reads a frame."""

    get_frame: Any = None


async def _get_frame(receiver: Any) -> Received:
    """The next frame. Raises as aiormq's own: AMQPConnectionError when the connection ends, InvalidFrameError."""
    if not receiver.started:
        first: Received = await _First.get_frame(receiver)
        receiver.cut = Cut()
        return first
    cut: Cut = receiver.cut
    while (frame := cut.next()) is None:
        try:
            data = await receiver.reader.read(READ_BYTES)
        except OSError as error:
            raise AMQPConnectionError(f"Server communication error: {error!r}") from error
        if not data:
            raise AMQPConnectionError(f"Server connection unexpectedly closed, {cut.left} bytes into a frame")
        cut.feed(data)
    return frame


class Cut:
    """Bytes as they come, cut into frames."""

    __slots__ = ("_at", "_data")

    def __init__(self) -> None:
        self._data = b""
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that are not a whole frame yet."""
        return len(self._data) - self._at

    def feed(self, data: bytes) -> None:
        """More bytes."""
        self._data = self._data[self._at :] + data if self.left else data
        self._at = 0

    def next(self) -> Received | None:
        """The next whole frame; None: more bytes are needed. Raises InvalidFrameError."""
        data, at = self._data, self._at
        if len(data) - at < _HEAD.size:
            return None
        kind, channel, size = _HEAD.unpack_from(data, at)
        if size > MAX_FRAME_BYTES:
            raise InvalidFrameError(f"a frame of {size} bytes")
        start = at + _HEAD.size
        end = start + size
        if len(data) <= end:
            return None
        if data[end] != _END:
            raise InvalidFrameError("Last byte error")
        self._at = end + 1
        return end + 1 - at, channel, _frame(kind, data[start:end])


def _frame(kind: int, payload: bytes) -> Any:
    if kind == _BODY:
        return ContentBody(payload)
    try:
        if kind == _METHOD:
            if payload.startswith(_DELIVER):
                return _deliver(payload)
            if payload.startswith(_ACK_METHOD):
                _, tag, bits = _ACK.unpack(payload)
                return Basic.Ack(tag, bool(bits & 1))
            return pamqp.frame._unmarshal_method_frame(payload)
        if kind == _HEADER:
            return pamqp.frame._unmarshal_header_frame(payload)
    except (PAMQPException, struct.error, IndexError) as error:
        raise InvalidFrameError(str(error)) from error
    if kind == _HEARTBEAT and not payload:
        return Heartbeat()
    raise InvalidFrameError(f"a frame of type {kind}")


def _deliver(payload: bytes) -> Basic.Deliver:
    consumer_tag, at = _text(payload, len(_DELIVER))
    tag, bits = _TAG.unpack_from(payload, at)
    exchange, at = _text(payload, at + _TAG.size)
    routing_key, _ = _text(payload, at)
    return Basic.Deliver(consumer_tag, tag, bool(bits & 1), exchange, routing_key)


def _text(payload: bytes, at: int) -> tuple[str, int]:
    """A short string as `tolerant` reads it, and where the next field begins."""
    end = at + 1 + payload[at]
    return payload[at + 1 : end].decode("utf-8", errors="surrogateescape"), end
