"""Everything about a placement worker that an operator may set."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from placement_worker.rest.config import RestConfig

Seconds = Annotated[float, Bound(gt=0, le=86_400 * 30)]
Some = Annotated[int, Bound(ge=1, le=10_000)]


class PlacementConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds and waits of one placement process.

    claim_batch, inventory_batch: messages applied as one transaction. concurrency: transactions under way per queue.
    feed_page: changes in one event. feed_gap_s: between two turns of publishing while commits go on. feed_linger_s: a
    claim's changes wait so long for those of others: the scheduler that claimed knows them already.
    feed_retention: published changes kept for replicas that fell behind; one that is further behind takes a snapshot.
    fence_retention_s: how long a released consumer's attempts stay fenced; longer than any claim can be under way.
    source_retention_s: how long the last version of a source is kept whose host is gone or was taken over; longer than
    any report can be under way. trim_batch: rows of each that one statement forgets. cell_wait_s: how long the start
    waits for cells that are away before it goes on without them (they are served when they come).
    """

    claim_batch: Some = 256
    claim_prefetch: Annotated[int, Bound(ge=1, le=65_535)] = 1024
    inventory_batch: Some = 128
    inventory_prefetch: Annotated[int, Bound(ge=1, le=65_535)] = 256
    read_batch: Some = 4
    concurrency: Annotated[int, Bound(ge=1, le=16)] = 2
    pool_size: Annotated[int, Bound(ge=2, le=100)] = 10
    feed_gap_s: Annotated[float, Bound(ge=0, le=1)] = 0.01
    feed_linger_s: Annotated[float, Bound(ge=0, le=1)] = 0.05
    feed_page: Some = 1000
    feed_retention: Annotated[int, Bound(ge=1000)] = 500_000
    head_interval_s: Seconds = 1.0
    trim_interval_s: Seconds = 30.0
    fence_retention_s: Seconds = 86_400.0
    source_retention_s: Seconds = 7 * 86_400.0
    trim_batch: Some = 5000
    cell_wait_s: Seconds = 5.0
    grace_s: Seconds = 10.0
    rest: RestConfig = RestConfig()
