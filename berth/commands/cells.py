"""`berth cells`: cells are taken into use and out of use while everything runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from berth.client.object_edits import ObjectEdit
from berth.commands import drain as drains
from berth.commands.common import (
    EXIT_NO,
    QUERY_TIMEOUT_S,
    AsJson,
    By,
    Stop,
    Timeout,
    client,
    out,
    print_json,
    run,
    settings_of,
)
from berth.commands.objects import DryRun, Name, Why, change_objects, object_commands
from berth.render import printable, render_rows
from berth.settings import Settings
from bus.contracts.cells import CellRecord, CellsPage, CellsQuery
from bus.contracts.drains import MAX_AT_ONCE, DrainTarget
from bus.contracts.objects import CellState, ObjectKind, StoredObject

cells = object_commands(ObjectKind.CELL, "Cells: which are in use, and which take builds.", lists=False, shows=False)

Reason = Annotated[str, typer.Option("--reason", help="Why, for those who read the log.")]
LastOne = Annotated[bool, typer.Option("--force", help="Also the last cell that takes builds.")]
Body = dict[str, Any]


@cells.command("list")
def list_cells(context: typer.Context, as_json: AsJson = False) -> None:
    """List all cells: those of the schedulers' settings, and those that operators have added."""

    async def body() -> None:
        found = await _known(settings_of(context))
        if as_json:
            print_json(found)
            return
        names = ["name", "state", "in use", "scheduler's link", "bus", "by", "at (UTC)", "reason"]
        render_rows(out, names, [_row(one) for one in found])

    run(body)


@cells.command("show")
def show_cell(context: typer.Context, name: Name, as_json: AsJson = False) -> None:
    """Show one cell."""

    async def body() -> None:
        found = [one for one in await _known(settings_of(context)) if one.name == name]
        if not found:
            raise Stop(EXIT_NO, "cell.unknown", f"there is no cell {name!r}")
        if as_json:
            print_json(found[0])
            return
        names = ["name", "state", "in use", "scheduler's link", "bus", "by", "at (UTC)", "reason"]
        render_rows(out, ["what", "is"], [[what, is_] for what, is_ in zip(names, _row(found[0]), strict=True)])

    run(body)


@cells.command("add")
def add_cell(
    context: typer.Context,
    name: Name,
    url_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="The URL of its bus is in this file in each worker's cells_dir.")
    ] = None,
    url_variable: Annotated[
        str | None,
        typer.Option(metavar="CELL_...", help="The URL of its bus is in this environment variable of each worker."),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="Put before every exchange and queue name there. Else the cell's name, on the API bus."),
    ] = None,
    disabled: Annotated[bool, typer.Option("--disabled", help="Without builds, until it is enabled.")] = False,
    why: Why = "",
    by: By = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Take a cell into use: running schedulers and placements connect to its bus.

    Its conductors and compute services are started with settings that have it. A removed cell is added again, with its
    bus as it was but for what is named ("": as without it).
    """
    state = CellState.DISABLED if disabled else CellState.ENABLED
    given = {"url_file": url_file, "url_variable": url_variable, "prefix": prefix}
    named = {key: value for key, value in given.items() if value is not None}
    if url_file and url_variable is None:
        named["url_variable"] = ""  # the URL is in one place
    if url_variable and url_file is None:
        named["url_file"] = ""

    def made(before: Body) -> Body:
        return {"state": state.value, "reason": why, "bus": {**before.get("bus", {}), **named}}

    _change(context, name, made, why=why, by=by, dry_run=dry_run, as_json=as_json)


@cells.command("set")
def set_cell(
    context: typer.Context,
    name: Name,
    state: Annotated[CellState, typer.Argument(help="Whether builds are placed there, and whether it is in use.")],
    why: Why = "",
    by: By = None,
    force: LastOne = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Disable a cell, enable it again, or remove it."""
    _change(context, name, _to(state, why), why=why, by=by, force=force, dry_run=dry_run, as_json=as_json)


