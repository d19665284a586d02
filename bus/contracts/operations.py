"""An operator's decisions about hosts at run time, by message, command or HTTP, the state that schedulers derive from
them, and fences, which are commanded to cells and announced by them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Count, Label, Message, Reason, Uuid, Version, Word


class AdminState(StrEnum):
    """An operator's decision about a host. It stands beside the reports of the host's compute service."""

    ENABLED = "enabled"  # berth may use it
    DISABLED = "disabled"  # it takes nothing new; its instances stay
    MAINTENANCE = "maintenance"  # as disabled, and requests that skip the filters (`forced`) are kept away as well
    # as maintenance, and an operator has made sure that it is off and stays off until it has been notified of its
    # losses; its instances may be evacuated
    FENCED = "fenced"


class HostAdminState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The newest decision about one host, as it is on record: an object of kind `host` (bus.contracts.objects)."""

    host_uuid: Uuid
    host: Label
    state: AdminState
    reason: Reason = ""
    by: str = ""  # the person, as the command or the HTTP caller named it
    at: float = 0.0  # seconds since the epoch
    version: Version = 0  # the revision of the objects that it was made in, so it rises with each decision
    # fence, acknowledged: the number of the newest decision about the host's fence, and of the newest that its cell has
    # on record (0: none)
    fence: Version = 0
    acknowledged: Version = 0
    pending: AdminState | None = None  # the decision about a fenced host once it has destroyed its losses
    stale_machines: Count = 0  # machines left, by its cell's last report
    drain: Uuid | None = None  # the drain that the host belongs to

    @property
    def is_fence_acknowledged(self) -> bool:
        """Whether the host's cell has the fence on record: until then it builds on a host that is switched on."""
        return self.state is AdminState.FENCED and self.acknowledged >= self.fence


class SetAdminState(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="hosts.set.v1"):
    """Decide about a host: `host` is its uuid, or its name when one host has it. Idempotent by the message's id. Kept
    as an object of kind `host`, so also in the log of changes.
    """

    host: Label
    # a fenced host stays fenced until its cell reports that it has destroyed its losses; until then this is its
    # `pending` state
    state: AdminState
    reason: Reason = ""
    by: Label
    # where a name is looked for (None: in all cells). It also states where a host to be fenced is, if nothing else
    # shows that; without it the fence is then refused (`host.cell_unknown`), unless `force`.
    cell: Word | None = None
    # fence a host although a compute service that is up reports it, or may do so (else refused: `host.service_up`;
    # `host.cell_silent`, not every service of its cell is known): an instance evacuated from a running host would run
    # twice. Or end a fence without its cell's acknowledgement, because the cell is gone for good; that needs a reason
    # (`host.reason_missing`).
    force: bool = False


class AdminStateSet(Message, frozen=True, kw_only=True, tag="hosts.set.result.v1"):
    """Reply to a SetAdminState that is on record."""

    host: HostAdminState


