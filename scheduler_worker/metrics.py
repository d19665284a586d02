"""What the scheduler counts and measures."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Counter, Gauge, Histogram

from bus.contracts.stages import Stamps
from bus.service.stages import STAGE_S as BUILD_STAGE_S

FAST_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
HOSTS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000, 100_000, 1_000_000)

REQUESTS = Counter(
    "berth_scheduler_requests", "Build and delete requests, by what became of them.", ["kind", "outcome"]
)
DECISIONS = Counter("berth_scheduler_decisions", "Decisions, by result.", ["result"])
CLAIMS = Counter("berth_scheduler_claims", "Claims, by outcome.", ["outcome"])
RETRIES = Counter("berth_scheduler_claim_retries", "Claims asked again, by why.", ["why"])
CANDIDATES = Histogram("berth_scheduler_candidates", "Hosts left to choose from.", buckets=HOSTS)
STAGE_S = Histogram("berth_scheduler_stage_seconds", "Time of one batch in one stage.", ["stage"], buckets=FAST_S)
ANNOUNCED = Counter("berth_scheduler_announcements", "Build events from cells, by what became of them.", ["outcome"])
SUBSET = Gauge("berth_scheduler_subset", "Near-best hosts that a choice is made among; contention widens it.")
KNOWN_HOSTS = Gauge("berth_scheduler_hosts", "Hosts that compute services have announced.")


def decided(builds: Sequence[Stamps]) -> None:
    """The stages that end with the decision."""
    BUILD_STAGE_S.observe("queued", [stamps.queued - stamps.asked for stamps in builds])
    BUILD_STAGE_S.observe("decided", [stamps.decided - stamps.queued for stamps in builds])
    BUILD_STAGE_S.observe("claimed", [stamps.claimed - stamps.decided for stamps in builds if stamps.claimed])


def announced(builds: Sequence[Stamps]) -> None:
    """The last stage, as far as a scheduler sees it: until it passed the end on."""
    BUILD_STAGE_S.observe("announced", [stamps.announced - stamps.built for stamps in builds])


FORGOTTEN = Counter("berth_scheduler_forgotten", "Records of builds that were dropped, long after they had ended.")
