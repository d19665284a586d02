"""The metrics of the REST API."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter(
    "berth_placement_rest_requests", "Answers, by method, route and status.", ["method", "route", "status"]
)
SECONDS = Histogram(
    "berth_placement_rest_seconds",
    "From a request's last byte to its answer, by method and route.",
    ["method", "route"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5),
)
GROUP_ITEMS = Histogram(
    "berth_placement_rest_group_items",
    "Writes in one transaction, by kind.",
    ["kind"],
    buckets=(1, 2, 5, 10, 20, 50, 100),
)

LET_GO = Counter(
    "berth_placement_rest_disconnected",
    "Clients that were disconnected, by the step that they were too slow at.",
    ["at"],
)
GATHERING = Gauge("berth_placement_rest_buffered_bytes", "Bytes of request bodies that are not whole yet.")

METHODS = frozenset({"GET", "POST", "PUT", "DELETE"})


def count_answer(method: str, route: str, status: int, seconds: float) -> None:
    """Count one answer. route: a path of the route table, never the client's own path, which could have any number of
    values.
    """
    method = method if method in METHODS else "other"
    REQUESTS.labels(method, route, status).inc()
    SECONDS.labels(method, route).observe(seconds)
