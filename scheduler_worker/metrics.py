"""The scheduler's metrics."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import numpy as np
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bus.clock import Clock
from bus.contracts.build import BuildEvent
from bus.contracts.objects import ZONE_KEY
from bus.contracts.placement import ClaimResult
from bus.contracts.stages import StageTimes
from bus.faults import Fault
from bus.service.stages import STAGE_S as BUILD_STAGE_S
from scheduler_worker.domain.admission import Admission, Answered, Continue
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.hosts import Rows
from scheduler_worker.domain.placement import LOST
from scheduler_worker.domain.selector import Selector
from scheduler_worker.domain.view import HostsView

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


def count_builds(admissions: Iterable[Admission]) -> None:
    """Count build requests by what their records lead to; one that is carried on by a redelivery is not counted."""
    labels = Counts(
        one.label if isinstance(one, Answered) else "accepted" for one in admissions if not isinstance(one, Continue)
    )
    for label, count in labels.items():
        count_requests("build", label, count)


STAGES = {stage: STAGE_S.labels(stage) for stage in ("record", "decide", "claim", "write")}


@contextmanager
def measured(stage: str, clock: Clock) -> Iterator[None]:
    """Measures how long one batch takes in a stage; a stage that raises is not measured."""
    started_s = clock.monotonic()
    yield
    STAGES[stage].observe(clock.monotonic() - started_s)


# Codes come from drivers, too: distinct ones beyond this number are counted as OTHER.
MAX_CODES = 200
OTHER = "other"
_codes: set[str] = set()


def count_ended(builds: Iterable[BuildEvent | RecordedBuild]) -> None:
    """Count those of the recorded states that end their request."""
    for (state, code), count in Counts([(one.state, one.code) for one in builds if one.terminal]).items():
        if code not in _codes and len(_codes) < MAX_CODES:
            _codes.add(code)
        BUILDS.labels(state.value, code if code in _codes else OTHER).inc(count)


def observe_round(chosen: int, candidates: Iterable[int]) -> None:
    """Count one pass of decisions: how many hosts it has chosen, and the candidates of each ranking that it made."""
    if chosen:
        DECISIONS.labels("chosen").inc(chosen)
    for count in candidates:
        CANDIDATES.observe(count)


def count_claims(answers: Iterable[ClaimResult | Fault]) -> None:
    """Count the answers to claims, and those after which a request claims again."""
    for answer, count in Counts([one.outcome if isinstance(one, ClaimResult) else one.code for one in answers]).items():
        CLAIMS.labels(str(answer)).inc(count)
        if answer in LOST:
            RETRIES.labels(str(answer)).inc(count)


def observe_decisions(builds: Sequence[StageTimes]) -> None:
    """Observe the stages that end with the decision."""
    BUILD_STAGE_S.observe("queued", [stage_times.queued - stage_times.requested for stage_times in builds])
    BUILD_STAGE_S.observe("decided", [stage_times.decided - stage_times.queued for stage_times in builds])
    BUILD_STAGE_S.observe(
        "claimed", [stage_times.claimed - stage_times.decided for stage_times in builds if stage_times.claimed]
    )


def observe_stage_times(builds: Sequence[StageTimes]) -> None:
    """Observe the last stage, as far as a scheduler sees it: until it published the end on the API bus."""
    BUILD_STAGE_S.observe("announced", [stage_times.announced - stage_times.built for stage_times in builds])


PURGED = Counter("berth_scheduler_purged_builds", "Records of builds that were purged, long after they had ended.")


UP, DISABLED, SILENT, NOT_REPORTED = "up", "disabled", "silent", "not_reported"
STATES = (UP, DISABLED, SILENT, NOT_REPORTED)

# The most resource classes that are added up; of more, the first by name. Every Ironic node may have a resource class
# of its own.
MAX_CLASSES = 200


Figure: TypeAlias = tuple[tuple[str, ...], int]  # the labels of one metric, and its value


class FleetSummary(NamedTuple):
    """All hosts and all classes, in order of their labels; those of no service have cell "". Groups without a host are
    left out.
    """

    hosts: list[Figure]
    capacity: list[Figure]
    usable: list[Figure]  # the part of the capacity that is on hosts which take builds
    used: list[Figure]  # with claims in flight


def summarize(view: HostsView, default_zone: str) -> FleetSummary:
    """Add up the hosts of a view. A host is in the zone of its first aggregate that names one, else in the default."""
    cells = ("", *view.table.cells)
    zones, zone = zones_of(view, default_zone)
    # An not_reported host has index NO_SERVICE; the columns of the host table hold no row for it.
    known = view.known
    cell = np.where(known, np.where(known, view.cell, 0) + 1, 0)
    state = np.where(known, np.where(view.up, np.where(view.enabled, 0, 1), 2), 3)
    groups = len(cells) * len(zones)
    group = cell * len(zones) + zone
    by_state = np.bincount(group * len(STATES) + state, minlength=groups * len(STATES)).reshape(groups, len(STATES))
    present = {int(at): (cells[int(at) // len(zones)], zones[int(at) % len(zones)]) for at in np.unique(group)}
    found = FleetSummary([], [], [], [])
    for at, names in present.items():
        found.hosts.extend(((*names, STATES[of]), int(count)) for of, count in enumerate(by_state[at]) if count)
    for resource_class in view.replica.resource_classes()[:MAX_CLASSES]:
        capacity = view.replica.totals(resource_class, view.rows)
        used = view.replica.usage(resource_class, view.rows)
        # Integers, not bincount's weights: a sum of floats is not exact above 2^53.
        sums = np.zeros((3, groups), dtype=np.int64)
        for of, amounts in enumerate((capacity, np.where(state == 0, capacity, 0), used)):
            np.add.at(sums[of], group, amounts)
        for at, names in present.items():
            if sums[0, at] or sums[2, at]:
                for figures, total in zip(found[1:], sums[:, at].tolist(), strict=True):
                    figures.append(((resource_class, *names), total))
    return found


def zones_of(view: HostsView, default_zone: str) -> tuple[Sequence[str], Rows]:
    """The names of all zones, and for each host of the view the index of its zone's name."""
    zoned = view.membership.with_key(ZONE_KEY)
    names = sorted({default_zone, *(aggregate.metadata[ZONE_KEY] for aggregate in zoned)})
    zone = np.full(len(view), names.index(default_zone), dtype=np.intp)
    for aggregate in reversed(zoned):  # the first one has the last word
        zone[view.member_of(aggregate.uuid)] = names.index(aggregate.metadata[ZONE_KEY])
    return names, zone


