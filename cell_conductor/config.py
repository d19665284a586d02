"""Everything about a conductor that an operator may set."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

Seconds = Annotated[float, Bound(gt=0, le=86_400)]


class ConductorConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds and waits of one conductor process.

    claim_timeout_s: how long one answer of placement is waited for; claim_retry_s: after this an instance that still
    waits for placement (a crash, an outage) is asked for again by the sweep. answer_timeout_s: how long a host that did
    not build in time is waited for, once it is asked what became of the attempt. destroy_retry_s: between two Destroy
    commands to a host that does not confirm, at first; destroy_retry_max_s: later. doubt_limit_s: how long a build is
    waited for that was under way when the database was set back, while its host is silent: then it has failed for its
    client, and what the host may run goes to quarantine. report_grace_s: a host's report only
    counts against an instance when it was made this long after the instance's last command, so that a report on its way
    cannot kill a young build. missed_heartbeats: so many heartbeats of a compute service in a row are missing, while
    the bus delivers, before it counts as silent: its builds go to other services, and schedulers choose none of its
    hosts. services_retention_s: how long a service that is down stays on record. breaker_limit: so many machines of one
    compute service may be lost, newly quarantined or found over in one report; more trip its breaker, and nothing of it
    is destroyed or taken for lost until an operator resets it. report_interval_s: between two requests for reports from
    all hosts (they also report by themselves). deleted_retention_s: how long a deleted instance stays on record, so
    that a late message about it is recognised; longer than any message can be under way. failed_retention_s: the same
    of a failed one; longer than the schedulers keep its request (ended_retention_s), because who deletes it there waits
    for our word. purge_interval_s: how often it looks for those that are older. progress_linger_s: an event that is not
    a build's end leaves with the next message, or after this.
    """

    claim_timeout_s: Seconds = 10.0
    claim_retry_s: Seconds = 15.0
    answer_timeout_s: Seconds = 10.0
    destroy_retry_s: Seconds = 30.0
    destroy_retry_max_s: Seconds = 600.0
    doubt_limit_s: Seconds = 3600.0
    report_grace_s: Seconds = 30.0
    report_interval_s: Seconds = 300.0
    sweep_interval_s: Seconds = 0.5
    sweep_batch: Annotated[int, Bound(ge=1, le=5000)] = 500
    max_batch: Annotated[int, Bound(ge=1, le=1000)] = 128
    concurrency: Annotated[int, Bound(ge=1, le=16)] = 2
    prefetch: Annotated[int, Bound(ge=1, le=65_535)] = 512
    missed_heartbeats: Annotated[int, Bound(ge=2, le=1000)] = 5
    services_retention_s: Annotated[float, Bound(ge=86_400)] = 7 * 86_400.0
    breaker_limit: Annotated[int, Bound(ge=0, le=1_000_000)] = 5
    deleted_retention_s: Seconds = 86_400.0
    failed_retention_s: Annotated[float, Bound(gt=0)] = 8 * 86_400.0
    purge_interval_s: Seconds = 60.0
    purge_batch: Annotated[int, Bound(ge=1, le=10_000)] = 1000
    progress_linger_s: Annotated[float, Bound(ge=0, le=1)] = 0.1
