"""The configuration that settings and objects make together, and why a change of it is refused. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import os_resource_classes
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.objects import (
    DEFAULT_QUOTA,
    Aggregate,
    ChangedObject,
    Flavor,
    GroupDefinition,
    ObjectKind,
    ProjectQuota,
    SchedulingRules,
)
from bus.contracts.placement import INSTANCES
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.records.object_records import Key, Objects, as_stored, body_of

STANDARD_CLASSES = tuple(os_resource_classes.STANDARDS)
CUSTOM = "CUSTOM_"
RESOURCES = re.compile(r"resources[^:]*:(.+)")

# Kinds that are about existing hosts or about callers, and not part of a configuration.
NOT_CONFIGURATION = frozenset(
    {
        ObjectKind.HOST,
        ObjectKind.FENCE,
        ObjectKind.CELL,
        ObjectKind.DRAIN,
        ObjectKind.REPAIR,
        ObjectKind.SERVICE,
        ObjectKind.TOKEN,
    }
)

NAMED = 5  # hosts that a reason names


def configuration_bodies(present: Objects, changed: Iterable[ChangedObject] = ()) -> dict[Key, dict[str, Any]]:
    """The bodies that make a configuration, once these changes are made: all kinds but NOT_CONFIGURATION."""
    bodies = {key: stored.body for key, stored in present.items()}
    for one in changed:
        if one.after is None:
            bodies.pop((one.kind, one.name), None)
        else:
            bodies[one.kind, one.name] = one.after
    return {key: body for key, body in bodies.items() if key[0] not in NOT_CONFIGURATION}


def effective_config(settings: SchedulerConfig, bodies: Mapping[Key, Mapping[str, Any]]) -> SchedulerConfig:
    """The settings with the objects in the place of their own flavors, aggregates, quotas and scheduling rules.

    bodies: those of `configuration_bodies`. Raises ValueError when one is not valid.
    """
    flavors: dict[str, Flavor] = {}
    aggregates: list[Aggregate] = []
    quotas: dict[str, dict[str, int]] = {}
    groups: dict[str, GroupDefinition] = {}
    rules = SchedulingRules()
    for (kind, name), body in sorted(bodies.items()):
        match body_of(kind, name, body):
            case Flavor() as flavor:
                flavors[name] = flavor
            case Aggregate() as aggregate:
                aggregates.append(aggregate)
            case ProjectQuota() as quota:
                quotas[name] = quota.limits
            case GroupDefinition() as group:
                groups[name] = group
            case SchedulingRules() as found:
                rules = found
    given = {name: value for name in rules.__struct_fields__ if (value := getattr(rules, name)) is not None}
    return replace(
        settings,
        default_flavors=(),
        flavors=flavors,
        aggregates=tuple(aggregates),
        default_quota=quotas.pop(DEFAULT_QUOTA, {}),
        quotas=quotas,
        groups=groups,
        **given,
    )


def seeds(settings: SchedulerConfig) -> tuple[ChangedObject, ...]:
    """The initial objects of an empty system: those of the settings. Scheduling rules stay settings until changed.

    Raises ValueError: two aggregates have one name.
    """
    doubled = [name for name, count in Counter(one.name for one in settings.aggregates).items() if count > 1]
    if doubled:
        raise ValueError(f"aggregate {doubled[0]!r} is named twice")
    bodies: dict[Key, Struct] = {(ObjectKind.FLAVOR, name): flavor for name, flavor in settings.flavors.items()}
    bodies |= {(ObjectKind.AGGREGATE, one.name): one for one in settings.aggregates}
    quotas = {**({DEFAULT_QUOTA: settings.default_quota} if settings.default_quota else {}), **settings.quotas}
    bodies |= {(ObjectKind.QUOTA, name): ProjectQuota(limits=limits) for name, limits in quotas.items()}
    bodies |= {(ObjectKind.GROUP, name): group for name, group in settings.groups.items()}
    return tuple(
        ChangedObject(kind=kind, name=name, after=as_stored(body)) for (kind, name), body in sorted(bodies.items())
    )


def unknown_class(changed: Iterable[ChangedObject]) -> str | None:
    """Why a change is refused: a quota or a flavor newly names a class that no provider can have, such as Nova's CORES;
    a quota of it would limit nothing. None: it names none.
    """
    for one in changed:
        for name in sorted(_classes_of(one.kind, one.after) - _classes_of(one.kind, one.before)):
            if name not in STANDARD_CLASSES and not name.startswith(CUSTOM):
                hint = f"there is no resource class {name}; classes of one's own begin with {CUSTOM}"
                return f"{one.kind.value} {one.name!r}: {hint}"
    return None


def _classes_of(kind: ObjectKind, body: Mapping[str, Any] | None) -> set[str]:
    """The resource classes that a quota or a flavor names."""
    if body is None:
        return set()
    if kind is ObjectKind.QUOTA:
        return {name for name in body.get("limits", {}) if name != INSTANCES}
    if kind is ObjectKind.FLAVOR:
        return {found[1] for key in body.get("extra_specs", {}) if (found := RESOURCES.fullmatch(key))}
    return set()


def zone_change_refusal(
    before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]], in_use: Sequence[str]
) -> str | None:
    """Why a change of aggregates is refused: it takes hosts with instances out of a zone. None: it does not.

    before, after: {host: its zones}, any of which an instance may have requested; in_use: hosts with allocations.
    """
    changed = sorted(host for host in in_use if set(before[host]) - set(after[host]))
    if not changed:
        return None
    shown = ", ".join(
        f"{host} ({' and '.join(before[host])} to {' and '.join(after[host])})" for host in changed[:NAMED]
    )
    more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
    hosts = "1 host" if len(changed) == 1 else f"{len(changed)} hosts"
    return (
        f"{hosts} with instances would be in another availability zone: {shown}{more}; drain them first, or force the "
        "change"
    )
