"""A receiver of OTLP over HTTP as JSON, that reads what it gets by OpenTelemetry's own definitions."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from google.protobuf import json_format
from msgspec import Struct
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.kit.waiting import until

LIMIT_S = 60.0


class ReceivedSpan(Struct, frozen=True):
    """A span as a collector has it. ids: hexadecimal."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    links: tuple[str, ...]
    attributes: dict[str, str | int]
    error: str


class OtlpReceiver:
    """The spans that have arrived."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.url = ""

    async def take(self, request: Request) -> Response:
        body = await request.body()
        message = trace_service_pb2.ExportTraceServiceRequest()
        json_format.Parse(json.dumps(_with_base64(json.loads(body))), message)
        for of_process in message.resource_spans:
            resource = {one.key: one.value.string_value for one in of_process.resource.attributes}
            for scope in of_process.scope_spans:
                self.spans += [_received(resource["service.name"], span) for span in scope.spans]
        return Response(b"{}", media_type="application/json")

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition, LIMIT_S)


@asynccontextmanager
async def otlp_receiver() -> AsyncIterator[OtlpReceiver]:
    """Listening on a free port of this computer."""
    receiver = OtlpReceiver()
    app = Starlette(routes=[Route("/v1/traces", receiver.take, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        receiver.url = f"http://127.0.0.1:{port}"
        yield receiver
    finally:
        server.should_exit = True
        await serving


def _with_base64(value: Any) -> Any:
    """OTLP's JSON has ids as hexadecimal digits, where protobuf's own has base64."""
    if isinstance(value, list):
        return [_with_base64(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64encode(bytes.fromhex(one)).decode()
        if key in {"traceId", "spanId", "parentSpanId"}
        else _with_base64(one)
        for key, one in value.items()
    }


def _received(service: str, span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        links=tuple(one.trace_id.hex() for one in span.links),
        attributes={one.key: one.value.string_value or one.value.int_value for one in span.attributes},
        error=span.status.message,
    )
