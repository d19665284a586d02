"""`berth quotas`: limits of projects, and their usage."""

from __future__ import annotations

from collections.abc import Mapping

import typer
from rich.text import Text

from berth.client.quota_use import QuotaUse, project_usage, quota_uses
from berth.commands.as_toml import NO_COMMENTS, Path, as_toml
from berth.commands.common import QUERY_TIMEOUT_S, AsJson, client, out, print_json, run, settings_of
from berth.commands.objects import (
    Name,
    object_commands,
    read_object,
    stored_objects,
)
from berth.render import printable, render_rows
from bus.contracts.objects import DEFAULT_QUOTA, ObjectKind

quotas = object_commands(ObjectKind.QUOTA, "Quotas of projects.", lists=False, shows=False)


@quotas.command("list")
def list_quotas(context: typer.Context, as_json: AsJson = False) -> None:
    """List projects that have a quota or hold something, with limits and usage."""

    async def body() -> None:
        async with client(settings_of(context)) as berth:
            stored = [one async for one in stored_objects(berth.bus, ObjectKind.QUOTA)]
            found = quota_uses(stored, await project_usage(berth.bus, (), timeout_s=QUERY_TIMEOUT_S))
        if as_json:
            print_json(found)
            return
        rows = [[printable(one.project), printable(one.quota), _uses(one), str(one.version or "")] for one in found]
        render_rows(out, ["project", "quota", "used of limit", "version"], rows)

    run(body)


@quotas.command("show")
def show_quota(context: typer.Context, name: Name, as_json: AsJson = False) -> None:
    """Show a quota as TOML, as `berth apply` reads it, with the project's usage."""

    async def body() -> None:
        async with client(settings_of(context)) as berth:
            stored = await read_object(berth.bus, ObjectKind.QUOTA, name)
            used = {} if name == DEFAULT_QUOTA else await project_usage(berth.bus, [name], timeout_s=QUERY_TIMEOUT_S)
        (found,) = quota_uses([stored], used, [name])
        if as_json:
            print_json(found)
            return
        comments: Mapping[Path, str] = {("quotas", name, key): f"{found.used.get(key, 0)} used" for key in found.limits}
        text = as_toml({"quotas": {name: found.limits}}, NO_COMMENTS if name == DEFAULT_QUOTA else comments)
        out.print(Text(text), end="", soft_wrap=True)

    run(body)


def _uses(one: QuotaUse) -> str:
    """Without usage for the default: each project has its own."""
    if one.project == DEFAULT_QUOTA and not one.used:
        return ", ".join(f"{name} {limit} each project" for name, limit in sorted(one.limits.items()))
    limited = [f"{name} {one.used.get(name, 0)} of {limit}" for name, limit in sorted(one.limits.items())]
    return ", ".join([*limited, *(f"{name} {n}" for name, n in sorted(one.used.items()) if name not in one.limits)])
