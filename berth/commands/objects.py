"""`berth flavors`, `rules`, `apply`, `objects`, `audit-log`: operators' objects."""

from __future__ import annotations

import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from berth.client.object_edits import ObjectEdit, change_object, find_object
from berth.commands.as_toml import as_toml
from berth.commands.common import (
    EXIT_NO,
    QUERY_TIMEOUT_S,
    AsJson,
    By,
    Stop,
    client,
    decided_by,
    out,
    print_json,
    run,
    settings_of,
)
from berth.render import printable, render_rows
from berth.settings import Settings
from bus.bus import Bus
from bus.contracts.base import MAX_REASON
from bus.contracts.objects import (
    MAX_CHANGES,
    SCHEDULING,
    ChangedObject,
    ObjectChange,
    ObjectKind,
    ObjectLogEntry,
    ObjectLogPage,
    ObjectLogQuery,
    ObjectsChange,
    ObjectsChanged,
    ObjectsPage,
    ObjectsQuery,
    StoredObject,
)
from bus.contracts.patterns import reason_of

MAX_FILE_BYTES = 8 * 2**20

# The sections of a file for `berth apply`, as `berth objects` prints them.
SECTIONS = {
    "flavors": ObjectKind.FLAVOR,
    "aggregates": ObjectKind.AGGREGATE,
    "quotas": ObjectKind.QUOTA,
    "groups": ObjectKind.GROUP,
    "rules": ObjectKind.SCHEDULING,
    "cells": ObjectKind.CELL,
}

# One and several of a kind, as the help names them.
NOUNS = {
    ObjectKind.FLAVOR: ("flavor", "flavors"),
    ObjectKind.AGGREGATE: ("aggregate", "aggregates"),
    ObjectKind.QUOTA: ("quota", "quotas"),
    ObjectKind.GROUP: ("server group", "server groups"),
    ObjectKind.SCHEDULING: ("set of scheduling rules", "scheduling rules"),
    ObjectKind.CELL: ("cell", "cells"),
}

Name = Annotated[str, typer.Argument(help="The name.", metavar="NAME")]
Names = Annotated[list[str], typer.Argument(help="The names.", metavar="NAME...")]
Why = Annotated[str, typer.Option("--reason", help="Why, for those who read the log.")]
Force = Annotated[
    bool, typer.Option("--force", help="Also if instances depend on it: on their flavor, group, zone or cell.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the changes, and make none.")]


def object_commands(kind: ObjectKind, what: str, *, lists: bool = True, shows: bool = True) -> typer.Typer:
    """The commands that every kind has: list, show, delete. lists, shows: False for a kind with its own."""
    one, several = NOUNS[kind]
    app = typer.Typer(no_args_is_help=True, help=f"{what} An operator changes them while everything runs.")

    def list_(context: typer.Context, as_json: AsJson = False) -> None:
        run(lambda: _list(settings_of(context), kind, as_json=as_json))

    if lists:
        app.command("list", help=f"List all {several}.")(list_)

    def show(context: typer.Context, name: Name, as_json: AsJson = False) -> None:
        run(lambda: _show(settings_of(context), kind, name, as_json=as_json))

    if shows:
        app.command("show", help=f"Show one {one} as TOML, as `berth apply` reads it.")(show)

    @app.command("delete", help=f"Delete {several}: all that are named, or none of them.")
    def delete(
        context: typer.Context,
        names: Names,
        why: Why = "",
        by: By = None,
        force: Force = False,
        dry_run: DryRun = False,
        as_json: AsJson = False,
    ) -> None:
        changes = [ObjectChange(kind=kind, name=name) for name in dict.fromkeys(names)]
        change_objects(context, changes, why=why, by=by, force=force, dry_run=dry_run, as_json=as_json)

    return app


async def _list(settings: Settings, kind: ObjectKind, *, as_json: bool) -> None:
    """Print the records of a kind."""
    async with client(settings) as berth:
        found = [stored async for stored in stored_objects(berth.bus, kind)]
    if as_json:
        print_json(found)
        return
    rows = [[printable(one.name), _compact(one.body), str(one.version), _when(one)] for one in found]
    render_rows(out, ["name", "body", "version", "changed"], rows)


async def _show(settings: Settings, kind: ObjectKind, name: str, *, as_json: bool) -> None:
    async with client(settings) as berth:
        found = await read_object(berth.bus, kind, name)
    if as_json:
        print_json(found)
        return
    out.print(Text(as_toml(_file([found]))), end="", soft_wrap=True)


flavors = object_commands(ObjectKind.FLAVOR, "Flavors, which clients may request.")
aggregates = object_commands(ObjectKind.AGGREGATE, "Host aggregates and availability zones.")
groups = object_commands(ObjectKind.GROUP, "Server groups, which requests name.", shows=False)
rules = object_commands(ObjectKind.SCHEDULING, "Scheduling rules: filters, weighers and their multipliers.")


