"""The tracer of a process, as the settings have it."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

from berth.config.settings import TraceSettings
from bus.distribution import version
from bus.service.settings import SettingsError
from bus.tracing.tracer import Tracer

_ROLE = re.compile(r"[a-z_]+")


def make_tracer(settings: TraceSettings, process: str, role: str = "") -> Tracer:
    """A tracer whose spans name the role as their service, and the process as its instance.

    Raises SettingsError: no address (`traces.endpoint`).
    """
    named = _ROLE.match(process)
    resource = {
        "service.namespace": "berth",
        "service.name": role or (named[0] if named else process),
        "service.instance.id": process,
        "service.version": version(),
        "host.name": socket.gethostname(),
    }
    try:
        _ = urlsplit(settings.endpoint).port
    except ValueError as error:
        raise SettingsError("traces.endpoint", str(error)) from None
    from bus.tracing.otlp_json import OtlpJsonExporter  # noqa: PLC0415  (httpx, which no other part of most has)

    exporter = OtlpJsonExporter(settings.endpoint, resource)
    return Tracer(exporter, ratio=settings.ratio, most_per_s=settings.most_per_s)
