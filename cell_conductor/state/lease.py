"""The lease of a compute service, and the one conductor of a cell that keeps the leases."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct

# The interval of a service that does not state how often it sends a heartbeat.
DEFAULT_HEARTBEAT_S = 10.0
LEADERSHIP_S = 5.0  # a leader that does not renew its lease is replaced after this
RENEW_LEADERSHIP_S = 2.0

STOPPED = "service.stopped"
SILENT = "service.silent"


class LeaseState(StrEnum):
    """Whether a service is up, as far as its cell knows."""

    UP = "up"
    SILENT = "silent"  # suspected: the heartbeats did not come
    STOPPED = "stopped"  # it stated that it stops


StatePeriod: TypeAlias = tuple[int, LeaseState, float]


class Lease(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The lease of one compute service, as it is recorded."""

    service: str
    epoch: int  # epoch of the process that last sent something
    interval_s: float = DEFAULT_HEARTBEAT_S  # time between its heartbeats
    state: LeaseState = LeaseState.UP
    since: float = 0.0  # when the state began; seconds since the epoch
    reason: str = ""  # why it is in this state, a sentence ("" while it is up)

    @property
    def state_period(self) -> StatePeriod:
        """For how long its service is in this state: of which process, and since when."""
        return self.epoch, self.state, self.since

    @property
    def code(self) -> str:
        """Why it takes no builds, as a stable code; "" while it is up."""
        return {LeaseState.UP: "", LeaseState.SILENT: SILENT, LeaseState.STOPPED: STOPPED}[self.state]


class Leader(Struct, frozen=True):
    """The conductor that records and publishes the leases, and until when. Its term rises with each change of leader:
    the service states of a former one that has not noticed yet are ignored, and its writes are refused.
    """

    process: str = ""
    term: int = 0
    until: float = 0.0


def next_leader(before: Leader, process: str, term: int | None, now: float, for_s: float) -> Leader | None:
    """The record by which this process becomes or remains the leader; None: another one is. term: its own (None: it is
    not the leader). now: by the database's clock, as `before` was read.
    """
    # Its term goes on only if it is on record and not over: an earlier term is of a former process of this name, or of
    # a database that was restored; while it was over another one may have been the leader, whose record is lost.
    is_held = before.until >= now
    if is_held and before.process != process:
        return None
    is_own = is_held and before.term == term
    newest = before.term if is_own else max(before.term + 1, (term or 0) + 1, int(now * 1000))
    return Leader(process, newest, now + for_s)
