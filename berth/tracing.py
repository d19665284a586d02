"""The tracer of a process, as the settings have it."""

from __future__ import annotations

import re
import socket
from importlib import metadata
from urllib.parse import urlsplit

from berth.settings import TraceSettings
from bus.service.settings import SettingsError
from bus.tracing.tracer import SpanExporter, Tracer

_ROLE = re.compile(r"[a-z_]+")


def make_tracer(settings: TraceSettings, process: str, role: str = "") -> Tracer:
    """A tracer whose spans name the role as their service, and the process as its instance.

    Raises SettingsError: OpenTelemetry's SDK is named and not installed (`traces.protocol`), or no address
    (`traces.endpoint`).
    """
    named = _ROLE.match(process)
    resource = {
        "service.namespace": "berth",
        "service.name": role or (named[0] if named else process),
        "service.instance.id": process,
        "service.version": metadata.version("berth"),
        "host.name": socket.gethostname(),
    }
    return Tracer(_exporter(settings, resource), ratio=settings.ratio, most_per_s=settings.most_per_s)


def _exporter(settings: TraceSettings, resource: dict[str, str]) -> SpanExporter:
    try:
        _ = urlsplit(settings.endpoint).port
    except ValueError as error:
        raise SettingsError("traces.endpoint", str(error)) from None
    if settings.protocol == "http/json":
        from bus.tracing.otlp_json import OtlpJsonExporter  # noqa: PLC0415  (httpx, which no other part of most has)

        return OtlpJsonExporter(settings.endpoint, resource)
    try:
        from bus.tracing.otlp_sdk import SdkExporter  # noqa: PLC0415  (an extra that few install)
    except ImportError as error:
        reason = f"http/protobuf needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http ({error})"
        raise SettingsError("traces.protocol", reason) from None
    return SdkExporter(settings.endpoint, resource)
