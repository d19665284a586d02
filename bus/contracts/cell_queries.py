"""Queries of a cell about builds that have had no event for a long time (about moves: `moves.CellMoveQuery`)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound

from .base import Message
from .cell import InstanceSpec


class CellBuildQuery(Message, frozen=True, kw_only=True, tag="cell.build.query.v1"):
    """Queries the state of a build that has had no event for a long time. It begins nothing.

    The answer is a BuildEvent: how far the build has come, or its end once more. A build that the cell has no record
    of ends as failed (`build.lost`) once all compute services of the cell have answered that they have no machine of
    it; a machine of it is adopted, or kept for an operator, and then nothing is answered.
    spec, build_timeout_s: as of its CellBuild. sequence: of the newest event of it that the schedulers have.
    """

    spec: InstanceSpec
    build_timeout_s: Annotated[float, Bound(gt=0, le=86_400)] = 300.0
    sequence: Annotated[int, Bound(ge=0, le=2**62)] = 0
