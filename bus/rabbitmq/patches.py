"""Patches to private parts of aiormq and pamqp: tolerant reading of properties, frames cut in batches, delivery tags
taken at once, alarms. `install` checks the versions.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from importlib.metadata import version
from typing import Any

import pamqp.frame
import structlog
from aiormq import Channel, Connection
from aiormq.abc import AbstractChannel, AbstractConnection, DeliveredMessage
from aiormq.connection import FrameReceiver
from aiormq.exceptions import AMQPConnectionError, InvalidFrameError
from pamqp import commands, decode
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.exceptions import PAMQPException
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from bus.transport import UNREAD, BusForbidden

log = structlog.get_logger("bus.rabbitmq")

# The versions in which these private parts may be as they were read; whether they are, `install` tries. pyproject.toml
# has the same bounds.
SUPPORTED = {"aio-pika": "10.", "aiormq": "7.", "pamqp": "4."}

_BLOCKED, _UNBLOCKED = "_Connection__handle_connection_blocked", "_Connection__handle_connection_unblocked"
_PRIVATE: tuple[tuple[object, str], ...] = (
    (FrameReceiver, "get_frame"),
    (Channel, "_get_frame"),
    (Channel, "_on_deliver_frame"),
    (Connection, _BLOCKED),
    (Connection, _UNBLOCKED),
    (decode, "METHODS"),
    (Basic.Properties, "unmarshal"),
    (commands.Connection.Open, "valid_responses"),
)

# Attributes that a channel gives itself, of which a class knows nothing.
_CLOSE_EVENT = "_Channel__close_event"
_OF_A_CHANNEL = ("write_queue", "delivery_tag", "confirmations", "message_id_delivery_tag", "consumers", _CLOSE_EVENT)

# Tables and arrays in each other; deeper values are left out.
MAX_DEPTH = 16
# Values of one message's headers; the values after them are left out.
MAX_VALUES = 4_096
# A timestamp beyond this many seconds counts milliseconds, as pamqp has it.
MAX_SECONDS = 0xFFFFFFFF

_BYTE, _FLAGS, _LONG = struct.Struct(">B"), struct.Struct(">H"), struct.Struct(">I")
_SHORT_TEXT, _TABLE, _OCTET, _TIMESTAMP = "shortstr", "table", "octet", "timestamp"
# A broker agrees to frames of 128 KiB; what claims to be much larger is no frame.
MAX_FRAME_BYTES = 16 * 2**20
READ_BYTES = 256 * 1024
END_BYTES = 64 * 1024  # of a body that is cut
_HEAD = struct.Struct(">BHI")  # type, channel, size
_METHOD, _HEADER, _BODY, _HEARTBEAT, _END = 1, 2, 3, 8, 0xCE
_DELIVER = struct.pack(">HH", 60, 60)
_ACK = struct.Struct(">4sQB")
_ACK_METHOD = struct.pack(">HH", 60, 80)
_TAG = struct.Struct(">QB")

Received = tuple[int, int, Any]  # bytes, channel, frame: as pamqp returns them

# How aiormq reads a frame.
_first_frame = FrameReceiver.get_frame


class UnknownLibrary(BusForbidden):
    """aio-pika, aiormq or pamqp is of a version whose private parts this file does not know."""

    code = "bus.library"


@cache
def install() -> None:
    """Make aiormq and pamqp receive and read by these functions. Raises UnknownLibrary."""
    # aiormq reports why a broker refuses to open a virtual host only where pamqp lists a Close as an answer: the last
    # patch.
    for name, known in SUPPORTED.items():
        found = version(name)
        if not found.startswith(known):
            raise UnknownLibrary(f"{name} {found} is installed; berth knows {known}*")
    for owner, name in _PRIVATE:
        if not hasattr(owner, name):
            raise UnknownLibrary(f"{getattr(owner, '__name__', owner)} has no {name}")
    for name in _OF_A_CHANNEL:
        if name not in Channel.__init__.__code__.co_names:
            raise UnknownLibrary(f"a channel has no {name}")
    decode.METHODS[_SHORT_TEXT] = _short_text
    Basic.Properties.unmarshal = _properties  # type: ignore[method-assign, assignment]
    FrameReceiver.get_frame = _get_frame  # type: ignore[method-assign, assignment]
    commands.Connection.Open.valid_responses.append(commands.Connection.Close.name)
    _try()


def _try() -> None:
    """Read frames as a broker sends them, one of a hostile client's message among them. Raises UnknownLibrary."""
    properties = Basic.Properties(message_id="%", headers={"a": ["b", 1]})
    sent = (
        Basic.Deliver("tag", 7, True, "exchange", "key"),
        ContentHeader(0, 1, properties),
        ContentBody(b"x"),
        Basic.Ack(7, True),
        commands.Channel.Close(404, "gone", 60, 40),
    )
    raw = b"".join(pamqp.frame.marshal(one, 1) for one in sent)
    cut, hostile = FrameSplitter(), FrameSplitter()
    cut.feed(raw)
    hostile.feed(raw.replace(b"%", b"\xff"))
    try:
        if b"".join(pamqp.frame.marshal(cut.next()[2], 1) for _ in sent) != raw:  # type: ignore[index]
            raise UnknownLibrary("pamqp's frames are others than berth knows")
        _, header = hostile.next(), hostile.next()
        if header is None or header[2].properties.message_id != "\udcff":
            raise UnknownLibrary("pamqp reads a message's properties by another function than berth knows")
    except (AttributeError, TypeError, InvalidFrameError) as error:
        raise UnknownLibrary(f"pamqp's frames are others than berth knows: {error}") from error


