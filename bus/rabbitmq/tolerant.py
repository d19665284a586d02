"""Properties and headers as the broker delivers them, read without ever failing.

The broker checks only their lengths, and any client may publish. pamqp raises on text that is not UTF-8, on a timestamp
beyond the calendar and on deep tables, and it does so in the reader of the connection: the connection is lost, all that
was delivered on it is delivered again, and one message drives its neighbours past their delivery limit. It also copies
the rest of a table for each value, so that a header frame of 128 kB takes seconds.

Here text that is not UTF-8 keeps its bytes (`surrogateescape`: written back, they are the same bytes), values without a
Python equivalent are None, and depth and number of values are bounded. Where some headers were left out, the header
`UNREAD` is there: a publisher could hide the broker's own headers behind too many others. Of two headers of one name
the first counts, which is the one that the broker goes on with.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import structlog
from pamqp import decode
from pamqp.commands import Basic

from bus.port import UNREAD

log = structlog.get_logger("bus.rabbitmq")

# Tables and arrays in each other; deeper values are left out.
MAX_DEPTH = 16
# Values of one message's headers; the values after them are left out.
MAX_VALUES = 4_096
# A timestamp beyond this many seconds counts milliseconds, as pamqp has it.
MAX_SECONDS = 0xFFFFFFFF

_LONG = struct.Struct(">I")
_SHORT_TEXT, _TABLE, _OCTET, _TIMESTAMP = "shortstr", "table", "octet", "timestamp"


def install() -> None:
    """Make pamqp read with these functions. Doing it twice is fine."""
    decode.METHODS[_SHORT_TEXT] = _short_text
    Basic.Properties.unmarshal = _properties  # type: ignore[method-assign, assignment]


def _short_text(value: bytes) -> tuple[int, str]:
    end = value[0] + 1
    return end, _text(value[1:end])


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="surrogateescape")


def _properties(properties: Any, flags: int, data: bytes) -> None:
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
            end = at + 1 + data[at]
            value, at = _text(data[at + 1 : end]), end
        elif kind == _TABLE:
            start = at + _LONG.size
            at = start + _LONG.unpack_from(data, at)[0]
            values = _Values(data)
            value = values.table(start, at, 0)
            if values.left_out:
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
        self.left_out = False  # for the number of values

    def table(self, at: int, end: int, depth: int) -> dict[str, object]:
        found: dict[str, object] = {}
        while at < end and self._left:
            start = at + 1
            at = start + self._data[at]
            name = self._data[start:at].decode("utf-8", errors="backslashreplace")
            value, at = self._value(at, depth)
            found.setdefault(name, value)
        self.left_out |= at < end
        return found

    def _array(self, at: int, end: int, depth: int) -> list[object]:
        found: list[object] = []
        while at < end and self._left:
            value, at = self._value(at, depth)
            found.append(value)
        self.left_out |= at < end
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


def _decimal(scale: int, raw: int) -> Decimal:
    return Decimal(raw).scaleb(-scale)


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
        ("D", ">BI", _decimal),
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
