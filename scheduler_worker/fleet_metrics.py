"""Gauges of the fleet, computed when they are scraped: hosts by state, capacity and use by class, cell and zone.

Every scheduler exports the same figures, each from its own replica: a query takes the maximum over the processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_worker.domain.fleet import FleetSummary, summarize
from scheduler_worker.domain.selector import Selector

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
