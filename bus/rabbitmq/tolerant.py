"""Messages whose properties cannot be read. The broker checks none of them, and anybody may publish.

pamqp raises on a timestamp beyond the calendar, on names that are not UTF-8 and on odd tables, in the reader of the
connection: the connection is lost, everything on it is delivered again, the same message comes back, and in twenty
turns it has driven its healthy neighbours past their delivery limit. Here such a message arrives without what could
not be read.
"""

from __future__ import annotations

from typing import Any

import structlog
from pamqp import decode
from pamqp.commands import Basic

log = structlog.get_logger("bus.rabbitmq")

_strict = Basic.Properties.unmarshal


def install() -> None:
    """Make pamqp read on. Doing it twice is fine."""
    decode.METHODS["shortstr"] = _short_text
    Basic.Properties.unmarshal = _properties  # type: ignore[method-assign, assignment]


def _short_text(value: bytes) -> tuple[int, str]:
    end = value[0] + 1
    return end, value[1:end].decode("utf-8", errors="replace")


def _properties(properties: Any, flags: int, data: bytes) -> None:
    try:
        _strict(properties, flags, data)
    except Exception as error:  # whatever it is, what was read so far stays, and the rest is as if not given
        log.warning("bus.unreadable_properties", error=type(error).__name__)
