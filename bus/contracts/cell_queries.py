"""Queries of a cell about builds that have had no event for a long time (about moves: `moves.CellMoveQuery`)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound

from .base import Message
from .cell import InstanceSpec


class CellBuildQuery(Message, frozen=True, kw_only=True, tag="cell.build.query.v1"):
    """Queries the state of a build that has had no event for a long time. It begins nothing.

    The answer is a BuildEvent: how far the build has come, or its end once more. A cell that has no record of the build
    puts it on record in doubt, once all its compute services that are up have answered. A machine of it is adopted.
    Without one it fails, what was claimed for it up to `attempt` is released, and a CellBuild that comes later finds
    that record.
    spec, build_timeout_s: as of its CellBuild. attempt: that holds its claim, as far as the schedulers have it.
    sequence: of the newest event of it that they have had. requested_at: when this query was decided.
    """

    spec: InstanceSpec
    attempt: Annotated[int, Bound(ge=1, le=1_000_000)] = 1
    build_timeout_s: Annotated[float, Bound(gt=0, le=86_400)] = 300.0
    sequence: Annotated[int, Bound(ge=0, le=2**62)] = 0
    requested_at: float = 0.0
