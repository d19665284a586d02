"""Selection 1.1 as Nova's conductor reads it: a chosen host or an alternate, and what is to be claimed there.

Serialised as oslo.versionedobjects does it. Its allocation request is a text: the JSON of a `PUT /allocations` body,
which the conductor sends to claim an alternate, and whose mappings it reads to bind ports and devices.
"""

from __future__ import annotations

from typing import Final

import msgspec

from bus.contracts.cell import Selection
from nova_scheduler.fit.numa import NumaLimits
from nova_scheduler.fit.numa_objects import primitive_of
from nova_scheduler.wire.versioned import Primitive, versioned

# Of Placement, as which the conductor sends the allocation request: nova-scheduler 34 asks for candidates with it.
MICROVERSION: Final = "1.36"


def limits(numa: NumaLimits | None) -> Primitive:
    """The limits of a host. As in Nova only NUMATopologyFilter sets any."""
    others = dict.fromkeys(("vcpu", "disk_gb", "memory_mb"))
    return versioned("SchedulerLimits", "1.0", {"numa_topology": numa and primitive_of(numa), **others})


def allocation_request(selection: Selection) -> str:
    """The body that claims there. Without numbered groups all providers give the un-numbered one."""
    mappings = selection.mappings or {"": tuple(selection.allocations)}
    allocations = {uuid: {"resources": dict(amounts)} for uuid, amounts in selection.allocations.items()}
    return msgspec.json.encode({"allocations": allocations, "mappings": mappings}).decode()


def primitive(selection: Selection, *, cell: str, zone: str, numa: NumaLimits | None = None) -> Primitive:
    """A host as a Selection. cell: uuid. zone: its name. Where nothing is claimed, as for a rebuild, it allocates
    nothing.
    """
    is_claimed = bool(selection.allocations)
    return versioned(
        "Selection",
        "1.1",
        {
            "compute_node_uuid": selection.host_uuid,
            "service_host": selection.service,
            "nodename": selection.host,
            "cell_uuid": cell,
            "limits": limits(numa),
            "allocation_request": allocation_request(selection) if is_claimed else "null",
            "allocation_request_version": MICROVERSION if is_claimed else None,
            "availability_zone": zone,
        },
    )


def legacy(selection: Selection, numa: NumaLimits | None = None) -> Primitive:
    """The same for a conductor that asks for no objects (`return_objects` = False)."""
    known = {} if numa is None else {"numa_topology": primitive_of(numa)}
    return {"host": selection.service, "nodename": selection.host, "limits": known}
