"""The metrics of a replica."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SEQUENCE = Gauge("berth_replica_sequence", "Number of the last change folded into the replica")
LAG = Gauge("berth_replica_lag_changes", "Changes between the replica and the newest number received")
PROVIDERS = Gauge("berth_replica_providers", "Providers in the replica")
APPLIED = Counter("berth_replica_changes_total", "Changes folded in")
DELAY = Histogram(
    "berth_replica_delay_seconds",
    "From the publication of a change to its being in the replica",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0),
)
RESYNCS = Counter("berth_replica_resyncs_total", "Times that changes of the feed had to be requested", ["why"])
SNAPSHOTS = Counter("berth_replica_snapshots_total", "Snapshots loaded")
