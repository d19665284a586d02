"""The traces that a client begins: a span for each sampled request, from its publication to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from msgspec import Struct

from bus.bus import Bus
from bus.tracing.context import CURRENT, NOT_SAMPLED, Scope, Span, TraceContext


class TracedRequest(Struct, frozen=True):
    """The name and subject of a span. cause: of its messages; also what its end is known by."""

    name: str
    cause: str
    attributes: dict[str, str | int]


class RequestSpans:
    """The spans of one client's requests that have not ended. They are made while its bus has a tracer."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._spans: dict[str, Span] = {}

    @contextlib.contextmanager
    def publishing(self, requests: Iterable[TracedRequest]) -> Iterator[None]:
        """The messages that the block publishes for them carry their traces, or that they are not sampled."""
        tracer = self._bus.tracer
        if tracer is None:
            yield
            return
        contexts: dict[str, TraceContext] = {}
        for one in requests:
            if (span := tracer.root(one.name, one.attributes)) is not None:
                self.end(one.cause)  # of the same request before
                self._spans[one.cause] = span
                contexts[one.cause] = span.context
        token = CURRENT.set(Scope(tracer.start, contexts, None, NOT_SAMPLED))
        try:
            yield
        finally:
            CURRENT.reset(token)

    def end(self, cause: str, code: str = "") -> None:
        """One has ended. code: why it failed."""
        if (span := self._spans.pop(cause, None)) is not None:
            span.end(code)

    def close(self) -> None:
        """The client goes: what it no longer follows ends here, so that its trace has a beginning."""
        for cause in list(self._spans):
            self.end(cause)
