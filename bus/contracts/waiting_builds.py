"""The builds of a compute service that wait for what manages its hosts: shown, and nothing is decided by them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound

from bus.contracts.base import Message, Reason, Word
from bus.contracts.cell import NumberedAttempt

MAX_WAITING = 1000


class WaitingBuild(NumberedAttempt, frozen=True, kw_only=True):
    """An attempt that goes on as soon as the manager of its host answers."""

    since: float  # seconds since the epoch
    reason: Reason


class BuildsWaiting(Message, frozen=True, kw_only=True, tag="compute.waiting.v1"):
    """All builds of a compute service that wait for the manager of its hosts, such as an Ironic that is down. For
    display only. Published repeatedly while there are any, and once more when there is none; each replaces the one
    before.
    """

    service: Word
    cell: Word
    # those beyond the first thousand are left out
    waiting: Annotated[tuple[WaitingBuild, ...], Bound(max_length=MAX_WAITING)] = ()
    lasts_s: Annotated[float, Bound(ge=0, le=3600)] = 0.0  # seconds for which this message holds
