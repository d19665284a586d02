"""`berth flavor|rules|quotas|aggregates|groups`: `set` changes the fields that are named, and all others stay."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import typer
from msgspec import Struct
from msgspec.structs import asdict
from rich.text import Text

from berth.cli.common import (
    Exit,
    Stop,
    pairs_of,
    parse_uuid,
)
from berth.cli.http import connected
from berth.cli.objects.objects import (
    ChangeOptions,
    ForcedOptions,
    Name,
    change_objects,
    number,
)
from berth.cli.output import (
    As,
    Form,
    ListedItems,
    ListOutput,
    Table,
    out,
    print_data,
    print_line,
    print_list,
)
from berth.cli.site.as_toml import NO_COMMENTS, Path, as_toml
from berth.client.types import QuotaUse
from berth.object_changes import Body, ObjectEdit, merged
from berth.text import printable, render_rows
from bus.clock import new_uuid
from bus.contracts.objects import (
    DEFAULT_QUOTA,
    SCHEDULING,
    ZONE_KEY,
    ObjectKind,
    StoredObject,
)
from bus.contracts.placement import GroupPolicy

GroupName = Annotated[str, typer.Argument(help="PROJECT/NAME.", metavar="PROJECT/NAME")]
Hosts = Annotated[list[str], typer.Argument(help="Hosts, by name or uuid.", metavar="HOST...")]
V = TypeVar("V")
AggregateUuid = Annotated[
    str | None, typer.Option(help="The uuid of the provider aggregate with its hosts; else as it is, or new.")
]


class FlavorFields(Struct, frozen=True, kw_only=True):
    """The fields of a flavor."""

    vcpus: Annotated[int | None, typer.Option(min=0, max=2**31 - 1, help="Virtual CPUs.")] = None
    memory_mb: Annotated[int | None, typer.Option(min=0, max=2**31 - 1, help="MiB.")] = None
    disk_gb: Annotated[
        int | None, typer.Option(min=0, max=2**31 - 1, help="GiB; of a new flavor 0 unless it is named.")
    ] = None
    extra_spec: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An extra spec, as in Nova; repeatable.")
    ] = None
    project: Annotated[
        list[str] | None, typer.Option(help="Only for this project, and those that it is for; repeatable.")
    ] = None


class AggregateFields(Struct, frozen=True, kw_only=True):
    """The fields of a host aggregate."""

    uuid: AggregateUuid = None
    host: Annotated[list[str] | None, typer.Option(help="A further host of it, by name or uuid; repeatable.")] = None
    hosts_in_placement: Annotated[
        bool, typer.Option("--hosts-in-placement", help="Name no hosts: its hosts are as Placement has them.")
    ] = False
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Metadata, as in Nova; repeatable.")
    ] = None
    zone: Annotated[str | None, typer.Option(help="Make it this availability zone.")] = None


class GroupFields(Struct, frozen=True, kw_only=True):
    """The fields of a server group."""

    max_per_host: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="With anti-affinity: this many may share a host; 1 unless it is named."),
    ] = None
    uuid: Annotated[
        str | None, typer.Option(parser=parse_uuid, metavar="UUID", help="Its uuid; else it follows from the name.")
    ] = None

    def given(self) -> Body:
        """Those that are named."""
        return {key: value for key, value in asdict(self).items() if value is not None}


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


async def create_flavor(context: typer.Context, name: Name, *, fields: FlavorFields, decision: ForcedOptions) -> None:
    """Make a flavor. It names --vcpus and --memory-mb."""

    def edit(known: StoredObject | None) -> Body:
        _check_new(ObjectKind.FLAVOR, name, known)
        body = _flavor({}, fields)
        _check_sizes(name, body)
        return body

    await change_objects(context, ObjectEdit(ObjectKind.FLAVOR, name, edit), decision)


async def set_flavor(
    context: typer.Context,
    name: Name,
    every_project: Annotated[bool, typer.Option("--every-project", help="For every project.")] = False,
    *,
    fields: FlavorFields,
    decision: ForcedOptions,
) -> None:
    """Change the named fields of a flavor."""
    if every_project and fields.project:
        raise typer.BadParameter("name projects, or every one", param_hint="--every-project")

    def edit(known: StoredObject | None) -> Body:
        body = _flavor(_before(ObjectKind.FLAVOR, name, known), fields)
        return {**body, "projects": []} if every_project else body

    await change_objects(context, ObjectEdit(ObjectKind.FLAVOR, name, edit), decision)


async def unset_flavor(
    context: typer.Context,
    name: Name,
    extra_spec: Annotated[list[str] | None, typer.Option(metavar="KEY", help="An extra spec; repeatable.")] = None,
    project: Annotated[list[str] | None, typer.Option(help="No longer for this project; repeatable.")] = None,
    *,
    decision: ForcedOptions,
) -> None:
    """Remove extra specs or projects of a flavor."""
    _check_named(extra_spec, project)

    def edit(known: StoredObject | None) -> Body:
        before = _before(ObjectKind.FLAVOR, name, known)
        kept = _members_of(before.get("projects", []), (), project, f"flavor {name!r} is not for project")
        if project and not kept:
            reason = f"without its last project it is for every project: berth flavor set {name} --every-project"
            raise Stop(Exit.USAGE, "flavor.last_project", f"flavor {name!r}: {reason}")
        specs = _pairs(before.get("extra_specs", {}), {}, extra_spec, f"flavor {name!r} has no extra spec")
        return {**before, "extra_specs": specs, "projects": kept}

    await change_objects(context, ObjectEdit(ObjectKind.FLAVOR, name, edit), decision)


def _flavor(before: Body, fields: FlavorFields) -> Body:
    sizes = {"vcpus": fields.vcpus, "memory_mb": fields.memory_mb, "disk_gb": fields.disk_gb}
    named = {key: value for key, value in sizes.items() if value is not None}
    specs = {**before.get("extra_specs", {}), **pairs_of(fields.extra_spec, "--extra-spec")}
    projects = _members_of(before.get("projects", []), fields.project, (), "")
    return {**before, **named, "extra_specs": specs, "projects": projects}


async def set_rules(
    context: typer.Context,
    multiplier: Annotated[
        list[str] | None, typer.Option(metavar="WEIGHER=NUMBER", help="A weigher's multiplier; repeatable.")
    ] = None,
    filters: Annotated[
        list[str] | None, typer.Option("--filter", help="All enabled filters, in order; repeatable.")
    ] = None,
    weighers: Annotated[list[str] | None, typer.Option("--weigher", help="All enabled weighers; repeatable.")] = None,
    host_subset_size: Annotated[int | None, typer.Option(min=1, help="Choose among this many of the best.")] = None,
    *,
    decision: ChangeOptions,
) -> None:
    """Set the named scheduling rules. Fields that no command has set are as in the settings of each scheduler."""
    numbers = {key: number(value, key, float) for key, value in pairs_of(multiplier, "--multiplier").items()}
    given = {"enabled_filters": filters, "enabled_weighers": weighers, "host_subset_size": host_subset_size}
    named: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    _check_named(numbers, named)

    def edit(known: StoredObject | None) -> Body:
        body = {} if known is None else dict(known.body)
        if numbers:
            body["multipliers"] = {**(body.get("multipliers") or {}), **numbers}
        return {**body, **named}

    await change_objects(context, ObjectEdit(ObjectKind.SCHEDULING, SCHEDULING, edit), decision)


async def unset_rules(
    context: typer.Context,
    fields: Annotated[list[RuleField] | None, typer.Argument(help="The rules.", metavar="[RULE]...")] = None,
    multiplier: Annotated[
        list[str] | None, typer.Option(metavar="WEIGHER", help="A weigher's multiplier; repeatable.")
    ] = None,
    *,
    decision: ChangeOptions,
) -> None:
    """Have scheduling rules as in the settings of each scheduler again."""
    _check_named(fields, multiplier)
    if multiplier and RuleField.MULTIPLIERS in (fields or ()):
        raise typer.BadParameter("name multipliers, or all of them", param_hint="--multiplier")

    def edit(known: StoredObject | None) -> Body:
        body = {} if known is None else dict(known.body)
        if multiplier:
            what = "there is no multiplier of weigher"
            body["multipliers"] = _pairs(body.get("multipliers") or {}, {}, multiplier, what)
        return merged(body, {_RULE_FIELDS[field]: None for field in fields or ()})

    await change_objects(context, ObjectEdit(ObjectKind.SCHEDULING, SCHEDULING, edit), decision)


async def set_quota(
    context: typer.Context,
    project: Annotated[str, typer.Argument(help=f"The project, or {DEFAULT_QUOTA!r}.")],
    limits: Annotated[
        list[str],
        typer.Argument(metavar="CLASS=AMOUNT...", help="Resource classes, or INSTANCES for their number."),
    ],
    *,
    decision: ChangeOptions,
) -> None:
    """Set limits of a project's quota. They apply from the next claim on; allocations beyond them stay."""
    numbers = {key: number(value, key) for key, value in pairs_of(limits, "CLASS=AMOUNT").items()}

    def edit(known: StoredObject | None) -> Body:
        before = {} if known is None else known.body
        return {**before, "limits": {**before.get("limits", {}), **numbers}}

    await change_objects(context, ObjectEdit(ObjectKind.QUOTA, project, edit), decision)


