"""A cloud's definitions as the objects of `berth apply`; what cannot be one is named with its reason. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from berth.nova_objects.cloud import CLASS, SERVERS, Cloud, FlavorRow, GroupRow, is_nova_limit
from bus.contracts.objects import DEFAULT_QUOTA, MAX_AGGREGATE_HOSTS, ChangedObject, Flavor, ObjectKind
from bus.contracts.placement import INSTANCES
from nova_scheduler.cloud.rest import AggregateRow
from nova_scheduler.request.request_spec import NotDecided, NovaFlavor
from nova_scheduler.request.resource_request import has_topology, specs_of_query
from scheduler_worker.objects.consistency import broken_rule
from scheduler_worker.objects.effective_config import unknown_class
from scheduler_worker.records.object_records import body_of
from scheduler_worker.selection.flavor import FlavorInvalid, parse

MIB_OF_GIB = 1024
# Nova's own limits that berth has, and their names here. One of cores bounds shared and dedicated ones together.
CORES = "cores"
LIMITS = {CORES: "VCPU", "ram": "MEMORY_MB", "instances": INSTANCES}
DEDICATED = "PCPU"
NONE = "none"


class LeftOut(Struct, frozen=True, kw_only=True):
    """A row of Nova that is no object of berth. kind, name: as Nova's operators call it."""

    kind: str
    name: str
    code: str
    reason: str


class Imported(Struct, frozen=True, kw_only=True):
    """objects: by kind and name, as `berth apply` takes them. notes: what of a row that was taken is otherwise here."""

    objects: dict[ObjectKind, dict[str, dict[str, Any]]]
    excluded: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()


class _Import:
    """One import while it is made."""

    def __init__(self) -> None:
        self.objects: dict[ObjectKind, dict[str, dict[str, Any]]] = {}
        self.excluded: list[LeftOut] = []
        self.notes: list[str] = []

    def exclude(self, kind: str, name: str, code: str, reason: str) -> None:
        self.excluded.append(LeftOut(kind=kind, name=name, code=code, reason=reason))

    def put(self, kind: ObjectKind, name: str, body: dict[str, Any], noun: str) -> None:
        """Take an object, if a scheduler would."""
        changed = ChangedObject(kind=kind, name=name, after=body)
        try:
            parsed = body_of(kind, name, body)
            if isinstance(parsed, Flavor):
                parse(name, parsed)
        except (ValueError, FlavorInvalid) as error:
            self.exclude(noun, name, "import.refused", str(error))
            return
        why = unknown_class([changed]) or broken_rule([changed], {(kind, name): body})
        if why is not None:
            self.exclude(noun, name, "import.refused", why)
            return
        self.objects.setdefault(kind, {})[name] = body


def imported(cloud: Cloud, *, with_hosts: bool = False) -> Imported:
    """The objects of a cloud. with_hosts: aggregates name their hosts; else their members are those in Placement."""
    making = _Import()
    for kind, name, why in cloud.unreadable:
        making.exclude(kind, name, "import.unreadable", why)
    for flavor in sorted(cloud.flavors, key=lambda one: one.name):
        _flavor(making, flavor, cloud.access.get(flavor.id, ()))
    for aggregate in sorted(cloud.aggregates, key=lambda one: one.name):
        _aggregate(making, aggregate, with_hosts=with_hosts)
    _groups(making, cloud.groups)
    for project, limits in _unified(making, cloud) if cloud.is_unified else _own_quotas(making, cloud):
        making.put(ObjectKind.QUOTA, project, {"limits": limits}, "quota")
    return Imported(objects=making.objects, excluded=tuple(making.excluded), notes=tuple(making.notes))


def _flavor(making: _Import, flavor: FlavorRow, projects: tuple[str, ...]) -> None:
    if flavor.extra_specs is None:
        making.exclude("flavor", flavor.name, "import.unreadable", "its extra specs are not shown to this user")
        return
    if not flavor.is_public and not projects:
        reason = "it is private, and no project has access to it: here a flavor without projects is everyone's"
        making.exclude("flavor", flavor.name, "import.of_nobody", reason)
        return
    nova_query = as_nova_has_it(flavor.name, flavor.vcpus, flavor.ram, flavor.extra_specs)
    try:
        specs = specs_of_query(nova_query) | flavor.extra_specs
    except NotDecided as undecided:
        reason = f"berth does not decide it by itself, and would place it otherwise than Nova: {undecided.detail}"
        making.exclude("flavor", flavor.name, "import.spec", reason)
        return
    if has_topology(nova_query):
        reason = (
            "Nova gives its servers a NUMA topology: in front of Nova, NUMATopologyFilter leaves them to the fallback"
        )
        making.notes.append(f"flavor {flavor.name}: {reason}")
    swap_mb = flavor.swap if isinstance(flavor.swap, int) else 0
    if flavor.ephemeral or swap_mb:
        making.notes.append(f"flavor {flavor.name}: its disk counts its ephemeral disk and swap, as Nova claims them")
    if len({key.partition(":")[0] for key in specs if key.startswith("resources") and key[9:10] not in {":", ""}}) > 1:
        if "group_policy" not in specs:
            making.notes.append(
                f"flavor {flavor.name}: group_policy = none is set, because Placement takes no two groups without it"
            )
        specs.setdefault("group_policy", NONE)
    body: dict[str, Any] = {
        "vcpus": flavor.vcpus,
        "memory_mb": flavor.ram,
        "disk_gb": flavor.disk + flavor.ephemeral + math.ceil(swap_mb / MIB_OF_GIB),
        "extra_specs": specs,
    }
    if not flavor.is_public:
        body["projects"] = list(projects)
    making.put(ObjectKind.FLAVOR, flavor.name, body, "flavor")


