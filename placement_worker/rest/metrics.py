"""What the REST API counts."""

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
REPLICA = Gauge("berth_placement_rest_replica_sequence", "The feed number that this process's replica is at.")