async def unset_quota(
    context: typer.Context,
    project: Annotated[str, typer.Argument(help=f"The project, or {DEFAULT_QUOTA!r}.")],
    classes: Annotated[list[str], typer.Argument(metavar="CLASS...", help="The resource classes.")],
    *,
    decision: ChangeOptions,
) -> None:
    """Remove limits of a project's quota."""

    def edit(known: StoredObject | None) -> Body:
        before = _before(ObjectKind.QUOTA, project, known)
        limits = _pairs(before.get("limits", {}), {}, classes, f"quota {project!r} has no limit of")
        if not limits:
            reason = f"without its last limit nothing limits it: berth quota delete {project}, or another limit"
            raise Stop(Exit.USAGE, "quota.last_limit", f"quota {project!r}: {reason}")
        return {**before, "limits": limits}

    await change_objects(context, ObjectEdit(ObjectKind.QUOTA, project, edit), decision)


async def create_aggregate(
    context: typer.Context, name: Name, *, fields: AggregateFields, decision: ForcedOptions
) -> None:
    """Make a host aggregate."""

    def edit(known: StoredObject | None) -> Body:
        _check_new(ObjectKind.AGGREGATE, name, known)
        return _aggregate({"uuid": new_uuid(random.SystemRandom()), "name": name}, fields)

    await change_objects(context, ObjectEdit(ObjectKind.AGGREGATE, name, edit), decision)


