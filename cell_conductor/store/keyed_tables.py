"""The keyed tables of a cell: unknown machines, breakers, fences and leases, and the values of their rows."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.cell import UNKNOWN_ATTEMPT
from bus.contracts.operations import FenceState
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.fence import Fence, StaleCount
from cell_conductor.state.lease import Lease
from cell_conductor.state.ownership_proof import rescan_of
from cell_conductor.state.unknown_machine import UNREADABLE, UnknownMachine, UnknownMachineKind
from cell_conductor.store.keyed import KeyedTable

DESTROY = "destroy"
PROTECT = "protect"
ADOPT = "adopt"

MachineKey = tuple[str, str]  # (host uuid, instance uuid)


class DecidedMachine(Struct, frozen=True):
    """The machines of an instance that a decision is about."""

    uuid: str
    host_uuid: str | None = None  # only the machine on this host (None: on any)
    attempt: int | None = None  # only while it has this attempt (None: any)


class UnknownMachineRecord(Struct, frozen=True, kw_only=True):
    """One machine on record."""

    machine: UnknownMachine
    service: str
    first_seen: float
    last_seen: float
    decision: str = ""  # an operator's decision ("": there is none)
    decided_by: str = ""
    decided_at: float = 0.0
    incarnation: int = 0  # incarnation of the database at the decision
    is_new: bool = False  # whether this call recorded it

    @property
    def location(self) -> MachineKey:
        """Where it is."""
        return self.machine.host_uuid, self.machine.uuid

    @property
    def rescan(self) -> str:
        """Of the rescan that shows whether it is there still."""
        return rescan_of("unknown_machine", *self.location, self.last_seen)


AT = ("host_uuid", "instance_uuid")
# Of one that cannot be read the operator may have said that it is kept.
UNKNOWN_MACHINES: KeyedTable[MachineKey, UnknownMachineRecord] = KeyedTable(
    "unknown_machines",
    AT,
    UnknownMachineRecord,
    attrgetter("location"),
    lambda place: UnknownMachineRecord(
        machine=UnknownMachine(place[1], UNKNOWN_ATTEMPT, place[0], UnknownMachineKind.QUARANTINED, UNREADABLE),
        service="",
        first_seen=0.0,
        last_seen=0.0,
        decision=PROTECT,
    ),
)
BREAKERS: KeyedTable[str, Breaker] = KeyedTable(
    "breakers", ("service",), Breaker, attrgetter("service"), lambda service: Breaker(service=service, tripped_at=0.0)
)
# Of hosts that an operator has fenced. Who abandons a machine there holds the fence and counts it; it is ended when a
# later scan shows none of those, and stays on record for a while: the message of an older decision would fence a host
# in use.
# One that cannot be read proves nothing: the host is to be fenced again, and may have a machine to destroy.
FENCES: KeyedTable[str, Fence] = KeyedTable(
    "fences",
    ("host_uuid",),
    Fence,
    attrgetter("host_uuid"),
    lambda host: Fence(host_uuid=host, host="", version=0, state=FenceState.UNFENCED, stale={"": StaleCount(1, 0.0)}),
)
# A service whose lease cannot be read may be up, and falls silent as any.
LEASES: KeyedTable[str, Lease] = KeyedTable(
    "leases", ("service",), Lease, attrgetter("service"), lambda service: Lease(service=service, epoch=0)
)
KEYED: tuple[KeyedTable[Any, Any], ...] = (UNKNOWN_MACHINES, BREAKERS, FENCES, LEASES)


def with_report(
    before: UnknownMachineRecord | None, machine: UnknownMachine, service: str, now: float, incarnation: int
) -> UnknownMachineRecord:
    """The record of a machine that is listed. A decision holds for one attempt only, and until the database is
    restored.
    """
    # Another attempt may have come since a restore, which is lost. But that a machine is kept holds: no attempt and no
    # tag shows that it is gone.
    if before is None:
        return UnknownMachineRecord(machine=machine, service=service, first_seen=now, last_seen=now)
    is_same = (before.machine.attempt, before.machine.kind, before.incarnation) == (
        machine.attempt,
        machine.kind,
        incarnation,
    )
    decision = before.decision if is_same or before.decision == PROTECT else ""
    return replace(before, machine=machine, service=service, last_seen=now, decision=decision)
