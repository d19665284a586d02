"""A build between its claim and its record: the result of its placement, and the decision that is to be written."""

from __future__ import annotations

from msgspec import Struct

from scheduler_worker.domain.builds import BuildDecision
from scheduler_worker.domain.pending import PendingBuild
from scheduler_worker.domain.placement import HostClaimed, PlacementRequest, PlacementResult


class DecidedBuild(Struct, frozen=True, kw_only=True):
    """A decision to write: scheduled or failed. may_hold_claim: a claim of it may stand or be in flight;
    only read when it has failed. in_doubt: as in PendingBuild, by now.
    """

    pending: PendingBuild
    decision: BuildDecision
    claimed: HostClaimed | None = None
    may_hold_claim: bool = False
    in_doubt: bool = False


class PlacedBuild(Struct, frozen=True):
    """A build with the result of its placement."""

    pending: PendingBuild
    request: PlacementRequest
    result: PlacementResult
