"""The metrics of the gateway."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

WAITING = Gauge(
    "berth_gateway_waiting", "Requests of a project that wait in its virtual host or for their turn", ["project"]
)
OLDEST_S = Gauge(
    "berth_gateway_oldest_seconds",
    "How long the oldest request that this gateway has of a project has waited",
    ["project"],
)
CONNECTED = Gauge("berth_gateway_connected", "1 while a project's virtual host is connected", ["project"])
EVENTS_MISSED = Counter("berth_gateway_events_missed", "Times that events of a project were dropped", ["project"])
