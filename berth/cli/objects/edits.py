"""`berth flavors|rules|quotas|aggregates|groups`: `set` changes the fields that are named, and all others stay."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.text import Text

from berth.bus_client.object_edits import Body, ObjectEdit, merged, project_usage, quota_uses, stored_objects
from berth.cli.common import (
    QUERY_TIMEOUT_S,
    AsJson,
    Exit,
    Stop,
    client,
    out,
    pairs_of,
    parse_uuid,
    print_json,
    print_rows,
)
from berth.cli.objects.objects import (
    ChangeOptions,
    ForcedOptions,
    Name,
    aggregates,
    change_objects,
    flavors,
    groups,
    number,
    quotas,
    read_object,
    rules,
)
from berth.cli.site.as_toml import NO_COMMENTS, Path, as_toml
from berth.client.types import QuotaUse
from berth.config.settings import Settings
from berth.text import printable, render_rows
from bus.bus import Bus
from bus.clock import new_uuid
from bus.contracts.objects import (
    DEFAULT_QUOTA,
    SCHEDULING,
    ZONE_KEY,
    GroupDefinition,
    ObjectKind,
    StoredObject,
    group_named,
)
from bus.contracts.placement import GroupPolicy
from bus.contracts.placement_queries import GroupMembersPage, GroupMembersQuery

__all__ = ["aggregates", "flavors", "groups", "quotas", "rules"]

GroupName = Annotated[str, typer.Argument(help="PROJECT/NAME.", metavar="PROJECT/NAME")]
Hosts = Annotated[list[str], typer.Argument(help="Hosts, by name or uuid.", metavar="HOST...")]
V = TypeVar("V")
DiskGb = Annotated[int | None, typer.Option(min=0, max=2**31 - 1, help="GiB; of a new flavor 0 unless it is named.")]
ExtraSpec = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="An extra spec, as in Nova; repeatable.")
]
RemoveExtraSpec = Annotated[list[str] | None, typer.Option(metavar="KEY", help="Remove an extra spec; repeatable.")]
Project = Annotated[list[str] | None, typer.Option(help="Only for this project, and those that it is for; repeatable.")]
AggregateUuid = Annotated[
    str | None, typer.Option(help="The uuid of the provider aggregate with its hosts; else as it is, or new.")
]
HostsInPlacement = Annotated[
    bool, typer.Option("--hosts-in-placement", help="Name no hosts: its hosts are as Placement has them.")
]
Metadata = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Metadata, as in Nova; repeatable.")]
RemoveMetadata = Annotated[list[str] | None, typer.Option(metavar="KEY", help="Remove metadata; repeatable.")]
# The sizes that a new flavor names, and the class of each, which an extra spec may state instead. A disk it need not
# have: as in Nova it is 0 unless it is named, for instances that boot from a volume.
SIZES = {"vcpus": "VCPU", "memory_mb": "MEMORY_MB"}


class RuleField(StrEnum):
    """A field of the scheduling rules that can be as in the settings again."""

    MULTIPLIERS = "multipliers"
    FILTERS = "filters"
    WEIGHERS = "weighers"
    HOST_SUBSET_SIZE = "host-subset-size"


_RULE_FIELDS = {
    RuleField.MULTIPLIERS: "multipliers",
    RuleField.FILTERS: "enabled_filters",
    RuleField.WEIGHERS: "enabled_weighers",
    RuleField.HOST_SUBSET_SIZE: "host_subset_size",
}


@flavors.command("set")
async def set_flavor(
    settings: Settings,
    name: Name,
    vcpus: Annotated[int | None, typer.Option(min=0, max=2**31 - 1, help="Virtual CPUs.")] = None,
    memory_mb: Annotated[int | None, typer.Option(min=0, max=2**31 - 1, help="MiB.")] = None,
    disk_gb: DiskGb = None,
    extra_spec: ExtraSpec = None,
    remove_extra_spec: RemoveExtraSpec = None,
    project: Project = None,
    remove_project: Annotated[list[str] | None, typer.Option(help="No longer for this project; repeatable.")] = None,
    every_project: Annotated[bool, typer.Option("--every-project", help="For every project.")] = False,
    *,
    decision: ForcedOptions,
) -> None:
    """Make a flavor, or change the named fields of one. A new one names --vcpus and --memory-mb."""
    sizes = {"vcpus": vcpus, "memory_mb": memory_mb, "disk_gb": disk_gb}
    named = {key: value for key, value in sizes.items() if value is not None}
    specs = pairs_of(extra_spec, "--extra-spec")
    _check_disjoint(specs, remove_extra_spec, "extra spec")
    if every_project and (project or remove_project):
        raise typer.BadParameter("name projects, or every one", param_hint="--every-project")

    def edit(known: StoredObject | None) -> Body:
        before = {} if known is None else known.body
        projects = before.get("projects", [])
        kept = _members_of(projects, project, remove_project, f"flavor {name!r} is not for project")
        if projects and not kept and not every_project:
            reason = "without its last project it is for every project: name --every-project, or another project"
            raise Stop(Exit.USAGE, "flavor.last_project", f"flavor {name!r}: {reason}")
        own = _pairs(before.get("extra_specs", {}), specs, remove_extra_spec, f"flavor {name!r} has no extra spec")
        body = {**before, **named, "extra_specs": own, "projects": [] if every_project else kept}
        if known is None:
            _check_sizes(name, body)
        return body

    await change_objects(settings, ObjectEdit(ObjectKind.FLAVOR, name, edit), decision)


@rules.command("set")
async def set_rules(
    settings: Settings,
    multiplier: Annotated[
        list[str] | None, typer.Option(metavar="WEIGHER=NUMBER", help="A weigher's multiplier; repeatable.")
    ] = None,
    remove_multiplier: Annotated[
        list[str] | None, typer.Option(metavar="WEIGHER", help="Remove a weigher's multiplier; repeatable.")
    ] = None,
    filters: Annotated[
        list[str] | None, typer.Option("--filter", help="All enabled filters, in order; repeatable.")
    ] = None,
    weighers: Annotated[list[str] | None, typer.Option("--weigher", help="All enabled weighers; repeatable.")] = None,
    host_subset_size: Annotated[int | None, typer.Option(min=1, help="Choose among this many of the best.")] = None,
    unset: Annotated[
        list[RuleField] | None, typer.Option(help="As in the settings of each scheduler again; repeatable.")
    ] = None,
    *,
    decision: ChangeOptions,
) -> None:
    """Set the named scheduling rules. Fields that no command has set are as in the settings of each scheduler."""
    numbers = {key: number(value, key, float) for key, value in pairs_of(multiplier, "--multiplier").items()}
    _check_disjoint(numbers, remove_multiplier, "multiplier")
    given = {"enabled_filters": filters, "enabled_weighers": weighers, "host_subset_size": host_subset_size}
    patch: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    cleared = {_RULE_FIELDS[field]: None for field in unset or ()}
    _check_disjoint(patch | ({"multipliers": None} if numbers or remove_multiplier else {}), cleared, "rule")
    patch |= cleared
    if not (patch or numbers or remove_multiplier):
        raise typer.BadParameter("name what is to be set (berth rules delete default: as in the settings again)")

    def edit(known: StoredObject | None) -> Body:
        body = {} if known is None else dict(known.body)
        if numbers or remove_multiplier:
            what = "there is no multiplier of weigher"
            body["multipliers"] = _pairs(body.get("multipliers") or {}, numbers, remove_multiplier, what)
        return merged(body, patch)

    await change_objects(settings, ObjectEdit(ObjectKind.SCHEDULING, SCHEDULING, edit), decision)


@quotas.command("set")
async def set_quota(
    settings: Settings,
    project: Annotated[str, typer.Argument(help=f"The project, or {DEFAULT_QUOTA!r}.")],
    limits: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CLASS=AMOUNT]...", help="Resource classes, or INSTANCES for their number."),
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="CLASS", help="Remove the limit of this class; repeatable.")
    ] = None,
    *,
    decision: ChangeOptions,
) -> None:
    """Set limits of a project's quota. They apply from the next claim on; allocations beyond them stay."""
    numbers = {key: number(value, key) for key, value in pairs_of(limits, "CLASS=AMOUNT").items()}
    _check_disjoint(numbers, remove, "limit")
    if not (numbers or remove):
        raise typer.BadParameter("name a limit", param_hint="CLASS=AMOUNT")

    def edit(known: StoredObject | None) -> Body:
        before = {} if known is None else known.body
        what = f"quota {project!r} has no limit of"
        limits = _pairs(before.get("limits", {}), numbers, remove, what)
        if not limits:
            reason = f"without its last limit nothing limits it: berth quotas delete {project}, or another limit"
            raise Stop(Exit.USAGE, "quota.last_limit", f"quota {project!r}: {reason}")
        return {**before, "limits": limits}

    await change_objects(settings, ObjectEdit(ObjectKind.QUOTA, project, edit), decision)


