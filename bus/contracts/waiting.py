"""The builds of a compute service that wait for what manages its hosts: shown, and nothing is decided by them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound

from .base import Message, Reason, Word
from .cell import NumberedAttempt

MAX_WAITING = 1000


class WaitingBuild(NumberedAttempt, frozen=True, kw_only=True):
    """An attempt that goes on as soon as the manager of its host answers."""

    since: float  # seconds since the epoch
    reason: Reason


class BuildsWaiting(Message, frozen=True, kw_only=True, tag="compute.waiting.v1"):
    """All builds of a compute service that wait for what manages its hosts, such as an Ironic that is down.

    Published again and again while there are any, and once more when there is none; each replaces the one before, and
    holds for `lasts_s`. Builds beyond the first thousand are left out. Nothing is decided by it: it is shown.
    """

    service: Word
    cell: Word
    waiting: Annotated[tuple[WaitingBuild, ...], Bound(max_length=MAX_WAITING)] = ()
    lasts_s: Annotated[float, Bound(ge=0, le=3600)] = 0.0
