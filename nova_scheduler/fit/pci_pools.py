"""`compute_nodes.pci_stats` of Nova's database: a `PciDevicePoolList` 1.x as JSON. Hostile until it is parsed."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from bus.contracts.base import reason_of
from bus.faults import Fault
from nova_scheduler.fit.pci import Devices, PciPool, Tags, ordered
from nova_scheduler.wire.versioned import ObjectUnreadable, data_of

MAX_BYTES = 1_048_576  # of a row; the column of MariaDB takes a sixteenth of it
MAX_POOLS = 4_096  # of a host

NumaNode = Annotated[int, Meta(ge=-1, le=65_535)]
_OWN = frozenset({"count", "numa_node", "product_id", "vendor_id"})  # what no tag may be named as


class PciPoolsUnreadable(Fault):
    """A host's PCI pools cannot be read, so it is not known which devices it has."""

    code = "nova.pci_pools_unreadable"


class _Pool(Struct, frozen=True):
    vendor_id: str
    product_id: str
    count: Devices
    numa_node: NumaNode | None = None
    tags: Tags = {}


def parse_pools(stored: str | bytes | None) -> tuple[PciPool, ...]:
    """The pools of a host in Nova's order; of a host without devices none. Raises PciPoolsUnreadable."""
    if not stored:
        return ()
    if len(stored) > MAX_BYTES:
        raise PciPoolsUnreadable(f"more than {MAX_BYTES} bytes")
    try:
        value = msgspec.json.decode(stored)
        if not value:
            return ()
        found = data_of(value, "PciDevicePoolList").get("objects")
        if not isinstance(found, list) or len(found) > MAX_POOLS:
            raise ObjectUnreadable(f"PciDevicePoolList: a list of at most {MAX_POOLS} pools")
        return ordered(_pool(msgspec.convert(data_of(one, "PciDevicePool"), _Pool)) for one in found)
    except (msgspec.DecodeError, ObjectUnreadable, RecursionError, UnicodeError) as error:
        raise PciPoolsUnreadable(reason_of(error)) from None


def _pool(one: _Pool) -> PciPool:
    if not _OWN.isdisjoint(one.tags):
        raise ObjectUnreadable("PciDevicePool: a tag has the name of a field")
    return PciPool.of(one.count, one.vendor_id, one.product_id, one.numa_node, one.tags)
