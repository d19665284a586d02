"""Which availability zones hosts are in, before and after a change of aggregates. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from bus.contracts.objects import Aggregate
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.flavors import ZONE_KEY
from scheduler_worker.domain.objects import zones_that_move
from scheduler_worker.domain.selector import Selector
from scheduler_worker.domain.view import HostsView, Membership

HostZones = Mapping[str, Mapping[str, str]]  # {host: {zone: the first aggregate that puts it there}}


def zones_after(selector: Selector, after: SchedulerConfig) -> HostsView:
    """All hosts in the aggregates of a configuration that is not in force yet."""
    view = selector.all_hosts()
    return HostsView(
        view.book,
        view.table,
        Membership(after.aggregates, selector.members_named(after.aggregates)),
        rows=view.rows,
        index=view.index,
        down=view.down,
        metrics=view.metrics,
    )


def zones_in(view: HostsView) -> HostZones:
    """The zones of each host by uuid; a host in none is left out."""
    zones: dict[str, dict[str, str]] = {}
    uuids = [view.book.uuid_of(row) for row in view.rows.tolist()]
    for aggregate in view.membership.with_key(ZONE_KEY):
        for at in np.flatnonzero(view.member_of(aggregate.uuid)).tolist():
            zones.setdefault(uuids[at], {}).setdefault(aggregate.metadata[ZONE_KEY], aggregate.name)
    return zones


def zones_named(aggregates: Iterable[Aggregate]) -> HostZones:
    """The zones of each host that aggregates name, as they name it."""
    zones: dict[str, dict[str, str]] = {}
    for aggregate in aggregates:
        if ZONE_KEY in aggregate.metadata:
            for host in aggregate.hosts or ():
                zones.setdefault(host, {}).setdefault(aggregate.metadata[ZONE_KEY], aggregate.name)
    return zones


def zone_conflict(before: HostZones, after: HostZones, name_of: Callable[[str], str] = str) -> str | None:
    """Why a change is refused: it puts a host into a second zone, which Nova refuses, too. None: it does not.

    A host that is in two already, by Placement's API, hinders no other change.
    """
    for host, zones in sorted(after.items()):
        if len(zones) > 1 and zones.keys() - before.get(host, {}).keys():
            (zone, name), (other, second), *_ = sorted(zones.items())
            both = f"{zone!r} by aggregate {name!r} and in {other!r} by aggregate {second!r}"
            return f"host {name_of(host)} would be in zone {both}: a host is in one availability zone"
    return None


def zones_of_each(view: HostsView, names: Sequence[str], default_zone: str) -> dict[str, list[str]]:
    """All zones of each host by name: a request for any of them is built there."""
    zones: dict[str, list[str]] = {name: [] for name in names}
    for aggregate in view.membership.with_key(ZONE_KEY):
        for at in np.flatnonzero(view.member_of(aggregate.uuid)).tolist():
            if (zone := aggregate.metadata[ZONE_KEY]) not in zones[names[at]]:
                zones[names[at]].append(zone)
    return {name: found or [default_zone] for name, found in zones.items()}


def zones_left(selector: Selector, after: SchedulerConfig) -> str | None:
    """Why a configuration is refused: it takes hosts with instances out of a zone. None: it does not."""
    view = selector.all_hosts()
    book = view.book
    used = np.zeros(len(view), dtype=np.bool_)
    for name in book.resource_classes():
        used |= book.usage(name, view.rows) > 0
    names = [book.name_of(row) for row in view.rows.tolist()]
    before = zones_of_each(view, names, selector.config.default_availability_zone)
    then = zones_of_each(zones_after(selector, after), names, after.default_availability_zone)
    return zones_that_move(before, then, [name for name, has in zip(names, used.tolist(), strict=True) if has])
