"""The metrics of a compute service."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

COMMANDS = Counter(
    "berth_compute_commands_total", "Spawn and Destroy commands, by their effect.", ["service", "action"]
)
BUILDS = Counter("berth_compute_builds_total", "Builds that ended, by how.", ["service", "outcome"])
BUILD_S = Histogram(
    "berth_compute_build_seconds",
    "From a build's acceptance to its end.",
    ["service"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300, 1800),
)
ACCEPTED = Gauge("berth_compute_builds_accepted", "Builds accepted and not ended.", ["service"])
RESULTS = Counter("berth_compute_results_total", "Results that the broker confirmed.", ["service"])
REPORTS = Counter("berth_compute_inventory_updates_total", "Inventory updates that the broker confirmed.", ["service"])
MEASURED = Counter("berth_compute_hosts_measured_total", "Readings of hosts published.", ["service"])
HOSTS_REPORTED = Counter("berth_compute_hosts_reported_total", "Host reports published.", ["service"])
JOURNALS_DAMAGED = Counter(
    "berth_compute_journals_damaged_total", "Journals that were found damaged and kept aside, by file.", ["file"]
)
HOST_CONFLICTS = Gauge(
    "berth_compute_hosts_refused",
    "Hosts that this service reports and placement has as another compute service's: no builds are taken for them.",
    ["service"],
)
RESERVED = Gauge(
    "berth_compute_reserved_machines",
    "Quarantined machines whose resources are kept out of their host's inventory; not for a machine of unknown size.",
    ["service", "size"],
)