HELD_S = 2.0  # a summary is reused for this long: several scrapers, one computation

FLEET_HOSTS = ("berth_fleet_hosts", "Hosts by state: up, disabled, silent, not_reported.", ("cell", "zone", "state"))
CAPACITY = ("berth_fleet_capacity", "Capacity of a resource class.", ("resource_class", "cell", "zone"))
USABLE = ("berth_fleet_usable", "Capacity on hosts that take builds.", ("resource_class", "cell", "zone"))
USED = ("berth_fleet_used", "Allocated, claims in flight included.", ("resource_class", "cell", "zone"))


class FleetCollector(Collector):
    """The state of the fleet as this process's schedulers see it; of several in one process, as the one opened first
    does.
    """

    families = (FLEET_HOSTS, CAPACITY, USABLE, USED)

    def __init__(self) -> None:
        self._selectors: list[Selector] = []
        self._summary: FleetSummary | None = None
        self._summed_s = 0.0

    async def add(self, selector: Selector) -> None:
        """Export the fleet as this scheduler sees it, until it is removed."""
        self._selectors.append(selector)

    async def remove(self, selector: Selector) -> None:
        """Export it no longer."""
        self._selectors = [one for one in self._selectors if one is not selector]
        self._summary = None

    def describe(self) -> Iterable[Metric]:
        """The names, without computing anything."""
        return [GaugeMetricFamily(name, meaning, labels=labels) for name, meaning, labels in self.families]

    def collect(self) -> Iterable[Metric]:
        """The present figures; none before a scheduler is open."""
        metrics = [GaugeMetricFamily(name, meaning, labels=labels) for name, meaning, labels in self.families]
        for metric, figures in zip(metrics, self._present() or (), strict=False):
            for labels, value in figures:
                metric.add_metric(labels, value)
        return metrics

    def _present(self) -> FleetSummary | None:
        if not self._selectors:
            return None
        now_s = time.monotonic()
        if self._summary is None or now_s - self._summed_s > HELD_S:
            selector = self._selectors[0]
            self._summary = summarize(selector.all_hosts(), selector.config.default_availability_zone)
            self._summed_s = now_s
        return self._summary


FLEET = FleetCollector()
REGISTRY.register(FLEET)
