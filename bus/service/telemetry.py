"""Logs that a machine can read, one JSON object a line, each with its process and role.

A line about a build carries `cause` (and `instance` where it is known): `log.info("claimed", cause=meta.cause)`.
Where its trace is sampled, it carries `trace_id` too.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO, cast

import msgspec
import structlog
from structlog.typing import Processor

from bus.tracing.context import CURRENT, context_of

log = structlog.get_logger("berth")

MAX_TEXT = 4000  # one value of a log line; a hostile message must not fill the disk

# Libraries that log at INFO what berth logs itself, or what needs no log.
QUIET = ("aio_pika", "aiormq", "alembic", "asyncio", "httpx", "httpcore", "sqlalchemy", "uvicorn")

_json = msgspec.json.Encoder(enc_hook=str).encode


def configure_logging(
    *, process: str, role: str, level: str = "info", style: str = "auto", stream: TextIO | None = None
) -> None:
    """Set up structlog and the standard library's logging for this process, all to standard error. style: "json",
    "pretty", or "auto" (pretty on a terminal).
    """
    out = stream if stream is not None else sys.stderr
    log_file = cast("TextIO", LossyLog(out))
    pretty = style == "pretty" or (style == "auto" and out.isatty())
    structlog.contextvars.bind_contextvars(process=process, role=role)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_trace,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    last: list[Processor] = (
        # Without the values of local variables, which the default prints: a request's have tokens and cookies.
        [
            _truncate,
            _escape,
            structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback),
        ]
        if pretty
        else [structlog.processors.format_exc_info, _truncate, structlog.processors.JSONRenderer(serializer=_dumps)]
    )
    structlog.configure(
        processors=[*shared, *last],
        logger_factory=structlog.WriteLoggerFactory(file=log_file),
        cache_logger_on_first_use=False,
    )
    _configure_standard_library(log_file, shared, last)
    set_log_level(level)


def set_log_level(level: str) -> None:
    """Log from this level on. A logger that was bound before keeps its own."""
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(number))
    logging.getLogger().setLevel(number)
    for name in QUIET:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))


def _configure_standard_library(log_file: TextIO, shared: Sequence[Processor], last: Sequence[Processor]) -> None:
    """Have what libraries log by the standard library's logging written as berth's own lines are."""
    handler = logging.StreamHandler(log_file)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]


class LossyLog:
    """A log whose lines are lost while they cannot be written, on a full disk or a pipe without a reader.

    A line that raised would end what wrote it: for example a task that connects again, for good.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost = 0

    def write(self, text: str) -> int:
        """Write, after a line about how many writes have failed since the last one."""
        try:
            if self._lost:
                self._stream.write(_dumps({"event": "log.lines_lost", "lines": self._lost}) + "\n")
                self._stream.flush()
                self._lost = 0
            self._stream.write(text)
        except (OSError, ValueError):  # ValueError: it is closed
            self._lost += 1
        return len(text)

    def flush(self) -> None:
        """Flush; what cannot be written stays in the stream's buffer, or is lost."""
        with suppress(OSError, ValueError):
            self._stream.flush()


def _add_trace(_logger: Any, _method: str, event: Any) -> Any:
    """The trace of the build that a line is about, found by its cause."""
    if CURRENT.get() is not None:
        found = context_of(event.get("cause", "")) or context_of(event.get("instance", ""))
        if found is not None:
            event["trace_id"] = found.trace_id
    return event


def _escape(_logger: Any, _method: str, event: Any) -> Any:
    """Characters that a terminal would execute, or read as a new line; JSON escapes it itself."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    return event


def _truncate(_logger: Any, _method: str, event: Any) -> Any:
    for key, value in event.items():
        if isinstance(value, str) and len(value) > MAX_TEXT:
            event[key] = value[:MAX_TEXT] + "…"
    return event


def _dumps(event: Any, **_: Any) -> str:
    return _json(event).decode()
