"""`berth flavor`, `rules`, `apply`, `objects`, `audit-log`: operators' objects."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Struct
from rich.text import Text

from berth.change_log import describe_change, line_of
from berth.cli.common import (
    MAX_LIMIT,
    Exit,
    Page,
    Stop,
    Yes,
    ask_first,
    by_cell,
    check_reason,
)
from berth.cli.http import connected
from berth.cli.output import (
    As,
    Cell,
    Form,
    ListedItems,
    ListOutput,
    Table,
    Time,
    gibibytes,
    mebibytes,
    out,
    print_data,
    print_line,
    print_list,
    rfc3339,
)
from berth.cli.site.as_toml import as_toml
from berth.client import AsyncClient
from berth.client.types import ChangeBody
from berth.object_changes import ObjectEdit, change_object
from bus.contracts.base import reason_of
from bus.contracts.objects import (
    MAX_CHANGES,
    SCHEDULING,
    ZONE_KEY,
    ChangedObject,
    ObjectChange,
    ObjectKind,
    ObjectLogEntry,
    ObjectsChanged,
    StoredObject,
)

MAX_FILE_BYTES = 8 * 2**20

# The sections of a file for `berth apply`, as `berth object export` prints them.
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
LogReason = Annotated[str, typer.Option("--reason", help="The reason, for the log.")]


class ChangeOptions(Struct, frozen=True, kw_only=True):
    """The options of each change of objects."""

    reason: LogReason = ""
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the changes, and make none.")] = False
    form: As = Form.TABLE


class ForcedOptions(ChangeOptions, frozen=True, kw_only=True):
    """The options of a change that instances may depend on."""

    force: Annotated[
        bool, typer.Option("--force", help="Also if instances depend on it: on their flavor, group, zone or cell.")
    ] = False


def list_of(kind: ObjectKind) -> Callable[..., Any]:
    """The command that lists all of a kind."""

    async def list_(context: typer.Context, *, listing: ListOutput) -> None:
        async with connected(context) as berth:

            async def read() -> ListedItems[StoredObject]:
                return ListedItems((await berth.list_objects(kind=kind)).objects)

            await print_list(read, TABLES[kind], listing)

    list_.__doc__ = f"List all {NOUNS[kind][1]}."
    return list_


def show_of(kind: ObjectKind) -> Callable[..., Any]:
    """The command that shows one of a kind."""

    async def show(context: typer.Context, name: Name, form: As = Form.TABLE) -> None:
        async with connected(context) as berth:
            found = await read_object(berth, kind, name)
        _print_file([found], found, form)

    show.__doc__ = f"Show one {NOUNS[kind][0]} as TOML, as `berth apply` reads it."
    return show


def delete_of(kind: ObjectKind) -> Callable[..., Any]:
    """The command that deletes some of a kind."""

    async def delete(context: typer.Context, names: Names, *, decision: ForcedOptions) -> None:
        changes = [ObjectChange(kind=kind, name=name) for name in dict.fromkeys(names)]
        await change_objects(context, changes, decision)

    delete.__doc__ = f"Delete {NOUNS[kind][1]}: all that are named, or none of them."
    return delete


list_flavors, show_flavor, delete_flavors = (of(ObjectKind.FLAVOR) for of in (list_of, show_of, delete_of))
list_aggregates, show_aggregate, delete_aggregates = (of(ObjectKind.AGGREGATE) for of in (list_of, show_of, delete_of))
list_rules, show_rules, delete_rules = (of(ObjectKind.SCHEDULING) for of in (list_of, show_of, delete_of))
list_groups, delete_groups = list_of(ObjectKind.GROUP), delete_of(ObjectKind.GROUP)
delete_quotas, delete_cells = delete_of(ObjectKind.QUOTA), delete_of(ObjectKind.CELL)


def _table(columns: str, cells: Callable[[Mapping[str, Any]], Sequence[Cell]]) -> Table[StoredObject]:
    """The table of a kind: its name, the cells of its body, and who changed it last."""

    def row(one: StoredObject) -> list[Cell]:
        return [one.name, *cells(one.body), Time(one.changed_at), one.changed_by, one.version]

    return Table(f"name {columns} changed by | version", row)


def _flavor_cells(body: Mapping[str, Any]) -> list[Cell]:
    sizes = [body.get("vcpus", 0), mebibytes(body.get("memory_mb", 0)), gibibytes(body.get("disk_gb", 0))]
    return [*sizes, _pairs_of(body.get("extra_specs", {})), " ".join(body.get("projects", []))]


def _aggregate_cells(body: Mapping[str, Any]) -> list[Cell]:
    metadata = dict(body.get("metadata", {}))
    hosts = body.get("hosts")
    zone = metadata.pop(ZONE_KEY, "")
    return [zone, "as in Placement" if hosts is None else " ".join(hosts), _pairs_of(metadata)]


def _group_cells(body: Mapping[str, Any]) -> list[Cell]:
    return [body.get("policy", ""), body.get("max_per_host", 1)]


def _pairs_of(pairs: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in pairs.items())


TABLES = {
    ObjectKind.FLAVOR: _table("vcpus memory disk specs projects", _flavor_cells),
    ObjectKind.AGGREGATE: _table("zone hosts metadata", _aggregate_cells),
    ObjectKind.GROUP: _table("policy max-per-host", _group_cells),
    ObjectKind.SCHEDULING: _table("rules", lambda body: [_compact(body)]),
}


def _print_file(objects: Sequence[StoredObject], as_plain: object, form: Form) -> None:
    if form.is_data:
        print_data(as_plain, form)
    else:
        tree = file_of([(one.kind, one.name, one.body) for one in objects])
        out.print(Text(as_toml(tree)), end="", soft_wrap=True)


async def apply(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="TOML as `berth object export` prints it.")],
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="Delete objects that are not in the file, of the kinds that it has a section for."
        ),
    ] = False,
    yes: Yes = False,
    *,
    decision: ForcedOptions,
) -> None:
    """Make the objects that a file describes.

    All or none; prints what changes.
    """
    changes, kinds = read_file(file)
    if prune and not (yes or decision.dry_run):
        planned = await change_objects(context, changes, decision, prune=kinds, ask=True)
        # These alone: what another operator makes before the answer is not in the prompt.
        gone = [ObjectChange(kind=one.kind, name=one.name) for one in planned.changed if one.after is None]
        of_kinds: dict[str, list[str]] = defaultdict(list)
        for one in gone:
            of_kinds[one.kind.value].append(one.name)
        if gone:
            ask_first(f"Delete {by_cell(of_kinds, 'object')}", yes=False)
        changes, prune = [*changes, *gone], False
    await change_objects(context, changes, decision, prune=kinds if prune else ())


async def objects(context: typer.Context, form: As = Form.TABLE) -> None:
    """Print all objects as TOML, for `berth apply`."""
    async with connected(context) as berth:
        found = (await berth.list_objects()).objects
    _print_file(found, found, form)


def _log_row(one: ObjectLogEntry) -> list[Cell]:
    object_ = f"{one.kind.value} {one.name}"
    return [one.revision, Time(one.at), one.actor, line_of(one), object_, describe_change(one).reason]


EVENTS = Table("revision since by change | object reason", _log_row)


class EventOptions(ListOutput, frozen=True, kw_only=True):
    """The options of `berth event list`."""

    kind: Annotated[ObjectKind | None, typer.Option(help="Only of this kind.")] = None
    name: Annotated[str | None, typer.Option(help="Only of this name.")] = None
    limit: Annotated[int, typer.Option(min=1, max=1000, help="So many, newest first.")] = 50
    page: Page = None


async def list_events(context: typer.Context, *, options: EventOptions) -> None:
    """List changes of objects and decisions: actor, time and reason."""
    before, after = _after(options.page)
    async with connected(context) as berth:

        async def read() -> ListedItems[ObjectLogEntry]:
            entries = await berth.list_changes(
                kind=options.kind, name=options.name, before=before, before_object=after, limit=options.limit
            )
            last = entries[-1] if len(entries) == options.limit else None
            token = None if last is None else {"--page": f"{last.revision}/{last.kind.value}/{last.name}"}
            return ListedItems(entries, token)

        await print_list(read, EVENTS, options)


def _after(page: str | None) -> tuple[int | None, str | None]:
    """Where a page ended: the revision, and its object, KIND/NAME. Raises BadParameter."""
    if page is None:
        return None, None
    revision, _, named = page.partition("/")
    kind, _, name = named.partition("/")
    if not (revision.isascii() and revision.isdigit() and kind and name):
        raise typer.BadParameter("take it from the list before", param_hint="--page")
    return int(revision), named


async def show_event(
    context: typer.Context,
    revision: Annotated[int, typer.Argument(min=1, help="The revision, as `list` shows it.")],
    form: As = Form.TABLE,
) -> None:
    """Show what one revision changed, before and after."""
    async with connected(context) as berth:
        entries = await berth.list_changes(before=revision + 1, limit=MAX_LIMIT)
    found = [one for one in entries if one.revision == revision]
    if not found:
        raise Stop(Exit.NO, "event.unknown", f"the log has no revision {revision}")
    if form.is_data:
        print_data(found, form)
        return
    for one in found:
        print_line(f"{one.revision} {rfc3339(one.at)} {one.actor}: {one.reason}")
        print_line(_message_of(one) + (" (forced)" if one.forced else ""))


async def change_objects(
    context: typer.Context,
    requested: Sequence[ObjectChange] | ObjectEdit,
    decision: ChangeOptions,
    *,
    force: bool = False,
    prune: tuple[ObjectKind, ...] = (),
    ask: bool = False,
) -> ObjectsChanged:
    """Change objects, and print the changes. requested: whole objects, or an edit of one on record. ask: only find what
    would change.
    """
    check_reason(decision.reason)
    if not isinstance(requested, ObjectEdit):
        requested = valid_changes(requested)
    async with connected(context) as berth:

        async def send(*changes: ObjectChange) -> ObjectsChanged:
            body = ChangeBody(
                changes=tuple(valid_changes(changes)),
                reason=decision.reason,
                prune=prune,
                force=force or (isinstance(decision, ForcedOptions) and decision.force),
                dry_run=ask or decision.dry_run,
            )
            return await berth.change_objects(body)

        if isinstance(requested, ObjectEdit):
            answer = await change_object(partial(find_object, berth), requested, send)
        else:
            answer = await send(*requested)
    if not ask:
        _print_changed(answer, decision)
    return answer


async def find_object(berth: AsyncClient, kind: ObjectKind, name: str) -> StoredObject | None:
    """An object on record. None: there is none."""
    return next(iter((await berth.list_objects(kind=kind, name=name)).objects), None)


def _print_changed(answer: ObjectsChanged, decision: ChangeOptions) -> None:
    if decision.form.is_data:
        print_data(answer, decision.form)
        return
    for one in answer.changed:
        print_line(_message_of(one))
    print_line(f"{len(answer.changed)} {'would change' if decision.dry_run else 'changed'}; revision {answer.revision}")


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


async def read_object(berth: AsyncClient, kind: ObjectKind, name: str) -> StoredObject:
    """An object on record. Raises Stop when there is none."""
    found = await find_object(berth, kind, name)
    if found is None and kind is ObjectKind.SCHEDULING and name == SCHEDULING:
        reason = "no scheduling rules are set: each scheduler goes by the section scheduler of its own settings"
        raise Stop(Exit.NO, "object.unknown", reason)
    if found is None:
        raise Stop(Exit.NO, "object.unknown", f"there is no {kind.value} {name!r}")
    return found


def file_of(found: Sequence[tuple[ObjectKind, str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Objects as the tree of a file for `berth apply`. The rules are one object, without a name in the file.

    found: kind, name and body of each.
    """
    tree: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        bodies = {name: _in_file(kind, body) for its, name, body in found if its is kind}
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
            raise typer.BadParameter(f"{file}: [{section}] has one table for each name")
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


def _message_of(changed: ChangedObject) -> str:
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