def apply(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="TOML as `berth objects` prints it.")],
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="Delete objects that are not in the file, of the kinds that it has a section for."
        ),
    ] = False,
    why: Why = "",
    by: By = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make the objects that a file describes.

    All or none; prints what changes.
    """
    changes, kinds = read_file(file)
    pruned = kinds if prune else ()
    change_objects(context, changes, why=why, by=by, force=force, dry_run=dry_run, as_json=as_json, prune=pruned)


def objects(context: typer.Context, as_json: AsJson = False) -> None:
    """Print all objects as TOML, for `berth apply`."""

    async def body() -> None:
        async with client(settings_of(context)) as berth:
            found = [stored async for stored in stored_objects(berth.bus)]
        if as_json:
            print_json(found)
            return
        out.print(Text(as_toml(_file(found))), end="", soft_wrap=True)

    run(body)


def audit_log(
    context: typer.Context,
    kind: Annotated[ObjectKind | None, typer.Option(help="Only of this kind.")] = None,
    name: Annotated[str | None, typer.Option(help="Only of this name.")] = None,
    before: Annotated[int | None, typer.Option(min=1, help="Only of earlier revisions.")] = None,
    before_object: Annotated[
        str | None,
        typer.Option(metavar="KIND/NAME", help="With --before: of that revision, those after this object, too."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="So many, newest first.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List changes of objects: who, when and why.

    For the page after one, give the revision and the object of its last entry.
    """
    last = None if before_object is None else before_object.partition("/")

    async def body() -> None:
        async with client(settings_of(context)) as berth:
            query = ObjectLogQuery(
                kind=kind, name=name, before=before, before_object=last and (last[0], last[2]), limit=limit
            )
            page = await berth.bus.request(query, ObjectLogPage, timeout_s=QUERY_TIMEOUT_S)
        if as_json:
            print_json(page.entries)
            return
        columns = ["revision", "at (UTC)", "who", "object", "change", "why"]
        render_rows(out, columns, [_log_row(one) for one in page.entries])

    run(body)


def _log_row(one: ObjectLogEntry) -> list[str | Text]:
    return [
        str(one.revision),
        _time(one.at),
        printable(one.who),
        printable(f"{one.kind.value} {one.name}"),
        printable("; ".join(_differences(one.before, one.after)) + (" (forced)" if one.forced else "")),
        printable(one.why),
    ]


def change_objects(
    context: typer.Context,
    requested: Sequence[ObjectChange] | ObjectEdit,
    *,
    why: str,
    by: str | None,
    force: bool,
    dry_run: bool,
    as_json: bool,
    prune: tuple[ObjectKind, ...] = (),
) -> None:
    """Change objects, print the changes, and end the command. requested: whole objects, or an edit of one on record."""
    if len(why) > MAX_REASON:
        raise typer.BadParameter(f"at most {MAX_REASON} characters", param_hint="--reason")
    who = decided_by(by)
    given = () if isinstance(requested, ObjectEdit) else valid_changes(requested)

    async def body() -> None:
        async with client(settings_of(context)) as berth:

            async def send(*changes: ObjectChange) -> ObjectsChanged:
                valid = tuple(valid_changes(changes))
                change = ObjectsChange(changes=valid, who=who, why=why, prune=prune, force=force, dry_run=dry_run)
                return await berth.bus.request(change, ObjectsChanged, timeout_s=QUERY_TIMEOUT_S)

            if isinstance(requested, ObjectEdit):
                answer = await change_object(berth.bus, requested, send, timeout_s=QUERY_TIMEOUT_S)
            else:
                answer = await send(*given)
        if as_json:
            print_json(answer)
            return
        for one in answer.changed:
            out.print(Text(printable(_sentence(one))), soft_wrap=True)
        verb = "would change" if dry_run else "changed"
        out.print(Text(f"{len(answer.changed)} {verb}; revision {answer.revision}"), soft_wrap=True)

    run(body)


def valid_changes(changes: Sequence[ObjectChange]) -> Sequence[ObjectChange]:
    """The changes, as a scheduler will read them. Raises typer.BadParameter."""
    if len(changes) > MAX_CHANGES:
        raise typer.BadParameter(f"at most {MAX_CHANGES} objects in one change, and these are {len(changes)}")
    try:
        return msgspec.convert(msgspec.to_builtins([*changes]), list[ObjectChange])
    except msgspec.ValidationError as error:
        raise typer.BadParameter(reason_of(error)) from error
    except RecursionError:
        raise typer.BadParameter("tables are nested too deeply") from None


