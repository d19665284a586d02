"""A build between its claim and its record: how it was placed, and the decision that is to be written."""

from __future__ import annotations

from msgspec import Struct

from scheduler_worker.domain.builds import BuildDecision
from scheduler_worker.domain.pending import PendingBuild
from scheduler_worker.domain.placement import HostClaimed, PlacementRequest, PlacementResult


class ScheduledBuild(Struct, frozen=True, kw_only=True):
    """A decision to write. may_hold_claim: it has failed, and a claim of it may stand, or may still be in flight."""

    pending: PendingBuild
    decision: BuildDecision
    claimed: HostClaimed | None = None
    may_hold_claim: bool = False


class PlacedBuild(Struct, frozen=True):
    """A build that is placed, and how that ended."""

    pending: PendingBuild
    request: PlacementRequest
    result: PlacementResult