@aggregates.command("set")
async def set_aggregate(
    settings: Settings,
    name: Name,
    uuid: AggregateUuid = None,
    host: Annotated[list[str] | None, typer.Option(help="A further host of it, by name or uuid; repeatable.")] = None,
    hosts_in_placement: HostsInPlacement = False,
    metadata: Metadata = None,
    remove_metadata: RemoveMetadata = None,
    zone: Annotated[str | None, typer.Option(help="Make it this availability zone.")] = None,
    no_zone: Annotated[bool, typer.Option("--no-zone", help="Make it no availability zone.")] = False,
    *,
    decision: ForcedOptions,
) -> None:
    """Make a host aggregate, or change the named fields of one (its hosts leave by remove-host)."""
    pairs = pairs_of(metadata, "--metadata") | ({} if zone is None else {ZONE_KEY: zone})
    removed = [*(remove_metadata or ())]
    _check_disjoint(pairs, [*removed, *([ZONE_KEY] if no_zone else [])], "metadata")
    if hosts_in_placement and host:
        raise typer.BadParameter("name hosts, or none", param_hint="--hosts-in-placement")

    def edit(known: StoredObject | None) -> Body:
        before: Body = {"uuid": new_uuid(random.SystemRandom()), "name": name} if known is None else known.body
        own = _pairs(before.get("metadata", {}), pairs, removed, f"aggregate {name!r} has no metadata")
        if no_zone:
            own.pop(ZONE_KEY, None)
        body = {**before, "metadata": own} if uuid is None else {**before, "metadata": own, "uuid": uuid}
        if host:
            body["hosts"] = _members_of(body.get("hosts") or [], host, (), "")
        if hosts_in_placement:
            body.pop("hosts", None)
        return body

    await change_objects(settings, ObjectEdit(ObjectKind.AGGREGATE, name, edit), decision)