def listen_for_alarms(connection: AbstractConnection, on_alarm: Callable[[str], None]) -> None:
    """Have a function called with the reason when the broker takes no more messages, and with "" when it takes them
    again.
    """
    # aiormq itself only logs an alarm.

    async def blocked(frame: commands.Connection.Blocked) -> None:
        on_alarm(frame.reason or "no reason given")

    async def unblocked(_: commands.Connection.Unblocked) -> None:
        on_alarm("")

    setattr(connection, _BLOCKED, blocked)
    setattr(connection, _UNBLOCKED, unblocked)


def has_ended(channel: AbstractChannel) -> bool:
    """Whether nothing may be written on a channel any more: for a frame that follows its end the broker ends the
    connection. aiormq says that a channel is closed some turns of the loop after it has acknowledged the end.
    """
    return channel.is_closed or getattr(channel, _CLOSE_EVENT).is_set()


def confirm_of(channel: Channel, message_id: str) -> asyncio.Future[object]:
    """Take the next delivery tag, for the publish whose frames are queued in the same step. The future ends with the
    broker's answer: aiormq's PublishError when the message comes back, DeliveryError when it is refused.
    """
    # aiormq waits for a lock, a time limit and the channel's end around each publish: twice the time of the rest of it.
    confirmed: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    tags, tag = channel.message_id_delivery_tag, channel.delivery_tag + 1
    channel.delivery_tag = tags[message_id] = tag
    channel.confirmations[tag] = confirmed

    def forget(_: object) -> None:
        if tags.get(message_id) == tag:  # not when another of this id was published meanwhile
            del tags[message_id]

    confirmed.add_done_callback(forget)
    return confirmed


def hand_over_at_once(channel: Any, on_message: Callable[[DeliveredMessage], None], most_bytes: int) -> None:
    """Have a channel that has one consumer call it with each delivery, instead of making a task for each. It raises
    nothing, which would end the channel. most_bytes: the bound of a body; a longer one keeps one byte more, its end
    among them.
    """

    async def on_deliver(frame: Basic.Deliver) -> None:
        header = await channel._get_frame()
        if not isinstance(header, ContentHeader):
            raise ValueError(f"{header!r} instead of a header")
        body = await _body(channel, header.body_size, most_bytes)
        on_message(DeliveredMessage(delivery=frame, header=header, body=body, channel=channel))

    channel._on_deliver_frame = on_deliver


