"""Topologies as Nova serialises them: a host's in `compute_nodes.numa_topology`, an instance's in a RequestSpec, limits
in a Selection. Hostile until they are parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import reason_of
from bus.faults import Fault
from nova_scheduler.fit.numa import (
    HostCell,
    HostTopology,
    InstanceCell,
    InstanceTopology,
    MemoryPages,
    NetworkMetadata,
    NumaLimits,
)
from nova_scheduler.wire.versioned import ObjectUnreadable, Primitive, data_of, versioned

MAX_BYTES = 4_194_304  # of a row; 8,192 CPUs take a tenth

_Parsed = TypeVar("_Parsed", bound=Struct)

# The class and version of each struct, and the fields that are objects. Other fields of a class are not read.
_CLASSES: Final[Mapping[type[Struct], tuple[str, str, Mapping[str, type[Struct]]]]] = {
    HostTopology: ("NUMATopology", "1.2", {"cells": HostCell}),
    HostCell: ("NUMACell", "1.5", {"mempages": MemoryPages, "network_metadata": NetworkMetadata}),
    MemoryPages: ("NUMAPagesTopology", "1.1", {}),
    NetworkMetadata: ("NetworkMetadata", "1.0", {}),
    InstanceTopology: ("InstanceNUMATopology", "1.3", {"cells": InstanceCell}),
    InstanceCell: ("InstanceNUMACell", "1.6", {}),
    NumaLimits: ("NUMATopologyLimits", "1.1", {"network_metadata": NetworkMetadata}),
}


class TopologyUnreadable(Fault):
    """A NUMA topology that cannot be read, so it is not known whether an instance fits."""

    code = "nova.numa_topology_unreadable"


def parse_host_topology(stored: str | bytes | None) -> HostTopology | None:
    """The topology of a host; of one that reports none, None. Raises TopologyUnreadable."""
    if not stored:
        return None
    if len(stored) > MAX_BYTES:
        raise TopologyUnreadable(f"more than {MAX_BYTES} bytes")
    try:
        found = _parsed(msgspec.json.decode(stored), HostTopology)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise TopologyUnreadable(reason_of(error)) from None
    if len({cell.id for cell in found.cells}) < len(found.cells):
        raise TopologyUnreadable("NUMATopology: two cells have the same id")
    return HostTopology(cells=tuple(_in_novas_order(cell) for cell in found.cells))


def _in_novas_order(cell: HostCell) -> HostCell:
    """The same CPUs as sets that list them in the order in which Nova's do, which decides what is pinned first: Nova
    puts them one by one into a set, from there one by one into another, and this as a whole into a third.
    """
    siblings = tuple(frozenset(set(iter(core))) for core in cell.siblings)
    return replace(cell, pcpuset=frozenset(set(iter(cell.pcpuset))), siblings=siblings)


def parse_instance_topology(value: object) -> InstanceTopology | None:
    """The topology of an instance, of a RequestSpec's field; None has none. Raises TopologyUnreadable."""
    if value is None:
        return None
    found = _parsed(value, InstanceTopology)
    if any(not (cell.cpuset or cell.pcpuset) for cell in found.cells):
        raise TopologyUnreadable("InstanceNUMATopology: a cell has no CPUs")
    return found


def parse_network_metadata(value: object) -> NetworkMetadata | None:
    """The networks of an instance, of a RequestSpec's field. Raises TopologyUnreadable."""
    return None if value is None else _parsed(value, NetworkMetadata)


def parse_limits(value: object) -> NumaLimits | None:
    """The limits of a Selection. Raises TopologyUnreadable."""
    return None if value is None else _parsed(value, NumaLimits)


def primitive_of(value: Struct) -> Primitive:
    """A topology, or limits, as Nova reads them. Networks that are None are left out, as Nova leaves them."""
    name, version, nested = _CLASSES[type(value)]
    fields: dict[str, Any] = {}
    for attribute, field in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
        found = getattr(value, attribute)
        if field in nested and found is not None:
            fields[field] = [primitive_of(one) for one in found] if isinstance(found, tuple) else primitive_of(found)
        elif field != "network_metadata":
            fields[field] = msgspec.to_builtins(found, str_keys=True)
    return versioned(name, version, fields)


def _parsed(value: object, kind: type[_Parsed]) -> _Parsed:
    try:
        return msgspec.convert(_plain(value, kind), kind, str_keys=True)
    except (msgspec.ValidationError, ObjectUnreadable, RecursionError) as error:
        raise TopologyUnreadable(reason_of(error)) from None


def _plain(value: object, kind: type[Struct]) -> dict[str, object]:
    """The fields of an object without their wrappings, as deep as `_CLASSES` goes."""
    name, _, nested = _CLASSES[kind]
    data = data_of(value, name)
    fields = {key: data[key] for key in kind.__struct_encode_fields__ if key in data}
    for key, of in nested.items():
        found = fields.get(key)
        if isinstance(found, list | tuple):
            fields[key] = [_plain(one, of) for one in found]
        elif found is not None:
            fields[key] = _plain(found, of)
    return fields