async def set_aggregate(
    context: typer.Context, name: Name, *, fields: AggregateFields, decision: ForcedOptions
) -> None:
    """Change the named fields of a host aggregate (its hosts leave by remove-host)."""

    def edit(known: StoredObject | None) -> Body:
        return _aggregate(_before(ObjectKind.AGGREGATE, name, known), fields)

    await change_objects(context, ObjectEdit(ObjectKind.AGGREGATE, name, edit), decision)


async def unset_aggregate(
    context: typer.Context,
    name: Name,
    metadata: Annotated[list[str] | None, typer.Option(metavar="KEY", help="Metadata; repeatable.")] = None,
    zone: Annotated[bool, typer.Option("--zone", help="Make it no availability zone.")] = False,
    *,
    decision: ForcedOptions,
) -> None:
    """Remove metadata of a host aggregate, or its availability zone."""
    _check_named(metadata, zone)

    def edit(known: StoredObject | None) -> Body:
        before = _before(ObjectKind.AGGREGATE, name, known)
        kept = _pairs(before.get("metadata", {}), {}, metadata, f"aggregate {name!r} has no metadata")
        if zone:
            kept.pop(ZONE_KEY, None)
        return {**before, "metadata": kept}

    await change_objects(context, ObjectEdit(ObjectKind.AGGREGATE, name, edit), decision)


def _aggregate(before: Body, fields: AggregateFields) -> Body:
    """Raises typer.BadParameter."""
    if fields.hosts_in_placement and fields.host:
        raise typer.BadParameter("name hosts, or none", param_hint="--hosts-in-placement")
    pairs = pairs_of(fields.metadata, "--metadata") | ({} if fields.zone is None else {ZONE_KEY: fields.zone})
    body = {**before, "metadata": {**before.get("metadata", {}), **pairs}}
    if fields.uuid is not None:
        body["uuid"] = fields.uuid
    if fields.host:
        body["hosts"] = _members_of(body.get("hosts") or [], fields.host, (), "")
    if fields.hosts_in_placement:
        body.pop("hosts", None)
    return body


Policy = Annotated[GroupPolicy, typer.Option(help="The policy of the group.")]
WithMembers = Annotated[bool, typer.Option("--force", help="Also where it has members.")]