async def _body(channel: Any, size: int, most_bytes: int) -> bytes:
    """The body of a delivery, of which a broker lets 128 MiB pass by default. Beyond the bound only so much is kept
    that its reader sees that, and the end, where oslo.messaging names whom to answer.
    """
    parts: list[bytes] = []
    seen, kept, end = 0, 0, b""
    while seen < size:
        frame = await channel._get_frame()
        if not isinstance(frame, ContentBody):
            raise ValueError(f"{frame!r} instead of a body")
        seen += len(frame.value)
        if seen > most_bytes:
            end = ((end or b"".join(parts)) + frame.value)[-END_BYTES:]
        if kept <= most_bytes:
            parts.append(frame.value[: most_bytes + 1 - kept])
            kept += len(parts[-1])
    if end:
        return b"".join(parts)[: most_bytes + 1 - len(end)] + end
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _get_frame(receiver: Any) -> Received:
    """The next frame. Raises as aiormq's own: AMQPConnectionError when the connection ends, InvalidFrameError."""
    if not receiver.started:
        first: Received = await _first_frame(receiver)
        return first
    # A connection that is older than this patch has read whole frames only: it goes on at the next one.
    cut: FrameSplitter = receiver.__dict__.setdefault("cut", FrameSplitter())
    while (frame := cut.next()) is None:
        try:
            data = await receiver.reader.read(READ_BYTES)
        except OSError as error:
            raise AMQPConnectionError(f"Server communication error: {error!r}") from error
        if not data:
            raise AMQPConnectionError(f"Server connection unexpectedly closed, {cut.left} bytes into a frame")
        cut.feed(data)
    return frame


class FrameSplitter:
    """Bytes as they come, cut into frames."""

    # All that one read has brought is cut without waiting again for each frame. aiormq waits three times for each,
    # under a lock, pamqp reads its head twice and its fields by the names of their types, and a delivery is three
    # frames and a task: a third of a scheduler's work at a low load. The first frame of a connection is read by aiormq,
    # which handles a broker of another protocol.

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
            return pamqp.frame.unmarshal(_HEAD.pack(_METHOD, 0, len(payload)) + payload + bytes((_END,)))[2]
        if kind == _HEADER:
            header = ContentHeader()
            header.unmarshal(payload)
            return header
    except (PAMQPException, struct.error, IndexError, ValueError) as error:
        raise InvalidFrameError(str(error)) from error
    if kind == _HEARTBEAT and not payload:
        return Heartbeat()
    raise InvalidFrameError(f"a frame of type {kind}")


def _deliver(payload: bytes) -> Basic.Deliver:
    consumer_tag, at = _text_at(payload, len(_DELIVER))
    tag, bits = _TAG.unpack_from(payload, at)
    exchange, at = _text_at(payload, at + _TAG.size)
    routing_key, _ = _text_at(payload, at)
    return Basic.Deliver(consumer_tag, tag, bool(bits & 1), exchange, routing_key)


def _text_at(payload: bytes, at: int) -> tuple[str, int]:
    """A short string, and where the next field begins."""
    end = at + 1 + payload[at]
    return payload[at + 1 : end].decode("utf-8", errors="surrogateescape"), end


def _short_text(value: bytes) -> tuple[int, str]:
    text, end = _text_at(value, 0)
    return end, text


def _properties(properties: Any, flags: int, data: bytes) -> None:
    # Properties are read without ever failing. The broker checks only their lengths, and any client may publish. pamqp
    # raises on text that is not UTF-8, on a timestamp beyond the calendar and on deep tables, in the reader of the
    # connection: the connection is lost, all that was delivered on it is delivered again, and one message drives its
    # neighbours past their delivery limit. It also copies the rest of a table for each value: a header frame of 128 kB
    # takes seconds. Here text that is not UTF-8 keeps its bytes (`surrogateescape`), values without a Python equivalent
    # are None, and depth and number of values are bounded. `UNREAD` marks left-out headers: a publisher could hide the
    # broker's own behind too many others. Of two headers of one name the first counts, as it does for the broker.
    try:
        _read(properties, flags, data)
    except Exception as error:  # on any error the values read so far stay, and the rest is treated as absent
        log.warning("bus.unreadable_properties", error=type(error).__name__)
        properties.headers = {**(properties.headers or {}), UNREAD: True}


