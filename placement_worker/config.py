"""The settings of a placement worker."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from placement_worker.rest.config import RestConfig

Seconds = Annotated[float, Bound(gt=0, le=86_400 * 30)]
Some = Annotated[int, Bound(ge=1, le=10_000)]


class PlacementConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds and waits of one placement process."""

    claim_batch: Some = 256
    """The most claims applied in one transaction. 256: larger groups gain little and hold their locks longer."""
    claim_prefetch: Annotated[int, Bound(ge=1, le=65_535)] = 1024
    """Unacknowledged claims that the broker delivers ahead: four batches."""
    inventory_batch: Some = 128
    """The most inventory updates applied in one transaction."""
    inventory_prefetch: Annotated[int, Bound(ge=1, le=65_535)] = 256
    """Unacknowledged inventory updates that the broker delivers ahead: two batches."""
    read_batch: Some = 4
    """The most read requests (snapshots, changes) answered together. 4: an answer can be large."""
    concurrency: Annotated[int, Bound(ge=1, le=16)] = 2
    """Transactions under way per queue: one runs while another waits for its commit."""
    pool_size: Annotated[int, Bound(ge=2, le=100)] = 10
    """The most connections to the database of one placement process, used instead of `database.pool_size`."""
    feed_gap_s: Annotated[float, Bound(ge=0, le=1)] = 0.01
    """Seconds between two turns of publishing while commits go on, so that a turn carries many changes."""
    feed_linger_s: Annotated[float, Bound(ge=0, le=1)] = 0.05
    """Seconds that a claim's change waits for further ones. The scheduler that claimed knows it already."""
    feed_page: Some = 1000
    """The most changes in one event of the feed."""
    feed_retention: Annotated[int, Bound(ge=1000)] = 500_000
    """Published changes that are kept for replicas that fell behind; one further behind takes a snapshot."""
    head_interval_s: Seconds = 1.0
    """Seconds between two messages with the newest change number; a replica notices a lost event so."""
    trim_interval_s: Seconds = 30.0
    """Seconds between two purges of changes, ended attempts and reporters."""
    ended_attempt_retention_s: Seconds = 86_400.0
    """Seconds that a released consumer's attempts stay on record as ended. Longer than any claim can be under way."""
    reporter_retention_s: Seconds = 7 * 86_400.0
    """Seconds that the last version of a reporter is kept after its host was removed or taken over, and what others
    gave the host: aggregates, and traits by the REST API. Longer than any report can be under way, and than a
    compute service or an Ironic hides hosts by mistake.
    """
    trim_batch: Some = 5000
    """The most rows of each kind that one statement purges."""
    cell_wait_s: Seconds = 5.0
    """Seconds that the start waits for unavailable cells. They are connected to when they come back."""
    grace_s: Seconds = 10.0
    """Seconds that stopping waits for requests under way."""
    rest: RestConfig = RestConfig()
    """The REST API."""
