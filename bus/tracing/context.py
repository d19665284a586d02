"""W3C trace contexts, and those of the messages that are being handled. Only sampled messages have one. A handler takes
a batch, so a context is found by the cause of a log line or message (`Meta.cause`), never by the task alone. Without
tracing `CURRENT` is None everywhere, and each look-up ends with that.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from enum import IntEnum

from msgspec import Struct, field

# The specification: version 00 has these four fields and no more; a later version may add some.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_INVALID_VERSION = "ff"
_SAMPLED = 0x01


class TraceContext(Struct, frozen=True):
    """A span of a trace that is sampled, by the ids that W3C gives it: 32 and 16 lower-case hexadecimal digits."""

    trace_id: str
    span_id: str

    @property
    def header(self) -> str:
        """The value of the header `traceparent`."""
        return f"00-{self.trace_id}-{self.span_id}-01"


def parse_traceparent(text: str | None) -> tuple[TraceContext, bool] | None:
    """The context that a header names, and whether its trace is sampled. None: it is no `traceparent`.

    Any client may have written it: a header that does not exactly follow the specification is ignored.
    """
    match = _TRACEPARENT.fullmatch(text) if text else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == _INVALID_VERSION or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id), bool(int(flags, 16) & _SAMPLED)


class SpanKind(IntEnum):
    """The kind of a span, by OTLP's numbers."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3
    CONSUMER = 5


class Span(Struct, eq=False):
    """One piece of work in one trace. kind and times as OpenTelemetry has them: nanoseconds since the epoch."""

    name: str
    context: TraceContext
    parent_id: str
    on_end: Callable[[Span], None]
    kind: SpanKind = SpanKind.INTERNAL
    links: Sequence[TraceContext] = ()
    attributes: Mapping[str, str | int] = {}
    error: str = ""
    started_ns: int = field(default_factory=time.time_ns)
    ended_ns: int = 0

    def end(self, error: str = "") -> None:
        """It is over. error: why it failed, a stable code. A second end changes nothing."""
        if not self.ended_ns:
            self.ended_ns = max(time.time_ns(), self.started_ns)
            self.error = error
            self.on_end(self)


class Scope(Struct, frozen=True, eq=False):
    """The messages that are being handled now."""

    start: Callable[..., Span]  # begins a span below a parent (`bus.tracing.tracer.Tracer.start`)
    by_cause: Mapping[str, TraceContext]  # the contexts of its sampled messages, by their causes and subjects
    # the span of the work for all of them, until it has ended; tasks begun meanwhile keep the scope, and find their own
    # context by cause
    parent: Span | None
    otherwise: str = ""  # the header of messages of other causes ("": none)
    whole: bool = False  # all of it is one request's work: other causes belong to `parent`, until it has ended

    def for_cause(self, cause: str) -> TraceContext | None:
        """The context of what this is the cause of, if it is sampled."""
        found = self.by_cause.get(cause)
        if found is None and self.whole and self.parent is not None and not self.parent.ended_ns:
            return self.parent.context
        return found

    def header_of(self, cause: str) -> str:
        """The same as a header; empty: none."""
        # Of each message that leaves: nearly all are of causes that are not sampled.
        if not self.whole and cause not in self.by_cause:
            return self.otherwise
        context = self.for_cause(cause)
        return self.otherwise if context is None else context.header

    def start_span(self, name: str, **attributes: str | int) -> Span | None:
        """A span of work that is done for all of it; end it with `Span.end`. None: that is over."""
        if self.parent is None or self.parent.ended_ns:
            return None
        return self.start(name, parent=self.parent.context, kind=SpanKind.CLIENT, attributes=attributes)


# Of a request that its client has not sampled, so that nothing further on begins a trace of it.
NOT_SAMPLED = f"00-{1:032x}-{1:016x}-00"

CURRENT: ContextVar[Scope | None] = ContextVar("trace", default=None)


def context_of(cause: str) -> TraceContext | None:
    """The context of what this is the cause of, if it is handled here and sampled."""
    scope = CURRENT.get()
    return None if scope is None else scope.for_cause(cause)


def traceparent_of(cause: str) -> str:
    """The same as a header; empty: none."""
    return "" if (scope := CURRENT.get()) is None else scope.header_of(cause)