@groups.command("set")
async def set_group(
    settings: Settings,
    name: GroupName,
    policy: Annotated[GroupPolicy | None, typer.Option(help="The policy of the group; a new one names it.")] = None,
    max_per_host: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="With anti-affinity: this many may share a host; 1 unless it is named."),
    ] = None,
    uuid: Annotated[
        str | None, typer.Option(parser=parse_uuid, metavar="UUID", help="Its uuid; else it follows from the name.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also where it has members.")] = False,
    *,
    decision: ChangeOptions,
) -> None:
    """Make a server group, or change the named fields of one. Members keep the rule that they were built under."""
    given = {"policy": None if policy is None else policy.value, "max_per_host": max_per_host, "uuid": uuid}
    named = {key: value for key, value in given.items() if value is not None}

    def edit(known: StoredObject | None) -> Body:
        if known is None and policy is None:
            raise Stop(Exit.USAGE, "group.incomplete", f"group {name!r} is new: name --policy")
        return {**({} if known is None else known.body), **named}

    await change_objects(settings, ObjectEdit(ObjectKind.GROUP, name, edit), decision, force=force)


@aggregates.command("add-host")
async def add_hosts(settings: Settings, name: Name, hosts: Hosts, *, decision: ForcedOptions) -> None:
    """Add hosts to an aggregate. Once it names hosts, it has those and no others."""
    await _change_hosts(settings, name, decision, named=hosts)


@aggregates.command("remove-host")
async def remove_hosts(settings: Settings, name: Name, hosts: Hosts, *, decision: ForcedOptions) -> None:
    """Remove hosts from an aggregate that names its hosts."""
    await _change_hosts(settings, name, decision, removed=hosts)


async def _change_hosts(
    settings: Settings, name: str, decision: ForcedOptions, *, named: Sequence[str] = (), removed: Sequence[str] = ()
) -> None:
    def edit(known: StoredObject | None) -> Body:
        if known is None:
            raise Stop(Exit.NO, "object.unknown", f"there is no aggregate {name!r}")
        hosts = _members_of(known.body.get("hosts") or (), named, removed, f"aggregate {name!r} does not name")
        return {**known.body, "hosts": hosts}

    await change_objects(settings, ObjectEdit(ObjectKind.AGGREGATE, name, edit), decision)


