"""Spans: begun and ended here, gathered, and exported in batches beside the work. A trace is sampled only where it
begins, by its id: at the client, or where a request without a context enters; a client may ask for it in its header,
within the same limit. Spans that cannot be exported in time are dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import structlog
from msgspec import Struct
from prometheus_client import Counter

from bus.consuming.outcome import Done, Outcome, Received
from bus.tracing.context import CURRENT, NOT_SAMPLED, Scope, Span, SpanKind, TraceContext, parse_traceparent

log = structlog.get_logger(__name__)

# Where a message without a context begins a trace of its own, and a client's wish is limited.
EDGES = frozenset({"scheduler.requests", "gateway.requests"})

MAX_SPANS = 8_192  # that wait for their export; one more is dropped
EXPORT_BATCH = 512  # spans in one export
EXPORT_PAUSE_S = 5.0  # ended spans gather this long, unless a batch is full
CLOSE_S = 3.0  # how long the last export may take
MAX_LINKS = 128  # of one batch
LOG_INTERVAL_S = 60.0  # failed exports are logged this often

_exported = Counter("berth_trace_spans", "Spans that the collector has taken")
_dropped = Counter("berth_trace_dropped_spans", "Spans that were dropped: too many waited, or the export failed")
_limited = Counter("berth_trace_limited", "Traces that were not sampled because of traces.most_per_s")


class SpanExporter(Protocol):
    """Sends spans to a collector. Adapter: `bus.tracing.otlp_json`."""

    async def export(self, spans: Sequence[Span]) -> None:
        """Returns when the collector has taken them; raises ExportFailed."""

    async def close(self) -> None:
        """Let go of connections."""


class ExportFailed(Exception):
    """The collector did not take the spans, which are dropped."""


class TraceLimit(Struct):
    """At most this many traces a second begin, and as many at once after a quiet second."""

    most_per_s: float
    left: float = 0.0
    at: float = 0.0

    def take(self, now: float) -> bool:
        """Whether one more may begin. now: monotonic seconds."""
        self.left = min(self.most_per_s, self.left + (now - self.at) * self.most_per_s)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


class Tracer:
    """Makes the spans of one process and has them exported."""

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        ratio: float,
        most_per_s: float,
        rng: random.Random | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._exporter = exporter
        self._rng = rng if rng is not None else random.Random()
        # As OpenTelemetry's TraceIdRatioBased: every sampler of the same ratio decides alike.
        self._bound = round(ratio * 2**64)
        self._limit = TraceLimit(most_per_s)
        self._spans: deque[Span] = deque()
        self._exporting: asyncio.Task[None] | None = None
        self._full = asyncio.Event()
        self._logged_at = -LOG_INTERVAL_S

    # --- spans

    def start(
        self,
        name: str,
        *,
        parent: TraceContext | None,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[TraceContext] = (),
        attributes: Mapping[str, str | int] = {},
    ) -> Span:
        """A span below a parent; without one, or below one without a span id, the first of its trace."""
        trace_id = parent.trace_id if parent is not None else self._new_id(128)
        context = TraceContext(trace_id, self._new_id(64))
        parent_id = "" if parent is None else parent.span_id
        return Span(name, context, parent_id, self._ended, kind, links, attributes)

    def root(self, name: str, attributes: Mapping[str, str | int], *, kind: SpanKind = SpanKind.CLIENT) -> Span | None:
        """The first span of a new trace, if the trace is sampled."""
        if (context := self._new_root()) is None:
            return None
        return Span(name, context, "", self._ended, kind, attributes=attributes)

    @contextlib.contextmanager
    def serving(self, name: str, traceparent: str | None, attributes: Mapping[str, str | int]) -> Iterator[Span | None]:
        """A request from outside, whose whole work is one span; None: its trace is not sampled.

        traceparent: its header, which decides about sampling within the limit; without one a trace begins here, or not.
        """
        parsed = parse_traceparent(traceparent)
        span = None
        if parsed is None:
            span = self.root(name, attributes, kind=SpanKind.SERVER)
        elif parsed[1] and self._may_begin():
            span = self.start(name, parent=parsed[0], kind=SpanKind.SERVER, attributes=attributes)
        token = CURRENT.set(Scope(self.start, {}, span, NOT_SAMPLED, whole=True))
        error = "request.raised"
        try:
            yield span
            error = ""
        finally:
            CURRENT.reset(token)
            if span is not None:
                span.end(error)

    @contextlib.contextmanager
    def consuming(self, bus: str, queue: str, batch: Sequence[Received]) -> Iterator[list[Outcome]]:
        """The handling of a batch: a span in the trace of each sampled message. It yields the list that takes the
        outcomes. Where several are sampled, the common work has a span and a trace of its own, with links to theirs.
        """
        spans, by_cause = self._spans_of(bus, queue, batch)
        outcomes: list[Outcome] = []
        if not spans:
            yield outcomes
            return
        several = len(spans) > 1
        work = next(iter(spans.values()))
        if several:
            links = [span.context for span in spans.values()][:MAX_LINKS]
            count: dict[str, str | int] = {"messaging.batch.message_count": len(batch), "berth.bus": bus}
            work = self.start(f"{queue} batch", parent=None, links=links, attributes=count)
            for span in spans.values():
                span.links = (work.context,)
        token = CURRENT.set(Scope(self.start, by_cause, work))
        error = "handler.raised"
        try:
            yield outcomes
            error = ""
        finally:
            CURRENT.reset(token)
            for position, span in spans.items():
                outcome = outcomes[position] if position < len(outcomes) else None
                span.end(error if outcome is None or isinstance(outcome, Done) else outcome.code)
            if several:
                work.end(error)

    def _spans_of(
        self, bus: str, queue: str, batch: Sequence[Received]
    ) -> tuple[dict[int, Span], dict[str, TraceContext]]:
        """({position: span} of the sampled messages of a batch, {the cause or subject of a message: its span})."""
        spans: dict[int, Span] = {}
        by_cause: dict[str, TraceContext] = {}
        is_edge = queue in EDGES
        for position, received in enumerate(batch):
            if not (is_edge or received.meta.traceparent) or (parent := self._parent_of(received, queue)) is None:
                continue
            subject = _subject_of(received)
            attributes: dict[str, str | int] = {
                "messaging.destination.name": queue,
                "messaging.batch.message_count": len(batch),
                "berth.bus": bus,
                "berth.message": type(received.message).__name__,
                "berth.instance": subject,
            }
            span = spans[position] = self.start(queue, parent=parent, kind=SpanKind.CONSUMER, attributes=attributes)
            for key in (received.meta.cause, subject, getattr(received.message, "request_id", "")):
                if key:
                    by_cause[key] = span.context
        return spans, by_cause

    def _parent_of(self, received: Received, queue: str) -> TraceContext | None:
        """The parent of a message's span; with an empty span id a trace that begins here; None: unsampled."""
        if received.meta.traceparent == NOT_SAMPLED:  # of most messages of berth's own clients
            return None
        if received.meta.traceparent:
            parsed = parse_traceparent(received.meta.traceparent)
            if parsed is not None:
                context, is_sampled = parsed
                return context if is_sampled and (queue not in EDGES or self._may_begin()) else None
        return self._new_root(span=False) if queue in EDGES else None

    def _new_root(self, *, span: bool = True) -> TraceContext | None:
        trace = self._rng.getrandbits(128) or 1
        if trace & (2**64 - 1) >= self._bound or not self._may_begin():
            return None
        return TraceContext(f"{trace:032x}", self._new_id(64) if span else "")

    def _may_begin(self) -> bool:
        if self._limit.take(self._monotonic()):
            return True
        _limited.inc()
        return False

    def _new_id(self, bits: int) -> str:
        return f"{self._rng.getrandbits(bits) or 1:0{bits // 4}x}"

    # --- export

    def _ended(self, span: Span) -> None:
        """Gather a span for the next export."""
        if len(self._spans) >= MAX_SPANS:
            _dropped.inc()
            return
        self._spans.append(span)
        if len(self._spans) >= EXPORT_BATCH:
            self._full.set()
        if self._exporting is None:
            self._exporting = asyncio.get_running_loop().create_task(self._export_all())

    async def _export_all(self) -> None:
        """Export until nothing is left; the next span begins another such task."""
        CURRENT.set(None)
        while self._spans:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXPORT_PAUSE_S):
                    await self._full.wait()
            self._full.clear()
            await self._export_waiting()
        self._exporting = None

    async def _export_waiting(self) -> None:
        while self._spans:
            spans = [self._spans.popleft() for _ in range(min(EXPORT_BATCH, len(self._spans)))]
            try:
                await self._exporter.export(spans)
            except ExportFailed as error:
                _dropped.inc(len(spans))
                if self._monotonic() - self._logged_at >= LOG_INTERVAL_S:
                    self._logged_at = self._monotonic()
                    log.warning("traces.not_exported", spans=len(spans), reason=str(error))
            else:
                _exported.inc(len(spans))

    async def close(self) -> None:
        """Export the gathered spans, within CLOSE_S."""
        task, self._exporting = self._exporting, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._export_waiting()
        await self._exporter.close()


@contextlib.contextmanager
def work_for(name: str, cause: str, *, host: str = "", attempt: int = 0) -> Iterator[None]:
    """Work of its own task for one of the messages of a batch: a span below that message's, if it is sampled."""
    scope = CURRENT.get()
    context = None if scope is None else scope.for_cause(cause)
    if scope is None or context is None:
        yield
        return
    attributes: dict[str, str | int] = {"berth.instance": cause, "berth.host": host, "berth.attempt": attempt}
    span = scope.start(name, parent=context, attributes=attributes)
    causes = {**scope.by_cause, cause: span.context}
    token = CURRENT.set(Scope(scope.start, causes, span, scope.otherwise, whole=scope.whole))
    try:
        yield
    except BaseException as error:
        span.end(type(error).__name__)
        raise
    else:
        span.end()
    finally:
        CURRENT.reset(token)


def _subject_of(received: Received) -> str:
    message = received.message
    return str(getattr(message, "instance_uuid", "") or getattr(message, "consumer", "") or received.meta.cause)
