"""The scheduler's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram

from bus.clock import Clock
from bus.contracts.build import BuildEvent
from bus.contracts.placement import ClaimResult
from bus.contracts.stages import Stamps
from bus.faults import Fault
from bus.service.stages import STAGE_S as BUILD_STAGE_S
from scheduler_worker.domain.builds import RecordedBuild

FAST_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
HOSTS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000, 100_000, 1_000_000)

REQUESTS = Counter("berth_scheduler_requests", "Build and delete requests, by outcome.", ["kind", "outcome"])
DECISIONS = Counter("berth_scheduler_decisions", "Decisions, by result.", ["result"])
CLAIMS = Counter("berth_scheduler_claims", "Claims, by outcome.", ["outcome"])
RETRIES = Counter("berth_scheduler_claim_retries", "Claims after which a request claims again, by outcome.", ["why"])
CANDIDATES = Histogram("berth_scheduler_candidates", "Hosts left to choose from.", buckets=HOSTS)
STAGE_S = Histogram("berth_scheduler_stage_seconds", "Time of one batch in one stage.", ["stage"], buckets=FAST_S)
ANNOUNCED = Counter("berth_scheduler_announcements", "Build events from cells, by outcome.", ["outcome"])
SUBSET = Gauge("berth_scheduler_subset", "Near-best hosts that a choice is made among; contention widens it.")
BUILDS = Counter("berth_scheduler_builds", "Build requests that ended, by terminal state and code.", ["state", "code"])
OBJECTS_REVISION = Gauge("berth_scheduler_objects_revision", "Revision of the operators' objects in force here.")
HOST_METRICS = Counter("berth_scheduler_host_metrics", "Numbers about hosts that came, by outcome.", ["outcome"])
MOVE_QUERIES = Counter("berth_scheduler_move_queries", "Queries to a cell about a request without news.", ["cell"])
SILENT_MOVES = Gauge(
    "berth_scheduler_moves_silent",
    "Requests under way of which their cell has published nothing, though queried repeatedly.",
)
KNOWN_HOSTS = Gauge("berth_scheduler_hosts", "Hosts that compute services have announced.")


def count_requests(kind: str, outcome: str, count: int = 1) -> None:
    """Count requests (build, delete) with the same outcome; those without a name are not counted."""
    if outcome and count:
        REQUESTS.labels(kind, outcome).inc(count)


@contextmanager
def timed_stage(stage: str, clock: Clock) -> Iterator[None]:
    """Measure how long one batch takes in a stage; a stage that raises is not measured."""
    started_s = clock.monotonic()
    yield
    STAGE_S.labels(stage).observe(clock.monotonic() - started_s)


# Codes come from drivers, too: distinct ones beyond this number are counted as OTHER.
MAX_CODES = 200
OTHER = "other"
_codes: set[str] = set()


def count_ended(builds: Iterable[BuildEvent | RecordedBuild]) -> None:
    """Count those of the recorded states that end their request."""
    for build in builds:
        if build.terminal:
            if build.code not in _codes and len(_codes) < MAX_CODES:
                _codes.add(build.code)
            BUILDS.labels(build.state.value, build.code if build.code in _codes else OTHER).inc()


def observe_round(chosen: int, candidates: Iterable[int]) -> None:
    """Count one pass of decisions: how many hosts it has chosen, and the candidates of each ranking that it made."""
    if chosen:
        DECISIONS.labels("chosen").inc(chosen)
    for count in candidates:
        CANDIDATES.observe(count)


def count_claim(answer: ClaimResult | Fault, *, retried: bool) -> None:
    """Count one answer to a claim. again: the request claims again."""
    if isinstance(answer, ClaimResult):
        CLAIMS.labels(answer.outcome.value).inc()
        if retried:
            RETRIES.labels(answer.outcome.value).inc()
    else:
        CLAIMS.labels(answer.code).inc()


def observe_decisions(builds: Sequence[Stamps]) -> None:
    """Observe the stages that end with the decision."""
    BUILD_STAGE_S.observe("queued", [stamps.queued - stamps.requested for stamps in builds])
    BUILD_STAGE_S.observe("decided", [stamps.decided - stamps.queued for stamps in builds])
    BUILD_STAGE_S.observe("claimed", [stamps.claimed - stamps.decided for stamps in builds if stamps.claimed])


def observe_announced(builds: Sequence[Stamps]) -> None:
    """Observe the last stage, as far as a scheduler sees it: until it published the end on the API bus."""
    BUILD_STAGE_S.observe("announced", [stamps.announced - stamps.built for stamps in builds])


PURGED = Counter("berth_scheduler_purged_builds", "Records of builds that were purged, long after they had ended.")
