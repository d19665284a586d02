"""The availability zones of hosts by their aggregates, and why a change of them is refused. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from msgspec.structs import replace

from bus.contracts.objects import ZONE_KEY, Aggregate
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.objects.effective_config import zone_change_refusal
from scheduler_worker.selection.host_view import HostsView, Membership, in_use
from scheduler_worker.selection.selector import Selector

HostZones = Mapping[str, Mapping[str, str]]  # {host: {zone: the first aggregate that puts it there}}


def zones_after(selector: Selector, after: SchedulerConfig) -> HostsView:
    """All hosts in the aggregates of a configuration that is not in force yet."""
    membership = Membership(after.aggregates, selector.members_named(after.aggregates))
    return replace(selector.all_hosts(), membership=membership)


def zones_in(view: HostsView) -> HostZones:
    """The zones of each host by uuid; a host in none is left out."""
    zones: dict[str, dict[str, str]] = {}
    uuids = [view.replica.uuid_of(row) for row in view.rows.tolist()]
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


def zones_of_each(view: HostsView, default_zone: str) -> dict[str, list[str]]:
    """All zones of each host by name: a request for any of them is built there."""
    replica, found = view.replica, zones_in(view)
    return {replica.name_of(row): list(found.get(replica.uuid_of(row), (default_zone,))) for row in view.rows.tolist()}


def zones_after_removal(selector: Selector, after: SchedulerConfig) -> str | None:
    """Why a configuration is refused: it takes hosts with instances out of a zone. None: it does not."""
    view = selector.all_hosts()
    replica, used = view.replica, in_use(view.replica, view.rows)
    before = zones_of_each(view, selector.config.settings.default_availability_zone)
    then = zones_of_each(zones_after(selector, after), after.default_availability_zone)
    return zone_change_refusal(before, then, [replica.name_of(row) for row in view.rows[used].tolist()])
