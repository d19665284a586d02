"""The fleet at one moment, added up: hosts by state, capacity and use by resource class, cell and zone. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from scheduler_worker.domain.flavors import ZONE_KEY
from scheduler_worker.domain.hosts import Mask, Rows
from scheduler_worker.domain.view import HostsView

UP, DISABLED, SILENT, UNANNOUNCED = "up", "disabled", "silent", "unannounced"
STATES = (UP, DISABLED, SILENT, UNANNOUNCED)

# The most resource classes that are added up; of more, the first by name. Every Ironic node may have a resource class
# of its own.
MAX_CLASSES = 200


class HostCount(Struct, frozen=True):
    """How many hosts of a cell and a zone are in a state. cell "": no compute service has announced them."""

    cell: str
    zone: str
    state: str
    hosts: int


class ClassTotal(Struct, frozen=True):
    """The capacity of one resource class over the hosts of a cell and a zone, and how much of it is used.

    usable: the part of the capacity that is on hosts which take builds. Claims in flight count as used.
    """

    resource_class: str
    cell: str
    zone: str
    capacity: int
    usable: int
    used: int


class FleetSummary(Struct, frozen=True):
    """All hosts and all classes, in order of their labels. Groups without a host are left out."""

    hosts: tuple[HostCount, ...]
    totals: tuple[ClassTotal, ...]


def summarize(view: HostsView, default_zone: str) -> FleetSummary:
    """Add up the hosts of a view. A host is in the zone of its first aggregate that names one, else in the default."""
    cells = ("", *view.table.cells)
    zones, zone = zones_of(view, default_zone)
    # An unannounced host has index NO_SERVICE; the columns of the host table hold no row for it.
    known = view.known
    cell = np.where(known, np.where(known, view.cell, 0) + 1, 0)
    state = np.where(known, np.where(view.up, np.where(view.enabled, 0, 1), 2), 3)
    groups = len(cells) * len(zones)
    group = cell * len(zones) + zone
    by_state = np.bincount(group * len(STATES) + state, minlength=groups * len(STATES)).reshape(groups, len(STATES))
    present = [(int(at), cells[int(at) // len(zones)], zones[int(at) % len(zones)]) for at in np.unique(group)]
    return FleetSummary(
        hosts=tuple(
            HostCount(name, zone_name, STATES[of], int(by_state[at, of]))
            for at, name, zone_name in present
            for of in range(len(STATES))
            if by_state[at, of]
        ),
        totals=tuple(
            total
            for resource_class in view.book.resource_classes()[:MAX_CLASSES]
            for total in _totals(view, resource_class, group, state == 0, present)
        ),
    )


def zones_of(view: HostsView, default_zone: str) -> tuple[Sequence[str], Rows]:
    """The names of all zones, and for each host of the view the index of its zone's name."""
    zoned = view.membership.with_key(ZONE_KEY)
    names = sorted({default_zone, *(aggregate.metadata[ZONE_KEY] for aggregate in zoned)})
    zone = np.full(len(view), names.index(default_zone), dtype=np.intp)
    for aggregate in reversed(zoned):  # the first one has the last word
        zone[view.member_of(aggregate.uuid)] = names.index(aggregate.metadata[ZONE_KEY])
    return names, zone


def _totals(
    view: HostsView, resource_class: str, group: Rows, usable: Mask, present: Sequence[tuple[int, str, str]]
) -> list[ClassTotal]:
    capacity = view.book.totals(resource_class, view.rows)
    used = view.book.usage(resource_class, view.rows)
    size = present[-1][0] + 1 if present else 0
    # Integers, not bincount's weights: a sum of floats is not exact above 2^53.
    sums = np.zeros((3, size), dtype=np.int64)
    for at, amounts in enumerate((capacity, np.where(usable, capacity, 0), used)):
        np.add.at(sums[at], group, amounts)
    return [
        ClassTotal(resource_class, cell, zone, *(int(sums[of, at]) for of in range(3)))
        for at, cell, zone in present
        if sums[0, at] or sums[2, at]
    ]
