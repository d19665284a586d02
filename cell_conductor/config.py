"""A conductor's settings."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

Seconds = Annotated[float, Bound(gt=0, le=86_400)]


class ConductorConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds and waits of one conductor process."""

    own_database: bool = False
    """Whether the cells' conductors have a database other than that of placement and the schedulers. With the same
    database (the default) a conductor claims an empty bus for it, as they do: of two deployments that start at once on
    empty buses one gets all of a bus.
    """
    claim_timeout_s: Seconds = 10.0
    """Seconds that a conductor waits for one answer of placement."""
    claim_retry_s: Seconds = 15.0
    """Seconds after which the sweep repeats the claim of an instance that still waits for placement (after a crash
    or an outage).
    """
    answer_timeout_s: Seconds = 10.0
    """Seconds in which a host that did not build in time has to answer the query about the attempt."""
    destroy_retry_s: Seconds = 30.0
    """Seconds between the first two Destroy commands to a host that does not confirm; the wait doubles."""
    destroy_retry_max_s: Seconds = 600.0
    """Longest such wait, in seconds."""
    live_copy_mb_s: Annotated[float, Bound(ge=0, le=1_000_000)] = 32.0
    """MiB of memory that a live migration copies per second, at least. Its source may take the time of copying the
    instance's memory at this rate beyond that of one step; then the action fails. 0: only the time of one step.
    """
    report_grace_s: Seconds = 30.0
    """Seconds after an instance's last change during which a host's report does not count against it: a report that
    differs from a younger record causes no new scan, because most of what it lacks is under way.
    """
    report_interval_s: Seconds = 300.0
    """Seconds between two requests for reports from all hosts, which also report by themselves."""
    sweep_interval_s: Seconds = 1.0
    """Seconds between two searches for instances whose deadline has passed."""
    sweep_batch: Annotated[int, Bound(ge=1, le=5000)] = 500
    """The most such instances handled in one transaction."""
    max_batch: Annotated[int, Bound(ge=1, le=1000)] = 128
    """The most messages handled in one transaction."""
    concurrency: Annotated[int, Bound(ge=1, le=16)] = 2
    """Batches under way per queue: one runs while another waits for its commit."""
    prefetch: Annotated[int, Bound(ge=1, le=65_535)] = 512
    """Unacknowledged messages that the broker delivers ahead: four batches."""
    missed_heartbeats: Annotated[int, Bound(ge=2, le=1000)] = 5
    """Heartbeats in a row that a compute service may miss, while the bus delivers, before it counts as silent: its
    builds go to other services, and schedulers choose none of its hosts.
    """
    services_retention_s: Annotated[float, Bound(ge=86_400)] = 7 * 86_400.0
    """Seconds that a service which is down stays on record. In a cell whose database was ever restored it stays there
    until `berth service delete`: it may have machines that the database has lost.
    """
    takeover_s: Seconds = 600.0
    """Seconds of silence after which hosts of a compute service pass to another one that reports the same uuids.
    A host restarts within this time; after it the machines of the silent service are lost by the other one's report.
    """
    breaker_limit: Annotated[int, Bound(ge=0, le=1_000_000)] = 5
    """The most machines of one compute service that its reports may show as lost, newly quarantined or over within
    `breaker_window_s`. More of them open its breaker: no machine of the service is destroyed or counted as lost until
    an operator resets it.
    """
    breaker_window_s: Annotated[float, Bound(ge=0, le=86_400)] = 60.0
    """Seconds within which the reports of a compute service count together. Each conductor of the cell counts those
    that it applied; the last report counts as a whole, also with 0.
    """
    deleted_retention_s: Seconds = 86_400.0
    """Seconds that a deleted instance stays on record, so that a late message about it is recognised. Longer than
    any message can be under way.
    """
    failed_retention_s: Annotated[float, Bound(gt=0)] = 8 * 86_400.0
    """Seconds that a failed instance stays on record, one that has left for another cell, and the end of a fence.
    Longer than the schedulers keep its request (`scheduler.ended_retention_s`), because a delete there waits for the
    cell's confirmation, and than the age of a backup that they may be restored from.
    """
    purge_interval_s: Seconds = 60.0
    """Seconds between two purges of those records."""
    purge_batch: Annotated[int, Bound(ge=1, le=10_000)] = 1000
    """The most records that one statement purges."""
    progress_linger_s: Annotated[float, Bound(ge=0, le=1)] = 0.5
    """Seconds that an event which does not end a build may wait for the next one of its instance: both are one message
    and one transaction of the scheduler. Shorter than a client's silence (1 s), after which it queries.
    """
