"""What machines in quarantine take of their hosts, and where the reservations of a report differ from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from bus.contracts.base import Allocations
from bus.contracts.cell import (
    MAX_RESERVED_AT_ONCE,
    MAX_RESERVED_MACHINES,
    HostStates,
    ReservedMachine,
    ReservedOnHost,
    Running,
)
from cell_conductor.state.instance import Instance
from cell_conductor.state.unknown_machine import UnknownMachine, UnknownMachineKind

Reserved = Mapping[str, Sequence[Running]]  # by host


def wrong_reservations(report: HostStates, unknown: Sequence[UnknownMachine]) -> Reserved:
    """For each host where the report disagrees, all machines that are to be reserved; most reports agree."""
    # Machines in quarantine are reserved: none of their claims is proved, and they stay. A reserved machine stays
    # reserved while it is being destroyed, and when its tag is removed: it is still there. A machine that a record
    # explains has its claim.
    kind_of = {(one.host_uuid, one.uuid): one.kind for one in unknown}
    wrong: dict[str, Sequence[Running]] = {}
    for host in report.hosts:
        wanted = [
            one
            for one in host.running or ()
            if (kind := kind_of.get((host.uuid, one.instance_uuid))) is UnknownMachineKind.QUARANTINED
            or (one.reserved and (one.destroying or kind is not None))
        ]
        if {one.instance_uuid for one in wanted} != {one.instance_uuid for one in host.running or () if one.reserved}:
            wrong[host.uuid] = wanted
    return wrong


def pages(wrong: Reserved) -> list[list[str]]:
    """The hosts in order, in lists of at most so many machines as one message names."""
    found: list[list[str]] = []
    left = 0
    for host, machines in wrong.items():
        if not found or len(machines) > left:
            found.append([])
            left = MAX_RESERVED_AT_ONCE
        left -= len(machines)
        found[-1].append(host)
    return found


def reserved_on(host_uuid: str, machines: Sequence[Running], records: Mapping[str, Instance]) -> ReservedOnHost:
    """The reservations for the service: the resources that each machine takes, if its record has them."""
    return ReservedOnHost(
        host_uuid=host_uuid,
        machines=tuple(
            ReservedMachine(
                instance_uuid=one.instance_uuid,
                attempt=one.attempt,
                allocations=_allocations(records.get(one.instance_uuid), host_uuid),
            )
            for one in islice(machines, MAX_RESERVED_MACHINES)
        ),
    )


def _allocations(instance: Instance | None, host_uuid: str) -> Allocations | None:
    """The resources that an instance was to take of this host, if its record has the host among those chosen."""
    chosen = instance.selections if instance is not None else ()
    return next((selection.allocations for selection in chosen if selection.host_uuid == host_uuid), None)
