"""`berth cell`: cells are enabled and disabled while everything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from berth.cli.common import (
    Exit,
    Stop,
)
from berth.cli.http import connected
from berth.cli.objects.objects import ChangeOptions, LogReason, Name, change_objects
from berth.cli.output import (
    As,
    Cell,
    Form,
    ListedItems,
    ListOutput,
    Table,
    Time,
    print_data,
    print_list,
    print_one,
)
from berth.client.types import CellView
from berth.object_changes import ObjectEdit
from bus.contracts.objects import CellState, ObjectKind, StoredObject

LastOne = Annotated[bool, typer.Option("--force", help="Also the last cell that takes builds.")]
Body = dict[str, Any]


async def list_cells(context: typer.Context, *, listing: ListOutput) -> None:
    """List all cells: those of the schedulers' settings, and those that operators have added."""
    async with connected(context) as berth:

        async def read() -> ListedItems[CellView]:
            return ListedItems(await berth.list_cells())

        await print_list(read, CELLS, listing)


async def show_cell(context: typer.Context, name: Name, form: As = Form.TABLE) -> None:
    """Show one cell."""
    async with connected(context) as berth:
        found = next((one for one in await berth.list_cells() if one.name == name), None)
    if found is None:
        raise Stop(Exit.NO, "cell.unknown", f"there is no cell {name!r}")
    if form.is_data:
        print_data(found, form)
    else:
        print_one(CELLS, found)


async def create_cell(
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
    *,
    decision: ChangeOptions,
) -> None:
    """Take a cell into use: running schedulers and placements connect to its bus.

    Its conductors and compute services are started with settings that have it. A removed cell is created again
    with its bus as it was, but for what is named ("": as without it).
    """
    state = CellState.DISABLED if disabled else CellState.ENABLED
    given = {"url_file": url_file, "url_variable": url_variable, "prefix": prefix}
    named = {key: value for key, value in given.items() if value is not None}
    if url_file and url_variable is None:
        named["url_variable"] = ""  # the URL is in one place
    if url_variable and url_file is None:
        named["url_file"] = ""

    def made(before: Body) -> Body:
        return {"state": state.value, "reason": decision.reason, "bus": {**before.get("bus", {}), **named}}

    await _change(context, name, made, decision)


class ReasonedOptions(ChangeOptions, frozen=True, kw_only=True):
    """The options of a decision that is not made without a reason."""

    reason: LogReason


async def disable_cell(
    context: typer.Context, name: Name, force: LastOne = False, *, decision: ReasonedOptions
) -> None:
    """Place no builds in a cell. Instances there continue to run, and moves within it continue."""
    await _change(context, name, _to(name, CellState.DISABLED, decision.reason), decision, force=force)


async def enable_cell(context: typer.Context, name: Name, *, decision: ChangeOptions) -> None:
    """Place builds in a cell again."""
    await _change(context, name, _to(name, CellState.ENABLED, decision.reason), decision)


async def remove_cell(
    context: typer.Context,
    name: Name,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Although instances are on record there: they are out of reach until it is added."
        ),
    ] = False,
    *,
    decision: ReasonedOptions,
) -> None:
    """Take a cell out of use: schedulers and placements leave its bus. Its queues and its database stay."""

    def made(before: Body) -> Body:
        return {**before, "state": CellState.REMOVED.value, "reason": decision.reason, "abandoned": force}

    await _change(context, name, made, decision, force=force)


def _to(name: str, state: CellState, reason: str) -> Callable[[Body], Body]:
    """A decision with another state: where the bus of the cell is stays as it was. Raises Stop for a removed cell.

    A command that is repeated after another operator has removed the cell would take it into use again.
    """

    def made(before: Body) -> Body:
        if before.get("state") == CellState.REMOVED and state is not CellState.REMOVED:
            raise Stop(Exit.NO, "cell.removed", f"cell {name!r} is removed; `berth cell create` puts it back")
        kept = {"bus": before["bus"]} if "bus" in before else {}
        return {"state": state.value, **({"reason": reason} if reason else {}), **kept}

    return made


async def _change(
    context: typer.Context, name: str, made: Callable[[Body], Body], decision: ChangeOptions, *, force: bool = False
) -> None:
    """Change a cell relative to its record. made: the body, of the one before."""

    def edit(known: StoredObject | None) -> Body:
        return made({} if known is None else known.body)

    await change_objects(context, ObjectEdit(ObjectKind.CELL, name, edit), decision, force=force)


def _row(one: CellView) -> list[Cell]:
    link = f"{one.link.value}: {one.problem}" if one.problem else one.link.value
    return [
        one.name,
        one.state.value,
        "yes" if one.in_use else "no",
        link,
        f"{one.hosts_up} of {one.hosts}",
        _place(one),
        one.by,
        Time(one.at),
        one.reason,
    ]


CELLS = Table("name state in-use link hosts-up bus | by at reason", _row)


def _place(one: CellView) -> str:
    """Where its bus is; a URL is never shown."""
    if one.configured or one.bus is None:
        return "as in the settings" if one.configured else ""
    if one.bus.url_file:
        return f"file {one.bus.url_file}"
    if one.bus.url_variable:
        return f"variable {one.bus.url_variable}"
    return f"the API bus's, prefix {one.bus.prefix or one.name + '.'}"
