"""Metrics of the fleet as a scheduler sees it: hosts and services by cell, zone and state."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bus.contracts.objects import ZONE_KEY
from scheduler_worker.hosts.host_table import Rows
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.selector import Selector

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
            self._summary = summarize(selector.all_hosts(), selector.config.settings.default_availability_zone)
            self._summed_s = now_s
        return self._summary


FLEET = FleetCollector()
REGISTRY.register(FLEET)
