"""The metrics of ironic_sync."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

NOTIFICATIONS = Counter("berth_ironic_notifications", "Notifications of Ironic, by event", ["event"])
REJECTED = Counter("berth_ironic_rejected", "Messages in Ironic's exchange that are no notification, by code", ["code"])
READS = Counter("berth_ironic_reads", "Reads of one node from Ironic's REST API, by outcome", ["outcome"])
RESYNCS = Counter("berth_ironic_resyncs", "Reads of all nodes, by outcome", ["outcome"])
RESYNC_S = Histogram("berth_ironic_resync_seconds", "How long reading all nodes took")
UPDATES = Counter("berth_ironic_updates", "Inventory updates published, by kind", ["kind"])
MEASURED = Counter("berth_ironic_nodes_measured", "Readings of nodes' sensors published")
NODES = Gauge("berth_ironic_nodes", "Nodes that were reported to placement")
PROBLEMS = Gauge(
    "berth_ironic_node_problems",
    "Nodes that cannot be placed on as they are, by code; as of the last read of all",
    ["code"],
)
LEADER = Gauge("berth_ironic_leader", "1 while this process is the writer")
BOUND = Gauge("berth_ironic_bound", "1 while the queue is bound to Ironic's exchange")
LATENCY_S = Histogram(
    "berth_ironic_latency_seconds",
    "From a notification's arrival to the confirm of the update it led to",
    ["kind"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60),
)