async def read_object(bus: Bus, kind: ObjectKind, name: str) -> StoredObject:
    """An object on record. Raises Stop when there is none."""
    found = await find_object(bus, kind, name, timeout_s=QUERY_TIMEOUT_S)
    if found is None and kind is ObjectKind.SCHEDULING and name == SCHEDULING:
        reason = "no scheduling rules are set: each scheduler goes by the section scheduler of its own settings"
        raise Stop(EXIT_NO, "object.unknown", reason)
    if found is None:
        raise Stop(EXIT_NO, "object.unknown", f"there is no {kind.value} {name!r}")
    return found


async def stored_objects(
    bus: Bus, kind: ObjectKind | None = None, name: str | None = None
) -> AsyncIterator[StoredObject]:
    """The objects on record, in order of kind and name."""
    after: tuple[str, str] | None = None
    while True:
        query = ObjectsQuery(kind=kind, name=name, after=after)
        page = await bus.request(query, ObjectsPage, timeout_s=QUERY_TIMEOUT_S)
        for stored in page.objects:
            yield stored
        if not page.more:
            return
        after = (page.objects[-1].kind.value, page.objects[-1].name)


def _file(found: Sequence[StoredObject]) -> dict[str, Any]:
    """Objects as the tree of a file for `berth apply`. The rules are one object, without a name in the file."""
    tree: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        bodies = {one.name: _in_file(kind, one.body) for one in found if one.kind is kind}
        if bodies:
            tree[section] = bodies.get(SCHEDULING, {}) if kind is ObjectKind.SCHEDULING else bodies
    return tree


def _in_file(kind: ObjectKind, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A quota is its limits, and an aggregate's name is that of its table."""
    match kind:
        case ObjectKind.QUOTA:
            limits: Mapping[str, Any] = body.get("limits", {})
            return limits
        case ObjectKind.AGGREGATE:
            return {key: value for key, value in body.items() if key != "name"}
    return body


def read_file(file: Path) -> tuple[list[ObjectChange], tuple[ObjectKind, ...]]:
    """The objects of a file, and the kinds that it has a section for. Raises typer.BadParameter."""
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise typer.BadParameter(f"{file} is larger than {MAX_FILE_BYTES} bytes")
        tree = tomllib.loads(text.decode())
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # besides what tomllib raises: a number of thousands of digits
        raise typer.BadParameter(f"{file} is not TOML: {error}") from error
    if unknown := tree.keys() - SECTIONS.keys():
        known = ", ".join(SECTIONS)
        raise typer.BadParameter(f"{file}: {', '.join(sorted(unknown))}: a file has the sections {known}")
    changes = []
    for section, kind in SECTIONS.items():
        if section not in tree:
            continue
        bodies = {SCHEDULING: tree[section]} if kind is ObjectKind.SCHEDULING else tree[section]
        if not isinstance(bodies, dict) or not all(isinstance(body, dict) for body in bodies.values()):
            raise typer.BadParameter(f"{file}: [{section}] holds one table for each name")
        changes += [
            ObjectChange(kind=kind, name=name, body=_from_file(kind, name, body)) for name, body in bodies.items()
        ]
    return changes, tuple(kind for section, kind in SECTIONS.items() if section in tree)


def _from_file(kind: ObjectKind, name: str, body: dict[str, Any]) -> dict[str, Any]:
    match kind:
        case ObjectKind.QUOTA:
            return {"limits": body}
        case ObjectKind.AGGREGATE:
            return {**body, "name": name}
    return body


def number(text: str, key: str, kind: type[int | float] = int) -> int | float:
    """The number of an option KEY=NUMBER. Raises typer.BadParameter."""
    try:
        return kind(text)
    except ValueError:
        raise typer.BadParameter(f"{key}={text}: {text!r} is no number") from None


def _sentence(changed: ChangedObject) -> str:
    what = f"{changed.kind.value} {changed.name}"
    if changed.before is None:
        return f"+ {what}: {_compact(changed.after or {})}"
    if changed.after is None:
        return f"- {what}"
    return f"~ {what}: {'; '.join(_differences(changed.before, changed.after))}"


def _differences(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[str]:
    """Field by field, the old and the new value. Of a host that is fenced once more nothing may differ."""
    if before is None or after is None:
        return [f"made: {_compact(after or {})}" if before is None else "deleted"]
    if before == after:
        return ["stated once more"]
    return [
        f"{key} {_compact(before.get(key))} to {_compact(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _compact(value: Any) -> str:
    return "nothing" if value is None else msgspec.json.encode(value, order="deterministic").decode()


def _when(one: StoredObject) -> str:
    return f"{_time(one.changed_at)} by {printable(one.changed_by)}"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
