"""The metrics of calls of a real Nova."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

CALLS = Counter("berth_nova_calls", "Calls and casts of Nova's services, by method and outcome.", ["method", "outcome"])
CALL_S = Histogram("berth_nova_call_seconds", "Time from the delivery of a call to its reply.", buckets=SECONDS)
IN_FLIGHT = Gauge("berth_nova_calls_in_flight", "Calls that were delivered and are not answered yet.")
FORWARDED = Counter(
    "berth_nova_forwarded",
    "Calls left to the fallback's nova-scheduler, by reason and outcome: answered, failed, cancelled, no_fallback.",
    ["reason", "outcome"],
)
UNREADABLE = Counter(
    "berth_nova_unreadable_rows", "Rows of Nova's API that were left out, as they could not be read, by list.", ["list"]
)
SHADOW = Counter(
    "berth_nova_shadow",
    "Calls that a stock nova-scheduler decided, by its answer's difference from berth's.",
    ["difference"],
)
SHADOW_S = Histogram(
    "berth_nova_shadow_seconds",
    "Time of a decision in the shadow, by scheduler: berth, stock.",
    ["by"],
    buckets=SECONDS,
)
NOTIFICATIONS = Counter(
    "berth_nova_notifications",
    "Notifications about calls of Nova, by outcome: published, dropped, failed.",
    ["outcome"],
)