@cells.command("disable")
def disable_cell(
    context: typer.Context, name: Name, why: Why, by: By = None, force: LastOne = False, as_json: AsJson = False
) -> None:
    """Place no builds in a cell. Instances there continue to run, and moves within it continue."""
    _change(context, name, _to(CellState.DISABLED, why), why=why, by=by, force=force, as_json=as_json)


@cells.command("enable")
def enable_cell(context: typer.Context, name: Name, why: Why = "", by: By = None, as_json: AsJson = False) -> None:
    """Place builds in a cell again."""
    _change(context, name, _to(CellState.ENABLED, why), why=why, by=by, as_json=as_json)


@cells.command("remove")
def remove_cell(
    context: typer.Context,
    name: Name,
    why: Reason,
    by: By = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Although instances are on record there: they are out of reach until it is added."
        ),
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Take a cell out of use: schedulers and placements leave its bus. Its queues and its database stay."""

    def made(before: Body) -> Body:
        return {**before, "state": CellState.REMOVED.value, "reason": why, "abandoned": force}

    _change(context, name, made, why=why, by=by, force=force, dry_run=dry_run, as_json=as_json)


@cells.command("drain")
def drain_cell(
    context: typer.Context,
    name: Name,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only print the destinations, and the instances that cannot move.")
    ] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Stop each instance for its move, instead of live.")] = False,
    at_once: Annotated[int, typer.Option(min=1, max=MAX_AT_ONCE, help="Instances under way at a time.")] = 4,
    force: Annotated[
        bool, typer.Option("--force", help="Begin though the plan has instances that cannot move.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Print the drain's id, and do not follow it.")] = False,
    reason: Reason = "drain",
    by: By = None,
    timeout: Timeout = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Drain a cell, as `berth drain NAME --target cell` does."""
    drains.drain(
        context,
        name,
        target=DrainTarget.CELL,
        plan=plan,
        cold=cold,
        at_once=at_once,
        rate=None,
        deadline=None,
        force=force,
        detach=detach,
        drain_id=None,
        reason=reason,
        cell=None,
        by=by,
        timeout=timeout,
        as_json=as_json,
    )


def _to(state: CellState, why: str) -> Callable[[Body], Body]:
    """A decision with another state: where the bus of the cell is stays as it was."""

    def made(before: Body) -> Body:
        kept = {"bus": before["bus"]} if "bus" in before else {}
        return {"state": state.value, **({"reason": why} if why else {}), **kept}

    return made


def _change(
    context: typer.Context,
    name: str,
    made: Callable[[Body], Body],
    *,
    why: str,
    by: str | None,
    force: bool = False,
    dry_run: bool = False,
    as_json: bool,
) -> None:
    """Change a cell relative to its record. made: the body, of the one before."""

    def edit(known: StoredObject | None) -> Body:
        return made({} if known is None else known.body)

    edited = ObjectEdit(ObjectKind.CELL, name, edit)
    change_objects(context, edited, why=why, by=by, force=force, dry_run=dry_run, as_json=as_json)


async def _known(settings: Settings) -> tuple[CellRecord, ...]:
    async with client(settings) as berth:
        return (await berth.bus.request(CellsQuery(), CellsPage, timeout_s=QUERY_TIMEOUT_S)).cells


def _row(one: CellRecord) -> list[str]:
    link = f"{one.link.value}: {one.problem}" if one.problem else one.link.value
    at = f"{datetime.fromtimestamp(one.at, UTC):%Y-%m-%d %H:%M:%S}" if one.at else ""
    return [
        printable(text)
        for text in (
            one.name,
            one.state.value,
            "yes" if one.in_use else "no",
            link,
            _place(one),
            one.by,
            at,
            one.reason,
        )
    ]


def _place(one: CellRecord) -> str:
    """Where its bus is; a URL is never shown."""
    if one.configured or one.bus is None:
        return "as in the settings" if one.configured else ""
    if one.bus.url_file:
        return f"file {one.bus.url_file}"
    if one.bus.url_variable:
        return f"variable {one.bus.url_variable}"
    return f"the API bus's, prefix {one.bus.prefix or one.name + '.'}"
