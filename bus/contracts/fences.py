"""A fence of a host as its cell learns of it: the operator's decision goes down, what became of it is announced."""

from __future__ import annotations

from enum import StrEnum

from .base import Count, Label, Message, Reason, Uuid, Version, Word


class EvacuationPolicy(StrEnum):
    """The policy for an active instance whose host is fenced."""

    RESTART = "restart"  # it is evacuated: built again on another host
    WAIT = "wait"  # it stays on record where it was, until its host is back or a person evacuates it
    FAIL = "fail"  # it has failed with its host, and its allocation goes


class CellFence(Message, frozen=True, kw_only=True, tag="cell.fence.v1"):
    """A person, or a fencing plug-in, has made sure that this host is off. It is repeated until the cell has
    acknowledged it.

    Every step about the host that waits for its answer ends without it: deletes, builds, the remains of a move there.
    A machine that the host may have kept is a loss, which it is to destroy when it comes back. lift: the host may be
    used again, once it has destroyed its losses. version: of the operator's decisions about this host; an older one is
    ignored. at: of the decision, in seconds since the epoch.
    """

    host_uuid: Uuid
    host: Label
    version: Version
    lift: bool = False
    reason: Reason = ""
    by: str = ""
    at: float = 0.0


class FenceState(StrEnum):
    """How far a cell is with a fence."""

    FENCED = "fenced"  # on record
    LIFTING = "lifting"  # to be lifted, and the host has losses to destroy
    LIFTED = "lifted"  # not on record (any more)


class HostFence(Message, frozen=True, kw_only=True, tag="host.fence.v1"):
    """A cell's record of a fence: announced when it changes, and for each CellFence that comes.

    version: the decision that it goes by. losses: machines that the host is still to destroy.
    at: seconds since the epoch.
    """

    cell: Word
    host_uuid: Uuid
    version: Version
    state: FenceState
    losses: Count = 0
    at: float = 0.0
