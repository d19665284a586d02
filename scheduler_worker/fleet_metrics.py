"""Gauges of the fleet, computed when they are scraped: hosts by state, capacity and use by class, cell and zone.

Every scheduler exports the same figures, each from its own replica: a query takes the maximum over the processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_worker.domain.flavors import ZONE_KEY
from scheduler_worker.domain.hosts import Mask, Rows
from scheduler_worker.domain.selector import Selector
from scheduler_worker.domain.view import HostsView

UP, DISABLED, SILENT, UNANNOUNCED = "up", "disabled", "silent", "unannounced"
STATES = (UP, DISABLED, SILENT, UNANNOUNCED)

# The most resource classes that are added up; of more, the first by name. Every Ironic node may have a resource class
# of its own.
MAX_CLASSES = 200


class HostCount(Struct, frozen=True):
    """How many hosts of a cell and a zone are in a state. cell "": no compute service has announced them."""

    cell: str
    zone: str
    state: str
    hosts: int


class ClassTotal(Struct, frozen=True):
    """The capacity of one resource class over the hosts of a cell and a zone, and how much of it is used.

    usable: the part of the capacity that is on hosts which take builds. Claims in flight count as used.
    """

    resource_class: str
    cell: str
    zone: str
    capacity: int
    usable: int
    used: int


class FleetSummary(Struct, frozen=True):
    """All hosts and all classes, in order of their labels. Groups without a host are left out."""

    hosts: tuple[HostCount, ...]
    totals: tuple[ClassTotal, ...]


def summarize(view: HostsView, default_zone: str) -> FleetSummary:
    """Add up the hosts of a view. A host is in the zone of its first aggregate that names one, else in the default."""
    cells = ("", *view.table.cells)
    zones, zone = zones_of(view, default_zone)
    # An unannounced host has index NO_SERVICE; the columns of the host table hold no row for it.
    known = view.known
    cell = np.where(known, np.where(known, view.cell, 0) + 1, 0)
    state = np.where(known, np.where(view.up, np.where(view.enabled, 0, 1), 2), 3)
    groups = len(cells) * len(zones)
    group = cell * len(zones) + zone
    by_state = np.bincount(group * len(STATES) + state, minlength=groups * len(STATES)).reshape(groups, len(STATES))
    present = [(int(at), cells[int(at) // len(zones)], zones[int(at) % len(zones)]) for at in np.unique(group)]
    return FleetSummary(
        hosts=tuple(
            HostCount(name, zone_name, STATES[of], int(by_state[at, of]))
            for at, name, zone_name in present
            for of in range(len(STATES))
            if by_state[at, of]
        ),
        totals=tuple(
            total
            for resource_class in view.book.resource_classes()[:MAX_CLASSES]
            for total in _totals(view, resource_class, group, state == 0, present)
        ),
    )


def zones_of(view: HostsView, default_zone: str) -> tuple[Sequence[str], Rows]:
    """The names of all zones, and for each host of the view the index of its zone's name."""
    zoned = view.membership.with_key(ZONE_KEY)
    names = sorted({default_zone, *(aggregate.metadata[ZONE_KEY] for aggregate in zoned)})
    zone = np.full(len(view), names.index(default_zone), dtype=np.intp)
    for aggregate in reversed(zoned):  # the first one has the last word
        zone[view.member_of(aggregate.uuid)] = names.index(aggregate.metadata[ZONE_KEY])
    return names, zone


def _totals(
    view: HostsView, resource_class: str, group: Rows, usable: Mask, present: Sequence[tuple[int, str, str]]
) -> list[ClassTotal]:
    capacity = view.book.totals(resource_class, view.rows)
    used = view.book.usage(resource_class, view.rows)
    size = present[-1][0] + 1 if present else 0
    # Integers, not bincount's weights: a sum of floats is not exact above 2^53.
    sums = np.zeros((3, size), dtype=np.int64)
    for at, amounts in enumerate((capacity, np.where(usable, capacity, 0), used)):
        np.add.at(sums[at], group, amounts)
    return [
        ClassTotal(resource_class, cell, zone, *(int(sums[of, at]) for of in range(3)))
        for at, cell, zone in present
        if sums[0, at] or sums[2, at]
    ]


HELD_S = 2.0  # a summary is reused for this long: several scrapers, one computation

HOSTS = ("berth_fleet_hosts", "Hosts by state: up, disabled, silent, unannounced.", ("cell", "zone", "state"))
CAPACITY = ("berth_fleet_capacity", "Capacity of a resource class.", ("resource_class", "cell", "zone"))
USABLE = ("berth_fleet_usable", "Capacity on hosts that take builds.", ("resource_class", "cell", "zone"))
USED = ("berth_fleet_used", "Allocated, claims in flight included.", ("resource_class", "cell", "zone"))


class FleetCollector(Collector):
    """The state of the fleet as this process's schedulers see it; of several in one process, as the one opened first
    does.
    """

    families = (HOSTS, CAPACITY, USABLE, USED)

    def __init__(self) -> None:
        self._selectors: list[Selector] = []
        self._summary: FleetSummary | None = None
        self._summed_s = 0.0

    def add(self, selector: Selector) -> None:
        """Export the fleet as this scheduler sees it, until it is removed."""
        self._selectors.append(selector)

    def remove(self, selector: Selector) -> None:
        """Export it no longer."""
        self._selectors = [one for one in self._selectors if one is not selector]
        self._summary = None

    def describe(self) -> Iterable[Metric]:
        """The names, without computing anything."""
        return [GaugeMetricFamily(name, meaning, labels=labels) for name, meaning, labels in self.families]

    def collect(self) -> Iterable[Metric]:
        """The present figures; none before a scheduler is open."""
        hosts, capacity, usable, used = (
            GaugeMetricFamily(name, meaning, labels=labels) for name, meaning, labels in self.families
        )
        summary = self._present()
        if summary is not None:
            for count in summary.hosts:
                hosts.add_metric([count.cell, count.zone, count.state], count.hosts)
            for total in summary.totals:
                labels = [total.resource_class, total.cell, total.zone]
                capacity.add_metric(labels, total.capacity)
                usable.add_metric(labels, total.usable)
                used.add_metric(labels, total.used)
        return [hosts, capacity, usable, used]

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
