"""`berth aggregates add-host|remove-host`, `berth groups show`: objects with members."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from berth.client.object_edits import ObjectEdit
from berth.commands.common import (
    EXIT_NO,
    QUERY_TIMEOUT_S,
    AsJson,
    By,
    Stop,
    client,
    out,
    print_json,
    run,
    settings_of,
)
from berth.commands.objects import (
    DryRun,
    Force,
    Name,
    Why,
    aggregates,
    change_objects,
    groups,
    read_object,
)
from berth.render import printable, render_rows
from bus.bus import Bus
from bus.contracts.book import GroupMembersPage, GroupMembersQuery
from bus.contracts.objects import GroupDefinition, ObjectKind, StoredObject, group_named

__all__ = ["aggregates", "groups"]

GroupName = Annotated[str, typer.Argument(help="PROJECT/NAME.", metavar="PROJECT/NAME")]
Hosts = Annotated[list[str], typer.Argument(help="Hosts, by name or uuid.", metavar="HOST...")]


@aggregates.command("add-host")
def add_hosts(
    context: typer.Context,
    name: Name,
    hosts: Hosts,
    why: Why = "",
    by: By = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Add hosts to an aggregate. Once it names hosts, it has those and no others."""

    def body(known: StoredObject | None) -> dict[str, Any]:
        named = _named(name, known)
        return {**_body_of(name, known), "hosts": [*named, *(host for host in hosts if host not in named)]}

    change_objects(
        context,
        ObjectEdit(ObjectKind.AGGREGATE, name, body),
        why=why,
        by=by,
        force=force,
        dry_run=dry_run,
        as_json=as_json,
    )


@aggregates.command("remove-host")
def remove_hosts(
    context: typer.Context,
    name: Name,
    hosts: Hosts,
    why: Why = "",
    by: By = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove hosts from an aggregate that names its hosts."""

    def body(known: StoredObject | None) -> dict[str, Any]:
        named = _named(name, known)
        if missing := [host for host in hosts if host not in named]:
            raise Stop(EXIT_NO, "object.unknown", f"aggregate {name!r} does not name {', '.join(missing)}")
        return {**_body_of(name, known), "hosts": [host for host in named if host not in hosts]}

    change_objects(
        context,
        ObjectEdit(ObjectKind.AGGREGATE, name, body),
        why=why,
        by=by,
        force=force,
        dry_run=dry_run,
        as_json=as_json,
    )


@groups.command("show")
def show_group(context: typer.Context, name: GroupName, as_json: AsJson = False) -> None:
    """Show a server group and its members: instances, and the hosts that they are on."""

    async def body() -> None:
        async with client(settings_of(context)) as berth:
            stored = await read_object(berth.bus, ObjectKind.GROUP, name)
            group = group_named(name, msgspec.convert(stored.body, GroupDefinition))
            members = [one async for one in _members(berth.bus, name.partition("/")[0], group.uuid)]
        if as_json:
            print_json({"group": stored, "uuid": group.uuid, "members": dict(members)})
            return
        rule = f"{group.policy.value}, max_per_host {group.max_per_host}, uuid {group.uuid}"
        out.print(Text(printable(f"{name}: {rule}")), soft_wrap=True)
        render_rows(out, ["member", "hosts"], [[uuid, printable(", ".join(hosts))] for uuid, hosts in members])

    run(body)


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


def _body_of(name: str, known: StoredObject | None) -> dict[str, Any]:
    if known is None:
        raise Stop(EXIT_NO, "object.unknown", f"there is no aggregate {name!r}")
    return known.body


def _named(name: str, known: StoredObject | None) -> list[str]:
    return list(_body_of(name, known).get("hosts") or ())
