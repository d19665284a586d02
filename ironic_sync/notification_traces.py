"""A trace of each notification of Ironic that has a node read, until placement has what followed from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bus.tracing.context import CURRENT, Scope, Span, SpanKind
from bus.tracing.tracer import Tracer


class NotificationTraces:
    """The spans of nodes whose notifications are under way, at most one a node."""

    # Later notifications about a node are answered by the same read and the same update, and so belong to the trace of
    # the first.

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer
        self._spans: dict[str, Span] = {}

    def begin(self, node: str, what: str, cause: str) -> None:
        """A notification has arrived. what: its event."""
        if self._tracer is None or node in self._spans:
            return
        about: dict[str, str | int] = {"berth.node": node, "berth.event": what, "berth.cause": cause}
        span = self._tracer.root("ironic notification", about, kind=SpanKind.CONSUMER)
        if span is not None:
            self._spans[node] = span

    def end(self, node: str) -> None:
        """Placement has what followed, or nothing did."""
        if (span := self._spans.pop(node, None)) is not None:
            span.end()

    def close(self, code: str) -> None:
        """The term ends with notifications under way."""
        for node in list(self._spans):
            self._spans.pop(node).end(code)

    def traceparent(self, node: str) -> str:
        """The header of an update of this node; empty: it has no sampled trace."""
        span = self._spans.get(node)
        return "" if span is None else span.context.header

    @contextlib.contextmanager
    def reading(self, node: str) -> Iterator[None]:
        """The block's requests to Ironic about the node are in the trace."""
        span = self._spans.get(node)
        if span is None or self._tracer is None:
            yield
            return
        token = CURRENT.set(Scope(self._tracer.start, {}, span, whole=True))
        try:
            yield
        finally:
            CURRENT.reset(token)
