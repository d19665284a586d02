"""The scheduler's metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram

from bus.clock import Clock
from bus.contracts.stages import StageTimes
from bus.service.stages import STAGE_S as BUILD_STAGE_S

FAST_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
HOSTS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000, 100_000, 1_000_000)

REQUESTS = Counter("berth_scheduler_requests", "Build and delete requests, by outcome.", ["kind", "outcome"])
DECISIONS = Counter("berth_scheduler_decisions", "Decisions, by result.", ["result"])
CLAIMS = Counter("berth_scheduler_claims", "Claims, by outcome.", ["outcome"])
RETRIES = Counter(
    "berth_scheduler_claim_retries", "Claims after which a request claims again, by outcome.", ["outcome"]
)
CANDIDATES = Histogram("berth_scheduler_candidates", "Hosts left to choose from.", buckets=HOSTS)
STAGE_S = Histogram("berth_scheduler_stage_seconds", "Time of one batch in one stage.", ["stage"], buckets=FAST_S)
CELL_EVENTS = Counter("berth_scheduler_cell_events", "Build events from cells, by outcome.", ["outcome"])
SUBSET = Gauge("berth_scheduler_subset", "Near-best hosts that a choice is made among; contention widens it.")
BUILDS = Counter("berth_scheduler_builds", "Build requests that ended, by terminal state and code.", ["state", "code"])
OBJECTS_REVISION = Gauge("berth_scheduler_objects_revision", "Revision of the operators' objects in force here.")
HOST_METRICS = Counter("berth_scheduler_host_metrics", "Numbers about hosts that came, by outcome.", ["outcome"])
ACTION_QUERIES = Counter("berth_scheduler_action_queries", "Queries to a cell about a request without news.", ["cell"])
SILENT_ACTIONS = Gauge(
    "berth_scheduler_actions_silent",
    "Requests under way of which their cell has published nothing, though queried repeatedly.",
)
KNOWN_HOSTS = Gauge("berth_scheduler_hosts", "Hosts that compute services have reported.")


def count_requests(kind: str, outcome: str, count: int = 1) -> None:
    """Count requests (build, delete) with the same outcome; those without a name are not counted."""
    if outcome and count:
        REQUESTS.labels(kind, outcome).inc(count)


STAGES = {stage: STAGE_S.labels(stage) for stage in ("record", "decide", "claim", "write")}


@contextmanager
def measured(stage: str, clock: Clock) -> Iterator[None]:
    """Measures how long one batch takes in a stage; a stage that raises is not measured."""
    started_s = clock.monotonic()
    yield
    STAGES[stage].observe(clock.monotonic() - started_s)


def observe_stage_times(builds: Sequence[StageTimes]) -> None:
    """Observe the last stage, as far as a scheduler sees it: until it published the end on the API bus."""
    BUILD_STAGE_S.observe("announced", [stage_times.announced - stage_times.built for stage_times in builds])


PURGED = Counter("berth_scheduler_purged_builds", "Records of builds that were purged, long after they had ended.")
