"""The metrics of a placement worker, its REST API included."""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter, Gauge, Histogram

CLAIMS = Counter("berth_placement_claims", "Claims, by outcome.", ["outcome"])
RELEASES = Counter("berth_placement_releases", "Releases, by outcome.", ["outcome"])
RESTATES = Counter("berth_placement_restates", "Restatements of recovering cells, by outcome.", ["outcome"])
REVERTS = Counter("berth_placement_reverts", "Reverts of moves, by outcome.", ["outcome"])
SWAPS = Counter("berth_placement_swaps", "Swaps, by outcome.", ["outcome"])
REPORTS = Counter("berth_placement_inventory_updates", "Inventory updates, by outcome or refusal code.", ["outcome"])
GROUP_SECONDS = Histogram(
    "berth_placement_group_seconds",
    "One transaction, by kind.",
    ["kind"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5),
)
GROUP_ITEMS = Histogram(
    "berth_placement_group_items",
    "Messages in one transaction.",
    ["kind"],
    buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500),
)
PUBLISHED = Counter("berth_placement_feed_published", "Changes published on the feed by this process.")
FEED_STALLS = Counter("berth_placement_feed_stalls", "Waits of the feed for the database or the bus.", ["code"])
OFFLOADED = Counter("berth_placement_rest_offloaded", "Work too long for the event loop, done in a thread.", ["kind"])
HEAD = Gauge("berth_placement_feed_head", "Newest committed change.")

# --- the REST API

REST_REQUESTS = Counter(
    "berth_placement_rest_requests", "Answers, by method, route and status.", ["method", "route", "status"]
)
REST_SECONDS = Histogram(
    "berth_placement_rest_seconds",
    "From a request's last byte to its answer, by method and route.",
    ["method", "route"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5),
)
REST_GROUP_ITEMS = Histogram(
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
    answers, duration = _of(method if method in METHODS else "other", route, status)
    answers.inc()
    duration.observe(seconds)


@cache  # to look labels up costs as much as the rest of a small request's counting
def _of(method: str, route: str, status: int) -> tuple[Counter, Histogram]:
    return REST_REQUESTS.labels(method, route, status), REST_SECONDS.labels(method, route)