@groups.command("show")
async def show_group(settings: Settings, name: GroupName, as_json: AsJson = False) -> None:
    """Show a server group and its members: instances, and the hosts that they are on."""
    async with client(settings) as berth:
        stored = await read_object(berth.bus, ObjectKind.GROUP, name)
        group = group_named(name, msgspec.convert(stored.body, GroupDefinition))
        members = [one async for one in _members(berth.bus, name.partition("/")[0], group.uuid)]
    if as_json:
        print_json({"group": stored, "uuid": group.uuid, "members": dict(members)})
        return
    rule = f"{group.policy.value}, max_per_host {group.max_per_host}, uuid {group.uuid}"
    out.print(Text(printable(f"{name}: {rule}")), soft_wrap=True)
    render_rows(out, ["member", "hosts"], [[uuid, printable(", ".join(hosts))] for uuid, hosts in members])


async def _members(bus: Bus, project: str, group: str) -> AsyncIterator[tuple[str, tuple[str, ...]]]:
    """(instance, names of its hosts) by uuid."""
    after: str | None = None
    while True:
        query = GroupMembersQuery(project_id=project, server_group=group, after=after)
        page = await bus.request(query, GroupMembersPage, timeout_s=QUERY_TIMEOUT_S)
        for one in page.members.items():
            yield one
        if not page.more:
            return
        after = max(page.members)


@quotas.command("list")
async def list_quotas(settings: Settings, as_json: AsJson = False) -> None:
    """List projects that have a quota or allocations, with limits and usage."""
    async with client(settings) as berth:
        stored = [one async for one in stored_objects(berth.bus, ObjectKind.QUOTA, timeout_s=QUERY_TIMEOUT_S)]
        found = quota_uses(stored, await project_usage(berth.bus, (), timeout_s=QUERY_TIMEOUT_S))
    columns = ["project", "quota", "used of limit", "version"]
    print_rows(found, as_json, columns, lambda one: [one.project, one.quota, _uses(one), str(one.version or "")])


@quotas.command("show")
async def show_quota(settings: Settings, name: Name, as_json: AsJson = False) -> None:
    """Show a quota as TOML, as `berth apply` reads it, with the project's usage."""
    async with client(settings) as berth:
        stored = await read_object(berth.bus, ObjectKind.QUOTA, name)
        used = {} if name == DEFAULT_QUOTA else await project_usage(berth.bus, [name], timeout_s=QUERY_TIMEOUT_S)
    (found,) = quota_uses([stored], used, [name])
    if as_json:
        print_json(found)
        return
    comments: Mapping[Path, str] = {("quotas", name, key): f"{found.used.get(key, 0)} used" for key in found.limits}
    text = as_toml({"quotas": {name: found.limits}}, NO_COMMENTS if name == DEFAULT_QUOTA else comments)
    out.print(Text(text), end="", soft_wrap=True)


def _uses(one: QuotaUse) -> str:
    """Without usage for the default: each project has its own."""
    if one.project == DEFAULT_QUOTA and not one.used:
        return ", ".join(f"{name} {limit} each project" for name, limit in sorted(one.limits.items()))
    limited = [f"{name} {one.used.get(name, 0)} of {limit}" for name, limit in sorted(one.limits.items())]
    return ", ".join([*limited, *(f"{name} {n}" for name, n in sorted(one.used.items()) if name not in one.limits)])


def _check_sizes(name: str, body: Body) -> None:
    """Raises Stop where a new flavor lacks a size."""
    missing = [key for key, of in SIZES.items() if key not in body and f"resources:{of}" not in body["extra_specs"]]
    if missing:
        options = " and ".join(f"--{key.replace('_', '-')}" for key in missing)
        raise Stop(Exit.USAGE, "flavor.incomplete", f"flavor {name!r} is new: name {options} (0 is a size, too)")


def _check_disjoint(named: Mapping[str, Any], removed: Iterable[str] | None, what: str) -> None:
    """Raises typer.BadParameter where one is set and removed at once."""
    if both := sorted(named.keys() & set(removed or ())):
        raise typer.BadParameter(f"{what} {', '.join(both)} is set and removed")


def _pairs(before: Mapping[str, V], named: Mapping[str, V], removed: Iterable[str] | None, what: str) -> dict[str, V]:
    """The pairs with those that are named, without those that are removed. Raises Stop: there is no such."""
    removed = tuple(removed or ())
    if missing := [key for key in removed if key not in before]:
        raise Stop(Exit.NO, "object.unknown", f"{what} {', '.join(missing)}")
    return {key: value for key, value in {**before, **named}.items() if key not in removed}


def _members_of(
    before: Iterable[str], named: Iterable[str] | None, removed: Iterable[str] | None, what: str
) -> list[str]:
    """The list with those that are named, without those that are removed. Raises Stop: there is no such."""
    kept = _pairs(dict.fromkeys(before), dict.fromkeys(named or ()), removed, what)
    return list(kept)
