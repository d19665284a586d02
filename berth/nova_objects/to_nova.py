"""Objects of berth as commands of the `openstack` client; what Nova does not have is named. Pure."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from berth.nova_objects.to_objects import DEDICATED, LIMITS, LeftOut, as_nova_has_it
from bus.contracts.objects import DEFAULT_QUOTA, ZONE_KEY, ObjectKind
from nova_scheduler.request.request_spec import NotDecided
from nova_scheduler.request.resource_request import POLICY, specs_of_query

# Extra specs that only berth reads.
OURS = re.compile(r"^(berth:|root_required$|same_subtree$|in_tree|trait[^:]*:in:)")
PREFERRED = "preferred"
Row = tuple[ObjectKind, str, Mapping[str, Any]]


class Exported(Struct, frozen=True, kw_only=True):
    """commands: in an order in which they may be run. notes: what of an object is otherwise in Nova."""

    commands: tuple[str, ...] = ()
    excluded: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()


class _Export:
    def __init__(self) -> None:
        self.commands: list[str] = []
        self.excluded: list[LeftOut] = []
        self.notes: list[str] = []

    def run(self, *words: str) -> None:
        self.commands.append(shlex.join(["openstack", *words]))

    def exclude(self, kind: ObjectKind, name: str, reason: str) -> None:
        self.excluded.append(LeftOut(kind=kind.value, name=name, code="export.not_in_nova", reason=reason))


def exported(objects: Iterable[Row]) -> Exported:
    """The commands that define the same in Nova."""
    making = _Export()
    for kind, name, body in sorted(objects, key=lambda one: (one[0], one[1])):
        match kind:
            case ObjectKind.FLAVOR:
                _flavor(making, name, body)
            case ObjectKind.AGGREGATE:
                _aggregate(making, name, body)
            case ObjectKind.GROUP:
                _group(making, name, body)
            case ObjectKind.QUOTA:
                _quota(making, name, body.get("limits", {}))
            case ObjectKind.SCHEDULING:
                making.exclude(kind, name, "filters and weighers are settings of nova-scheduler")
            case _:
                making.exclude(kind, name, "Nova's API does not make it")
    return Exported(commands=tuple(making.commands), excluded=tuple(making.excluded), notes=tuple(making.notes))


def _flavor(making: _Export, name: str, body: Mapping[str, Any]) -> None:
    specs = body.get("extra_specs", {})
    with contextlib.suppress(NotDecided):  # Nova says these itself, and takes no amounts of CPUs beside `hw:cpu_policy`
        said = specs_of_query(as_nova_has_it(name, body.get("vcpus", 0), body.get("memory_mb", 0), specs))
        specs = {key: value for key, value in specs.items() if said.get(key) != value}
    odd = sorted(key for key, value in specs.items() if OURS.match(key) or value == PREFERRED)
    if odd:
        making.exclude(ObjectKind.FLAVOR, name, f"Nova does not read {', '.join(odd)}")
        return
    if POLICY in specs and (cpus := sorted(specs.keys() & {"resources:PCPU", "resources:VCPU"})):
        making.exclude(ObjectKind.FLAVOR, name, f"Nova takes no {', '.join(cpus)} beside {POLICY}")
        return
    sizes = {"vcpus": "--vcpus", "memory_mb": "--ram", "disk_gb": "--disk"}
    # Nova's flavors have at least one CPU and one MiB, which an extra spec may take away again.
    least = {"vcpus": 1, "memory_mb": 1, "disk_gb": 0}
    classes = {"vcpus": "VCPU", "memory_mb": "MEMORY_MB"}
    given = {field: int(body.get(field, 0)) for field in sizes}
    none = {f"resources:{classes[field]}": "0" for field in classes if given[field] < least[field]}
    words = [word for field, option in sizes.items() for word in (option, str(max(given[field], least[field])))]
    for key, value in sorted({**none, **specs}.items()):
        words += ["--property", f"{key}={value}"]
    projects = body.get("projects", ())
    making.run("flavor", "create", *words, *(["--private"] if projects else []), name)
    for project in projects:
        making.run("flavor", "set", "--project", project, name)


def _aggregate(making: _Export, name: str, body: Mapping[str, Any]) -> None:
    metadata = dict(body.get("metadata", {}))
    zone = metadata.pop(ZONE_KEY, None)
    words = [] if zone is None else ["--zone", zone]
    for key, value in sorted(metadata.items()):
        words += ["--property", f"{key}={value}"]
    making.run("aggregate", "create", *words, name)
    making.notes.append(f"aggregate {name}: Nova gives it a uuid of its own, in place of {body.get('uuid')}")
    hosts = body.get("hosts")
    if hosts is None:
        making.notes.append(f"aggregate {name}: its members are those in Placement; add them with `aggregate add host`")
    for host in hosts or ():
        making.run("aggregate", "add", "host", name, host)


def _group(making: _Export, name: str, body: Mapping[str, Any]) -> None:
    project, _, own = name.partition("/")
    most = body.get("max_per_host", 1)
    rule = ["--rule", f"max_server_per_host={most}"] if most > 1 else []
    making.run("--os-compute-api-version", "2.64", "--os-project-id", project, "server", "group", "create",
               "--policy", body["policy"], *rule, own)  # fmt: skip
    making.notes.append(f"server group {name}: Nova gives it a uuid of its own, and it has no members")


def _quota(making: _Export, name: str, limits: Mapping[str, int]) -> None:
    of_cores = {DEDICATED} if limits.get(DEDICATED) == limits.get("VCPU") else set()
    odd = sorted(limits.keys() - set(LIMITS.values()) - of_cores)
    if odd:
        making.exclude(ObjectKind.QUOTA, name, f"limits of {', '.join(odd)} are unified limits of Keystone")
    words = [word for option, limit in sorted(LIMITS.items()) for word in (f"--{option}", str(limits.get(limit, -1)))]
    making.run("quota", "set", *(["--class"] if name == DEFAULT_QUOTA else []), *words, name)
