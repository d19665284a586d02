"""Export by OpenTelemetry's exporter (the extra `otel`): OTLP as protobuf, with the variables `OTEL_EXPORTER_OTLP_*`.

The only module that imports opentelemetry, and imported only where `traces.protocol` names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from bus.tracing.context import Span, TraceContext
from bus.tracing.tracer import ExportFailed

EXPORT_TIMEOUT_S = 5
_FLAGS = TraceFlags(TraceFlags.SAMPLED)


class SdkExporter:
    """Posts to `<endpoint>/v1/traces` from a thread, as the SDK's exporter blocks."""

    def __init__(self, endpoint: str, resource: Mapping[str, str]) -> None:
        self._exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
        self._resource = Resource.create(dict(resource))

    async def export(self, spans: Sequence[Span]) -> None:
        """Returns when the collector has taken them; raises ExportFailed."""
        readable = [self._readable(span) for span in spans]
        try:
            result = await asyncio.to_thread(self._exporter.export, readable)
        except Exception as error:  # on any error of a transport: these spans are lost, and nothing else
            raise ExportFailed(type(error).__name__) from error
        if result is not SpanExportResult.SUCCESS:
            raise ExportFailed("the collector did not take them")

    async def close(self) -> None:
        """Let go of connections."""
        await asyncio.to_thread(self._exporter.shutdown)

    def _readable(self, span: Span) -> ReadableSpan:
        parent = TraceContext(span.context.trace_id, span.parent_id) if span.parent_id else None
        return ReadableSpan(
            name=span.name,
            context=_context(span.context),
            parent=None if parent is None else _context(parent),
            resource=self._resource,
            attributes=span.attributes,
            links=[Link(_context(one)) for one in span.links],
            kind=trace.SpanKind[span.kind.name],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=span.started_ns,
            end_time=span.ended_ns,
        )


def _context(context: TraceContext) -> SpanContext:
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), is_remote=False, trace_flags=_FLAGS)