def as_nova_has_it(name: str, vcpus: int, memory_mb: int, extra_specs: Mapping[str, str]) -> NovaFlavor:
    """A flavor as Nova's scheduler gets it, but for its disks."""
    return NovaFlavor(name=name, vcpus=vcpus, memory_mb=memory_mb, extra_specs=dict(extra_specs))


def _aggregate(making: _Import, aggregate: AggregateRow, *, with_hosts: bool) -> None:
    hosts = aggregate.hosts or ()
    body: dict[str, Any] = {"uuid": aggregate.uuid, "name": aggregate.name, "metadata": dict(aggregate.metadata or {})}
    if with_hosts:
        body["hosts"] = sorted(hosts)
        if len(hosts) > MAX_AGGREGATE_HOSTS:
            reason = f"it has {len(hosts)} hosts, and an aggregate names at most {MAX_AGGREGATE_HOSTS}"
            making.exclude("aggregate", aggregate.name, "import.refused", reason)
            return
    making.put(ObjectKind.AGGREGATE, aggregate.name, body, "aggregate")


def _groups(making: _Import, groups: list[GroupRow]) -> None:
    """Server groups. Of several that a project calls alike each has the beginning of its uuid in its name."""
    alike = Counter((one.project_id, one.name) for one in groups)
    for group in sorted(groups, key=lambda one: (one.project_id, one.name, one.id)):
        name = f"{group.project_id}/{group.name}"
        if alike[group.project_id, group.name] > 1:
            name = f"{name}-{group.id}"
            making.notes.append(f"server group {group.id} is here {name}: its project has several of its name")
        if group.policy is None:
            making.exclude("server group", name, "import.refused", "it has no policy")
            continue
        body: dict[str, Any] = {"uuid": group.id, "policy": group.policy}
        most = group.rules.get("max_server_per_host")
        if most is not None:
            body["max_per_host"] = int(most) if isinstance(most, str) and most.isdecimal() else most
        making.put(ObjectKind.GROUP, name, body, "server group")


def _own_quotas(making: _Import, cloud: Cloud) -> Iterator[tuple[str, dict[str, int]]]:
    """(project, limits) by Nova's own quotas; -1 is no limit. A project that has the default has no object."""
    default = _named(cloud.default_quota)
    if others := sorted(cloud.default_quota.keys() - LIMITS.keys()):
        making.notes.append(f"limits that berth does not have: {', '.join(others)}")
    making.notes += [f"the quota of project {project} is not read: {why}" for project, why in cloud.without_quota]
    if any(limits.get(CORES, -1) >= 0 for limits in (cloud.default_quota, *cloud.quotas.values())):
        making.notes.append("a limit of cores bounds VCPU and PCPU together in Nova; here it is a limit of each")
    if default:
        yield DEFAULT_QUOTA, default
    for project, limits in sorted(cloud.quotas.items()):
        if _named(limits) != default:
            yield project, _named(limits)


def _named(limits: Mapping[str, int]) -> dict[str, int]:
    named = {LIMITS[name]: limit for name, limit in sorted(limits.items()) if name in LIMITS and limit >= 0}
    return named | ({DEDICATED: named["VCPU"]} if "VCPU" in named else {})


def _unified(making: _Import, cloud: Cloud) -> Iterator[tuple[str, dict[str, int]]]:
    """(project, limits) by Keystone's; here a project's quota replaces the default, so it repeats what it leaves."""
    making.notes.append("the quotas are Keystone's unified limits; Nova counts by them with its UnifiedLimitsDriver")
    default: dict[str, int] = {}
    for one in cloud.registered:
        if (name := _of_unified(making, one.resource_name, "registered limit", default)) is not None:
            default[name] = one.default_limit
    own: dict[str, dict[str, int]] = {}
    for limit in cloud.limits:
        if limit.project_id is None:
            if is_nova_limit(limit.resource_name):
                reason = "it is of a domain, and berth has limits of projects"
                making.exclude("limit", f"{limit.domain_id} {limit.resource_name}", "import.limit", reason)
            continue
        mine = own.setdefault(limit.project_id, {})
        noun = f"limit of {limit.project_id}"
        if (name := _of_unified(making, limit.resource_name, noun, mine)) is not None:
            mine[name] = limit.resource_limit
    if default:
        yield DEFAULT_QUOTA, _limited(default)
    for project, mine in sorted(own.items()):
        if _limited({**default, **mine}) != _limited(default):
            yield project, _limited({**default, **mine})


def _limited(limits: Mapping[str, int]) -> dict[str, int]:
    return {name: limit for name, limit in sorted(limits.items()) if limit >= 0}


def _of_unified(making: _Import, resource: str, noun: str, known: Mapping[str, int]) -> str | None:
    """The name of a limit here. None: it is of another service or of no kind that berth has."""
    if not is_nova_limit(resource):
        if resource.startswith("server_"):
            making.notes.append(f"{noun} {resource}: berth does not have it")
        return None
    name = INSTANCES if resource == SERVERS else resource.removeprefix(CLASS)
    if name in known:
        making.exclude(noun, resource, "import.limit", "there are several, of different regions")
        return None
    return name