def _read(properties: Any, flags: int, data: bytes) -> None:
    at = 0
    for name, flag, kind in _PROPERTIES:
        if not flags & flag:
            continue
        value: object
        if kind == _SHORT_TEXT:
            value, at = _text_at(data, at)
        elif kind == _TABLE:
            start = at + _LONG.size
            at = start + _LONG.unpack_from(data, at)[0]
            values = _Values(data)
            value = values.table(start, at, 0)
            if values.is_truncated:
                value = {**value, UNREAD: True}
        elif kind == _OCTET:
            value, at = data[at], at + 1
        else:
            value, at = _timestamp(struct.unpack_from(">Q", data, at)[0]), at + 8
        setattr(properties, name, value)


class _Values:
    """The values of one message's headers."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = MAX_VALUES
        self.is_truncated = False  # for the number of values

    def table(self, at: int, end: int, depth: int) -> dict[str, object]:
        found: dict[str, object] = {}
        while at < end and self._left:
            start = at + 1
            at = start + self._data[at]
            name = self._data[start:at].decode("utf-8", errors="backslashreplace")
            value, at = self._value(at, depth)
            found.setdefault(name, value)
        self.is_truncated |= at < end
        return found

    def _array(self, at: int, end: int, depth: int) -> list[object]:
        found: list[object] = []
        while at < end and self._left:
            value, at = self._value(at, depth)
            found.append(value)
        self.is_truncated |= at < end
        return found

    def _value(self, at: int, depth: int) -> tuple[object, int]:
        """A value, and where the next one begins."""
        self._left -= 1
        kind, at = self._data[at], at + 1
        fixed = _FIXED.get(kind)
        if fixed is not None:
            form, port_error = fixed
            raw = form.unpack_from(self._data, at)
            return (port_error(*raw) if port_error is not None else raw[0]), at + form.size
        if kind in _VOID:
            return None, at
        if kind not in _LENGTH_FIRST:
            raise ValueError(f"unknown type {kind}")
        start = at + _LONG.size
        end = start + _LONG.unpack_from(self._data, at)[0]
        if kind in _STRINGS:
            raw_text = self._data[start:end]
            try:
                return (raw_text.decode() if kind == ord("S") else raw_text), end
            except UnicodeDecodeError:
                return raw_text, end
        if depth >= MAX_DEPTH:
            return None, end
        return (self.table if kind == ord("F") else self._array)(start, end, depth + 1), end


def _timestamp(ticks: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(ticks / 1000 if ticks > MAX_SECONDS else ticks, tz=UTC)
    except (ValueError, OverflowError, OSError):
        return None


_FIXED: dict[int, tuple[struct.Struct, Callable[..., object] | None]] = {
    ord(kind): (struct.Struct(form), port_error)
    for kind, form, port_error in (
        ("t", ">B", bool),
        ("b", ">b", None),
        ("B", ">B", None),
        ("s", ">h", None),
        ("u", ">H", None),
        ("I", ">i", None),
        ("i", ">I", None),
        ("l", ">q", None),
        ("L", ">q", None),
        ("f", ">f", None),
        ("d", ">d", None),
        ("D", ">BI", lambda scale, raw: Decimal(raw).scaleb(-scale)),
        ("T", ">Q", _timestamp),
    )
}
_VOID = (ord("V"), 0)
_STRINGS = (ord("S"), ord("x"))
_LENGTH_FIRST = (*_STRINGS, ord("A"), ord("F"))
# In the order in which they follow each other.
_PROPERTIES = tuple(
    (name, Basic.Properties.flags[name], str(getattr(Basic.Properties, f"_{name}")))
    for name in Basic.Properties.__slots__
)