async def create_group(
    context: typer.Context, name: GroupName, policy: Policy, *, fields: GroupFields, decision: ChangeOptions
) -> None:
    """Make a server group."""

    def edit(known: StoredObject | None) -> Body:
        _check_new(ObjectKind.GROUP, name, known)
        return {"policy": policy.value, **fields.given()}

    await change_objects(context, ObjectEdit(ObjectKind.GROUP, name, edit), decision)


async def set_group(
    context: typer.Context,
    name: GroupName,
    policy: Annotated[GroupPolicy | None, typer.Option(help="The policy of the group.")] = None,
    force: WithMembers = False,
    *,
    fields: GroupFields,
    decision: ChangeOptions,
) -> None:
    """Change the named fields of a server group. Members keep the rule that they were built under."""
    named = fields.given() | ({} if policy is None else {"policy": policy.value})

    def edit(known: StoredObject | None) -> Body:
        return {**_before(ObjectKind.GROUP, name, known), **named}

    await change_objects(context, ObjectEdit(ObjectKind.GROUP, name, edit), decision, force=force)


async def add_hosts(context: typer.Context, name: Name, hosts: Hosts, *, decision: ForcedOptions) -> None:
    """Add hosts to an aggregate. Once it names hosts, it has those and no others."""
    await _change_hosts(context, name, decision, named=hosts)


async def remove_hosts(context: typer.Context, name: Name, hosts: Hosts, *, decision: ForcedOptions) -> None:
    """Remove hosts from an aggregate that names its hosts."""
    await _change_hosts(context, name, decision, removed=hosts)


async def _change_hosts(
    context: typer.Context,
    name: str,
    decision: ForcedOptions,
    *,
    named: Sequence[str] = (),
    removed: Sequence[str] = (),
) -> None:
    def edit(known: StoredObject | None) -> Body:
        before = _before(ObjectKind.AGGREGATE, name, known)
        hosts = _members_of(before.get("hosts") or (), named, removed, f"aggregate {name!r} does not name")
        return {**before, "hosts": hosts}

    await change_objects(context, ObjectEdit(ObjectKind.AGGREGATE, name, edit), decision)


async def show_group(context: typer.Context, name: GroupName, form: As = Form.TABLE) -> None:
    """Show a server group and its members: instances, and the hosts that they are on."""
    async with connected(context) as berth:
        found = await berth.show_groups(name)
    if form.is_data:
        print_data(found, form)
        return
    group = found.group
    rule = f"{group.policy.value}, max_per_host {group.max_per_host}, uuid {group.uuid}"
    out.print(Text(printable(f"{name}: {rule}")), soft_wrap=True)
    members = [[uuid, printable(", ".join(hosts))] for uuid, hosts in found.members.items()]
    render_rows(out, ["member", "hosts"], members)
    if found.more:
        print_line(f"and more than these {len(members)}")


QUOTAS = Table[QuotaUse](
    "project quota used | version", lambda one: [one.project, one.quota or "", _uses(one), one.version or ""]
)


async def list_quotas(context: typer.Context, *, listing: ListOutput) -> None:
    """List projects that have a quota or allocations, with limits and usage."""
    async with connected(context) as berth:

        async def read() -> ListedItems[QuotaUse]:
            return ListedItems(await berth.list_quotas())

        await print_list(read, QUOTAS, listing)


async def show_quota(context: typer.Context, name: Name, form: As = Form.TABLE) -> None:
    """Show a quota as TOML, as `berth apply` reads it, with the project's usage."""
    async with connected(context) as berth:
        found = await berth.show_quota(name)
    if found.quota != name:
        raise Stop(Exit.NO, "object.unknown", f"there is no quota {name!r}")
    if form.is_data:
        print_data(found, form)
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


def _check_named(*given: object) -> None:
    """Raises typer.BadParameter where nothing is named."""
    if not any(given):
        raise typer.BadParameter("name what is to be changed")


def _check_new(kind: ObjectKind, name: str, known: StoredObject | None) -> None:
    """Raises Stop: it is there."""
    if known is not None:
        raise Stop(Exit.NO, "object.exists", f"there is a {kind.value} {name!r}: berth {kind.value} set changes it")


def _before(kind: ObjectKind, name: str, known: StoredObject | None) -> Body:
    """Its body. Raises Stop: there is none of this name."""
    if known is None:
        raise Stop(Exit.NO, "object.unknown", f"there is no {kind.value} {name!r}")
    return known.body


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
