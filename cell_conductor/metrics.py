"""What a conductor counts."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

STEPS = Counter("berth_conductor_steps", "Events taken, by state before and event.", ["state", "event"])
ASKED = Counter("berth_conductor_asked", "Questions to placement, by kind and outcome.", ["kind", "outcome"])
ENDED = Counter("berth_conductor_ended", "Instances that reached active, failed or deleted.", ["state"])
ALTERNATES = Counter("berth_conductor_alternates", "Attempts commanded on an alternate.")
SWEPT = Counter("berth_conductor_swept", "Deadlines that passed, by state.", ["state"])
REPAIRED = Counter("berth_conductor_repaired", "Differences between hosts' reports and the record.", ["kind"])
BATCH_SECONDS = Histogram("berth_conductor_batch_seconds", "One batch: steps, transaction, questions.", ["source"])