class Reasoned(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who has something forgotten that is gone for good, and why."""

    reason: Annotated[Reason, Bound(min_length=1)]
    by: Label
    cell: Word | None = None  # that it is in (None: found by its name, which one cell has)


class DeleteHost(Message, Reasoned, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="hosts.delete.v1"):
    """Forget a host that is gone for good: its provider tree leaves placement; its decision and its place in aggregates
    leave the schedulers' record. Idempotent. A host that is reported once more is a new host.
    """

    # its uuid, or its name when one host has it. Refused while it may not be gone: a compute service that is up reports
    # it (`host.service_up`), not every service of a cell is known (`host.cell_silent`), its fence is open
    # (`host.fence_open`), a drain that has not ended has it (`host.draining`), instances are on record there
    # (`host.has_instances`), or consumers hold something of it (`host.in_use`).
    host: Label


class HostDeleted(Message, frozen=True, kw_only=True, tag="hosts.deleted.v1"):
    """Reply to a DeleteHost."""

    host_uuid: Uuid
    host: Label
    removed: bool  # False: nothing of the host was on record any more
    aggregates: tuple[str, ...] = ()  # those that named it


class DeleteService(Message, Reasoned, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="services.delete.v1"):
    """Forget a compute service that is gone for good, with the machines that it may have had: its cell drops its lease,
    so neither a recovery nor `berth check` waits for it. Idempotent. A service that sends a heartbeat once more is a
    new service.
    """

    # refused while it is up (`service.up`), while placement has hosts of it (`service.has_hosts`: forget or re-home
    # them first), or while instances are on record there, on hosts that are not fenced (`service.has_instances`)
    service: Word


class ServiceDeleted(Message, frozen=True, kw_only=True, tag="services.deleted.v1"):
    """Reply to a DeleteService."""

    service: Word
    cell: Word
    removed: bool  # False: its cell had it on record no more


class ServicesQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="services.query.v1"):
    """Ask a scheduler which compute services it knows."""

    cell: Word | None = None  # only this cell's
    up: bool | None = None  # only those up, or not
    limit: Annotated[int, Bound(ge=1, le=100_000)] = 1000


class ServiceRecord(Struct, frozen=True, kw_only=True):
    """One compute service as a scheduler sees it."""

    name: str
    cell: str
    up: bool
    epoch: int = 0  # of its present life
    # code, reason, since: why it is not up, as its cell's conductor reports it, and since when (seconds since the
    # epoch)
    code: str = ""
    reason: str = ""
    since: float = 0.0
    last_seen_s: float = 0.0  # seconds since its last announcement of hosts
    # hosts, enabled: how many hosts it manages, and how many of them take builds
    hosts: Count = 0
    enabled: Count = 0
    in_placement: Count = 0  # how many of them its copy of placement has
    # it has announced its hosts since this scheduler's start; otherwise it is only listed as down by its cell
    reported: bool = True


class ServicesPage(Message, frozen=True, kw_only=True, tag="services.page.v1"):
    """Reply to a ServicesQuery, by cell and name."""

    services: tuple[ServiceRecord, ...] = ()


class EvacuationPolicy(StrEnum):
    """The policy for an active instance whose host is fenced."""

    RESTART = "restart"  # it is evacuated: built again on another host
    WAIT = "wait"  # it stays on record where it was, until its host is back or a person evacuates it
    FAIL = "fail"  # it has failed with its host, and its allocation goes


class CellFence(Message, frozen=True, kw_only=True, tag="cell.fence.v1"):
    """A person, or a fencing plug-in, has made sure that this host is off. Repeated until the cell acknowledges it.
    Every step that waits for the host's answer ends: deletes, builds, the remains of a move. Machines it may have kept
    are losses.
    """

    host_uuid: Uuid
    host: Label
    version: Version  # of the operator's decisions about this host; an older one is ignored
    unfence: bool = False  # the host may be used again, once it has destroyed its losses
    reason: Reason = ""
    by: str = ""
    at: float = 0.0  # of the decision, in seconds since the epoch


class FenceState(StrEnum):
    """How far a cell is with a fence."""

    FENCED = "fenced"  # on record
    UNFENCING = "unfencing"  # its fence is to end, and the host has stale machines to destroy
    UNFENCED = "unfenced"  # not on record (any more)


class HostFence(Message, frozen=True, kw_only=True, tag="host.fence.v1"):
    """A cell's record of a fence: announced when it changes, and soon after a CellFence came again."""

    cell: Word
    host_uuid: Uuid
    version: Version  # of the decision that it follows
    state: FenceState
    stale_machines: Count = 0  # the machines that the host may still have to destroy, at most
    at: float = 0.0  # seconds since the epoch


class Losses(Struct, frozen=True, omit_defaults=True):
    """The instances that a recovery would end without a client's delete."""

    count: int = 0
    instances: tuple[str, ...] = ()  # the first MAX_LOSSES_NAMED
    builds: int = 0  # how many builds would fail meanwhile
