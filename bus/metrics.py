"""The metrics of the bus, in the process's Prometheus registry. Labelled children are looked up once and cached."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

PUBLISHED = Counter("berth_bus_published", "Broker messages confirmed.", ["bus"])
ITEMS = Counter("berth_bus_items", "Messages confirmed; several may share one broker message.", ["bus"])
PUBLISH_ERRORS = Counter("berth_bus_publish_errors", "Broker messages not confirmed.", ["bus", "code"])
IN_FLIGHT = Gauge("berth_bus_in_flight", "Broker messages that wait for their confirm.", ["bus"])
BLOCKED = Gauge("berth_bus_blocked", "1 while the broker takes no messages: short of memory or disk.", ["bus"])
CONSUMED = Counter("berth_bus_consumed", "Messages taken from a queue.", ["bus", "queue"])
OUTCOMES = Counter("berth_bus_outcomes", "Outcomes of the messages taken.", ["bus", "queue", "outcome"])
STALLS = Counter(
    "berth_bus_stalls", "Handler calls put off because a dependency was unavailable.", ["bus", "queue", "code"]
)
LATE_REPLIES = Counter("berth_bus_late_replies", "Replies that are not waited for any more.", ["bus"])
REPLY_TIMEOUTS = Counter("berth_bus_reply_timeouts", "Requests without a reply at their deadline.", ["bus"])
DEAD_DROPPED = Counter("berth_bus_dead_letters_dropped", "Dead letters dropped: too many are parked.", ["bus", "queue"])
BROKEN = Counter("berth_bus_invariants_broken", "Messages whose handling broke an invariant.", ["bus", "queue"])
WORKER = Gauge("berth_worker", "1 for each running worker.", ["role", "process", "version"])
DEAD_LETTERS = Gauge(
    "berth_bus_dead_letters", "Dead letters parked on a bus, read from the broker when scraped.", ["bus"]
)
CELLS_NOT_ENTERED = Counter(
    "berth_bus_cells_not_entered",
    "Times that the bus of a cell that was added at run time could not be entered.",
    ["cell"],
)
